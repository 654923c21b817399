"""Small constant matrices times vectors, as straight-line code.

The matrices of Winograd's transforms hold many zeros and ones, and their rows (or columns) come in pairs that are
equal up to signs. The common part of a pair and its differing part are computed once, and then added and subtracted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import combinations

from tilewright import te
from tilewright.dtypes import DType
from tilewright.loops.ir import Buffer, Scope

Row = Sequence[Fraction]
Keep = Callable[[te.Expr], te.Expr]


def times_vector(matrix: Sequence[Row], values: Sequence[te.Expr], keep: Keep) -> list[te.Expr]:
    """The products of the matrix's rows with `values`. `keep` stores an expression that is used more than once in a
    register, and returns the load."""
    matrix, values = _with_column_pairs(matrix, values, keep)
    results: dict[int, te.Expr] = {}
    for first, second in combinations(range(len(matrix)), 2):
        if first in results or second in results or not _alike(matrix[first], matrix[second]):
            continue
        equal, opposite = _halves(matrix[first], matrix[second])
        scale = _common_factor(opposite)
        same = keep(_dot(equal, values))
        other = keep(_dot([entry / scale for entry in opposite], values))
        results[first], results[second] = _plus(same, scale, other), _plus(same, -scale, other)
    return [results[n] if n in results else _dot(row, values) for n, row in enumerate(matrix)]


@lru_cache(maxsize=32)
def operations(matrix: tuple[tuple[Fraction, ...], ...]) -> int:
    """The number of instructions of `times_vector`."""
    registers = Buffer("r", DType.F32, 1, Scope.REGISTER)
    value = te.Load(registers, (te.as_index(0),))
    written: list[te.Expr] = []

    def keep(expr: te.Expr) -> te.Expr:
        written.append(expr)
        return value

    written += times_vector(matrix, [value] * len(matrix[0]), keep)
    return sum(isinstance(node, te.Call) for expr in written for node in te.walk(expr))


def _with_column_pairs(
    matrix: Sequence[Row], values: Sequence[te.Expr], keep: Keep
) -> tuple[list[list[Fraction]], list[te.Expr]]:
    """The same products, where two values with similar columns are replaced by their sum and difference."""
    columns, values = [list(column) for column in zip(*matrix, strict=True)], list(values)
    paired: set[int] = set()
    for first, second in combinations(range(len(columns)), 2):
        if paired & {first, second} or not _alike(columns[first], columns[second]):
            continue
        paired |= {first, second}
        a, b = values[first], values[second]
        values[first], values[second] = keep(te.call("add", a, b)), keep(te.call("sub", a, b))
        columns[first], columns[second] = _halves(columns[first], columns[second])
    return [list(row) for row in zip(*columns, strict=True)], values


def _alike(first: Row, second: Row) -> bool:
    """Whether they are equal up to signs, with some signs equal and some different."""
    entries = [(a, b) for a, b in zip(first, second, strict=True) if a or b]
    return all(abs(a) == abs(b) for a, b in entries) and len({a == b for a, b in entries}) == 2


def _halves(first: Row, second: Row) -> tuple[list[Fraction], list[Fraction]]:
    """The entries of `first` that equal those of `second`, and the others, with zeros elsewhere."""
    pairs = list(zip(first, second, strict=True))
    return [a if a == b else Fraction(0) for a, b in pairs], [a if a != b else Fraction(0) for a, b in pairs]


def _common_factor(row: Row) -> Fraction:
    """An entry that divides all others exactly in binary."""
    for factor in filter(None, row):
        if all(_is_binary(entry / factor) for entry in row):
            return factor
    return Fraction(1)


def _is_binary(number: Fraction) -> bool:
    return number.denominator & (number.denominator - 1) == 0


def _dot(row: Row, values: Sequence[te.Expr]) -> te.Expr:
    """The sum of entries times values, starting with a value that needs no multiplication if there is one."""
    terms = sorted(
        ((entry, value) for entry, value in zip(row, values, strict=True) if entry), key=_is_scaled
    )
    (entry, total), *rest = terms
    if entry != 1:
        total = te.call("mul", total, float(entry))
    for entry, value in rest:
        total = _plus(total, entry, value)
    return total


def _is_scaled(term: tuple[Fraction, te.Expr]) -> bool:
    return term[0] != 1


def _plus(total: te.Expr, entry: Fraction, value: te.Expr) -> te.Expr:
    """total + entry * value"""
    if abs(entry) == 1:
        return te.call("add" if entry > 0 else "sub", total, value)
    return te.call("fma", te.const(float(entry), value.dtype), value, total)
