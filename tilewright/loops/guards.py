"""What conditions say about the indices that they guard.

A fact is a linear form that lies within bounds wherever a statement runs: `0 <= 2*y + ky - 1 < 56` around a load,
`i < 4` around a store. An index that is a multiple of such a form and something else is bounded by the two together.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright import te
from tilewright.dtypes import DType
from tilewright.te.index import Bounds, Linear, bounds, linear, simplify

_AT_ONCE = 4  # facts that bound one index together


@dataclass(frozen=True)
class Fact:
    form: Linear
    low: int | None
    high: int | None

    @property
    def impossible(self) -> bool:
        low, high = bounds(self.form.expr())
        return _is_empty(_both((low, high), (self.low, self.high)))


def facts_of(condition: te.Expr, holds: bool) -> tuple[Fact, ...]:
    """What is known where the condition holds, or where it does not."""
    if not isinstance(condition, te.Call):
        return ()
    if condition.op == "not":
        return facts_of(condition.args[0], not holds)
    if condition.op == ("and" if holds else "or") and condition.dtype is DType.BOOL:
        return tuple(fact for part in condition.args for fact in facts_of(part, holds))
    if condition.op not in _COMPARISONS or condition.args[0].dtype is not DType.I64:
        return ()
    left, right = condition.args
    return _compared(_COMPARISONS[condition.op][0 if holds else 1], linear(left) + linear(right).scaled(-1))


# Comparison -> what it is of the difference, where it holds and where it does not.
_COMPARISONS = {
    "lt": ("negative", "not negative"),
    "le": ("not positive", "positive"),
    "eq": ("zero", "not zero"),
    "ne": ("not zero", "zero"),
}


def _compared(what: str, difference: Linear) -> tuple[Fact, ...]:
    if what == "not zero":
        low, high = bounds(difference.expr())
        return (
            (Fact(difference, 1, None),) if low == 0 else (Fact(difference, None, -1),) if high == 0 else ()
        )
    ends: dict[str, Bounds] = {
        "negative": (None, -1),
        "not positive": (None, 0),
        "zero": (0, 0),
        "not negative": (0, None),
        "positive": (1, None),
    }
    return (Fact(difference, *ends[what]),)


def bounds_under(index: te.Expr, facts: tuple[Fact, ...]) -> Bounds | None:
    """Inclusive bounds of an index where the facts hold; None where they never hold together, and where they do not
    tell: what a condition on quotients and remainders says of others is not followed."""
    if any(fact.impossible for fact in facts) or any(map(_divides, (index, *(f.form.expr() for f in facts)))):
        return None
    narrower = _narrowed(facts)
    found = _bounds(linear(simplify(te.substitute(index, narrower))), _replaced(facts, narrower), _AT_ONCE)
    return None if _is_empty(found) else found


def _divides(expr: te.Expr) -> bool:
    return any(
        isinstance(node, te.Call) and node.op in ("floordiv", "mod") for node in te.walk(simplify(expr))
    )


def _narrowed(facts: tuple[Fact, ...]) -> dict[te.Var, te.Expr]:
    """Variables that facts are about alone, as others that take only the values left."""
    left: dict[te.Var, Bounds] = {}
    for fact in facts:
        if len(fact.form.terms) != 1:
            continue
        ((atom, factor),) = fact.form.terms.items()
        if isinstance(atom, te.Var):
            left[atom] = _both(left.get(atom, bounds(atom)), _solved(fact, factor))
    return {
        var: te.Var(var.name, high - low + 1) + low
        for var, (low, high) in left.items()
        if low is not None and high is not None and low <= high
    }


def _solved(fact: Fact, factor: int) -> Bounds:
    """Bounds of an atom with `low <= factor * atom + constant <= high`."""
    low = None if fact.low is None else fact.low - fact.form.constant
    high = None if fact.high is None else fact.high - fact.form.constant
    if factor < 0:
        factor, low, high = -factor, None if high is None else -high, None if low is None else -low
    return None if low is None else -(-low // factor), None if high is None else high // factor


def _replaced(facts: tuple[Fact, ...], values: dict[te.Var, te.Expr]) -> tuple[Fact, ...]:
    return tuple(
        Fact(linear(simplify(te.substitute(fact.form.expr(), values))), fact.low, fact.high) for fact in facts
    )


def _bounds(form: Linear, facts: tuple[Fact, ...], depth: int) -> Bounds:
    best: Bounds = (form.constant, form.constant)
    for atom, factor in form.terms.items():
        best = _sum(best, _atom_bounds(atom, facts, depth), factor)
    if not depth:
        return best
    for number, fact in enumerate(facts):
        others = facts[:number] + facts[number + 1 :]
        factors = {
            form.terms[atom] // step
            for atom, step in fact.form.terms.items()
            if atom in form.terms and form.terms[atom] % step == 0
        }
        for factor in factors:
            rest = _bounds(form + fact.form.scaled(-factor), others, depth - 1)
            best = _both(best, _sum(rest, (fact.low, fact.high), factor))
    return best


def _atom_bounds(atom: te.Expr, facts: tuple[Fact, ...], depth: int) -> Bounds:
    known = bounds(atom)
    if not isinstance(atom, te.Call) or not depth:
        return known
    first, second = (_bounds(linear(arg), facts, depth - 1) for arg in atom.args)
    if atom.op == "min":
        return _both(known, (None, _both(first, second)[1]))
    if atom.op == "max":
        return _both(known, (_both(first, second)[0], None))
    return known


def _sum(rest: Bounds, other: Bounds, factor: int) -> Bounds:
    """Bounds of `rest + factor * other`."""
    low, high = other if factor > 0 else other[::-1]
    return (
        None if low is None or rest[0] is None else rest[0] + factor * low,
        None if high is None or rest[1] is None else rest[1] + factor * high,
    )


def _both(a: Bounds, b: Bounds) -> Bounds:
    lows = [end for end in (a[0], b[0]) if end is not None]
    highs = [end for end in (a[1], b[1]) if end is not None]
    return max(lows, default=None), min(highs, default=None)


def _is_empty(ends: Bounds) -> bool:
    low, high = ends
    return low is not None and high is not None and low > high
