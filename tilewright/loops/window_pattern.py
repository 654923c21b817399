"""Recognise windows: how far they move from one result to the next."""

from __future__ import annotations

from tilewright import te
from tilewright.te.index import coefficient, simplify


def stride_of(data: te.Expr, axis: te.Var, position: te.Var) -> int | None:
    """Window positions per step of the axis, if `data` depends on both only through that combination: it is unchanged
    after one step of the axis and that many steps back in the window."""
    for load in te.loads(data):
        if not load.indices:
            continue
        along, within = coefficient(load.indices[0], axis), coefficient(load.indices[0], position)
        if along and within and along % within == 0:
            stride = along // within
            moved = {axis: axis + 1, position: position - stride}
            same = simplify(te.substitute(data, moved)) == simplify(data)
            return stride if same and stride > 0 else None
    return None
