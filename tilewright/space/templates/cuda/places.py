"""Several axes counted as one: what an expression is at a place of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilewright import te
from tilewright.dtypes import DType
from tilewright.loops.gpu.places import positions
from tilewright.loops.ir import Buffer
from tilewright.te.index import Linear, linear


def step_of(terms: Mapping[te.Expr, int], axes: Sequence[te.Var]) -> int | None:
    """How far one place further along all axes, counted as one, is; None where they are not walked as one."""
    if not any(axis in terms for axis in axes):
        return 0
    step = terms.get(axes[-1], 0)
    inner = step
    for outer, axis in zip(reversed(axes[:-1]), reversed(axes), strict=False):
        inner *= axis.extent
        if terms.get(outer, 0) != inner:
            return None
    return step if step > 0 else None


def at_places(expr: te.Expr, axes: Sequence[te.Var], place: te.Expr) -> te.Expr:
    """`expr` with the axes, counted as one, at `place`: without divisions where an index walks them as one."""

    def walked(index: te.Expr) -> te.Expr:
        form = linear(index)
        step = step_of(form.terms, axes)
        if not step or any(
            set(axes) & te.variables(atom) for atom in form.terms if not isinstance(atom, te.Var)
        ):
            return index
        rest = {atom: c for atom, c in form.terms.items() if atom not in axes}
        return Linear(rest, form.constant).expr() + place * step

    def rule(node: te.Expr) -> te.Expr | None:
        if isinstance(node, te.Load) and node.indices:
            return te.Load(node.source, (walked(node.indices[0]),))
        return None

    return te.substitute(te.rewrite(expr, rule), positions(place, axes))


def index_at_places(index: te.Expr, axes: Sequence[te.Var], place: te.Expr) -> te.Expr:
    return at_places(te.Load(Buffer("index", DType.I8, 1), (index,)), axes, place).indices[0]  # type: ignore[attr-defined]
