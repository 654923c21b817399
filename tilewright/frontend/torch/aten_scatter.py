"""Operators that write at indices given by data, as pure functions: scatter, index_put and similar ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tilewright.dtypes import DType
from tilewright.frontend.builder import Number, Operand, Unsupported
from tilewright.frontend.torch.aten_ordering import check_steps
from tilewright.frontend.torch.context import Context, axis_of
from tilewright.frontend.torch.registry import Inexpressible, converter
from tilewright.graph.ir import Node
from tilewright.graph.ops.scatter import identity

# PyTorch's names of the ways to combine.
_COMBINE = {
    "sum": "add",
    "add": "add",
    "prod": "mul",
    "multiply": "mul",
    "amax": "max",
    "amin": "min",
    "mean": "add",
}


def _as_index(ctx: Context, indices: Node) -> Node:
    return indices if indices.dtype in (DType.I64, DType.I32) else ctx.cast(indices, DType.I64)


def _put(ctx: Context, op: str, x: Node, index: Node, updates: Node, axis: int, combine: str) -> Node:
    """`put` or `put_along`, also of bools, which combine as numbers."""
    if not updates.type.size or not x.type.size:
        return x
    check_steps(x.type.size * updates.shape[axis], "writing at indices")
    index = _as_index(ctx, index)
    if x.dtype is not DType.BOOL or combine == "set":
        return ctx.emit(op, x, index, ctx.cast(updates, x.dtype), axis=axis, combine=combine)
    wide, others = ctx.cast(x, DType.I64), ctx.cast(ctx.cast(updates, DType.BOOL), DType.I64)
    return ctx.truth(ctx.emit(op, wide, index, others, axis=axis, combine=combine))


def _reduced(
    ctx: Context, op: str, x: Node, index: Node, source: Node, axis: int, reduce: str, include_self: bool
) -> Node:
    """x combined with the source at the index; if not included, x's own elements at written positions do not take
    part."""
    if reduce not in _COMBINE:
        raise Unsupported(f"reduce={reduce!r}")
    if not source.type.size or not x.type.size:
        return x
    combine = _COMBINE[reduce]
    work = ctx.cast(x, DType.U8) if x.dtype is DType.BOOL else x
    source = ctx.cast(ctx.cast(source, x.dtype), work.dtype)
    base = work
    if not include_self:
        nothing = ctx.full(identity(combine, work.dtype), work.dtype, source.shape)
        base = _put(ctx, op, work, index, nothing, axis, "set")
    result = _put(ctx, op, base, index, source, axis, combine)
    if reduce != "mean":
        return ctx.cast(result, x.dtype)
    ones = ctx.full(1, work.dtype, source.shape)
    counts = _put(ctx, op, ctx.full(int(include_self), work.dtype, x.shape), index, ones, axis, "add")
    counts = ctx.emit("clamp", counts, min=1.0 if work.dtype.is_float else 1, max=None)
    return ctx.emit("div" if work.dtype.is_float else "floordiv", result, counts)


# -- scatter ----------------------------------------------------------------------------------------------------


def _scatter_operands(
    ctx: Context, x: Node, dim: int, index: Node, source: Operand
) -> tuple[Node, Node, Node, int]:
    """The operands in the same rank, at least 1; the source is as long as the index."""
    if x.type.rank == 0:
        x, index = ctx.reshape(x, (1,)), ctx.reshape(index, (index.type.size,))
        source = ctx.reshape(source, (source.type.size,)) if isinstance(source, Node) else source
    if index.type.rank == 0:
        index = ctx.reshape(index, (1,) * x.type.rank)
    axis = axis_of(dim, x.type.rank)
    if not isinstance(source, Node):
        return x, index, ctx.full(source, x.dtype, index.shape), axis
    source = ctx.reshape(source, (1,) * x.type.rank) if source.type.rank == 0 else source
    for d, extent in enumerate(index.shape):
        source = ctx.slice_axis(source, d, 0, extent)
    return x, index, source, axis


@converter("aten.scatter.src", "aten.scatter.value")
def scatter(ctx: Context, x: Node, dim: int, index: Node, source: Operand) -> Node:
    wide, index, source, axis = _scatter_operands(ctx, x, dim, index, source)
    return ctx.reshape(_put(ctx, "put_along", wide, index, source, axis, "set"), x.shape)


@converter("aten.scatter.reduce", "aten.scatter.value_reduce")
def scatter_combined(ctx: Context, x: Node, dim: int, index: Node, source: Operand, *, reduce: str) -> Node:
    wide, index, source, axis = _scatter_operands(ctx, x, dim, index, source)
    return ctx.reshape(_put(ctx, "put_along", wide, index, source, axis, _COMBINE[reduce]), x.shape)


@converter("aten.scatter_add.default")
def scatter_add(ctx: Context, x: Node, dim: int, index: Node, src: Node) -> Node:
    wide, index, source, axis = _scatter_operands(ctx, x, dim, index, src)
    return ctx.reshape(_put(ctx, "put_along", wide, index, source, axis, "add"), x.shape)


@converter("aten.scatter_reduce.two")
def scatter_reduce(
    ctx: Context, x: Node, dim: int, index: Node, src: Node, reduce: str, *, include_self: bool = True
) -> Node:
    wide, index, source, axis = _scatter_operands(ctx, x, dim, index, src)
    result = _reduced(ctx, "put_along", wide, index, source, axis, reduce, include_self)
    return ctx.reshape(result, x.shape)


# -- along one axis ---------------------------------------------------------------------------------------------


def _axis_operands(
    ctx: Context, x: Node, dim: int, index: Node, source: Operand
) -> tuple[Node, Node, Node, int]:
    """The index with one axis, the source with a slice for each of its elements."""
    index = ctx.reshape(index, (index.type.size,))
    wide = x if x.type.rank else ctx.reshape(x, (1,))
    axis = axis_of(dim, wide.type.rank)
    shape = (*wide.shape[:axis], index.type.size, *wide.shape[axis + 1 :])
    if not isinstance(source, Node):
        return wide, index, ctx.full(source, wide.dtype, shape), axis
    if source.type.size == math.prod(shape):
        return wide, index, ctx.reshape(source, shape), axis
    return wide, index, ctx.broadcast_to(source, shape), axis


@converter("aten.index_add.default")
def index_add(ctx: Context, x: Node, dim: int, index: Node, source: Node, *, alpha: Number = 1) -> Node:
    wide, index, source, axis = _axis_operands(ctx, x, dim, index, source)
    if alpha != 1:
        source = ctx.cast(ctx.mul(source, alpha), x.dtype)
    return ctx.reshape(_put(ctx, "put", wide, index, source, axis, "add"), x.shape)


@converter("aten.index_copy.default")
def index_copy(ctx: Context, x: Node, dim: int, index: Node, source: Node) -> Node:
    wide, index, source, axis = _axis_operands(ctx, x, dim, index, source)
    return ctx.reshape(_put(ctx, "put", wide, index, source, axis, "set"), x.shape)


@converter("aten.index_fill.int_Scalar", "aten.index_fill.int_Tensor")
def index_fill(ctx: Context, x: Node, dim: int, index: Node, value: Operand) -> Node:
    if isinstance(value, Node):
        value = ctx.cast(ctx.reshape(value, (1,) * max(x.type.rank, 1)), x.dtype)
    wide, index, source, axis = _axis_operands(ctx, x, dim, index, value)
    return ctx.reshape(_put(ctx, "put", wide, index, source, axis, "set"), x.shape)


@converter("aten.index_reduce.default")
def index_reduce(
    ctx: Context, x: Node, dim: int, index: Node, source: Node, reduce: str, *, include_self: bool = True
) -> Node:
    wide, index, source, axis = _axis_operands(ctx, x, dim, index, source)
    return ctx.reshape(_reduced(ctx, "put", wide, index, source, axis, reduce, include_self), x.shape)


@converter("aten.put.default")
def put(ctx: Context, x: Node, index: Node, source: Node, accumulate: bool = False) -> Node:
    flat, index = ctx.reshape(x, (x.type.size,)), ctx.reshape(index, (index.type.size,))
    source = ctx.reshape(source, (source.type.size,))
    result = _put(ctx, "put", flat, index, source, 0, "add" if accumulate else "set")
    return ctx.reshape(result, x.shape)


# -- advanced indexing ------------------------------------------------------------------------------------------


@converter("aten.index_put.default", "aten._unsafe_index_put.default")
def index_put(
    ctx: Context, x: Node, indices: Sequence[Node | None], values: Operand, accumulate: bool = False
) -> Node:
    value = values if isinstance(values, Node) else ctx.full(values, x.dtype)
    value = ctx.cast(value, x.dtype)
    given = [i for i in indices if i is not None]
    if not given:
        return ctx.broadcast_to(value, x.shape) if not accumulate else ctx.add(x, value)
    if any(i.dtype in (DType.BOOL, DType.U8) for i in given):
        return _masked_put(ctx, x, indices, value, accumulate)
    # The indexed axes in front and merged; the index with one axis; the values with the index's axes in front.
    axes = [axis for axis, i in enumerate(indices) if i is not None]
    others = [axis for axis in range(x.type.rank) if axis not in axes]
    together = axes == list(range(axes[0], axes[0] + len(axes)))
    lead = axes[0] if together else 0  # axes of the indexed tensor before those of the index
    shape = _broadcast([i.shape for i in given])
    other_shape = tuple(x.shape[axis] for axis in others)
    indexed = (*other_shape[:lead], *shape, *other_shape[lead:])
    value = ctx.broadcast_to(value, indexed)
    inner = tuple(range(lead, lead + len(shape)))
    rest = tuple(axis for axis in range(len(indexed)) if axis not in inner)
    count, room = math.prod(shape), math.prod(x.shape[axis] for axis in axes)
    value = ctx.reshape(ctx.permute(value, (*inner, *rest)), (count, *other_shape))
    flat: Node | None = None
    for axis, positions in zip(axes, given, strict=True):
        wide = ctx.cast(positions, DType.I64)
        extent = x.shape[axis]
        wide = ctx.select(ctx.compare("lt", wide, 0), ctx.add(wide, extent), wide)
        flat = wide if flat is None else ctx.add(ctx.mul(flat, extent), wide)
    assert flat is not None
    flat = ctx.reshape(ctx.broadcast_to(flat, shape), (count,))
    order = (*axes, *others)
    merged = ctx.reshape(ctx.permute(x, order), (room, *other_shape))
    result = _put(ctx, "put", merged, flat, value, 0, "add" if accumulate else "set")
    result = ctx.reshape(result, tuple(x.shape[axis] for axis in order))
    return ctx.permute(result, tuple(order.index(axis) for axis in range(x.type.rank)))


def _broadcast(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    return tuple(next((e for e in extents if e != 1), 1) for extents in zip(*padded, strict=True))


def _masked_put(ctx: Context, x: Node, indices: Sequence[Node | None], value: Node, accumulate: bool) -> Node:
    """x[mask] = a value that is the same for every element of the mask: a selection."""
    masks = [i for i in indices if i is not None]
    if len(masks) != 1 or indices[0] is None:
        raise Inexpressible("writing at a mask together with other indices: which places depends on data")
    mask = ctx.truth(masks[0])
    rest = x.type.rank - mask.type.rank
    if value.type.rank > rest:
        if any(extent != 1 for extent in value.shape[: value.type.rank - rest]):
            raise Inexpressible("writing a value for each place of a mask: their number depends on data")
        value = ctx.reshape(value, value.shape[value.type.rank - rest :])
    mask = ctx.reshape(mask, mask.shape + (1,) * rest)
    result = ctx.add(x, value) if accumulate else value
    return ctx.broadcast_to(ctx.select(mask, ctx.cast(result, x.dtype), x, x.dtype), x.shape)


@converter("aten.masked_scatter.default")
def masked_scatter(ctx: Context, x: Node, mask: Node, source: Node) -> Node:
    """Replace elements where the mask is set by the next elements of the source."""
    x = ctx.broadcast_to(x, ctx.shape)
    mask = ctx.broadcast_to(ctx.truth(mask), ctx.shape)
    if not x.type.size or not source.type.size:
        return x
    flat = ctx.reshape(ctx.cast(mask, DType.I64), (x.type.size,))
    check_steps(x.type.size**2, "masked_scatter")
    number = ctx.sub(ctx.emit("cumsum", flat, axis=0), 1)
    number = ctx.emit("clamp", number, min=0, max=source.type.size - 1)
    values = ctx.take(ctx.reshape(source, (source.type.size,)), number, 0)
    return ctx.select(mask, ctx.reshape(values, x.shape), x, x.dtype)
