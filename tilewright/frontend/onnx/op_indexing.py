"""Gathering, scattering and ordering elements.

Scatters and orderings compare all positions with all indices. That needs only comparisons and reductions, and suits
the small tensors that models scatter and sort; larger ones are refused. A scatter with constant indices becomes a
gather, computed at import.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from tilewright.dtypes import DType
from tilewright.frontend.builder import Unsupported
from tilewright.frontend.onnx.context import Context, axis_of, highest, lowest
from tilewright.frontend.onnx.registry import converter
from tilewright.graph.ir import Node

# -- gathering --------------------------------------------------------------------------------------------------------


def _check_range(indices: Node, extent: int) -> None:
    """Raise Unsupported for constant indices that are out of range."""
    if indices.data is not None and indices.data.size:
        least, most = int(indices.data.min()), int(indices.data.max())
        if least < -extent or most >= extent:
            raise Unsupported(f"indices from {least} to {most} of an axis of {extent}")


def _check_tuples(indices: Node, extents: tuple[int, ...]) -> None:
    """The same for index tuples, which are the last axis."""
    if indices.data is not None and indices.data.size:
        limits = np.array(extents)
        if (indices.data < -limits).any() or (indices.data >= limits).any():
            raise Unsupported(f"indices beyond the extents {list(extents)}")


@converter("Gather")
def gather(ctx: Context, x: Node, indices: Node, *, axis: int = 0) -> Node:
    axis = axis_of(axis, x.type.rank)
    _check_range(indices, x.shape[axis])
    return ctx.take(x, indices, axis)


@converter("GatherElements")
def gather_elements(ctx: Context, x: Node, indices: Node, *, axis: int = 0) -> Node:
    axis = axis_of(axis, x.type.rank)
    _check_range(indices, x.shape[axis])
    return ctx.emit("take_along", x, indices, axis=axis)


@converter("GatherND")
def gather_nd(ctx: Context, x: Node, indices: Node, *, batch_dims: int = 0) -> Node:
    depth = indices.shape[-1]
    batch = x.shape[:batch_dims]
    if batch != indices.shape[:batch_dims] or batch_dims + depth > x.type.rank:
        raise Unsupported(f"indices {indices.type!r} of {x.type!r} with {batch_dims} batch axes")
    _check_tuples(indices, x.shape[batch_dims : batch_dims + depth])
    position = flat_positions(ctx, indices, x.shape[batch_dims : batch_dims + depth])
    span = math.prod(x.shape[batch_dims : batch_dims + depth])
    if batch:
        ctx.reserve(math.prod(batch), "the first position of each batch")
        first = np.arange(math.prod(batch)).reshape(*batch, *[1] * (position.type.rank - batch_dims)) * span
        position = ctx.add(position, ctx.constant(first))
    rest = x.shape[batch_dims + depth :]
    return ctx.take(ctx.reshape(x, (math.prod(batch) * span, *rest)), position, 0)


def flat_positions(ctx: Context, indices: Node, extents: tuple[int, ...]) -> Node:
    """Index tuples (the last axis) as positions in the flattened axes that they index."""
    indices = ctx.cast(indices, DType.I64)
    limits = ctx.ints(extents)
    counted = ctx.select(ctx.compare("lt", indices, 0), ctx.add(indices, limits), indices)
    steps = [math.prod(extents[axis + 1 :]) for axis in range(len(extents))]
    return ctx.reduce("sum", ctx.mul(counted, ctx.ints(steps)), (indices.type.rank - 1,), False)


# -- scattering -------------------------------------------------------------------------------------------------------

_COMBINE: dict[str, tuple[str, str, Callable[[DType], int | float | bool]]] = {
    # reduction: (over the updates of one element, with the previous value, neutral element)
    "add": ("sum", "add", lambda dtype: 0),
    "mul": ("prod", "mul", lambda dtype: 1),
    "max": ("amax", "maximum", lowest),
    "min": ("amin", "minimum", highest),
}


def scattered(
    ctx: Context, data: Node, indices: Node, updates: Node, axis: int, reduction: str = "none"
) -> Node:
    """`data` with `updates` at `indices` along `axis`. All have one rank; indices and updates have one shape, whose
    extents except that of `axis` are at most the data's. Of several updates of one element the last one wins."""
    count, extent = indices.shape[axis], data.shape[axis]
    if not indices.type.size:
        return data
    if reduction == "none" and ctx.statics.is_static(indices):
        ctx.check_table(data.type.size + indices.type.size, "a scatter")
        return replaced(ctx, data, updates, last_updates(ctx.static(indices), data.shape, axis), axis)
    indices = ctx.cast(indices, DType.I64)
    indices = ctx.select(ctx.compare("lt", indices, 0), ctx.add(indices, extent), indices)
    # Where the data has more than the indices on another axis, no place is hit.
    more = [0 if d == axis else n - m for d, (n, m) in enumerate(zip(data.shape, indices.shape, strict=True))]
    if any(width < 0 for width in more):
        raise Unsupported(f"indices {indices.type!r} for {data.type!r}")
    zeros = [0] * data.type.rank
    indices = ctx.pad(indices, zeros, more, -1)
    updates = ctx.pad(updates, zeros, more, 0)
    ctx.check_table(indices.type.size * extent, "a scatter")
    # The table: places of the data on `axis`, updates on the axis behind it.
    table = (*data.shape[: axis + 1], count, *data.shape[axis + 1 :])
    hit = ctx.compare("eq", ctx.unsqueeze(indices, axis), ctx.iota(table, axis))
    if reduction == "none":
        last = ctx.select(hit, ctx.iota(table, axis + 1), -1)
        last = ctx.reduce("amax", last, (axis + 1,), False)
        found = ctx.emit("take_along", updates, ctx.emit("relu", last), axis=axis)
        return ctx.select(ctx.compare("ge", last, 0), found, data)
    if reduction not in _COMBINE:
        raise Unsupported(f"the reduction {reduction}")
    over, join, neutral = _COMBINE[reduction]
    candidates = ctx.select(hit, ctx.unsqueeze(ctx.widen(updates), axis), neutral(data.dtype.compute))
    combined = ctx.reduce(over, candidates, (axis + 1,), False)
    return ctx.cast(ctx.emit(join, ctx.widen(data), combined), data.dtype)


