"""Indices and conditions over the lanes of an aligned vector, in the form that shows what the lanes have in common."""

from __future__ import annotations

from tilewright import te
from tilewright.te.index import Linear, divisor_of, linear, simplify


def over_lanes(expr: te.Expr, lane: te.Var) -> te.Expr:
    """The same expression of a lane, without the lane where it changes nothing.

    With 8 lanes: `(i * 8 + lane) // 24` is `i * 8 // 24`, `(i * 8 + lane) % 24` is `i * 8 % 24 + lane`, and
    `i * 8 + lane < 64` is `i * 8 < 64`.
    """
    if lane not in te.variables(expr):
        return expr

    def first(index: te.Expr, divisor: int) -> te.Expr | None:
        """The index of the first lane, if the others are within the same multiple of the divisor."""
        form = linear(index)
        if form.terms.get(lane) != 1 or divisor % lane.extent:
            return None
        found = Linear({atom: c for atom, c in form.terms.items() if atom != lane}, form.constant).expr()
        if lane in te.variables(found) or divisor_of(found) % lane.extent:
            return None
        return found

    def rule(node: te.Expr) -> te.Expr | None:
        if not isinstance(node, te.Call) or len(node.args) != 2:
            return None
        left, right = node.args
        if node.op in ("floordiv", "mod", "lt") and isinstance(right, te.Const):
            found = first(left, int(right.value))
            if found is None:
                return None
            same = te.call(node.op, found, right)
            return same + lane if node.op == "mod" else same
        if node.op == "le" and isinstance(left, te.Const) and not left.value:
            found = first(right, 0)
            return None if found is None else te.call("le", left, found)
        return None

    return simplify(te.rewrite(expr, rule))
