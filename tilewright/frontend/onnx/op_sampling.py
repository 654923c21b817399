"""Operators that read a tensor at computed coordinates: grid_sample, roi_align, deformable convolution; and col2im.

Coordinates become positions in the flattened image, and every access is one `take` of rows of channels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from tilewright.dtypes import DType
from tilewright.frontend.builder import Ints, Unsupported
from tilewright.frontend.onnx.context import Context
from tilewright.frontend.onnx.matmuls import WindowAttributes, ones
from tilewright.frontend.onnx.registry import FallBack, converter
from tilewright.graph.ir import Node


def rows_of(ctx: Context, x: Node) -> Node:
    """N C spatial as [N * spatial, C]."""
    rank = x.type.rank
    last = ctx.permute(x, (0, *range(2, rank), 1))
    return ctx.reshape(last, (x.shape[0] * math.prod(x.shape[2:]), x.shape[1]))


def read(ctx: Context, rows: Node, extents: Ints, batch: Node, position: Sequence[Node]) -> Node:
    """Rows of channels at integer coordinates (floats, clamped to the image) of the images given by `batch`."""
    flat = batch
    for coordinate, extent in zip(position, extents, strict=True):
        inside = ctx.emit("clamp", coordinate, min=0.0, max=float(extent - 1))
        flat = ctx.add(ctx.mul(flat, extent), ctx.cast(inside, DType.I64))
    return ctx.take(rows, flat, 0)


def batch_numbers(ctx: Context, shape: Ints) -> Node:
    return ctx.iota(shape, 0)


# -- grids ------------------------------------------------------------------------------------------------------


def _reflected(ctx: Context, position: Node, low: float, high: float) -> Node:
    """Reflect at the borders until the coordinate is between them."""
    span = high - low
    if span <= 0:
        return ctx.full(low, position.dtype, position.shape)
    beyond = ctx.emit("abs", ctx.sub(position, low))
    around = ctx.arithmetic("fmod", beyond, 2 * span)
    return ctx.add(ctx.select(ctx.compare("gt", around, span), ctx.sub(2 * span, around), around), low)


_CUBIC_A = -0.75


def _taps(ctx: Context, position: Node, mode: str) -> list[tuple[Node, Node | None]]:
    """(integer coordinate, weight) of the elements that are summed along one axis."""
    if mode == "nearest":
        return [(position, None)]
    floor = ctx.emit("floor", position)
    t = ctx.sub(position, floor)
    if mode == "linear":
        return [(floor, ctx.sub(1, t)), (ctx.add(floor, 1), t)]

    def near(d: Node) -> Node:
        bent = ctx.sub(ctx.mul(d, _CUBIC_A + 2), _CUBIC_A + 3)
        return ctx.add(ctx.mul(ctx.mul(bent, d), d), 1)

    def far(d: Node) -> Node:
        bent = ctx.add(ctx.mul(ctx.sub(ctx.mul(d, _CUBIC_A), 5 * _CUBIC_A), d), 8 * _CUBIC_A)
        return ctx.sub(ctx.mul(bent, d), 4 * _CUBIC_A)

    return [
        (ctx.sub(floor, 1), far(ctx.add(t, 1))),
        (floor, near(t)),
        (ctx.add(floor, 1), near(ctx.sub(1, t))),
        (ctx.add(floor, 2), far(ctx.sub(2, t))),
    ]


def sampled(
    ctx: Context,
    rows: Node,
    extents: Ints,
    batch: Node,
    positions: Sequence[Node],
    mode: str,
    padding: str,
    borders: Sequence[tuple[float, float]],
) -> Node:
    """Rows of channels interpolated at `positions`, one float tensor per spatial axis."""
    total: Node | None = None
    for taps in itertools.product(*(_taps(ctx, position, mode) for position in positions)):
        weight: Node | None = None
        coordinates = []
        for (coordinate, factor), extent, (low, high) in zip(taps, extents, borders, strict=True):
            if padding == "zeros":
                inside = ctx.both(ctx.compare("ge", coordinate, 0), ctx.compare("lt", coordinate, extent))
                factor = (
                    ctx.cast(inside, coordinate.dtype) if factor is None else ctx.select(inside, factor, 0)
                )
            elif padding == "reflection":
                coordinate = ctx.emit("trunc", _reflected(ctx, coordinate, low, high))
            coordinates.append(coordinate)
            if factor is not None:
                weight = factor if weight is None else ctx.mul(weight, factor)
        value = read(ctx, rows, extents, batch, coordinates)
        if weight is not None:
            value = ctx.mul(value, ctx.cast(ctx.unsqueeze(weight, weight.type.rank), value.dtype))
        total = value if total is None else ctx.add(total, value)
    assert total is not None
    return total


@converter("AffineGrid")
def affine_grid(ctx: Context, theta: Node, size: Node, *, align_corners: int = 0) -> Node:
    """AffineGrid of the standard, if theta fits the size: [N, 2, 3] and N C H W, or [N, 3, 4] and N C D H W."""
    extents = ctx.static_ints(size)
    axes = len(extents) - 2
    if axes not in (2, 3) or any(extent < 1 for extent in extents):
        raise Unsupported(f"the size {extents}: must be N C H W or N C D H W")
    if theta.shape != (extents[0], axes, axes + 1):
        raise Unsupported(
            f"theta {theta.type!r} for the size {extents}: must be {[extents[0], axes, axes + 1]}"
        )
    raise FallBack


_MODES = {"bilinear": "linear", "bicubic": "cubic"}


@converter("GridSample")
def grid_sample(
    ctx: Context,
    x: Node,
    grid: Node,
    *,
    align_corners: int = 0,
    mode: str = "linear",
    padding_mode: str = "zeros",
) -> Node:
    extents = x.shape[2:]
    mode = _MODES.get(mode, mode)
    if not extents or grid.type.rank != x.type.rank or grid.shape[0] != x.shape[0]:
        raise Unsupported(f"a grid {grid.type!r} of {x.type!r}: must have its rank and its batch")
    if grid.shape[-1] != len(extents) or mode not in ("nearest", "linear", "cubic"):
        raise Unsupported(f"mode {mode} with a grid {grid.type!r} of {x.type!r}")
    if padding_mode not in ("zeros", "border", "reflection"):
        raise Unsupported(f"padding_mode {padding_mode}")
    if not all(extents):
        raise Unsupported("an axis without elements")
    points = ctx.widen(grid)
    positions, borders = [], []
    for axis, extent in enumerate(extents):
        low, high = (0.0, extent - 1.0) if align_corners else (-0.5, extent - 0.5)
        value = ctx.index_axis(
            points, points.type.rank - 1, len(extents) - 1 - axis
        )  # the grid counts backwards
        if align_corners:
            position = ctx.mul(ctx.mul(ctx.add(value, 1), 0.5), extent - 1)
        else:
            position = ctx.mul(ctx.sub(ctx.mul(ctx.add(value, 1), extent), 1), 0.5)
        if mode == "nearest":
            position = ctx.emit("round", position)
        beyond = ctx.emit("logical_or", ctx.compare("lt", position, low), ctx.compare("gt", position, high))
        if padding_mode == "border":
            position = ctx.select(beyond, ctx.emit("clamp", position, min=0.0, max=extent - 1.0), position)
        elif padding_mode == "reflection":
            position = ctx.select(beyond, _reflected(ctx, position, low, high), position)
            if mode == "nearest":
                position = ctx.emit("trunc", position)
        positions.append(position)
        borders.append((low, high))
    batch = batch_numbers(ctx, grid.shape[:-1])
    result = sampled(ctx, rows_of(ctx, ctx.widen(x)), extents, batch, positions, mode, padding_mode, borders)
    return ctx.cast(ctx.move_axis(result, result.type.rank - 1, 1), x.dtype)


# -- roi_align --------------------------------------------------------------------------------------------------------


@converter("RoiAlign")
def roi_align(
    ctx: Context,
    x: Node,
    rois: Node,
    batch_indices: Node,
    *,
    coordinate_transformation_mode: str | None = None,
    mode: str = "avg",
    output_height: int = 1,
    output_width: int = 1,
    sampling_ratio: int = 0,
    spatial_scale: float = 1.0,
) -> Node:
    if sampling_ratio <= 0:
        raise Unsupported("a number of samples that depends on data (sampling_ratio = 0)")
    default = "half_pixel" if ctx.opset >= 16 else "output_half_pixel"
    placing = coordinate_transformation_mode or default
    if placing not in ("half_pixel", "output_half_pixel"):
        raise Unsupported(f"the coordinate transformation {placing}")
    half = placing == "half_pixel"
    if x.type.rank != 4 or rois.type.rank != 2 or rois.shape[1] != 4 or min(output_height, output_width) < 1:
        raise Unsupported(f"{rois.type!r} of {x.type!r} as {output_height} x {output_width}")
    count, samples = rois.shape[0], int(sampling_ratio)
    if batch_indices.shape != (count,):
        raise Unsupported(f"batch_indices {batch_indices.type!r} for {count} regions")
    ctx.check_values(batch_indices, 0, x.shape[0] - 1, "batch_indices")
    corners = ctx.sub(ctx.mul(ctx.widen(rois), spatial_scale), 0.5 if half else 0.0)
    axes = []
    for axis, size in ((1, output_height), (0, output_width)):
        begin = ctx.slice_axis(corners, 1, axis, axis + 1)
        length = ctx.sub(ctx.slice_axis(corners, 1, axis + 2, axis + 3), begin)
        if not half:
            length = ctx.arithmetic("maximum", length, 1)
        step = ctx.div(length, size)
        ctx.reserve(size * samples, "the positions of samples")
        offsets = np.arange(size)[:, None] + (np.arange(samples)[None] + 0.5) / samples
        offset = ctx.constant(offsets.reshape(1, -1).astype(step.dtype.numpy))
        axes.append(ctx.add(begin, ctx.mul(offset, step)))  # [rois, size * samples]
    shape = (count, output_height * samples, output_width * samples)
    heights = ctx.broadcast_to(ctx.unsqueeze(axes[0], 2), shape)
    widths = ctx.broadcast_to(ctx.unsqueeze(axes[1], 1), shape)
    batch = ctx.broadcast_to(ctx.reshape(ctx.cast(batch_indices, DType.I64), (count, 1, 1)), shape)
    terms = _bilinear_terms(ctx, rows_of(ctx, ctx.widen(x)), x.shape[2:], batch, (heights, widths))
    channels = x.shape[1]
    bins = (count, output_height, samples, output_width, samples, channels)
    if mode == "avg":
        total = terms[0]
        for term in terms[1:]:
            total = ctx.add(total, term)
        result = ctx.reduce("mean", ctx.reshape(total, bins), (2, 4), False)
    elif mode == "max":
        best = terms[0]
        for term in terms[1:]:
            best = ctx.emit("maximum", best, term)
        result = ctx.reduce("amax", ctx.reshape(best, bins), (2, 4), False)
    else:
        raise Unsupported(f"the mode {mode}")
    return ctx.cast(ctx.move_axis(result, 3, 1), x.dtype)


def _bilinear_terms(
    ctx: Context, rows: Node, extents: Ints, batch: Node, positions: tuple[Node, Node]
) -> list[Node]:
    """The four weighted neighbours of every coordinate; 0 if it is more than one element outside."""
    valid: Node | None = None
    taps: list[list[tuple[Node, Node]]] = []
    for position, extent in zip(positions, extents, strict=True):
        near = ctx.both(ctx.compare("ge", position, -1), ctx.compare("le", position, extent))
        valid = near if valid is None else ctx.both(valid, near)
        inside = ctx.emit("clamp", position, min=0.0, max=float(extent - 1))
        low = ctx.emit("floor", inside)
        t = ctx.sub(inside, low)
        taps.append([(low, ctx.sub(1, t)), (ctx.add(low, 1), t)])
    assert valid is not None
    terms = []
    for (y, wy), (x, wx) in itertools.product(*taps):
        weight = ctx.select(valid, ctx.mul(wy, wx), 0)
        value = read(ctx, rows, extents, batch, (y, x))
        terms.append(ctx.mul(value, ctx.unsqueeze(weight, weight.type.rank)))
    return terms


# -- deformable convolution -------------------------------------------------------------------------------------------


@converter("DeformConv")
def deform_conv(
    ctx: Context,
    x: Node,
    w: Node,
    offset: Node,
    bias: Node | None = None,
    mask: Node | None = None,
    *,
    dilations: Ints | None = None,
    group: int = 1,
    kernel_shape: Ints | None = None,
    offset_group: int = 1,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> Node:
    if x.type.rank != 4 or group < 1 or offset_group < 1 or x.shape[1] % offset_group:
        raise Unsupported(f"x {x.type!r} in {group} and {offset_group} groups: two spatial axes")
    batch, channels, *extents = x.shape
    window = WindowAttributes("NOTSET", dilations, group, kernel_shape, pads, strides)
    window.check(x, w)
    kernel = w.shape[2:]
    stride, dilation = window.stride(2), window.dilation(2)
    pairs = window.padding(x, w)
    low = tuple(before for before, _ in pairs)
    sizes = tuple(
        (extent + sum(pair) - step * (k - 1) - 1) // s + 1
        for extent, pair, step, k, s in zip(extents, pairs, dilation, kernel, stride, strict=True)
    )
    taps = math.prod(kernel)
    if offset.shape != (batch, offset_group * taps * 2, *sizes):
        wanted = [batch, offset_group * taps * 2, *sizes]
        raise Unsupported(f"offsets {offset.type!r} for a result of {list(sizes)}: must be {wanted}")
    if mask is not None and mask.shape != (batch, offset_group * taps, *sizes):
        wanted = [batch, offset_group * taps, *sizes]
        raise Unsupported(f"a mask {mask.type!r} for a result of {list(sizes)}: must be {wanted}")
    moves = ctx.reshape(ctx.widen(offset), (batch, offset_group, taps, 2, *sizes))
    shape = (batch, offset_group, taps, *sizes)
    positions = []
    for axis in range(2):
        ctx.reserve(taps * sizes[axis], "the positions of taps")
        kernel_step = np.arange(kernel[axis]) * dilation[axis]
        across = np.repeat(kernel_step, kernel[1]) if axis == 0 else np.tile(kernel_step, kernel[0])
        line = np.arange(sizes[axis]) * stride[axis] - low[axis]
        along = line.reshape(-1, 1) if axis == 0 else line.reshape(1, -1)
        grid = across.reshape(-1, 1, 1) + along
        moved = ctx.index_axis(moves, 3, axis)
        positions.append(ctx.add(moved, ctx.constant(grid.astype(moved.dtype.numpy))))
    # Every group of channels has its own images: the group is part of the batch.
    inner = channels // offset_group
    images = ctx.reshape(ctx.widen(x), (batch * offset_group, inner, *extents))
    number = ctx.add(ctx.mul(ctx.iota(shape, 0), offset_group), ctx.iota(shape, 1))
    borders = [(0.0, extent - 1.0) for extent in extents]
    seen = sampled(ctx, rows_of(ctx, images), extents, number, positions, "linear", "zeros", borders)
    if mask is not None:
        seen = ctx.mul(seen, ctx.reshape(ctx.widen(mask), (*shape, 1)))
    # [batch, offset group, taps, H, W, inner] -> per group of the convolution, a product over (channels, taps).
    columns = ctx.permute(seen, (0, 1, 5, 2, 3, 4))
    columns = ctx.reshape(columns, (batch, group, channels // group * taps, math.prod(sizes)))
    weight = ctx.reshape(ctx.widen(w), (1, group, w.shape[0] // group, w.shape[1] * taps))
    result = ctx.reshape(ctx.emit("matmul", weight, columns), (batch, w.shape[0], *sizes))
    if bias is not None:
        result = ctx.add(result, ctx.reshape(ctx.widen(bias), (w.shape[0], 1, 1)))
    return ctx.cast(result, x.dtype)


# -- col2im -----------------------------------------------------------------------------------------------------------


@converter("Col2Im")
def col2im(
    ctx: Context,
    x: Node,
    image_shape: Node,
    block_shape: Node,
    *,
    dilations: Ints | None = None,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> Node:
    """Add blocks where they overlap: for every position in the block, its spaced and shifted image."""
    extents, block = ctx.static_ints(image_shape), ctx.static_ints(block_shape)
    rank = len(extents)
    stride, dilation = ones(strides, rank), ones(dilations, rank)
    widths = (0,) * (2 * rank) if pads is None else tuple(pads)
    batch, packed, count = x.shape
    channels = packed // math.prod(block)
    padded = [extent + widths[axis] + widths[axis + rank] for axis, extent in enumerate(extents)]
    blocks = [
        (room - step * (k - 1) - 1) // s + 1
        for room, k, s, step in zip(padded, block, stride, dilation, strict=True)
    ]
    if math.prod(blocks) != count or channels * math.prod(block) != packed:
        raise Unsupported(f"blocks {block} of an image {extents} from {x.type!r}")
    ctx.budget.count(math.prod(block), f"{ctx.source}: blocks of {math.prod(block)} elements")
    parts = ctx.reshape(x, (batch, channels, *block, *blocks))
    total: Node | None = None
    for offset in itertools.product(*(range(k) for k in block)):
        part = parts
        for position in offset:
            part = ctx.index_axis(part, 2, position)
        low = [position * step for position, step in zip(offset, dilation, strict=True)]
        high = [
            room - begin - (n - 1) * s - 1
            for room, begin, n, s in zip(padded, low, blocks, stride, strict=True)
        ]
        spread = ctx.emit(
            "pad",
            part,
            low=(0, 0, *low),
            high=(0, 0, *high),
            interior=(0, 0, *(s - 1 for s in stride)),
            value=0.0 if x.dtype.is_float else 0,
        )
        total = spread if total is None else ctx.add(total, spread)
    assert total is not None
    for axis in range(rank):
        total = ctx.slice_axis(total, axis + 2, widths[axis], widths[axis] + extents[axis])
    return total
