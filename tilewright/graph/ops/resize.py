"""`resize(sizes, mode, coordinates)`: the last len(sizes) axes resampled to `sizes`.

Element o of an axis that goes from n to m elements is sampled at

    half_pixel      (o + 1/2) n / m - 1/2     PyTorch's align_corners=False
    align_corners   o (n - 1) / (m - 1)       (0 where m is 1)
    asymmetric      o n / m

- "nearest" takes the element at the floor of that; with half_pixel, of (o + 1/2) n / m. So asymmetric is PyTorch's
  "nearest" and half_pixel its "nearest-exact"; there is no nearest with align_corners.
- "linear" and "cubic" (a = -0.75) weigh 2 and 4 neighbours per axis, at indices clamped into the axis. "linear" does
  not sample before the first element.

The positions are ratios of integers, so indices are computed in exact integer arithmetic. PyTorch computes those of
"nearest" in f32 (f64 for f64 tensors), and for about 2% of pairs (n, m), such as 2 -> 82, rounding is off by one
element. Its f32 result defines the meaning here; the lowering computes in f32 for those pairs only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewright import te
from tilewright.dtypes import DType
from tilewright.graph.ir import Attrs, TensorType
from tilewright.graph.op import Application, Fusion, Op, register
from tilewright.graph.ops.common import (
    FLOAT,
    divided,
    expect,
    expect_choice,
    expect_ints,
    expect_kind,
    expect_operands,
    label,
    scaled,
    shifted,
)

Weight = Any  # a te.Expr or an array, like the positions; None is 1
Taps = list[tuple[Any, Weight]]  # (index, weight) of the summed elements


def infer(inputs: Sequence[TensorType], attrs: Attrs) -> TensorType:
    expect_operands(inputs, 1)
    (x,) = inputs
    mode = expect_choice("mode", attrs["mode"], "nearest", "linear", "cubic")
    coordinates = expect_choice(
        "coordinates", attrs["coordinates"], "half_pixel", "align_corners", "asymmetric"
    )
    sizes = attrs["sizes"]
    legal = isinstance(sizes, tuple) and 1 <= len(sizes) <= x.rank
    expect(legal, f"sizes must be a tuple of 1 to {x.rank} extents, got {sizes!r}")
    sizes = expect_ints("sizes", sizes, len(sizes), 1)
    expect(mode != "nearest" or coordinates != "align_corners", "nearest does not go with align_corners")
    if mode != "nearest":
        expect_kind(x.dtype, FLOAT)
    lead = x.rank - len(sizes)
    expect(0 not in x.shape[lead:], f"cannot resize an axis that has no elements, of shape {list(x.shape)}")
    return TensorType(x.shape[:lead] + sizes, x.dtype)


@dataclass(frozen=True)
class Positions:
    """Element o of the result is sampled at (o * scale + offset) / divisor."""

    scale: int
    offset: int
    divisor: int

    @staticmethod
    def of(extent: int, size: int, coordinates: str) -> Positions:
        if coordinates == "half_pixel":
            scale, offset, divisor = 2 * extent, extent - size, 2 * size
        elif coordinates == "asymmetric":
            scale, offset, divisor = extent, 0, size
        else:
            scale, offset, divisor = (extent - 1, 0, size - 1) if size > 1 else (0, 0, 1)
        common = math.gcd(scale, offset, divisor)
        return Positions(scale // common, offset // common, divisor // common)


def nearest_indices(extent: int, size: int, coordinates: str) -> np.ndarray:
    """The index of every element."""
    coords = np.arange(size)
    if coordinates == "half_pixel":
        return np.asarray((2 * coords + 1) * extent // (2 * size))
    ratio = np.float32(extent) / np.float32(size)
    return np.asarray(np.minimum(np.floor(coords.astype(np.float32) * ratio).astype(np.int64), extent - 1))


def nearest_index(axis: te.Expr, extent: int, size: int, coordinates: str) -> te.Expr:
    if coordinates == "half_pixel":
        scale, offset, divisor = 2 * extent, extent, 2 * size
    else:
        scale, offset, divisor = extent, 0, size
    common = math.gcd(scale, offset, divisor)
    scale, offset, divisor = scale // common, offset // common, divisor // common
    exact = (np.arange(size) * scale + offset) // divisor
    if np.array_equal(exact, nearest_indices(extent, size, coordinates)):
        return divided(shifted(scaled(axis, scale), offset), divisor)
    ratio = float(np.float32(extent) / np.float32(size))
    floor = te.call("floor", te.cast(axis, DType.F32) * ratio)
    return te.call("min", te.cast(floor, DType.I64), extent - 1)


def cubic_weights(t: Any) -> list[Any]:
    """Weights of the elements at distances 1 + t, t, 1 - t and 2 - t."""
    a = -0.75

    def near(d: Any) -> Any:
        return ((a + 2) * d - (a + 3)) * d * d + 1.0

    def far(d: Any) -> Any:
        return ((a * d - 5 * a) * d + 8 * a) * d - 4 * a

    return [far(1.0 + t), near(t), near(1.0 - t), far(2.0 - t)]


# -- the oracle ---------------------------------------------------------------------------------------------------


def array_taps(extent: int, size: int, mode: str, coordinates: str) -> Taps:
    if mode == "nearest":
        return [(nearest_indices(extent, size, coordinates), None)]
    positions = Positions.of(extent, size, coordinates)
    numerator = np.arange(size) * positions.scale + positions.offset
    if mode == "linear":
        numerator = np.maximum(numerator, 0)
    first, t = numerator // positions.divisor, numerator % positions.divisor / positions.divisor
    if mode == "linear":
        return [(first, 1 - t), (np.minimum(first + 1, extent - 1), t)]
    weights = cubic_weights(t)
    return [
        (np.clip(first + d, 0, extent - 1), weight) for d, weight in zip(range(-1, 3), weights, strict=True)
    ]


def oracle(attrs: Attrs, x: np.ndarray) -> np.ndarray:
    lead = x.ndim - len(attrs["sizes"])
    for axis, size in enumerate(attrs["sizes"], start=lead):
        if size == x.shape[axis]:
            continue
        along = [-1 if d == axis else 1 for d in range(x.ndim)]
        total: Any = None
        for index, weight in array_taps(x.shape[axis], size, attrs["mode"], attrs["coordinates"]):
            term = np.take(x, index, axis)
            if weight is not None:
                term = term * weight.reshape(along)
            total = term if total is None else total + term
        x = total
    return x


# -- the lowering -------------------------------------------------------------------------------------------------


def expr_taps(axis: te.Expr, extent: int, size: int, attrs: Attrs, dtype: DType) -> Taps:
    mode, coordinates = attrs["mode"], attrs["coordinates"]
    if extent == size:
        return [(axis, None)]
    if mode == "nearest":
        return [(nearest_index(axis, extent, size, coordinates), None)]
    positions = Positions.of(extent, size, coordinates)
    numerator = shifted(scaled(axis, positions.scale), positions.offset)
    if mode == "linear" and positions.offset < 0:
        numerator = te.call("max", numerator, 0)
    # Neighbours of weight 0 are read too: an infinity times 0 is NaN, as in PyTorch.
    first = numerator // positions.divisor
    t = te.cast(numerator % positions.divisor, dtype) / positions.divisor
    if mode == "linear":
        return [(first, 1.0 - t), (te.call("min", first + 1, extent - 1), t)]
    taps: Taps = []
    for d, weight in zip(range(-1, 3), cubic_weights(t), strict=True):
        taps.append((te.call("min", te.call("max", shifted(first, d), 0), extent - 1), weight))
    return taps


def lower(app: Application, inputs: Sequence[te.Tensor]) -> te.Tensor:
    (x,) = inputs
    sizes, lead = app.attrs["sizes"], len(x.shape) - len(app.attrs["sizes"])

    def element(*axes: te.Var) -> te.Expr:
        taps = [
            expr_taps(axis, extent, size, app.attrs, x.dtype.compute)
            for axis, extent, size in zip(axes[lead:], x.shape[lead:], sizes, strict=True)
        ]

        def sample(indices: tuple[te.Expr, ...]) -> te.Expr:
            if len(indices) == len(sizes):
                return x[(*axes[:lead], *indices)]
            total: te.Expr | None = None
            for index, weight in taps[len(indices)]:
                term = sample((*indices, index))
                term = term if weight is None else term * weight
                total = term if total is None else total + term
            assert total is not None
            return total

        return sample(())

    return te.compute(label(app, "resize"), app.type.shape, app.type.dtype, element)


register(
    Op(
        "resize",
        infer=infer,
        oracle=oracle,
        fusion=Fusion.INJECTIVE,
        lower=lower,
        attrs=("sizes", "mode", "coordinates"),
    )
)
