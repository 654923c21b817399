"""Index arithmetic: linear forms, bounds and simplification of integer expressions.

A linear form is `constant + sum(coefficient * atom)`, where an atom is a variable or any integer expression that is
not linear itself (a `floordiv`, a `mod`, a `min`, a load of an index). Variables know their extents, so `(4*i + j) //
4` is `i` when j < 4. All tests for contiguity and fusable loops use this module.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from tilewright.dtypes import DType
from tilewright.te.expr import (
    Call,
    Cast,
    Const,
    Expr,
    Load,
    Select,
    Var,
    all_of,
    as_index,
    call,
    children,
    variables,
    with_children,
)

Bounds = tuple["int | None", "int | None"]  # inclusive; None: unbounded


@dataclass(frozen=True)
class Linear:
    """`constant + sum(coefficient * atom)`; coefficients are never zero."""

    terms: dict[Expr, int]
    constant: int

    def __add__(self, other: Linear) -> Linear:
        terms = dict(self.terms)
        for atom, coefficient in other.terms.items():
            total = terms.get(atom, 0) + coefficient
            if total:
                terms[atom] = total
            else:
                del terms[atom]
        return Linear(terms, self.constant + other.constant)

    def scaled(self, factor: int) -> Linear:
        if factor == 0:
            return Linear({}, 0)
        return Linear({atom: c * factor for atom, c in self.terms.items()}, self.constant * factor)

    def expr(self) -> Expr:
        """The form as an expression, larger strides first, so that equal forms give equal expressions."""
        result: Expr | None = None
        for atom, coefficient in sorted(self.terms.items(), key=lambda item: (-item[1], _order(item[0]))):
            term = atom if coefficient == 1 else Call("mul", (atom, as_index(coefficient)), DType.I64)
            result = term if result is None else Call("add", (result, term), DType.I64)
        if result is None:
            return as_index(self.constant)
        return Call("add", (result, as_index(self.constant)), DType.I64) if self.constant else result


def _order(atom: Expr) -> str:
    return atom.name if isinstance(atom, Var) else f"~{atom!r}"


def _interval_add(a: Bounds, b: Bounds) -> Bounds:
    low = None if a[0] is None or b[0] is None else a[0] + b[0]
    high = None if a[1] is None or b[1] is None else a[1] + b[1]
    return low, high


def _interval_scale(bounds: Bounds, factor: int) -> Bounds:
    scaled = tuple(None if end is None else end * factor for end in bounds)
    return (scaled[0], scaled[1]) if factor >= 0 else (scaled[1], scaled[0])


def _linear_bounds(form: Linear) -> Bounds:
    total: Bounds = (form.constant, form.constant)
    for atom, coefficient in form.terms.items():
        total = _interval_add(total, _interval_scale(bounds(atom), coefficient))
    return total


@lru_cache(maxsize=16384)
def bounds(expr: Expr) -> Bounds:
    """Inclusive bounds of an integer expression, as far as they are known."""
    if isinstance(expr, Const):
        return int(expr.value), int(expr.value)
    if isinstance(expr, Var):
        return 0, max(expr.extent - 1, 0)
    if isinstance(expr, Select):
        (low_a, high_a), (low_b, high_b) = bounds(expr.then), bounds(expr.other)
        return (
            None if low_a is None or low_b is None else min(low_a, low_b),
            None if high_a is None or high_b is None else max(high_a, high_b),
        )
    if not isinstance(expr, Call):
        return None, None
    if expr.op in ("add", "sub", "mul", "neg"):
        return _arithmetic_bounds(expr)
    parts = [bounds(arg) for arg in expr.args]
    if expr.op in ("floordiv", "mod"):
        divisor = expr.args[1]
        if not isinstance(divisor, Const) or int(divisor.value) <= 0:
            return None, None
        d = int(divisor.value)
        low, high = parts[0]
        if expr.op == "floordiv":
            return None if low is None else low // d, None if high is None else high // d
        if low is not None and high is not None and low // d == high // d:
            return low % d, high % d
        return 0, d - 1
    if expr.op in ("min", "max"):
        (low_a, high_a), (low_b, high_b) = parts
        if expr.op == "min":
            highs = [high for high in (high_a, high_b) if high is not None]
            return None if low_a is None or low_b is None else min(low_a, low_b), min(highs, default=None)
        lows = [low for low in (low_a, low_b) if low is not None]
        return max(lows, default=None), None if high_a is None or high_b is None else max(high_a, high_b)
    if expr.op == "xor" and all(low is not None and low >= 0 and high is not None for low, high in parts):
        return 0, (1 << max(high.bit_length() for _, high in parts if high is not None)) - 1
    return None, None


def _arithmetic_bounds(expr: Call) -> Bounds:
    if expr.op == "mul" and not any(isinstance(arg, Const) for arg in expr.args):
        (low_a, high_a), (low_b, high_b) = bounds(expr.args[0]), bounds(expr.args[1])
        if None in (low_a, high_a, low_b, high_b):
            return None, None
        corners = [x * y for x in (low_a, high_a) for y in (low_b, high_b)]  # type: ignore[operator]
        return min(corners), max(corners)
    return _linear_bounds(linear(expr))


@lru_cache(maxsize=16384)
def linear(expr: Expr) -> Linear:
    """The linear form of an integer expression, its parts simplified."""
    if isinstance(expr, Const):
        return Linear({}, int(expr.value))
    if isinstance(expr, Var):
        return Linear({expr: 1}, 0) if expr.extent > 1 else Linear({}, 0)
    if isinstance(expr, Call) and expr.dtype is DType.I64:
        if expr.op in ("add", "sub"):
            return linear(expr.args[0]) + linear(expr.args[1]).scaled(1 if expr.op == "add" else -1)
        if expr.op == "neg":
            return linear(expr.args[0]).scaled(-1)
        forms = [linear(arg) for arg in expr.args]
        if expr.op == "mul":
            for form, other in (forms, forms[::-1]):
                if not form.terms:
                    return other.scaled(form.constant)
        if expr.op in ("floordiv", "mod") and not forms[1].terms and forms[1].constant > 0:
            return _divide(expr.op, forms[0], forms[1].constant)
        if expr.op in ("min", "max"):
            return _extreme(expr.op, forms[0], forms[1])
        if expr.op == "xor":
            for form, other in (forms, forms[::-1]):
                if not form.terms and not form.constant:
                    return other
        return Linear({Call(expr.op, tuple(form.expr() for form in forms), DType.I64): 1}, 0)
    return Linear({_simplify_parts(expr): 1}, 0)


def _divide(op: str, form: Linear, divisor: int) -> Linear:
    """`form // divisor` or `form % divisor`, with multiples of the divisor factored out."""
    if divisor == 1:
        return form if op == "floordiv" else Linear({}, 0)
    whole = Linear(
        {atom: c // divisor for atom, c in form.terms.items() if c % divisor == 0}, form.constant // divisor
    )
    rest = Linear({atom: c for atom, c in form.terms.items() if c % divisor}, form.constant % divisor)
    low, high = _linear_bounds(rest)
    if low is not None and high is not None and low // divisor == high // divisor:
        quotient = low // divisor
        if op == "floordiv":
            return whole + Linear({}, quotient)
        return rest + Linear({}, -quotient * divisor)
    if op == "floordiv":
        inner = _nested_floordiv(rest, divisor)
        return whole + Linear({inner: 1}, 0)
    return Linear({Call("mod", (rest.expr(), as_index(divisor)), DType.I64): 1}, 0)


def _nested_floordiv(form: Linear, divisor: int) -> Expr:
    """`(x // a) // b` is `x // (a * b)`."""
    if not form.constant and len(form.terms) == 1:
        ((atom, coefficient),) = form.terms.items()
        if (
            coefficient == 1
            and isinstance(atom, Call)
            and atom.op == "floordiv"
            and isinstance(atom.args[1], Const)
        ):
            return Call("floordiv", (atom.args[0], as_index(int(atom.args[1].value) * divisor)), DType.I64)
    return Call("floordiv", (form.expr(), as_index(divisor)), DType.I64)


def _extreme(op: str, a: Linear, b: Linear) -> Linear:
    low, high = _linear_bounds(a + b.scaled(-1))
    if low is not None and low >= 0:
        return a if op == "max" else b
    if high is not None and high <= 0:
        return b if op == "max" else a
    return Linear({Call(op, (a.expr(), b.expr()), DType.I64): 1}, 0)


def _simplify_parts(expr: Expr) -> Expr:
    return with_children(expr, tuple(simplify(child) for child in children(expr)))


@lru_cache(maxsize=16384)
def simplify(expr: Expr) -> Expr:
    """`expr` with its integer arithmetic in canonical form and decidable conditions resolved."""
    if expr.dtype is DType.I64 and not isinstance(expr, (Load, Cast, Select)):
        return linear(expr).expr()
    expr = _simplify_parts(expr)
    if isinstance(expr, Select) and isinstance(expr.cond, Const):
        return expr.then if expr.cond.value else expr.other
    if isinstance(expr, Call) and expr.dtype is DType.BOOL:
        return _simplify_condition(expr)
    return expr


def _simplify_condition(expr: Call) -> Expr:
    if expr.op in ("lt", "le", "eq", "ne") and expr.args[0].dtype is DType.I64:
        low, high = _linear_bounds(linear(expr.args[0]) + linear(expr.args[1]).scaled(-1))
        decided = _decide(expr.op, low, high)
        return expr if decided is None else Const(decided, DType.BOOL)
    if expr.op in ("and", "or") and expr.args[0].dtype is DType.BOOL:
        absorbing = expr.op == "or"
        for one, other in (expr.args, expr.args[::-1]):
            if isinstance(one, Const):
                return one if one.value == absorbing else other
    if expr.op == "not" and isinstance(expr.args[0], Const):
        return Const(not expr.args[0].value, DType.BOOL)
    return expr


def _decide(op: str, low: int | None, high: int | None) -> bool | None:
    """Whether `difference op 0` holds for every, or for no, difference in [low, high]."""
    if op == "lt":
        return True if high is not None and high < 0 else False if low is not None and low >= 0 else None
    if op == "le":
        return True if high is not None and high <= 0 else False if low is not None and low > 0 else None
    never_equal = (low is not None and low > 0) or (high is not None and high < 0)
    always_equal = low == 0 and high == 0
    if never_equal or always_equal:
        return always_equal == (op == "eq")
    return None


def coefficient(expr: Expr, var: Var) -> int | None:
    """The change of `expr` when `var` increases by one; None if it is not constant."""
    form = linear(expr)
    if any(atom != var and var in variables(atom) for atom in form.terms):
        return None
    return form.terms.get(var, 0)


def divisor_of(expr: Expr) -> int:
    """A number that divides every value of `expr`; 0 if it is always 0."""
    form = linear(expr)
    result = form.constant
    for atom, factor in form.terms.items():
        known = 1
        if isinstance(atom, Call) and atom.op in ("min", "max", "mod"):
            known = math.gcd(*(divisor_of(arg) for arg in atom.args))
        result = math.gcd(result, factor * known)
    return result


def in_range(index: Expr, extent: int) -> Expr | None:
    """The condition that 0 <= index < extent, or None if it always holds."""
    low, high = bounds(simplify(index))
    conditions = []
    if low is None or low < 0:
        conditions.append(call("le", as_index(0), index))
    if high is None or high >= extent:
        conditions.append(call("lt", index, as_index(extent)))
    return all_of(conditions)


def flat_index(indices: Sequence[Expr], shape: Sequence[int]) -> Expr:
    """The offset of an element of a dense array, the last axis fastest."""
    offset: Expr = as_index(0)
    for index, extent in zip(indices, shape, strict=True):
        offset = offset * extent + index
    return offset