def last_updates(indices: np.ndarray, shape: tuple[int, ...], axis: int) -> np.ndarray:
    """The number of the last update of each element of a tensor of `shape`, or -1."""
    if any(n > m for d, (n, m) in enumerate(zip(indices.shape, shape, strict=True)) if d != axis):
        raise Unsupported(f"indices of shape {list(indices.shape)} for {list(shape)}")
    positions: list[np.ndarray] = list(np.indices(indices.shape, sparse=True))
    order = np.broadcast_to(positions[axis], indices.shape)
    positions[axis] = np.where(indices < 0, indices + shape[axis], indices)
    inside = (positions[axis] >= 0) & (positions[axis] < shape[axis])
    last = np.full(shape, -1, np.int64)
    np.maximum.at(
        last, tuple(np.broadcast_to(position, indices.shape)[inside] for position in positions), order[inside]
    )
    return last


def replaced(ctx: Context, data: Node, updates: Node, last: np.ndarray, axis: int) -> Node:
    """`data` with the update of number `last` along `axis` where that is not -1."""
    more = [0 if d == axis else n - m for d, (n, m) in enumerate(zip(last.shape, updates.shape, strict=True))]
    updates = ctx.pad(updates, [0] * len(more), more, 0)
    found = ctx.emit("take_along", updates, ctx.constant(np.maximum(last, 0)), axis=axis)
    return ctx.select(ctx.constant(last >= 0), found, data)


@converter("ScatterElements", "Scatter")
def scatter_elements(
    ctx: Context, data: Node, indices: Node, updates: Node, *, axis: int = 0, reduction: str = "none"
) -> Node:
    axis = axis_of(axis, data.type.rank)
    if indices.type.rank != data.type.rank or indices.shape != updates.shape:
        raise Unsupported(f"indices {indices.type!r} and updates {updates.type!r} for {data.type!r}")
    _check_range(indices, data.shape[axis])
    return scattered(ctx, data, indices, updates, axis, reduction)


@converter("ScatterND")
def scatter_nd(ctx: Context, data: Node, indices: Node, updates: Node, *, reduction: str = "none") -> Node:
    depth = indices.shape[-1]
    if depth > data.type.rank:
        raise Unsupported(f"indices {indices.type!r} of {data.type!r}")
    rest = data.shape[depth:]
    if updates.shape != (*indices.shape[:-1], *rest):
        raise Unsupported(f"updates {updates.type!r} for indices {indices.type!r} of {data.type!r}")
    _check_tuples(indices, data.shape[:depth])
    rows, width = math.prod(data.shape[:depth]), math.prod(rest)
    position = flat_positions(ctx, indices, data.shape[:depth])
    count = position.type.size
    if not count:
        return data
    flat = ctx.reshape(data, (rows, width))
    rows_of_updates = ctx.reshape(updates, (count, width))
    if reduction == "none" and ctx.statics.is_static(position):
        ctx.check_table(rows + count, "a scatter")
        last = last_updates(ctx.static(position).reshape(-1), (rows,), 0)
        found = ctx.take(rows_of_updates, np.maximum(last, 0), 0)
        result = ctx.select(ctx.constant((last >= 0)[:, None]), found, flat)
    elif reduction == "none":  # one table for all columns
        hit = ctx.compare("eq", ctx.reshape(position, (1, count)), ctx.iota((rows, count), 0))
        ctx.check_table(rows * count, "a scatter")
        latest = ctx.reduce("amax", ctx.select(hit, ctx.iota((rows, count), 1), -1), (1,), False)
        found = ctx.take(rows_of_updates, ctx.emit("relu", latest), 0)
        result = ctx.select(ctx.reshape(ctx.compare("ge", latest, 0), (rows, 1)), found, flat)
    else:
        wide = ctx.broadcast_to(ctx.reshape(position, (count, 1)), (count, width))
        result = scattered(ctx, flat, wide, rows_of_updates, 0, reduction)
    return ctx.reshape(result, data.shape)


