"""Resize, in all the standard's variants.

Where the core's `resize` means the same, it is that. Otherwise an axis is resampled by its own table, made when the
model is compiled: indices for "nearest", and for "linear" and "cubic" a matrix of weights that it is multiplied with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tilewright.frontend.builder import Ints, Unsupported
from tilewright.frontend.onnx.context import Context, distinct_axes
from tilewright.frontend.onnx.registry import converter
from tilewright.graph.ir import Node


@dataclass(frozen=True)
class Sampling:
    """How positions of the result map to positions of the operand, and what is read there."""

    mode: str
    coordinates: str
    nearest_mode: str
    cubic_a: float
    antialias: bool
    exclude_outside: bool


def positions(extent: int, size: int, scale: float, coordinates: str, roi: tuple[float, float]) -> np.ndarray:
    """The position of every element of an axis of `size` on the operand's axis of `extent`."""
    coords = np.arange(size, dtype=np.float64)
    width = scale * extent
    if coordinates == "align_corners":
        return np.zeros(size) if width == 1 else coords * (extent - 1) / (width - 1)
    if coordinates == "asymmetric":
        return coords / scale
    if coordinates == "tf_half_pixel_for_nn":
        return (coords + 0.5) / scale
    if coordinates == "tf_crop_and_resize":
        begin, end = roi
        if width == 1:
            return np.full(size, (begin + end) * (extent - 1) / 2)
        return begin * (extent - 1) + coords * (end - begin) * (extent - 1) / (width - 1)
    half = (coords + 0.5) / scale - 0.5
    if coordinates == "pytorch_half_pixel":
        return half if width != 1 else np.full(size, -0.5)
    if coordinates == "half_pixel_symmetric":
        return extent / 2 * (1 - size / width) + half
    if coordinates != "half_pixel":
        raise Unsupported(f"the coordinate transformation {coordinates}")
    return half


def nearest(coords: np.ndarray, extent: int, mode: str) -> np.ndarray:
    if mode == "round_prefer_floor":
        found = np.ceil(coords - 0.5)
    elif mode == "round_prefer_ceil":
        found = np.floor(coords + 0.5)
    elif mode in ("floor", "simple"):
        found = np.floor(coords)
    elif mode == "ceil":
        found = np.ceil(coords)
    else:
        raise Unsupported(f"the nearest_mode {mode}")
    return np.clip(found.astype(np.int64), 0, extent - 1)


def cubic(distance: np.ndarray, a: float) -> np.ndarray:
    d = np.abs(distance)
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return np.where(d <= 1, near, np.where(d < 2, far, 0))


def weights(coords: np.ndarray, extent: int, scale: float, sampling: Sampling) -> np.ndarray:
    """A row of weights over the operand's axis for every position."""
    support = 1 if sampling.mode == "linear" else 2
    shrink = min(scale, 1.0) if sampling.antialias else 1.0
    first = math.floor(-support / shrink) + 1
    # A place on an element belongs to the interval that ends there.
    base = np.ceil(coords) - 1
    offsets = np.arange(first, 2 - first)
    distance = (offsets[None] - (coords - base)[:, None]) * shrink
    rows = (
        np.clip(1 - np.abs(distance), 0, 1)
        if sampling.mode == "linear"
        else cubic(distance, sampling.cubic_a)
    )
    columns = (base[:, None] + offsets[None]).astype(np.int64)
    if sampling.exclude_outside:
        rows = np.where((columns >= 0) & (columns < extent), rows, 0)
    if sampling.antialias or sampling.exclude_outside:
        rows = rows / rows.sum(1, keepdims=True)
    table = np.zeros((len(coords), extent))
    np.add.at(table, (np.arange(len(coords))[:, None], np.clip(columns, 0, extent - 1)), rows)
    return table


def _widest(scale: float, sampling: Sampling) -> int:
    """The number of elements that one place is computed from."""
    support = 1 if sampling.mode == "linear" else 2
    return 2 * math.ceil(support / (min(scale, 1.0) if sampling.antialias else 1.0)) + 2


def resized(
    ctx: Context,
    x: Node,
    sizes: Ints,
    scales: Sequence[float],
    *,
    mode: str = "nearest",
    coordinates: str = "half_pixel",
    nearest_mode: str = "round_prefer_floor",
    cubic_a: float = -0.75,
    antialias: bool = False,
    exclude_outside: bool = False,
    extrapolation: float = 0.0,
    roi: Sequence[float] | None = None,
    axes: Sequence[int] = (),
) -> Node:
    """`x` with its `axes` resampled to `sizes`, by `scales`, which may differ from the ratios of the extents."""
    sampling = Sampling(mode, coordinates, nearest_mode, cubic_a, antialias, exclude_outside)
    if mode not in ("nearest", "linear", "cubic"):
        raise Unsupported(f"the mode {mode}")
    if any(size < 0 for size in sizes) or any(not scale > 0 for scale in scales):
        raise Unsupported(f"sizes {tuple(sizes)}, scales {tuple(scales)}")
    if any(x.shape[axis] == 0 for axis in axes):
        raise Unsupported("an axis without elements")
    if _core_means_the_same(x, sizes, scales, sampling, axes):
        lead = x.type.rank - len(sizes)
        coord = "half_pixel" if coordinates == "pytorch_half_pixel" else coordinates
        wide = ctx.widen(x)
        return ctx.cast(
            ctx.emit(
                "resize",
                wide,
                sizes=tuple(int(s) for s in sizes[-(x.type.rank - lead) :]),
                mode=mode,
                coordinates=coord,
            ),
            x.dtype,
        )
    result, outside = ctx.widen(x), None
    for position, axis in enumerate(axes):
        extent, size, scale = x.shape[axis], int(sizes[position]), float(scales[position])
        part = (float(roi[position]), float(roi[position + len(axes)])) if roi is not None else (0.0, 1.0)
        if size == extent and scale == 1 and coordinates != "tf_crop_and_resize":
            continue
        ctx.reserve(size, "the positions of a resize")
        coords = positions(extent, size, scale, coordinates, part)
        if mode == "nearest":
            result = ctx.take(result, nearest(coords, extent, nearest_mode), axis)
        else:
            ctx.reserve(size * (extent + _widest(scale, sampling)), "the weights of a resize")
            table = weights(coords, extent, scale, sampling).astype(result.dtype.numpy)
            last = ctx.move_axis(result, axis, x.type.rank - 1)
            result = ctx.move_axis(ctx.emit("linear", last, ctx.constant(table)), x.type.rank - 1, axis)
        if coordinates == "tf_crop_and_resize":
            beyond = ((coords < 0) | (coords > extent - 1)).reshape(-1, *[1] * (x.type.rank - 1 - axis))
            here = ctx.constant(beyond)
            outside = here if outside is None else ctx.emit("logical_or", outside, here)
    if outside is not None:
        result = ctx.select(outside, extrapolation, result)
    return ctx.cast(result, x.dtype)


