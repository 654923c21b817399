"""Quantised arithmetic. Contractions of bytes accumulate exactly in i32; only the rescaling is in floats.

The product of two dequantised tensors (the QDQ form) is computed from the bytes too, see `matmuls.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewright.dtypes import DType
from tilewright.frontend.builder import Unsupported
from tilewright.frontend.onnx.context import Context, axis_of
from tilewright.frontend.onnx.matmuls import (
    Quantised,
    WindowAttributes,
    along,
    integer_convolution,
    integer_matmul,
    is_byte,
    one,
    per_channel,
)
from tilewright.frontend.onnx.registry import converter
from tilewright.frontend.onnx.types import dtype_of
from tilewright.graph.ir import Node

LEVELS = 255  # between the least and the largest byte


def _per_axis(ctx: Context, parameter: Node, x: Node, axis: int, block_size: int) -> Node:
    """A scale or zero point in a shape that broadcasts against x: one number, one per slice, or one per block."""
    if parameter.type.size == 1 and not block_size:
        return ctx.reshape(parameter, ())
    axis = axis_of(axis, x.type.rank)
    if parameter.type.rank == 1 and not block_size and parameter.shape[0] == x.shape[axis]:
        return ctx.reshape(parameter, (*parameter.shape, *[1] * (x.type.rank - 1 - axis)))
    if not block_size or parameter.type.rank != x.type.rank:
        raise Unsupported(f"parameters {parameter.type!r} for {x.type!r}")
    wanted = [-(-n // block_size) if d == axis else n for d, n in enumerate(x.shape)]
    if block_size < 0 or list(parameter.shape) != wanted:
        raise Unsupported(f"parameters {parameter.type!r} for blocks of {block_size} of {x.type!r}")
    ctx.reserve(x.shape[axis], "the blocks of an axis")
    positions = np.arange(x.shape[axis]) // block_size
    return ctx.take(parameter, positions, axis)


def _check_zero_point(scale: Node, zero_point: Node | None) -> None:
    if zero_point is not None and zero_point.type.size != scale.type.size:
        raise Unsupported(f"a zero point {zero_point.type!r} for a scale {scale.type!r}")


@converter("QuantizeLinear")
def quantize_linear(
    ctx: Context,
    x: Node,
    scale: Node,
    zero_point: Node | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
    precision: int = 0,
    saturate: int = 1,
) -> Node:
    dtype = DType.U8 if zero_point is None else zero_point.dtype
    if output_dtype and zero_point is None:
        dtype = dtype_of(output_dtype)
    wide = x if x.dtype.is_float else ctx.cast(x, DType.F32)
    working = wide.dtype.compute
    if precision and dtype_of(precision).is_float:
        working = dtype_of(precision).compute
    steps = ctx.cast(_per_axis(ctx, scale, x, axis, block_size), working)
    ratio = ctx.div(ctx.cast(wide, working), steps)
    _check_zero_point(scale, zero_point)
    zero = None if zero_point is None else _per_axis(ctx, zero_point, x, axis, block_size)
    return rounded(ctx, ratio, zero, dtype)


def rounded(ctx: Context, ratio: Node, zero: Node | None, dtype: DType) -> Node:
    """Round to the nearest integer (halves to even), add the zero point, and clamp to the type."""
    if not dtype.is_integer:
        raise Unsupported(f"quantisation to {dtype.short}")
    whole = ctx.emit("round", ratio)
    if zero is not None:
        whole = ctx.add(whole, ctx.cast(zero, ratio.dtype))
    info = np.iinfo(dtype.numpy)
    kept = ctx.emit("clamp", whole, min=float(info.min), max=float(info.max))
    return ctx.cast(ctx.cast(kept, DType.I32), dtype)


@converter("DynamicQuantizeLinear")
def dynamic_quantize_linear(ctx: Context, x: Node) -> tuple[Node, Node, Node]:
    """(y, scale, zero point), as ONNX Runtime computes them: a zero tensor has the scale 1, where the standard's own
    definition divides 0 by 0."""
    axes = tuple(range(x.type.rank))
    low = ctx.emit("minimum", ctx.reduce("amin", x, axes, False), ctx.full(0, x.dtype))
    high = ctx.emit("maximum", ctx.reduce("amax", x, axes, False), ctx.full(0, x.dtype))
    steps = ctx.div(ctx.sub(high, low), float(LEVELS))
    scale = ctx.select(ctx.compare("eq", low, high), 1, steps)
    start = ctx.emit("clamp", ctx.sub(0, ctx.div(low, scale)), min=0.0, max=float(LEVELS))
    zero = ctx.cast(ctx.cast(ctx.emit("round", start), DType.I32), DType.U8)
    return rounded(ctx, ctx.div(x, scale), zero, DType.U8), scale, zero


@converter("DequantizeLinear")
def dequantize_linear(
    ctx: Context,
    x: Node,
    scale: Node,
    zero_point: Node | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
) -> Node:
    _check_zero_point(scale, zero_point)
    dtype = dtype_of(output_dtype) if output_dtype else scale.dtype
    value = ctx.cast(x, DType.I32) if x.dtype.is_integer else x
    if zero_point is not None:
        value = ctx.sub(value, ctx.cast(_per_axis(ctx, zero_point, x, axis, block_size), value.dtype))
    working = DType.F64 if dtype is DType.F64 else DType.F32
    steps = ctx.cast(_per_axis(ctx, scale, x, axis, block_size), working)
    result = ctx.cast(ctx.mul(ctx.cast(value, working), steps), dtype)
    if is_byte(x) and dtype is DType.F32 and scale.dtype is DType.F32 and not block_size:
        ctx.quantised[result] = Quantised(
            x, scale, zero_point, axis_of(axis, x.type.rank) if x.type.rank > 1 else 0
        )
    return result


@converter("MatMulInteger")
def matmul_integer(
    ctx: Context, a: Node, b: Node, a_zero: Node | None = None, b_zero: Node | None = None
) -> Node:
    return integer_matmul(ctx, a, b, a_zero, b_zero)


def requantised(
    ctx: Context, total: Node, scale: Node, y_scale: Node, y_zero: Node | None, dtype: DType
) -> Node:
    """Integers times `scale` over `y_scale`, as bytes again."""
    working = DType.F64 if scale.dtype is DType.F64 else DType.F32
    ratio = ctx.div(ctx.cast(scale, working), ctx.cast(y_scale, working))
    return rounded(ctx, ctx.mul(ctx.cast(total, working), ratio), y_zero, dtype)


@converter("QLinearMatMul")
def qlinear_matmul(
    ctx: Context,
    a: Node,
    a_scale: Node,
    a_zero: Node,
    b: Node,
    b_scale: Node,
    b_zero: Node,
    y_scale: Node,
    y_zero: Node,
) -> Node:
    total = integer_matmul(ctx, a, b, a_zero, b_zero)
    left = along(ctx, a_scale, a, rows=True)
    right = along(ctx, b_scale, b, rows=False)
    assert left is not None and right is not None
    scale = ctx.mul(ctx.widen(left), ctx.widen(right))
    return requantised(ctx, total, scale, one(ctx, y_scale), one(ctx, y_zero), y_zero.dtype)


@converter("ConvInteger")
def conv_integer(
    ctx: Context,
    x: Node,
    w: Node,
    x_zero: Node | None = None,
    w_zero: Node | None = None,
    **attributes: Any,
) -> Node:
    return integer_convolution(ctx, x, w, x_zero, w_zero, WindowAttributes.of(attributes))


@converter("QLinearConv")
def qlinear_conv(
    ctx: Context,
    x: Node,
    x_scale: Node,
    x_zero: Node,
    w: Node,
    w_scale: Node,
    w_zero: Node,
    y_scale: Node,
    y_zero: Node,
    bias: Node | None = None,
    **attributes: Any,
) -> Node:
    total = integer_convolution(ctx, x, w, x_zero, w_zero, WindowAttributes.of(attributes))
    rank = x.type.rank - 2
    if bias is not None:
        total = ctx.add(total, per_channel(ctx, bias, rank))
    scale = ctx.mul(ctx.widen(one(ctx, x_scale)), ctx.widen(one(ctx, w_scale)))
    if scale.type.rank:
        scale = per_channel(ctx, scale, rank)
    return requantised(ctx, total, scale, one(ctx, y_scale), one(ctx, y_zero), y_zero.dtype)
