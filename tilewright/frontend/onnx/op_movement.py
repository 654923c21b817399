"""Operators that move elements: reshapes, slices, paddings, tilings."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tilewright.dtypes import DType
from tilewright.frontend.builder import Ints, Unsupported
from tilewright.frontend.onnx.context import Context, axes_of, axis_of, distinct_axes
from tilewright.frontend.onnx.registry import NotStatic, converter
from tilewright.graph.ir import Node
from tilewright.graph.ops.common import broadcast_shapes


@converter("Reshape")
def reshape(
    ctx: Context,
    x: Node,
    target: Node | None = None,
    *,
    shape: Ints | None = None,
    allowzero: int = 0,
    consumed_inputs: object = None,
) -> Node:
    wanted = ctx.ints_or(target, shape)
    if wanted is None:
        raise Unsupported("no target shape")
    return ctx.reshape(x, resolved_shape(x.shape, wanted, bool(allowzero)))


def resolved_shape(old: tuple[int, ...], wanted: Ints, allow_zero: bool) -> tuple[int, ...]:
    """The shape with its -1 resolved and its 0s copied."""
    extents = []
    for axis, extent in enumerate(wanted):
        if extent == 0 and not allow_zero:
            if axis >= len(old):
                raise Unsupported(f"the shape {tuple(wanted)} copies axis {axis} of {list(old)}")
            extent = old[axis]
        extents.append(extent)
    if extents.count(-1) > 1 or any(extent < -1 for extent in extents):
        raise Unsupported(f"the shape {tuple(wanted)}")
    if -1 in extents:
        others = math.prod(extent for extent in extents if extent != -1)
        size = math.prod(old)
        if others == 0 or size % others:
            raise Unsupported(f"the shape {tuple(wanted)} of {size} elements")
        extents[extents.index(-1)] = size // others
    return tuple(extents)


@converter("Flatten")
def flatten(ctx: Context, x: Node, *, axis: int = 1) -> Node:
    if axis != x.type.rank:
        axis = axis_of(axis, x.type.rank)
    return ctx.reshape(x, (math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))


@converter("Squeeze")
def squeeze(ctx: Context, x: Node, axes_input: Node | None = None, *, axes: Ints | None = None) -> Node:
    named = ctx.ints_or(axes_input, axes)
    if named is None:
        return ctx.reshape(x, [extent for extent in x.shape if extent != 1])
    gone = axes_of(named, x.type.rank)
    if any(x.shape[axis] != 1 for axis in gone):
        raise Unsupported(f"squeezing axes {gone} of {x.type!r}, which are not all of extent 1")
    return ctx.reshape(x, [extent for axis, extent in enumerate(x.shape) if axis not in gone])


@converter("Unsqueeze")
def unsqueeze(ctx: Context, x: Node, axes_input: Node | None = None, *, axes: Ints | None = None) -> Node:
    named = ctx.ints_or(axes_input, axes) or ()
    rank = x.type.rank + len(named)
    new = axes_of(named, rank)
    left = iter(x.shape)
    return ctx.reshape(x, [1 if axis in new else next(left) for axis in range(rank)])


@converter("Transpose")
def transpose(ctx: Context, x: Node, *, perm: Ints | None = None) -> Node:
    if perm is not None and sorted(perm) != list(range(x.type.rank)):
        raise Unsupported(f"perm {tuple(perm)} of {x.type!r}")
    return ctx.permute(x, tuple(reversed(range(x.type.rank))) if perm is None else perm)


@converter("Expand")
def expand(ctx: Context, x: Node, shape: Node) -> Node:
    wanted = ctx.static_ints(shape)
    if any(extent < 0 for extent in wanted):
        raise Unsupported(f"the shape {wanted}")
    return ctx.broadcast_to(x, broadcast_shapes(x.shape, wanted))


@converter("Concat")
def concat(ctx: Context, *parts: Node, axis: int = 1) -> Node:
    return ctx.concat(parts, axis_of(axis, parts[0].type.rank))


@converter("Split")
def split(
    ctx: Context,
    x: Node,
    sizes: Node | None = None,
    *,
    axis: int = 0,
    split: Ints | None = None,
    num_outputs: int | None = None,
) -> tuple[Node, ...]:
    axis = axis_of(axis, x.type.rank)
    widths = ctx.ints_or(sizes, split)
    extent, outputs = x.shape[axis], len(ctx.proto.output)
    count = (num_outputs or outputs) if widths is None else len(widths)
    ctx.budget.count(count, f"{ctx.source}: {count} parts")
    if count != outputs:
        raise Unsupported(f"{count} parts for {outputs} outputs")
    if widths is None:
        step = -(-extent // count)
        widths = tuple(min(step, extent - step * part) for part in range(count))
    if sum(widths) != extent or any(width < 0 for width in widths):
        raise Unsupported(f"parts {widths} of an axis of {extent}")
    return tuple(chunks(ctx, x, axis, widths))


def chunks(ctx: Context, x: Node, axis: int, widths: Ints) -> list[Node]:
    begin, parts = 0, []
    for width in widths:
        parts.append(ctx.slice_axis(x, axis, begin, begin + width))
        begin += width
    return parts


@converter("Slice")
def slice_(
    ctx: Context,
    x: Node,
    starts_input: Node | None = None,
    ends_input: Node | None = None,
    axes_input: Node | None = None,
    steps_input: Node | None = None,
    *,
    starts: Ints | None = None,
    ends: Ints | None = None,
    axes: Ints | None = None,
) -> Node:
    begins, stops = ctx.ints_or(starts_input, starts), ctx.ints_or(ends_input, ends)
    if begins is None or stops is None or len(begins) != len(stops):
        raise Unsupported(f"starts {begins} with ends {stops}")
    named = ctx.ints_or(axes_input, axes)
    chosen = [axis_of(axis, x.type.rank) for axis in (range(len(begins)) if named is None else named)]
    steps = ctx.static_ints(steps_input) if steps_input is not None else (1,) * len(begins)
    if not len(chosen) == len(begins) == len(steps) or 0 in steps or len(set(chosen)) != len(chosen):
        raise Unsupported(f"starts {begins}, axes {tuple(chosen)} and steps {steps}")
    for axis, start, stop, step in zip(chosen, begins, stops, steps, strict=True):
        coords = range(x.shape[axis])[slice(start, stop, step)]
        if step > 0:
            x = ctx.slice_axis(x, axis, coords.start, max(coords.start, coords.stop), step)
        elif not len(coords):
            x = ctx.slice_axis(x, axis, 0, 0)
        else:
            span = ctx.slice_axis(x, axis, coords[-1], coords[0] + 1)
            x = ctx.slice_axis(ctx.emit("flip", span, axes=(axis,)), axis, 0, span.shape[axis], -step)
    return x


@converter("Tile")
def tile(ctx: Context, x: Node, repeats: Node, old_axis: Node | None = None) -> Node:
    counts = ctx.static_ints(repeats)
    if old_axis is not None:  # opset 1: how often, and along which axis
        axis = ctx.static_int(old_axis)
        counts = tuple(counts[0] if d == axis else 1 for d in range(x.type.rank))
    if len(counts) != x.type.rank or any(count < 0 for count in counts):
        raise Unsupported(f"repeats {counts} of {x.type!r}")
    spread = [entry for extent in x.shape for entry in (1, extent)]
    wide = [entry for extent, count in zip(x.shape, counts, strict=True) for entry in (count, extent)]
    result = [extent * count for extent, count in zip(x.shape, counts, strict=True)]
    return ctx.reshape(ctx.broadcast_to(ctx.reshape(x, spread), wide), result)


# -- pad --------------------------------------------------------------------------------------------------------------


@converter("Pad")
def pad(
    ctx: Context,
    x: Node,
    pads_input: Node | None = None,
    value_input: Node | None = None,
    axes_input: Node | None = None,
    *,
    mode: str = "constant",
    pads: Ints | None = None,
    paddings: Ints | None = None,
    value: float = 0.0,
) -> Node:
    widths = ctx.ints_or(pads_input, pads if pads is not None else paddings)
    axes = list(range(x.type.rank))
    if axes_input is not None:
        axes = distinct_axes(ctx.static_ints(axes_input), x.type.rank)
    if widths is None or len(widths) != 2 * len(axes):
        raise Unsupported(f"pads {widths} for axes {axes}")
    low, high = [0] * x.type.rank, [0] * x.type.rank
    for position, axis in enumerate(axes):
        low[axis], high[axis] = widths[position], widths[position + len(axes)]
    for axis in axes:  # negative widths cut off
        begin, end = max(0, -low[axis]), x.shape[axis] - max(0, -high[axis])
        if begin > end:
            raise Unsupported(f"pads {low[axis]} and {high[axis]} of an axis of {x.shape[axis]}")
        x = ctx.slice_axis(x, axis, begin, end)
    low, high = [max(0, width) for width in low], [max(0, width) for width in high]
    if mode == "constant":
        return _pad_constant(ctx, x, low, high, value_input, value)
    if mode not in ("reflect", "edge", "wrap"):
        raise Unsupported(f"the mode {mode}")
    for axis, (before, after) in enumerate(zip(low, high, strict=True)):
        if before or after:
            if x.shape[axis] == 0:
                raise Unsupported(f"{mode} of an axis without elements")
            ctx.reserve(before + after + x.shape[axis], "the positions of a padding")
            coords = np.pad(np.arange(x.shape[axis]), (before, after), mode=mode)  # type: ignore[call-overload]
            x = ctx.take(x, coords, axis)
    return x


def _pad_constant(
    ctx: Context, x: Node, low: Ints, high: Ints, value_input: Node | None, value: float
) -> Node:
    if value_input is None:
        return ctx.pad(x, low, high, value)
    if value_input.type.size != 1:
        raise Unsupported(f"a constant_value {value_input.type!r}: must be one number")
    try:
        return ctx.pad(x, low, high, ctx.static(value_input, pin=False).reshape(-1)[0].item())
    except NotStatic:  # the value depends on the call
        inside = ctx.pad(ctx.full(True, DType.BOOL, x.shape), low, high, False)
        return ctx.select(inside, ctx.pad(x, low, high, 0), ctx.reshape(value_input, ()))


@converter("CenterCropPad")
def centre_crop_pad(ctx: Context, x: Node, shape: Node, *, axes: Ints | None = None) -> Node:
    wanted = ctx.static_ints(shape)
    chosen = distinct_axes(range(x.type.rank) if axes is None else axes, x.type.rank)
    if len(wanted) != len(chosen) or any(extent < 0 for extent in wanted):
        raise Unsupported(f"the shape {wanted} for axes {tuple(chosen)} of {x.type!r}")
    for axis, extent in zip(chosen, wanted, strict=True):
        surplus = x.shape[axis] - extent
        if surplus > 0:
            begin = surplus // 2
            x = ctx.slice_axis(x, axis, begin, begin + extent)
        elif surplus < 0:
            low, high = [0] * x.type.rank, [0] * x.type.rank
            low[axis] = -surplus // 2
            high[axis] = -surplus - low[axis]
            x = ctx.pad(x, low, high, 0)
    return x


# -- blocks, triangles, reversals -------------------------------------------------------------------------------------


@converter("DepthToSpace")
def depth_to_space(ctx: Context, x: Node, *, blocksize: int, mode: str = "DCR") -> Node:
    if x.type.rank != 4 or blocksize < 1 or x.shape[1] % blocksize**2 or mode not in ("DCR", "CRD"):
        raise Unsupported(f"blocks of {blocksize} of {x.type!r}, mode {mode}")
    batch, channels, height, width = x.shape
    inner = channels // blocksize**2
    if mode == "DCR":
        shape, order = (batch, blocksize, blocksize, inner, height, width), (0, 3, 4, 1, 5, 2)
    else:
        shape, order = (batch, inner, blocksize, blocksize, height, width), (0, 1, 4, 2, 5, 3)
    moved = ctx.permute(ctx.reshape(x, shape), order)
    return ctx.reshape(moved, (batch, inner, height * blocksize, width * blocksize))


@converter("SpaceToDepth")
def space_to_depth(ctx: Context, x: Node, *, blocksize: int, mode: str = "DCR") -> Node:
    if x.type.rank != 4 or blocksize < 1 or x.shape[2] % blocksize or x.shape[3] % blocksize:
        raise Unsupported(f"blocks of {blocksize} of {x.type!r}")
    batch, channels, height, width = x.shape
    rows, columns = height // blocksize, width // blocksize
    split = ctx.reshape(x, (batch, channels, rows, blocksize, columns, blocksize))
    order = (0, 3, 5, 1, 2, 4) if mode == "DCR" else (0, 1, 3, 5, 2, 4)
    return ctx.reshape(ctx.permute(split, order), (batch, channels * blocksize**2, rows, columns))


@converter("Trilu")
def trilu(ctx: Context, x: Node, k: Node | None = None, *, upper: int = 1) -> Node:
    shape = x.shape[-2:]
    above = ctx.sub(ctx.iota(shape, 1), ctx.iota(shape, 0))
    offset: Node | int = 0 if k is None else ctx.reshape(ctx.cast(k, DType.I64), ())
    kept = ctx.compare("ge" if upper else "le", above, offset)
    return ctx.select(kept, x, False if x.dtype is DType.BOOL else 0)


@converter("ReverseSequence")
def reverse_sequence(
    ctx: Context, x: Node, lengths: Node, *, batch_axis: int = 1, time_axis: int = 0
) -> Node:
    """Reverse the first `lengths[b]` elements along the time axis and keep the rest."""
    rank = x.type.rank
    batch_axis, time_axis = axis_of(batch_axis, rank), axis_of(time_axis, rank)
    if sorted((batch_axis, time_axis)) != [0, 1] or lengths.shape != (x.shape[batch_axis],):
        raise Unsupported(f"lengths {lengths.type!r} of {x.type!r}, axes {batch_axis} and {time_axis}")
    ctx.check_values(lengths, 0, x.shape[time_axis], "lengths")
    shape = [1] * rank
    shape[batch_axis] = x.shape[batch_axis]
    length = ctx.reshape(ctx.cast(lengths, DType.I64), shape)
    coord = ctx.iota(x.shape, time_axis)
    source = ctx.select(ctx.compare("lt", coord, length), ctx.sub(ctx.sub(length, 1), coord), coord)
    return ctx.emit("take_along", x, source, axis=time_axis)


@converter("Upsample")
def upsample(
    ctx: Context,
    x: Node,
    scales_input: Node | None = None,
    *,
    mode: str = "nearest",
    scales: Sequence[float] | None = None,
    width_scale: float | None = None,
    height_scale: float | None = None,
) -> Node:
    from tilewright.frontend.onnx.op_image import resized

    if scales_input is not None:
        factors = [float(value) for value in ctx.static(scales_input).reshape(-1)]
    elif scales is not None:
        factors = list(scales)
    else:
        factors = [1.0, 1.0, float(height_scale or 1), float(width_scale or 1)]
    sizes = [math.floor(extent * factor) for extent, factor in zip(x.shape, factors, strict=True)]
    return resized(
        ctx,
        x,
        sizes,
        factors,
        mode=mode,
        coordinates="asymmetric",
        nearest_mode="floor",
        axes=range(x.type.rank),
    )
