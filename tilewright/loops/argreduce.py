"""Narrows the indices of argmax-like reductions to 32 bits where they fit: twice as many per vector.

min over k of (k if here else n)   ->   wide(min over k of (narrow(k) if here else narrow(n)))
"""

from __future__ import annotations

from dataclasses import replace

from tilewright import te
from tilewright.dtypes import DType
from tilewright.loops.formula import Formula, Reduction

_WIDE, _NARROW = DType.I64, DType.I32
_LARGEST = (1 << 31) - 1


def with_narrow_indices(formula: Formula) -> Formula:
    """The same formula with narrow indices; its value and later reductions widen them again."""
    wide: dict[te.Expr, te.Expr] = {}
    reductions: list[Reduction] = []

    def widened(expr: te.Expr) -> te.Expr:
        return te.rewrite(expr, wide.get)

    for reduction in formula.reductions:
        reduction = replace(reduction, body=widened(reduction.body))
        body = _narrow(reduction.body) if reduction.kind in ("min", "max") else None
        if body is not None:
            result = replace(reduction.result, dtype=_NARROW)
            wide[te.Load(reduction.result, ())] = te.cast(te.Load(result, ()), _WIDE)
            reduction = replace(reduction, result=result, body=body)
        reductions.append(reduction)
    return replace(formula, reductions=tuple(reductions), value=widened(formula.value))


def _narrow(body: te.Expr) -> te.Expr | None:
    """A selection between indices in 32 bits; None if the body has another form or an index may not fit."""
    if body.dtype is not _WIDE or not isinstance(body, te.Select):
        return None
    sides = [
        _narrow(side) if isinstance(side, te.Select) else _position(side) for side in (body.then, body.other)
    ]
    then, other = sides
    return None if then is None or other is None else te.select(body.cond, then, other)


def _position(expr: te.Expr) -> te.Expr | None:
    if isinstance(expr, te.Const):
        return te.cast(expr, _NARROW) if 0 <= expr.value <= _LARGEST else None
    return te.cast(expr, _NARROW) if isinstance(expr, te.Var) and expr.extent <= _LARGEST else None
