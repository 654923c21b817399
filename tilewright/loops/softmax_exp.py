"""Fast exp for non-positive arguments, as in a softmax: `exp(x - max x)` by the shorter `exp2_nonpositive`.

The product with log2(e) is rounded, which gives a relative error of |x - max x| / 2**24: smallest where the result is
largest. A division by the sum of such weights, which is at least 1, becomes a multiplication by its reciprocal: one
division per row. The maximum need not propagate NaN: see `combined`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from tilewright import te
from tilewright.loops.formula import Formula, Reduction
from tilewright.loops.tiling import updated
from tilewright.te.index import simplify

_CARRIERS = frozenset(("add", "sub", "mul", "div", "fma", "neg", "log"))  # NaN if an argument is


def with_softmax_exp(formula: Formula) -> Formula:
    """The formula with exp(x - row maximum) replaced by the fast exponential."""
    rows = set(formula.rows)
    columns = tuple(axis for axis in formula.axes if axis not in rows)
    for top in formula.reductions:
        if top.kind == "max" and top.result.dtype.is_float:
            reductions = tuple(replace(r, body=_weighed(r.body, r.axes, top)) for r in formula.reductions)
            value = _weighed(formula.value, columns, top)
            formula = replace(formula, reductions=reductions, value=value)
    return replace(formula, value=_scaled(formula))


def _scaled(formula: Formula) -> te.Expr:
    totals = {
        te.Load(r.result, ())
        for r in formula.reductions
        if r.kind == "sum" and isinstance(r.body, te.Call) and r.body.op == "exp2_nonpositive"
    }

    def rule(node: te.Expr) -> te.Expr | None:
        if isinstance(node, te.Call) and node.op == "div" and node.args[1] in totals:
            return node.args[0] * (te.const(1, node.dtype) / node.args[1])
        return None

    return te.rewrite(formula.value, rule) if totals else formula.value


def _weighed(expr: te.Expr, axes: Sequence[te.Var], top: Reduction) -> te.Expr:
    if [axis.extent for axis in axes] != [axis.extent for axis in top.axes]:
        return expr
    element = simplify(te.substitute(top.body, dict(zip(top.axes, axes, strict=True))))
    below = te.call("sub", element, te.Load(top.result, ()))

    def rule(node: te.Expr) -> te.Expr | None:
        if isinstance(node, te.Call) and node.op == "exp" and simplify(node.args[0]) == below:
            return te.call("exp2_nonpositive", node.args[0] * math.log2(math.e))
        return None

    return te.rewrite(expr, rule)


def combined(reduction: Reduction, formula: Formula, so_far: te.Expr, body: te.Expr) -> te.Expr:
    """One step of a reduction of the formula."""
    if _nan_arrives_anyway(reduction, formula):
        return te.select(te.call("lt", so_far, body), body, so_far)
    return updated(reduction, so_far, body)


def _nan_arrives_anyway(top: Reduction, formula: Formula) -> bool:
    """Whether `top` is the maximum of a softmax: if an element is NaN, so are its weight, their sum and the result. A
    maximum that ignores NaN is one instruction instead of four."""
    read = te.Load(top.result, ())
    totals = [
        te.Load(r.result, ())
        for r in formula.reductions
        if r.kind == "sum" and isinstance(r.body, te.Call) and r.body.op == "exp2_nonpositive"
        if read in te.walk(r.body)
    ]
    return top.kind == "max" and any(_carries_nan(formula.value, total) for total in totals)


def _carries_nan(expr: te.Expr, load: te.Load) -> bool:
    """Whether `expr` is NaN if `load` is."""
    if isinstance(expr, te.Cast):
        return expr.dtype.is_float and _carries_nan(expr.value, load)
    if isinstance(expr, te.Call) and expr.op in _CARRIERS:
        return any(_carries_nan(arg, load) for arg in expr.args)
    return expr == load
