"""Pooling.

Windows that Tilewright's operator cannot express (uneven padding, overhanging windows) are padded first, with the
lowest value for a maximum and zeros for a sum; averages are sums divided by counts known at compile time.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewright.dtypes import DType
from tilewright.frontend.builder import Ints, Unsupported
from tilewright.frontend.onnx.context import Context, lowest
from tilewright.frontend.onnx.matmuls import Pairs, ones, window_padding
from tilewright.frontend.onnx.registry import converter
from tilewright.graph.ir import Node


@dataclass(frozen=True)
class PoolAttributes:
    """The windows of a pooling operator on its input."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    declared: Pairs  # the model's padding
    padding: Pairs  # with the additional padding for the last window
    sizes: tuple[int, ...]  # extents of the result

    @staticmethod
    def of(
        x: Node,
        *,
        kernel_shape: Ints,
        auto_pad: str = "NOTSET",
        ceil_mode: int = 0,
        dilations: Ints | None = None,
        pads: Ints | None = None,
        strides: Ints | None = None,
        **others: Any,
    ) -> PoolAttributes:
        """From the attributes that every pooling operator has, with the standard's defaults."""
        if others:
            raise Unsupported(f"the attribute {', '.join(others)}")
        rank = check_rank(x, kernel_shape)
        extents, kernel = x.shape[2:], tuple(kernel_shape)
        stride, dilation = ones(strides, rank), ones(dilations, rank)
        declared = window_padding(auto_pad, pads, extents, kernel, stride, dilation)
        wider, sizes = [], []
        for extent, k, s, step, (low, high) in zip(extents, kernel, stride, dilation, declared, strict=True):
            room = extent + low + high - step * (k - 1) - 1
            size = (-(-room // s) if ceil_mode else room // s) + 1
            if ceil_mode and (size - 1) * s >= extent + low:
                size -= 1  # the last window would start in the padding
            if size < 1:
                raise Unsupported(f"a window of {k} on an axis of {extent}")
            if max(low, high) > step * (k - 1):
                raise Unsupported(f"a window of {k} that lies in the padding of {max(low, high)}")
            reach = (size - 1) * s + step * (k - 1) + 1
            wider.append((low, max(high, reach - extent - low)))
            sizes.append(size)
        return PoolAttributes(kernel, stride, dilation, declared, tuple(wider), tuple(sizes))


def padded(ctx: Context, x: Node, pairs: Pairs, value: float | int) -> Node:
    return ctx.pad(x, (0, 0, *(low for low, _ in pairs)), (0, 0, *(high for _, high in pairs)), value)


def check_rank(x: Node, kernel: Ints) -> int:
    rank = x.type.rank - 2
    if not 1 <= rank <= 3 or len(kernel) != rank:
        raise Unsupported(f"a window {tuple(kernel)} on {x.type!r}: 1 to 3 spatial axes")
    return rank


@converter("MaxPool")
def max_pool(ctx: Context, x: Node, *, storage_order: int = 0, **attributes: Any) -> Node | tuple[Node, Node]:
    pool = PoolAttributes.of(x, **attributes)
    even = all(
        low == high and 2 * low <= step * (k - 1) + 1
        for (low, high), k, step in zip(pool.padding, pool.kernel, pool.dilation, strict=True)
    )
    source = x if even else padded(ctx, x, pool.padding, lowest(x.dtype))
    result = ctx.emit(
        "max_pool",
        source,
        kernel=pool.kernel,
        stride=pool.stride,
        padding=tuple(low if even else 0 for low, _ in pool.padding),
        dilation=pool.dilation,
        ceil_mode=False,
        layout="channels_first",
    )
    result = trimmed(ctx, result, pool.sizes)
    if not ctx.wants(1):
        return result
    return result, _coords_of_maxima(ctx, x, pool, bool(storage_order))


def trimmed(ctx: Context, x: Node, sizes: Ints) -> Node:
    """Drop windows after the last one that counts."""
    for axis, size in enumerate(sizes, start=2):
        x = ctx.slice_axis(x, axis, 0, size)
    return x


def _coords_of_maxima(ctx: Context, x: Node, pool: PoolAttributes, by_column: bool) -> Node:
    """The index of each window's maximum in the whole tensor, counted along rows or along columns."""
    wide = padded(ctx, x, pool.padding, lowest(x.dtype))
    extents, sizes = x.shape[2:], pool.sizes
    if by_column:
        steps = [math.prod(extents[:axis]) for axis in range(len(extents))]
    else:
        steps = [math.prod(extents[axis + 1 :]) for axis in range(len(extents))]
    seen, tables = [], []
    taps = math.prod(pool.kernel)
    ctx.budget.count(taps, f"{ctx.source}: a window of {taps} elements")
    ctx.reserve(taps * math.prod(sizes) + x.shape[0] * x.shape[1], "the positions of maxima")
    for offset in itertools.product(*(range(k) for k in pool.kernel)):
        part = wide
        table = np.zeros(sizes, np.int64)
        for axis, (o, s, step, size, (low, _)) in enumerate(
            zip(offset, pool.stride, pool.dilation, sizes, pool.padding, strict=True)
        ):
            begin = o * step
            part = ctx.slice_axis(part, axis + 2, begin, begin + (size - 1) * s + 1, s)
            line = np.arange(size) * s + begin - low
            table += (line * steps[axis]).reshape([-1 if d == axis else 1 for d in range(len(sizes))])
        seen.append(part)
        tables.append(table)
    stacked = ctx.stack(seen, 2)
    best = ctx.emit("argmax", stacked, axis=2, keepdims=True)
    positions = ctx.broadcast_to(ctx.constant(np.stack(tables)[None, None]), stacked.shape)
    coord = ctx.squeeze(ctx.emit("take_along", positions, best, axis=2), 2)
    images = x.shape[0] * x.shape[1]
    first = np.arange(images).reshape(x.shape[0], x.shape[1], *[1] * len(sizes)) * math.prod(extents)
    return ctx.add(coord, ctx.constant(first))


@converter("AveragePool")
def average_pool(ctx: Context, x: Node, *, count_include_pad: int = 0, **attributes: Any) -> Node:
    pool = PoolAttributes.of(x, **attributes)
    total = window_sum(ctx, ctx.widen(x), pool)
    ctx.reserve(sum(size * k for size, k in zip(pool.sizes, pool.kernel, strict=True)), "counts of elements")
    ctx.reserve(math.prod(pool.sizes), "counts of elements")
    counts = _counts(x.shape[2:], pool, bool(count_include_pad))
    divisor = counts.reshape(1, 1, *counts.shape)
    if counts.min() == counts.max():
        divisor = divisor.reshape(-1)[:1].reshape(())
    return ctx.cast(ctx.div(total, ctx.constant(divisor.astype(total.dtype.numpy))), x.dtype)


def window_sum(ctx: Context, x: Node, pool: PoolAttributes) -> Node:
    """The sum of every window."""
    rank = len(pool.kernel)
    wide = padded(ctx, x, pool.padding, 0)
    if all(step == 1 for step in pool.dilation):
        total = ctx.emit(
            "avg_pool",
            wide,
            kernel=pool.kernel,
            stride=pool.stride,
            padding=(0,) * rank,
            ceil_mode=False,
            count_include_pad=True,
            divisor=1,
            layout="channels_first",
        )
        return trimmed(ctx, total, pool.sizes)
    images = ctx.reshape(wide, (x.shape[0] * x.shape[1], 1, *wide.shape[2:]))
    total = ctx.emit(
        "conv",
        images,
        ctx.full(1, x.dtype, (1, 1, *pool.kernel)),
        stride=pool.stride,
        padding=((0, 0),) * rank,
        dilation=pool.dilation,
        groups=1,
        layout="channels_first",
    )
    return trimmed(ctx, ctx.reshape(total, (*x.shape[:2], *total.shape[2:])), pool.sizes)


def _counts(extents: Ints, pool: PoolAttributes, with_padding: bool) -> np.ndarray:
    """The number of elements in every window; declared padding counts if `with_padding`."""
    result = np.ones((), np.int64)
    for extent, k, s, step, (low, high), size in zip(
        extents, pool.kernel, pool.stride, pool.dilation, pool.declared, pool.sizes, strict=True
    ):
        coords = np.arange(size)[:, None] * s + np.arange(k)[None] * step - low
        begin, end = (-low, extent + high) if with_padding else (0, extent)
        result = np.multiply.outer(result, ((coords >= begin) & (coords < end)).sum(1))
    return result


@converter("LpPool")
def lp_pool(ctx: Context, x: Node, *, p: int = 2, **attributes: Any) -> Node:
    pool = PoolAttributes.of(x, **attributes)
    powers = _power(ctx, ctx.emit("abs", ctx.widen(x)), p)
    total = window_sum(ctx, powers, pool)
    return ctx.cast(_root(ctx, total, p), x.dtype)


def _power(ctx: Context, x: Node, p: int) -> Node:
    if p == 1:
        return x
    return ctx.mul(x, x) if p == 2 else ctx.arithmetic("pow", x, p)


def _root(ctx: Context, x: Node, p: int) -> Node:
    if p == 1:
        return x
    return ctx.emit("sqrt", x) if p == 2 else ctx.arithmetic("pow", x, 1 / p)


def _spatial(x: Node) -> tuple[int, ...]:
    return tuple(range(2, x.type.rank))


@converter("GlobalAveragePool")
def global_average_pool(ctx: Context, x: Node) -> Node:
    return ctx.reduce("mean", x, _spatial(x), True)


@converter("GlobalMaxPool")
def global_max_pool(ctx: Context, x: Node) -> Node:
    return ctx.reduce("amax", x, _spatial(x), True)


@converter("GlobalLpPool")
def global_lp_pool(ctx: Context, x: Node, *, p: int = 2) -> Node:
    powers = _power(ctx, ctx.emit("abs", ctx.widen(x)), p)
    return ctx.cast(_root(ctx, ctx.reduce("sum", powers, _spatial(x), True), p), x.dtype)


@converter("MaxUnpool")
def max_unpool(
    ctx: Context,
    x: Node,
    indices: Node,
    output_shape: Node | None = None,
    *,
    kernel_shape: Ints,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> Node:
    """The elements at their indices in a tensor whose size follows from the strides and windows."""
    from tilewright.frontend.onnx.op_indexing import scattered

    rank = check_rank(x, kernel_shape)
    stride = ones(strides, rank)
    widths = (0,) * (2 * rank) if pads is None else tuple(pads)
    implied = [
        (extent - 1) * s + k - widths[axis] - widths[axis + rank]
        for axis, (extent, s, k) in enumerate(zip(x.shape[2:], stride, kernel_shape, strict=True))
    ]
    shape = (*x.shape[:2], *implied)
    if indices.shape != x.shape or any(extent < 1 for extent in implied):
        raise Unsupported(f"indices {indices.type!r} for {x.type!r} and a result of {list(shape)}")
    ctx.check_values(indices, 0, math.prod(shape) - 1, "indices")
    coord = ctx.cast(ctx.reshape(indices, (indices.type.size,)), DType.I64)
    empty = ctx.full(0, x.dtype, (math.prod(shape),))
    result = ctx.reshape(scattered(ctx, empty, coord, ctx.reshape(x, (x.type.size,)), 0), shape)
    if output_shape is None:
        return result
    wanted = ctx.static_ints(output_shape)  # the implied tensor is its upper left corner
    if (
        len(wanted) != len(shape)
        or wanted[:2] != shape[:2]
        or any(more < less for more, less in zip(wanted, shape, strict=True))
    ):
        raise Unsupported(f"output_shape {wanted} for a result of {shape}")
    return ctx.pad(
        result, (0,) * len(shape), [more - less for more, less in zip(wanted, shape, strict=True)], 0
    )
