"""Small constant matrices times vectors, written out without a loop.

The matrices of Winograd's transforms are mostly zeros and ones, and come in pairs: rows (or columns) that agree up to
signs. Of a pair of rows, what they agree in and what they do not is computed once, and then added and subtracted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import combinations

from tilewright import te

Row = Sequence[Fraction]
Keep = Callable[[te.Expr], te.Expr]


def times_vector(matrix: Sequence[Row], values: Sequence[te.Expr], keep: Keep) -> list[te.Expr]:
    """The products of the matrix's rows with `values`. `keep` puts an expression that is used more than once into a
    register and gives the load from there."""
    matrix, values = _with_column_pairs(matrix, values, keep)
    results: dict[int, te.Expr] = {}
    for first, second in combinations(range(len(matrix)), 2):
        if first in results or second in results or not _alike(matrix[first], matrix[second]):
            continue
        pairs = list(zip(matrix[first], matrix[second], strict=True))
        same = keep(_dot([a if a == b else Fraction(0) for a, b in pairs], values))
        scale, row = _scaled([a if a != b else Fraction(0) for a, b in pairs])
        other = keep(_dot(row, values))
        results[first], results[second] = _plus(same, scale, other), _plus(same, -scale, other)
    return [results[n] if n in results else _dot(row, values) for n, row in enumerate(matrix)]


def operations(matrix: Sequence[Row]) -> int:
    """How many instructions `times_vector` takes."""
    count = 0

    def counted(expr: te.Expr) -> te.Expr:
        nonlocal count
        count += sum(isinstance(node, te.Call) for node in te.walk(expr))
        return te.Var(f"kept{count}", 1)

    values = [te.cast(te.Var(f"x{n}", 1), te.Const(0.0, _F32).dtype) for n in range(len(matrix[0]))]
    for result in times_vector(matrix, values, lambda expr: te.cast(counted(expr), _F32)):
        counted(result)
    return count


_F32 = te.DType.F32 if hasattr(te, "DType") else None


def _alike(first: Row, second: Row) -> bool:
    """Whether they differ in signs alone, and do differ and agree somewhere."""
    signs = {a == b for a, b in zip(first, second, strict=True) if a or b}
    return len(signs) == 2 and all(abs(a) == abs(b) for a, b in zip(first, second, strict=True))