def _core_means_the_same(
    x: Node, sizes: Ints, scales: Sequence[float], sampling: Sampling, axes: Sequence[int]
) -> bool:
    if not x.dtype.is_float or sampling.mode == "nearest" or sampling.antialias or sampling.exclude_outside:
        return False
    if sampling.coordinates not in ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric"):
        return False
    if sampling.mode == "cubic" and sampling.cubic_a != -0.75:
        return False
    if list(axes) != list(range(x.type.rank - len(axes), x.type.rank)):
        return False
    exact = all(
        float(scale) * x.shape[axis] == size for axis, size, scale in zip(axes, sizes, scales, strict=True)
    )
    return exact and all(size > 1 for size in sizes[-1:])


@converter("Resize", since=11)
def resize(
    ctx: Context,
    x: Node,
    roi: Node | None = None,
    scales: Node | None = None,
    sizes: Node | None = None,
    *,
    antialias: int = 0,
    axes: Ints | None = None,
    coordinate_transformation_mode: str = "half_pixel",
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    extrapolation_value: float = 0.0,
    keep_aspect_ratio_policy: str = "stretch",
    mode: str = "nearest",
    nearest_mode: str = "round_prefer_floor",
) -> Node:
    chosen = distinct_axes(range(x.type.rank) if axes is None else axes, x.type.rank)
    extents = [x.shape[axis] for axis in chosen]
    by_size, by_scale = (operand is not None and operand.type.size > 0 for operand in (sizes, scales))
    if by_size and by_scale:
        raise Unsupported("both scales and sizes: must be one of them")
    if keep_aspect_ratio_policy not in ("stretch", "not_larger", "not_smaller"):
        raise Unsupported(f"the keep_aspect_ratio_policy {keep_aspect_ratio_policy}")
    if sizes is not None and by_size:
        wanted = list(ctx.static_ints(sizes))
        if len(wanted) != len(chosen) or 0 in extents:
            raise Unsupported(f"sizes {tuple(wanted)} for {x.type!r}")
        factors = [size / extent for size, extent in zip(wanted, extents, strict=True)]
        if keep_aspect_ratio_policy != "stretch":
            one = min(factors) if keep_aspect_ratio_policy == "not_larger" else max(factors)
            factors = [one] * len(factors)
            wanted = [math.floor(one * extent + 0.5) for extent in extents]
    elif scales is not None and by_scale:
        factors = [float(value) for value in ctx.static(scales).reshape(-1)]
        if len(factors) != len(chosen) or keep_aspect_ratio_policy != "stretch":
            raise Unsupported(f"scales {tuple(factors)} for {x.type!r}, policy {keep_aspect_ratio_policy}")
        wanted = [math.floor(extent * factor) for extent, factor in zip(extents, factors, strict=True)]
    else:
        raise Unsupported("neither scales nor sizes")
    region = None
    if coordinate_transformation_mode == "tf_crop_and_resize":
        if roi is None:
            raise Unsupported("tf_crop_and_resize without a region")
        region = [float(value) for value in ctx.static(roi).reshape(-1)]
        if len(region) != 2 * len(chosen):
            raise Unsupported(f"a region of {len(region)} numbers for {len(chosen)} axes")
    return resized(
        ctx,
        x,
        wanted,
        factors,
        mode=mode,
        coordinates=coordinate_transformation_mode,
        nearest_mode=nearest_mode,
        cubic_a=cubic_coeff_a,
        antialias=bool(antialias),
        exclude_outside=bool(exclude_outside),
        extrapolation=extrapolation_value,
        roi=region,
        axes=chosen,
    )


@converter("Resize", since=10)
def resize10(ctx: Context, x: Node, scales: Node, *, mode: str = "nearest") -> Node:
    factors = [float(value) for value in ctx.static(scales).reshape(-1)]
    wanted = [math.floor(extent * factor) for extent, factor in zip(x.shape, factors, strict=True)]
    return resized(
        ctx,
        x,
        wanted,
        factors,
        mode=mode,
        coordinates="asymmetric",
        nearest_mode="floor",
        axes=range(x.type.rank),
    )