@converter("TensorScatter")
def tensor_scatter(
    ctx: Context,
    past: Node,
    update: Node,
    write_indices: Node | None = None,
    *,
    axis: int = -2,
    mode: str = "linear",
) -> Node:
    """A cache with `update` written along `axis` from each batch element's position on, wrapping around if
    circular."""
    axis = axis_of(axis, past.type.rank)
    length, extent = update.shape[axis], past.shape[axis]
    start = (
        ctx.full(0, DType.I64, (past.shape[0],))
        if write_indices is None
        else ctx.cast(write_indices, DType.I64)
    )
    if mode == "linear":
        ctx.check_values(start, 0, extent - length, "write_indices")
    start = ctx.reshape(start, (past.shape[0], *[1] * (past.type.rank - 1)))
    offset = ctx.sub(ctx.iota(past.shape, axis), start)
    if mode == "circular":
        offset = ctx.emit("mod", offset, ctx.full(extent, DType.I64))
    inside = ctx.both(ctx.compare("ge", offset, 0), ctx.compare("lt", offset, length))
    found = ctx.emit("take_along", update, ctx.emit("clamp", offset, min=0, max=length - 1), axis=axis)
    return ctx.select(inside, found, past)


# -- ordering ---------------------------------------------------------------------------------------------------------


def ordered(ctx: Context, x: Node, axis: int, count: int, *, largest: bool) -> tuple[Node, Node]:
    """The first `count` elements along `axis` in order, and their indices; ties keep their order."""
    rank, extent = x.type.rank, x.shape[axis]
    if not 0 <= count <= extent:
        raise Unsupported(f"{count} elements of an axis of {extent}")
    ctx.check_table(x.type.size * extent, "an ordering")
    rows = ctx.move_axis(x, axis, rank - 1)
    here, other = ctx.unsqueeze(rows, rank), ctx.unsqueeze(rows, rank - 1)  # [..., i, 1] and [..., 1, j]
    before = ctx.compare("gt" if largest else "lt", other, here)
    if x.dtype.is_float:  # NaN is greater than everything, as in NumPy
        nan_here, nan_other = ctx.emit("isnan", here), ctx.emit("isnan", other)
        one = ctx.emit("logical_not", nan_here if largest else nan_other)
        above = ctx.both(nan_other if largest else nan_here, one)
        before = ctx.emit("logical_or", before, above)
        same = ctx.emit("logical_or", ctx.compare("eq", other, here), ctx.both(nan_here, nan_other))
    else:
        same = ctx.compare("eq", other, here)
    ctx.reserve(extent * extent, "an ordering's table of positions")
    earlier = ctx.constant(np.tri(extent, k=-1, dtype=np.bool_))  # j < i
    before = ctx.emit("logical_or", before, ctx.both(same, earlier))
    position = ctx.reduce("sum", ctx.cast(before, DType.I64), (rank,), False)  # of element i in the result
    table = (*rows.shape[:-1], count, extent)
    hit = ctx.compare("eq", ctx.unsqueeze(position, rank - 1), ctx.iota(table, rank - 1))
    source = ctx.reduce("sum", ctx.select(hit, ctx.iota(table, rank), 0), (rank,), False)
    values = ctx.emit("take_along", rows, source, axis=rank - 1)
    return ctx.move_axis(values, rank - 1, axis), ctx.move_axis(source, rank - 1, axis)


@converter("TopK")
def top_k(
    ctx: Context,
    x: Node,
    count: Node | None = None,
    *,
    axis: int = -1,
    k: int | None = None,
    largest: int = 1,
    sorted: int = 1,
) -> tuple[Node, Node]:
    number = ctx.static_int(count) if count is not None else int(k or 0)
    return ordered(ctx, x, axis_of(axis, x.type.rank), number, largest=bool(largest))
