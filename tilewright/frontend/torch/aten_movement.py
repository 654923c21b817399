"""Operators that move elements: views, slices, joins, repetition, padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tilewright.dtypes import DType
from tilewright.frontend.builder import Ints, Number, Operand, Unsupported
from tilewright.frontend.torch.context import Context, axis_of
from tilewright.frontend.torch.registry import converter, refuse
from tilewright.frontend.torch.types import common_dtype
from tilewright.graph.ir import Node

# -- views of all elements: the exported result says the shape ---------------------------------------------------


@converter(
    "aten.view.default",
    "aten.view_copy.default",
    "aten._unsafe_view.default",
    "aten.reshape.default",
    "aten.view_as.default",
    "aten.reshape_as.default",
    "aten.flatten.using_ints",
    "aten.ravel.default",
    "aten.unflatten.int",
    "aten.unsqueeze.default",
    "aten.unsqueeze_copy.default",
    "aten.squeeze.default",
    "aten.squeeze.dim",
    "aten.squeeze.dims",
    "aten.squeeze_copy.dim",
    "aten.atleast_1d.default",
    "aten.atleast_2d.default",
    "aten.atleast_3d.default",
    "aten._reshape_copy.default",
    "prims.view_of.default",
)
def reshaped(ctx: Context, x: Node, *arguments: object, **keywords: object) -> Node:
    return ctx.reshape(x, ctx.shape)


@converter(
    "aten.expand.default",
    "aten.expand_copy.default",
    "aten.expand_as.default",
    "aten.broadcast_to.default",
)
def expand(ctx: Context, x: Node, *arguments: object, **keywords: object) -> Node:
    return ctx.broadcast_to(x, ctx.shape)


@converter("aten.broadcast_tensors.default")
def broadcast_tensors(ctx: Context, tensors: Sequence[Node]) -> tuple[Node, ...]:
    return tuple(ctx.broadcast_to(x, ctx.shape) for x in tensors)


# -- permutations -----------------------------------------------------------------------------------------------


@converter("aten.permute.default", "aten.permute_copy.default")
def permute(ctx: Context, x: Node, dims: Ints) -> Node:
    return ctx.permute(x, [axis_of(dim, x.type.rank) for dim in dims])


@converter(
    "aten.transpose.int",
    "aten.transpose_copy.int",
    "aten.swapaxes.default",
    "aten.swapdims.default",
)
def transpose(ctx: Context, x: Node, dim0: int, dim1: int) -> Node:
    axes = list(range(x.type.rank))
    if not axes:
        return x
    a, b = axis_of(dim0, x.type.rank), axis_of(dim1, x.type.rank)
    axes[a], axes[b] = axes[b], axes[a]
    return ctx.permute(x, axes)


@converter(
    "aten.t.default",
    "aten.t_copy.default",
    "aten.numpy_T.default",
    "aten.matrix_H.default",
    "aten.mH.default",
)
def reversed_axes(ctx: Context, x: Node) -> Node:
    return ctx.permute(x, tuple(range(x.type.rank))[::-1])


@converter("aten.mT.default", "aten.adjoint.default")
def matrix_transpose(ctx: Context, x: Node) -> Node:
    return transpose(ctx, x, -2, -1)


@converter("aten.movedim.int", "aten.movedim.intlist", "aten.moveaxis.int", "aten.moveaxis.intlist")
def movedim(ctx: Context, x: Node, source: int | Ints, destination: int | Ints) -> Node:
    rank = x.type.rank
    sources = [axis_of(axis, rank) for axis in ([source] if isinstance(source, int) else source)]
    targets = [
        axis_of(axis, rank) for axis in ([destination] if isinstance(destination, int) else destination)
    ]
    placed = dict(zip(targets, sources, strict=True))
    others = iter(axis for axis in range(rank) if axis not in sources)
    return ctx.permute(x, [placed[axis] if axis in placed else next(others) for axis in range(rank)])


@converter("aten.flip.default")
def flip(ctx: Context, x: Node, dims: Ints) -> Node:
    axes = tuple(sorted(axis_of(dim, x.type.rank) for dim in dims))
    return ctx.emit("flip", x, axes=axes) if axes and x.type.rank else x


@converter("aten.fliplr.default")
def fliplr(ctx: Context, x: Node) -> Node:
    return flip(ctx, x, [1])


@converter("aten.flipud.default")
def flipud(ctx: Context, x: Node) -> Node:
    return flip(ctx, x, [0])


@converter("aten.roll.default")
def roll(ctx: Context, x: Node, shifts: int | Ints, dims: int | Ints = ()) -> Node:
    shifts = [shifts] if isinstance(shifts, int) else shifts
    dims = [dims] if isinstance(dims, int) else dims
    if not dims:
        flat = _rolled(ctx, ctx.reshape(x, (x.type.size,)), shifts[0], 0)
        return ctx.reshape(flat, x.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        x = _rolled(ctx, x, shift, axis_of(dim, x.type.rank))
    return x


def _rolled(ctx: Context, x: Node, shift: int, axis: int) -> Node:
    extent = x.shape[axis]
    cut = (-shift) % extent if extent else 0
    if cut == 0:
        return x
    return ctx.concat([ctx.slice_axis(x, axis, cut, extent), ctx.slice_axis(x, axis, 0, cut)], axis)


@converter("aten.pixel_shuffle.default")
def pixel_shuffle(ctx: Context, x: Node, upscale_factor: int) -> Node:
    """[..., C r r, H, W] -> [..., C, H r, W r]"""
    r = upscale_factor
    *lead, channels, height, width = x.shape
    n = len(lead)
    split = ctx.reshape(x, (*lead, channels // (r * r), r, r, height, width))
    order = (*range(n), n, n + 3, n + 1, n + 4, n + 2)
    return ctx.reshape(ctx.permute(split, order), ctx.shape)


@converter("aten.pixel_unshuffle.default")
def pixel_unshuffle(ctx: Context, x: Node, downscale_factor: int) -> Node:
    """[..., C, H r, W r] -> [..., C r r, H, W]"""
    r = downscale_factor
    *lead, channels, height, width = x.shape
    n = len(lead)
    split = ctx.reshape(x, (*lead, channels, height // r, r, width // r, r))
    order = (*range(n), n, n + 2, n + 4, n + 1, n + 3)
    return ctx.reshape(ctx.permute(split, order), ctx.shape)


@converter("aten.rot90.default")
def rot90(ctx: Context, x: Node, k: int = 1, dims: Ints = (0, 1)) -> Node:
    a, b = (axis_of(dim, x.type.rank) for dim in dims)
    if k % 4 == 2:
        return flip(ctx, x, [a, b])
    rotated = x if k % 4 == 0 else transpose(ctx, x, a, b)
    return rotated if k % 4 == 0 else flip(ctx, rotated, [a if k % 4 == 1 else b])


@converter("aten.channel_shuffle.default", "aten.native_channel_shuffle.default")
def channel_shuffle(ctx: Context, x: Node, groups: int) -> Node:
    split = ctx.reshape(x, (x.shape[0], groups, x.shape[1] // groups, *x.shape[2:]))
    order = (0, 2, 1, *range(3, split.type.rank))
    return ctx.reshape(ctx.permute(split, order), x.shape)


# -- parts ------------------------------------------------------------------------------------------------------


def bounds(extent: int, start: int | None, stop: int | None) -> tuple[int, int]:
    """Python's bounds of a slice, as 0 <= start <= stop <= extent."""
    first, last, _ = slice(start, stop).indices(extent)
    return first, max(first, last)


