"""Bounds of indices that follow from the conditions guarding them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from tilewright import te
from tilewright.dtypes import DType
from tilewright.support.arith import ceil_div
from tilewright.te.index import Bounds, Linear, bounds, linear, simplify

_MAX_CASES = 16  # maximum number of cases from disjunctions
Guard = tuple[te.Expr, bool]  # a condition, and whether it holds


def bounds_under(index: te.Expr, guards: tuple[Guard, ...]) -> Bounds | None:
    """Inclusive, tight bounds of an index under the guards. None if the guards never hold, or if the bounds are
    unknown: for conditions on several variables at once and non-linear indices."""
    cases = _all_of([_cases(condition, holds) for condition, holds in guards])
    if len(cases) > _MAX_CASES:
        return None
    reached = []
    for case in cases:
        left = _left(case)
        if left is None:
            return None
        if any(low is None or high is None or low > high for low, high in left.values()):
            continue
        narrower = {var: te.Var(var.name, high - low + 1) + low for var, (low, high) in left.items()}  # type: ignore[operator]
        form = linear(simplify(te.substitute(index, narrower)))
        if not all(isinstance(atom, te.Var) for atom in form.terms):
            return None
        reached.append(bounds(form.expr()))
    lows, highs = (
        [low for low, _ in reached if low is not None],
        [high for _, high in reached if high is not None],
    )
    return (min(lows), max(highs)) if reached else None


def _cases(condition: te.Expr, holds: bool) -> list[tuple[Guard, ...]]:
    """Conjunctions of which one is true if the condition is true (or false, if not `holds`)."""
    if not (
        isinstance(condition, te.Call) and condition.op in ("and", "or") and condition.dtype is DType.BOOL
    ):
        return [((condition, holds),)]
    parts = [_cases(part, holds) for part in condition.args]
    return _all_of(parts) if (condition.op == "and") == holds else [case for part in parts for case in part]


def _all_of(parts: Sequence[list[tuple[Guard, ...]]]) -> list[tuple[Guard, ...]]:
    if math.prod(map(len, parts)) > _MAX_CASES:
        return [()] * (_MAX_CASES + 1)
    return [tuple(itertools.chain.from_iterable(chosen)) for chosen in itertools.product(*parts)]


def _left(guards: tuple[Guard, ...]) -> dict[te.Var, Bounds] | None:
    """The remaining ranges of variables; None if unknown."""
    left: dict[te.Var, Bounds] = {}
    for condition, holds in guards:
        facts = _facts(condition, holds)
        if facts is None:
            return None
        for var, low, high in facts:
            left[var] = _meet(left.get(var, (0, var.extent - 1)), (low, high))
    return left


def conjuncts(condition: te.Expr) -> list[te.Expr]:
    """Conditions that are all true if it is true."""
    if isinstance(condition, te.Call) and condition.op == "and":
        return [part for each in condition.args for part in conjuncts(each)]
    return [condition]


def interval_of(conditions: Sequence[te.Expr], var: te.Var) -> tuple[int, int] | None:
    """(first, end) of the variable's values under all conditions, each of which must bound only this variable; None
    otherwise, or if there are no such values."""
    if any(te.loads(condition) or te.variables(condition) != {var} for condition in conditions):
        return None
    within = bounds_under(var, tuple((condition, True) for condition in conditions))
    if within is None:
        return None
    low, high = within
    assert low is not None and high is not None
    return low, high + 1


def _facts(condition: te.Expr, holds: bool) -> list[tuple[te.Var, int | None, int | None]] | None:
    """Variables and their bounds that are equivalent to a comparison; None if it has another form."""
    if not isinstance(condition, te.Call):
        return None
    if condition.op in ("lt", "le", "eq") and condition.args[0].dtype.is_float:
        return []  # a condition on data says nothing about the index
    if condition.op not in ("lt", "le", "eq") or condition.args[0].dtype is not DType.I64:
        return None
    difference = linear(condition.args[0]) + linear(condition.args[1]).scaled(-1)
    if len(difference.terms) != 1 or not isinstance(next(iter(difference.terms)), te.Var):
        return None
    if condition.op == "eq":
        return _between(difference, 0, 0) if holds else None
    limit = -1 if condition.op == "lt" else 0
    return _between(difference, None, limit) if holds else _between(difference, limit + 1, None)


def _between(form: Linear, low: int | None, high: int | None) -> list[tuple[te.Var, int | None, int | None]]:
    """Bounds of the only variable of a linear form that is itself within bounds."""
    ((var, factor),) = form.terms.items()
    assert isinstance(var, te.Var)
    ends = [None if end is None else end - form.constant for end in (low, high)]
    if factor < 0:
        factor, ends = -factor, [None if end is None else -end for end in reversed(ends)]
    least, most = ends
    return [
        (var, None if least is None else ceil_div(least, factor), None if most is None else most // factor)
    ]


def _meet(a: Bounds, b: Bounds) -> Bounds:
    lows, highs = ([end for end in ends if end is not None] for ends in zip(a, b, strict=True))
    return max(lows, default=None), min(highs, default=None)
