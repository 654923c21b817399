"""Thread indexing: positions along axes from the thread index, and the vector widths that memory allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilewright import te
from tilewright.dtypes import DType
from tilewright.loops.formula import Formula
from tilewright.loops.ir import Buffer, If, Stmt
from tilewright.support.arith import ceil_div
from tilewright.te.index import Linear, coefficient, linear

VECTOR_BYTES = 16  # the widest access of a thread
THREADS = 256


def positions(flat: te.Expr, axes: Sequence[te.Var]) -> dict[te.Var, te.Expr]:
    """The index along each axis at position `flat` of their product, the last axis fastest."""
    values: dict[te.Var, te.Expr] = {}
    inner = 1
    for number, axis in enumerate(reversed(axes)):
        value = flat if inner == 1 else flat // inner
        values[axis] = value if number == len(axes) - 1 else value % axis.extent
        inner *= axis.extent
    return values


def by_stride(formula: Formula, axes: Sequence[te.Var]) -> list[te.Var]:
    """The axes sorted by the output's stride, the largest first."""
    steps = {axis: coefficient(formula.store, axis) or 0 for axis in axes}
    return sorted(axes, key=lambda axis: -abs(steps[axis]))


def store_position(
    formula: Formula, axes: Sequence[te.Var], flat: te.Expr, position: dict[te.Var, te.Expr]
) -> te.Expr:
    """The output offset at position `flat` of the product of `axes`: `flat` itself if the output is contiguous in
    that order."""
    step = 1
    for axis in reversed(axes):
        if coefficient(formula.store, axis) != step:
            return te.substitute(formula.store, position)
        step *= axis.extent
    form = linear(formula.store)
    return (
        flat if set(form.terms) == set(axes) and not form.constant else te.substitute(formula.store, position)
    )


def vector_lanes(accesses: Sequence[tuple[te.Expr, int]], axis: te.Var) -> int:
    """How many neighbours along `axis` a thread can access at once. Accesses (offset, element bytes) along the axis
    must be aligned to the vector; a vector has at most 16 bytes."""
    along = [(offset, size) for offset, size in accesses if coefficient(offset, axis) == 1]
    lanes = VECTOR_BYTES // max((size for _, size in along), default=VECTOR_BYTES)
    while lanes > 1 and not (
        axis.extent % lanes == 0 and all(_is_multiple(offset, axis, lanes) for offset, _ in along)
    ):
        lanes //= 2
    return max(lanes, 1)


def _is_multiple(offset: te.Expr, axis: te.Var, lanes: int) -> bool:
    form = linear(offset)
    others = [c for atom, c in form.terms.items() if atom != axis]
    return form.constant % lanes == 0 and all(c % lanes == 0 for c in others)


def blocks_for(units: int, per_block: int) -> te.Var:
    return te.Var("b", max(1, ceil_div(units, per_block)))


def guarded(position: te.Expr, limit: int, extent: int) -> te.Expr | None:
    """The condition that `position`, which goes up to `extent`, is below `limit`; None if it always is."""
    return te.call("lt", position, limit) if extent > limit else None


def under(condition: te.Expr | None, stmt: Stmt) -> Stmt:
    """`stmt` under the condition, or unconditionally if it is None."""
    return stmt if condition is None else If(condition, stmt)


# -- fused axes
# -------------------------------------------------------------------------------------------------------


def step_of(terms: Mapping[te.Expr, int], axes: Sequence[te.Var]) -> int | None:
    """The stride along the fused axes; None if the access is not linear in the fused index."""
    if not any(axis in terms for axis in axes):
        return 0
    step = terms.get(axes[-1], 0)
    inner = step
    for outer, axis in zip(reversed(axes[:-1]), reversed(axes), strict=False):
        inner *= axis.extent
        if terms.get(outer, 0) != inner:
            return None
    return step if step > 0 else None


def walked(expr: te.Expr, axes: Sequence[te.Var], coord: te.Expr) -> te.Expr:
    """`expr` with the axes at `coord` in every load that is linear in the fused index; elsewhere they stay."""

    def at(index: te.Expr) -> te.Expr:
        form = linear(index)
        step = step_of(form.terms, axes)
        if not step or any(
            set(axes) & te.variables(atom) for atom in form.terms if not isinstance(atom, te.Var)
        ):
            return index
        rest = {atom: c for atom, c in form.terms.items() if atom not in axes}
        return Linear(rest, form.constant).expr() + coord * step

    def rule(node: te.Expr) -> te.Expr | None:
        if isinstance(node, te.Load) and node.indices:
            return te.Load(node.source, (at(node.indices[0]),))
        return None

    return te.rewrite(expr, rule)


def at_positions(expr: te.Expr, axes: Sequence[te.Var], coord: te.Expr) -> te.Expr:
    """`expr` with the fused axes at `coord`, without divisions where an index is linear in the fused index."""
    return te.substitute(walked(expr, axes, coord), positions(coord, axes))


def index_at_positions(index: te.Expr, axes: Sequence[te.Var], coord: te.Expr) -> te.Expr:
    found = at_positions(te.Load(Buffer("index", DType.I8, 1), (index,)), axes, coord)
    assert isinstance(found, te.Load)
    return found.indices[0]