@converter("aten.slice.Tensor", "aten.slice_copy.Tensor")
def slice_(
    ctx: Context, x: Node, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Node:
    axis = axis_of(dim, x.type.rank)
    return ctx.slice_axis(x, axis, *bounds(x.shape[axis], start, end), step)


@converter("aten.select.int", "aten.select_copy.int")
def select(ctx: Context, x: Node, dim: int, index: int) -> Node:
    axis = axis_of(dim, x.type.rank)
    index = index % x.shape[axis]
    return ctx.squeeze(ctx.slice_axis(x, axis, index, index + 1), axis)


@converter("aten.narrow.default", "aten.narrow_copy.default")
def narrow(ctx: Context, x: Node, dim: int, start: int, length: int) -> Node:
    axis = axis_of(dim, x.type.rank)
    start = start % x.shape[axis] if x.shape[axis] and start < 0 else start
    return ctx.slice_axis(x, axis, start, start + length)


@converter(
    "aten.split.Tensor",
    "aten.split.sizes",
    "aten.split_copy.Tensor",
    "aten.split_with_sizes.default",
    "aten.split_with_sizes_copy.default",
    "aten.chunk.default",
    "aten.unsafe_split.Tensor",
    "aten.unsafe_split_with_sizes.default",
    "aten.unsafe_chunk.default",
    "aten.tensor_split.sections",
    "aten.tensor_split.indices",
)
def split(ctx: Context, x: Node, how: int | Ints, dim: int = 0) -> tuple[Node, ...]:
    """Consecutive parts; the exported results say how long each is."""
    axis = axis_of(dim, x.type.rank)
    parts, start = [], 0
    for part in ctx.value:
        stop = start + int(part.shape[axis])
        parts.append(ctx.slice_axis(x, axis, start, stop))
        start = stop
    return tuple(parts)


@converter("aten.unbind.int", "aten.unbind_copy.int")
def unbind(ctx: Context, x: Node, dim: int = 0) -> tuple[Node, ...]:
    axis = axis_of(dim, x.type.rank)
    return tuple(select(ctx, x, axis, index) for index in range(x.shape[axis]))


@converter("aten.slice_scatter.default")
def slice_scatter(
    ctx: Context,
    x: Node,
    src: Node,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Node:
    """`x` with `src` in place of a slice of it."""
    axis = axis_of(dim, x.type.rank)
    extent = x.shape[axis]
    first, last = bounds(extent, start, end)
    src = ctx.cast(src, x.dtype)
    if step == 1:
        before, after = ctx.slice_axis(x, axis, 0, first), ctx.slice_axis(x, axis, last, extent)
        return ctx.concat([before, src, after], axis)
    low, high, interior = [0] * x.type.rank, [0] * x.type.rank, [0] * x.type.rank
    spread = (src.shape[axis] - 1) * step + 1
    low[axis], high[axis], interior[axis] = first, extent - first - spread, step - 1
    zero: Number = False if x.dtype is DType.BOOL else 0.0 if x.dtype.is_float else 0
    laid = ctx.emit("pad", src, low=tuple(low), high=tuple(high), interior=tuple(interior), value=zero)
    covered = np.zeros([extent if d == axis else 1 for d in range(x.type.rank)], dtype=np.bool_)
    covered.reshape(-1)[first:last:step] = True
    return ctx.emit("select", ctx.constant(covered), laid, x)


@converter("aten.select_scatter.default")
def select_scatter(ctx: Context, x: Node, src: Node, dim: int, index: int) -> Node:
    axis = axis_of(dim, x.type.rank)
    index = index % x.shape[axis]
    return slice_scatter(ctx, x, ctx.unsqueeze(src, axis), axis, index, index + 1)


def diagonal_of(ctx: Context, x: Node, offset: int, dim1: int, dim2: int) -> Node:
    """The diagonal as the last axis: a slice with stride columns + 1 of the flattened matrix."""
    a, b = axis_of(dim1, x.type.rank), axis_of(dim2, x.type.rank)
    others = [axis for axis in range(x.type.rank) if axis not in (a, b)]
    x = ctx.permute(x, (*others, a, b))
    *lead, rows, columns = x.shape
    row, column = max(-offset, 0), max(offset, 0)
    length = max(0, min(rows - row, columns - column))
    flat = ctx.reshape(x, (*lead, rows * columns))
    start = min(row * columns + column, rows * columns)
    stop = start + (length - 1) * (columns + 1) + 1 if length else start
    return ctx.slice_axis(flat, len(lead), start, stop, columns + 1)


@converter("aten.diagonal.default", "aten.diagonal_copy.default")
def diagonal(ctx: Context, x: Node, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Node:
    return diagonal_of(ctx, x, offset, dim1, dim2)


@converter("aten.linalg_diagonal.default")
def linalg_diagonal(ctx: Context, A: Node, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Node:
    return diagonal_of(ctx, A, offset, dim1, dim2)


@converter("aten.diag_embed.default")
def diag_embed(ctx: Context, x: Node, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Node:
    size = x.shape[-1] + abs(offset)
    padding = ctx.full(0, x.dtype, (*x.shape[:-1], abs(offset)))
    # Row i holds element i (below the diagonal: i + offset) of x at column i + offset.
    values = ctx.concat([x, padding] if offset >= 0 else [padding, x], x.type.rank - 1)
    matrix = (size, size)
    columns = ctx.add(ctx.iota(matrix, 0), offset)
    on_diagonal = ctx.emit("eq", columns, ctx.iota(matrix, 1))
    result = ctx.select(on_diagonal, ctx.unsqueeze(values, x.type.rank), 0, x.dtype)
    rank = result.type.rank
    a, b = axis_of(dim1, rank), axis_of(dim2, rank)
    placed = {a: rank - 2, b: rank - 1}
    others = iter(range(rank - 2))
    return ctx.permute(result, [placed[axis] if axis in placed else next(others) for axis in range(rank)])


@converter("aten.diag.default")
def diag(ctx: Context, x: Node, diagonal: int = 0) -> Node:
    return diag_embed(ctx, x, diagonal) if x.type.rank == 1 else diagonal_of(ctx, x, diagonal, 0, 1)


@converter("aten.diagonal_scatter.default")
def diagonal_scatter(ctx: Context, x: Node, src: Node, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Node:
    """`x` with `src` in place of its diagonal."""
    a, b = axis_of(dim1, x.type.rank), axis_of(dim2, x.type.rank)
    order = (*(axis for axis in range(x.type.rank) if axis not in (a, b)), a, b)
    matrices = ctx.permute(x, order)
    rows, columns = matrices.shape[-2:]
    if not src.type.size:
        return x
    # Row i holds element i of the diagonal, counted from the row where it begins.
    element = np.clip(np.arange(rows) - max(-offset, 0), 0, src.shape[-1] - 1)
    values = ctx.unsqueeze(ctx.take(ctx.cast(src, x.dtype), element, src.type.rank - 1), src.type.rank)
    on_diagonal = ctx.constant(np.eye(rows, columns, offset, dtype=np.bool_))
    result = ctx.emit("select", on_diagonal, values, matrices)
    return ctx.permute(result, tuple(order.index(axis) for axis in range(x.type.rank)))


@converter("aten.unfold.default", "aten.unfold_copy.default")
def unfold(ctx: Context, x: Node, dimension: int, size: int, step: int) -> Node:
    """Windows along one axis; the window becomes the last axis."""
    if x.type.rank == 0:
        return ctx.reshape(x, ctx.shape)
    axis = axis_of(dimension, x.type.rank)
    count = (x.shape[axis] - size) // step + 1
    windows = np.arange(count)[:, None] * step + np.arange(size)[None, :]
    return ctx.move_axis(ctx.take(x, windows, axis), axis + 1, x.type.rank)


# -- joins and repetition ---------------------------------------------------------------------------------------


@converter("aten.cat.default", "aten.concat.default", "aten.concatenate.default")
def cat(ctx: Context, tensors: Sequence[Node], dim: int = 0) -> Node:
    parts = [x for x in tensors if x.shape != (0,)] or list(tensors[:1])  # PyTorch skips those of shape [0]
    return ctx.concat([ctx.cast(x, ctx.dtype) for x in parts], axis_of(dim, parts[0].type.rank))


@converter("aten.stack.default")
def stack(ctx: Context, tensors: Sequence[Node], dim: int = 0) -> Node:
    axis = axis_of(dim, tensors[0].type.rank + 1)
    return ctx.concat([ctx.unsqueeze(ctx.cast(x, ctx.dtype), axis) for x in tensors], axis)


def _at_least(ctx: Context, x: Node, rank: int) -> Node:
    """NumPy's atleast_1d, 2d, 3d: [] -> [1] -> [1, n] -> [1, n, 1], [m, n] -> [m, n, 1]"""
    shape = x.shape or (1,)
    if rank >= 2 and len(shape) == 1:
        shape = (1, *shape)
    if rank >= 3 and len(shape) == 2:
        shape = (*shape, 1)
    return ctx.reshape(x, shape)


@converter("aten.hstack.default")
def hstack(ctx: Context, tensors: Sequence[Node]) -> Node:
    parts = [_at_least(ctx, x, 1) for x in tensors]
    return cat(ctx, parts, 0 if parts[0].type.rank == 1 else 1)


@converter("aten.vstack.default", "aten.row_stack.default")
def vstack(ctx: Context, tensors: Sequence[Node]) -> Node:
    return cat(ctx, [_at_least(ctx, x, 2) for x in tensors], 0)


@converter("aten.dstack.default")
def dstack(ctx: Context, tensors: Sequence[Node]) -> Node:
    return cat(ctx, [_at_least(ctx, x, 3) for x in tensors], 2)


@converter("aten.column_stack.default")
def column_stack(ctx: Context, tensors: Sequence[Node]) -> Node:
    return cat(ctx, [x if x.type.rank >= 2 else ctx.reshape(x, (x.type.size, 1)) for x in tensors], 1)


def repeated(ctx: Context, x: Node, repeats: Ints) -> Node:
    """The tensor laid out `repeats` times along each axis, extra axes first."""
    shape = (1,) * (len(repeats) - x.type.rank) + x.shape
    repeats = (1,) * (len(shape) - len(repeats)) + tuple(repeats)
    target = tuple(extent * count for extent, count in zip(shape, repeats, strict=True))
    if all(count == 1 or extent == 1 for extent, count in zip(shape, repeats, strict=True)):
        return ctx.broadcast_to(ctx.reshape(x, shape), target)
    inner = [extent for pair in ((1, extent) for extent in shape) for extent in pair]
    outer = [extent for pair in zip(repeats, shape, strict=True) for extent in pair]
    return ctx.reshape(ctx.broadcast_to(ctx.reshape(x, inner), outer), target)


@converter("aten.repeat.default", "aten.tile.default")
def repeat(ctx: Context, x: Node, repeats: Ints) -> Node:
    return repeated(ctx, x, repeats)


def repeated_elements(ctx: Context, x: Node, count: int, axis: int) -> Node:
    """Each element along `axis` `count` times in a row."""
    shape = x.shape
    spread = ctx.broadcast_to(ctx.unsqueeze(x, axis + 1), (*shape[: axis + 1], count, *shape[axis + 1 :]))
    return ctx.reshape(spread, (*shape[:axis], shape[axis] * count, *shape[axis + 1 :]))


@converter("aten.repeat_interleave.self_int")
def repeat_interleave(
    ctx: Context, x: Node, repeats: int, dim: int | None = None, output_size: int | None = None
) -> Node:
    if dim is None or x.type.rank == 0:
        x, dim = ctx.reshape(x, (x.type.size,)), 0
    return repeated_elements(ctx, x, repeats, axis_of(dim, x.type.rank))


@converter("aten.meshgrid.default", "aten.meshgrid.indexing")
def meshgrid(ctx: Context, tensors: Sequence[Node], indexing: str = "ij") -> tuple[Node, ...]:
    order = list(range(len(tensors)))
    if indexing == "xy" and len(order) >= 2:
        order[0], order[1] = 1, 0
    grids = []
    for position, x in enumerate(tensors):
        shape = [1] * len(tensors)
        shape[order.index(position)] = x.type.size
        grids.append(ctx.broadcast_to(ctx.reshape(x, shape), ctx.shape))
    return tuple(grids)


# -- padding ----------------------------------------------------------------------------------------------------


@converter("aten.constant_pad_nd.default")
def constant_pad(ctx: Context, x: Node, pad: Ints, value: Operand = 0) -> Node:
    """`pad` holds (before, after) from the last axis on; negative ones cut off."""
    if isinstance(value, Node):
        raise Unsupported("padding with a value that is a tensor")
    low, high = [0] * x.type.rank, [0] * x.type.rank
    for i in range(len(pad) // 2):
        axis = x.type.rank - 1 - i
        before, after = pad[2 * i], pad[2 * i + 1]
        x = ctx.slice_axis(x, axis, max(-before, 0), x.shape[axis] - max(-after, 0))
        low[axis], high[axis] = max(before, 0), max(after, 0)
    if not any(low) and not any(high):
        return x
    fill: Number = bool(value) if x.dtype is DType.BOOL else float(value) if x.dtype.is_float else int(value)
    return ctx.emit("pad", x, low=tuple(low), high=tuple(high), interior=(0,) * x.type.rank, value=fill)


def _reflected(extent: int, before: int, after: int) -> np.ndarray:
    period = max(2 * (extent - 1), 1)
    folded = np.arange(-before, extent + after) % period
    return np.minimum(folded, period - folded) if extent > 1 else np.zeros_like(folded)


def _replicated(extent: int, before: int, after: int) -> np.ndarray:
    return np.clip(np.arange(-before, extent + after), 0, extent - 1)


def _circular(extent: int, before: int, after: int) -> np.ndarray:
    """Apply negative padding first, then wrap around what is left."""
    first, last = max(-before, 0), extent - max(-after, 0)
    room = last - first
    return first + np.arange(-max(before, 0), room + max(after, 0)) % max(room, 1)


_INDICES: dict[str, Callable[[int, int, int], np.ndarray]] = {
    "reflect": _reflected,
    "replicate": _replicated,
    "circular": _circular,
}


def _pad_by_index(ctx: Context, x: Node, pad: Ints, mode: str) -> Node:
    for i in range(len(pad) // 2):
        axis = x.type.rank - 1 - i
        before, after = pad[2 * i], pad[2 * i + 1]
        if before or after:
            x = ctx.take(x, _INDICES[mode](x.shape[axis], before, after), axis)
    return x


@converter("aten.pad.default")
def pad(ctx: Context, x: Node, pad: Ints, mode: str = "constant", value: float | None = None) -> Node:
    if mode == "constant":
        return constant_pad(ctx, x, pad, 0 if value is None else value)
    return _pad_by_index(ctx, x, pad, mode)


def _register_padding(name: str, mode: str) -> None:
    @converter(*(f"aten.{name}_pad{d}d.default" for d in (1, 2, 3)))
    def convert(ctx: Context, x: Node, padding: Ints) -> Node:
        return _pad_by_index(ctx, x, padding, mode)


_register_padding("reflection", "reflect")
_register_padding("replication", "replicate")


@converter("aten.im2col.default")
def im2col(ctx: Context, x: Node, kernel_size: Ints, dilation: Ints, padding: Ints, stride: Ints) -> Node:
    """F.unfold: [N, C, H, W] -> [N, C kh kw, L]"""
    batched = x if x.type.rank == 4 else ctx.unsqueeze(x, 0)
    batched = constant_pad(ctx, batched, (padding[1], padding[1], padding[0], padding[0]))
    for axis, (kernel, step, spacing) in enumerate(zip(kernel_size, stride, dilation, strict=True)):
        extent = batched.shape[2 + 2 * axis]
        count = (extent - spacing * (kernel - 1) - 1) // step + 1
        windows = np.arange(kernel)[:, None] * spacing + np.arange(count)[None, :] * step
        batched = ctx.take(batched, windows, 2 + 2 * axis)
    # [N, C, kh, oh, kw, ow] -> [N, C, kh, kw, oh, ow]
    columns = ctx.permute(batched, (0, 1, 2, 4, 3, 5))
    return ctx.reshape(columns, ctx.shape)


@converter("aten.block_diag.default")
def block_diag(ctx: Context, tensors: Sequence[Node]) -> Node:
    dtype = common_dtype(tensors)
    total = ctx.shape[1]
    rows, done = [], 0
    for x in tensors:
        matrix = ctx.cast(ctx.reshape(x, ((1,) * (2 - x.type.rank)) + x.shape), dtype)
        width = matrix.shape[1]
        rows.append(constant_pad(ctx, matrix, (done, total - done - width)))
        done += width
    return ctx.concat(rows, 0)


refuse(
    "reads memory by strides, which a graph does not have",
    "aten.as_strided.default",
    "aten.as_strided_copy.default",
    "aten.as_strided_scatter.default",
)
