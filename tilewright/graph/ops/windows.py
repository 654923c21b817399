"""Pooling: a reduction over the elements of a window, for every position of the window.

- `max_pool(kernel, stride, padding, dilation, ceil_mode, layout)`
- `avg_pool(kernel, stride, padding, ceil_mode, count_include_pad, divisor, layout)`; `divisor` is None or the number
  to divide by instead of the count.
- `adaptive_avg_pool(sizes, layout)`, `adaptive_max_pool(sizes, layout)`: `sizes` windows per axis; window o of m over
  n elements goes from floor(o n / m) to ceil((o + 1) n / m).

The layouts are those of `layouts.py`, with 1 to 3 spatial axes. `padding` is one integer per spatial axis, at most
half of the window. With `ceil_mode` the last window may overhang the end, but not start after it, as in PyTorch.
Padding never affects a maximum; with `count_include_pad` it counts in an average, as far as `padding` reaches. NaN
propagates.

In the lowering a window is a reduction over its axes, with a predicate only on axes where a window can be out of
range; divisors that do not vary are constants.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewright import te
from tilewright.graph.ir import Attrs, TensorType
from tilewright.graph.op import Application, Fusion, Op, register
from tilewright.graph.ops.common import (
    FLOAT,
    NUMBER,
    expect,
    expect_ints,
    expect_kind,
    expect_operands,
    finish,
    is_int,
    label,
    scaled,
    shifted,
)
from tilewright.graph.ops.layouts import block_of, expect_layout, spatial_axes


@dataclass(frozen=True)
class Window(abc.ABC):
    """The windows along one axis of `extent` elements: `size` windows of up to `width` elements."""

    extent: int
    size: int
    width: int

    @abc.abstractmethod
    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """The first index of every window and the one after its last; they may be out of range."""

    @abc.abstractmethod
    def element(self, position: te.Expr, offset: te.Expr | None) -> tuple[te.Expr, list[te.Expr]]:
        """The index of the element at `offset` in a window (None: it has only one), and the condition for it to be in
        the window and in range."""


@dataclass(frozen=True)
class StridedWindow(Window):
    """Windows of `width` elements, `dilation` apart, starting at position * stride - padding."""

    stride: int
    padding: int
    dilation: int

    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        begin = np.arange(self.size) * self.stride - self.padding
        return begin, begin + self.dilation * (self.width - 1) + 1

    def begin(self, position: te.Expr) -> te.Expr:
        return shifted(scaled(position, self.stride), -self.padding)

    def element(self, position: te.Expr, offset: te.Expr | None) -> tuple[te.Expr, list[te.Expr]]:
        index = scaled(position, self.stride)
        if offset is not None:
            index = index + scaled(offset, self.dilation)
        index = shifted(index, -self.padding)
        begins, ends = self.bounds()
        conditions = []
        if (begins < 0).any():
            conditions.append(te.call("le", 0, index))
        if (ends > self.extent).any():
            conditions.append(te.call("lt", index, self.extent))
        return index, conditions


@dataclass(frozen=True)
class AdaptiveWindow(Window):
    """Windows from floor(position * extent / size) to ceil((position + 1) * extent / size)."""

    @staticmethod
    def of(extent: int, size: int) -> AdaptiveWindow:
        begin, end = AdaptiveWindow(extent, size, 0).bounds()
        return AdaptiveWindow(extent, size, int((end - begin).max()))

    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        positions = np.arange(self.size)
        return positions * self.extent // self.size, -(-(positions + 1) * self.extent // self.size)

    def begin(self, position: te.Expr) -> te.Expr:
        if self.extent % self.size == 0:
            return scaled(position, self.extent // self.size)
        return scaled(position, self.extent) // self.size

    def end(self, position: te.Expr) -> te.Expr:
        return (scaled(position, self.extent) + (self.extent + self.size - 1)) // self.size

    def element(self, position: te.Expr, offset: te.Expr | None) -> tuple[te.Expr, list[te.Expr]]:
        index = self.begin(position) if offset is None else self.begin(position) + offset
        begin, end = self.bounds()
        varies = bool(np.ptp(end - begin))
        return index, [te.call("lt", index, self.end(position))] if varies else []


# -- layouts ------------------------------------------------------------------------------------------------------


def expect_pooled(
    inputs: Sequence[TensorType], attrs: Attrs, takes: str, per_axis: str
) -> tuple[TensorType, range]:
    """The operand and its spatial axes, as many as the attribute `per_axis` has entries."""
    expect_operands(inputs, 1)
    (x,) = inputs
    expect_kind(x.dtype, takes)
    layout = expect_layout(attrs["layout"])
    block = block_of(layout)
    entries = attrs[per_axis]
    channel_axes = 3 if block else 2
    legal = isinstance(entries, tuple) and 1 <= len(entries) <= 3 and x.rank == len(entries) + channel_axes
    expect(
        legal,
        f"{per_axis} must have one entry per spatial axis of x (1 to 3 of them), got {entries!r} for {x!r}",
    )
    expect(not block or x.shape[-1] == block, f"x must have blocks of {block} channels, got {x!r}")
    axes = spatial_axes(x.rank, layout)
    expect(all(x.shape[axis] > 0 for axis in axes), f"spatial extents must not be 0, got {x!r}")
    return x, axes


def with_sizes(x: TensorType, axes: range, windows: Sequence[Window]) -> TensorType:
    shape = list(x.shape)
    for axis, window in zip(axes, windows, strict=True):
        shape[axis] = window.size
    return TensorType(tuple(shape), x.dtype)


def strided_windows(shape: tuple[int, ...], attrs: Attrs) -> list[Window]:
    axes = spatial_axes(len(shape), attrs["layout"])
    dilations = attrs.get("dilation", (1,) * len(axes))
    windows: list[Window] = []
    for axis, k, s, p, step in zip(
        axes, attrs["kernel"], attrs["stride"], attrs["padding"], dilations, strict=True
    ):
        extent = shape[axis]
        room = extent + 2 * p - step * (k - 1) - 1
        size = (-(-room // s) if attrs["ceil_mode"] else room // s) + 1
        if attrs["ceil_mode"] and (size - 1) * s >= extent + p:
            size -= 1  # the last window would start after the end
        windows.append(StridedWindow(extent, size, k, s, p, step))
    return windows


def adaptive_windows(shape: tuple[int, ...], attrs: Attrs) -> list[Window]:
    axes = spatial_axes(len(shape), attrs["layout"])
    return [AdaptiveWindow.of(shape[axis], size) for axis, size in zip(axes, attrs["sizes"], strict=True)]


# -- type rules ---------------------------------------------------------------------------------------------------


def infer_strided(takes: str) -> Callable[[Sequence[TensorType], Attrs], TensorType]:
    def infer(inputs: Sequence[TensorType], attrs: Attrs) -> TensorType:
        x, axes = expect_pooled(inputs, attrs, takes, "kernel")
        rank = len(axes)
        kernel, _ = (expect_ints(name, attrs[name], rank, 1) for name in ("kernel", "stride"))
        padding = expect_ints("padding", attrs["padding"], rank, 0)
        dilation = expect_ints("dilation", attrs.get("dilation", (1,) * rank), rank, 1)
        expect(
            all(2 * p <= step * (k - 1) + 1 for p, k, step in zip(padding, kernel, dilation, strict=True)),
            f"padding must be at most half of the window, got {padding} for a kernel of {kernel}",
        )
        expect_flag(attrs, "ceil_mode")
        if "divisor" in attrs:
            expect_flag(attrs, "count_include_pad")
            divisor = attrs["divisor"]
            legal = divisor is None or (is_int(divisor) and divisor != 0)
            expect(legal, f"divisor must be None or an integer that is not 0, got {divisor!r}")
        windows = strided_windows(x.shape, attrs)
        sizes = tuple(window.size for window in windows)
        expect(
            all(size >= 1 for size in sizes),
            f"the window {kernel} does not fit in {x!r}: result extents {sizes}",
        )
        return with_sizes(x, axes, windows)

    return infer


def expect_flag(attrs: Attrs, name: str) -> None:
    expect(isinstance(attrs[name], bool), f"{name} must be True or False, got {attrs[name]!r}")


def infer_adaptive(takes: str) -> Callable[[Sequence[TensorType], Attrs], TensorType]:
    def infer(inputs: Sequence[TensorType], attrs: Attrs) -> TensorType:
        x, axes = expect_pooled(inputs, attrs, takes, "sizes")
        expect_ints("sizes", attrs["sizes"], len(axes), 1)
        return with_sizes(x, axes, adaptive_windows(x.shape, attrs))

    return infer


# -- oracles ------------------------------------------------------------------------------------------------------


def combine_windows(
    x: np.ndarray, axes: range, windows: Sequence[Window], combine: Any, identity: Any
) -> np.ndarray:
    """Reduce axis by axis: a maximum or a sum over a box is separable."""
    for axis, window in zip(axes, windows, strict=True):
        step = window.dilation if isinstance(window, StridedWindow) else 1
        begins, ends = window.bounds()
        total: Any = None
        for offset in range(window.width):
            index = begins + offset * step
            inside = (index >= 0) & (index < np.minimum(ends, window.extent))
            seen = np.take(x, np.clip(index, 0, window.extent - 1), axis)
            mask = inside.reshape([-1 if d == axis else 1 for d in range(x.ndim)])
            term = np.where(mask, seen, identity)
            total = term if total is None else combine(total, term)
        x = total
    return x


def lowest(dtype: np.dtype[Any]) -> Any:
    return dtype.type(-np.inf) if dtype.kind == "f" else np.iinfo(dtype).min


def max_oracle(windows_of: Callable[..., list[Window]]) -> Callable[[Attrs, np.ndarray], np.ndarray]:
    def oracle(attrs: Attrs, x: np.ndarray) -> np.ndarray:
        axes = spatial_axes(x.ndim, attrs["layout"])
        return combine_windows(x, axes, windows_of(x.shape, attrs), np.maximum, lowest(x.dtype))

    return oracle


def avg_oracle(windows_of: Callable[..., list[Window]]) -> Callable[[Attrs, np.ndarray], np.ndarray]:
    def oracle(attrs: Attrs, x: np.ndarray) -> np.ndarray:
        axes, windows = spatial_axes(x.ndim, attrs["layout"]), windows_of(x.shape, attrs)
        result = combine_windows(x, axes, windows, np.add, x.dtype.type(0))
        if attrs.get("divisor") is not None:
            return np.asarray(result / attrs["divisor"])
        for axis, window in zip(axes, windows, strict=True):
            result = result / counts(window, attrs).reshape([-1 if d == axis else 1 for d in range(x.ndim)])
        return result

    return oracle


def counts(window: Window, attrs: Attrs) -> np.ndarray:
    """The divisor at each position of a window."""
    begin, end = window.bounds()
    if isinstance(window, StridedWindow) and attrs["count_include_pad"]:
        return np.asarray(np.minimum(end, window.extent + window.padding) - begin)
    return np.asarray(np.minimum(end, window.extent) - np.maximum(begin, 0))


# -- lowerings ----------------------------------------------------------------------------------------------------


def window_stage(
    name: str, kind: str, x: te.Tensor, result: TensorType, axes: range, windows: list[Window]
) -> te.Tensor:
    """Reduce every window; a window of one element needs no reduction."""
    dtype = x.dtype.compute
    identity = te.reduce_identity(kind, dtype)

    def formula(*positions: te.Var) -> te.Expr:
        summed = te.reduce_axes([window.width for window in windows if window.width > 1])
        left = iter(summed)
        indices: list[te.Expr] = list(positions)
        conditions: list[te.Expr] = []
        for axis, window in zip(axes, windows, strict=True):
            offset = next(left) if window.width > 1 else None
            indices[axis], needed = window.element(positions[axis], offset)
            conditions += needed
        inside = te.all_of(conditions)
        element = x[indices] if inside is None else te.select(inside, x[indices], identity)
        return te.reduce_over(kind, element, summed) if summed else element

    return te.compute(name, result.shape, dtype, formula)


def lower_max(
    name: str, windows_of: Callable[..., list[Window]]
) -> Callable[[Application, Sequence[te.Tensor]], te.Tensor]:
    def lower(app: Application, inputs: Sequence[te.Tensor]) -> te.Tensor:
        (x,) = inputs
        title, axes = label(app, name), spatial_axes(len(x.shape), app.attrs["layout"])
        stage = f"{title}_max" if x.dtype.is_half else title
        result = window_stage(stage, "max", x, app.type, axes, windows_of(x.shape, app.attrs))
        return finish(title, app.type, result)

    return lower


def lower_avg(
    name: str, windows_of: Callable[..., list[Window]]
) -> Callable[[Application, Sequence[te.Tensor]], te.Tensor]:
    def lower(app: Application, inputs: Sequence[te.Tensor]) -> te.Tensor:
        (x,) = inputs
        title, axes = label(app, name), spatial_axes(len(x.shape), app.attrs["layout"])
        windows = windows_of(x.shape, app.attrs)
        total = window_stage(f"{title}_sum", "sum", x, app.type, axes, windows)

        def divide(*positions: te.Var) -> te.Expr:
            return total[positions] / divisor(positions, axes, windows, app.attrs, total)

        return te.compute(title, app.type.shape, app.type.dtype, divide)

    return lower


def divisor(
    positions: Sequence[te.Expr], axes: range, windows: Sequence[Window], attrs: Attrs, total: te.Tensor
) -> te.Expr:
    """The number of elements that count: a constant, except along axes where it varies."""
    if attrs.get("divisor") is not None:
        return te.const(attrs["divisor"], total.dtype)
    constant, varying = 1, None
    for axis, window in zip(axes, windows, strict=True):
        number = counts(window, attrs)
        if not np.ptp(number):
            constant *= int(number[0])
            continue
        factor = count_expr(positions[axis], window, attrs)
        varying = factor if varying is None else varying * factor
    if varying is None:
        return te.const(constant, total.dtype)
    return te.cast(scaled(varying, constant), total.dtype)


def count_expr(position: te.Expr, window: Window, attrs: Attrs) -> te.Expr:
    """`counts` as a formula."""
    if isinstance(window, AdaptiveWindow):
        return window.end(position) - window.begin(position)
    assert isinstance(window, StridedWindow)
    begins, ends = window.bounds()
    padded = attrs["count_include_pad"]
    limit = window.extent + window.padding if padded else window.extent
    begin: te.Expr = window.begin(position)
    end: te.Expr = shifted(scaled(position, window.stride), window.width - window.padding)
    if (ends > limit).any():
        end = te.call("min", end, limit)
    if not padded and (begins < 0).any():
        begin = te.call("max", begin, 0)
    return end - begin


def window_flops(windows_of: Callable[..., list[Window]]) -> Callable[[Application], int]:
    def flops(app: Application) -> int:
        widths = (window.width for window in windows_of(app.inputs[0].shape, app.attrs))
        return app.type.size * math.prod(widths)

    return flops


# -- the operators ------------------------------------------------------------------------------------------------

register(
    Op(
        "max_pool",
        infer=infer_strided(NUMBER),
        oracle=max_oracle(strided_windows),
        fusion=Fusion.REDUCTION,
        lower=lower_max("max_pool", strided_windows),
        flops=window_flops(strided_windows),
        attrs=("kernel", "stride", "padding", "dilation", "ceil_mode", "layout"),
    )
)
register(
    Op(
        "avg_pool",
        infer=infer_strided(FLOAT),
        oracle=avg_oracle(strided_windows),
        fusion=Fusion.REDUCTION,
        lower=lower_avg("avg_pool", strided_windows),
        flops=window_flops(strided_windows),
        attrs=("kernel", "stride", "padding", "ceil_mode", "count_include_pad", "divisor", "layout"),
    )
)
register(
    Op(
        "adaptive_max_pool",
        infer=infer_adaptive(NUMBER),
        oracle=max_oracle(adaptive_windows),
        fusion=Fusion.REDUCTION,
        lower=lower_max("adaptive_max_pool", adaptive_windows),
        flops=window_flops(adaptive_windows),
        attrs=("sizes", "layout"),
    )
)
register(
    Op(
        "adaptive_avg_pool",
        infer=infer_adaptive(FLOAT),
        oracle=avg_oracle(adaptive_windows),
        fusion=Fusion.REDUCTION,
        lower=lower_avg("adaptive_avg_pool", adaptive_windows),
        flops=window_flops(adaptive_windows),
        attrs=("sizes", "layout"),
    )
)
