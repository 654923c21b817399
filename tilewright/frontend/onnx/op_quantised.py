"""Quantised arithmetic. Sums of products of bytes are exact in i32; only the rescaling is in floats.

A zero point other than 0, or one per row or channel, is taken off before the product, in i32.
"""

from __future__ import annotations

import numpy as np

from tilewright.dtypes import DType
from tilewright.frontend.onnx.context import Context, Ints, axis_of
from tilewright.frontend.onnx.op_contraction import convolution, is_byte, product
from tilewright.frontend.onnx.registry import Unsupported, converter
from tilewright.frontend.onnx.types import dtype_of
from tilewright.graph.ir import Node


def _per_axis(ctx: Context, parameter: Node, x: Node, axis: int, block_size: int) -> Node:
    """A scale or zero point in a shape that broadcasts against x: of one number, one per slice, or one per block."""
    if parameter.type.size == 1 and not block_size:
        return ctx.reshape(parameter, ())
    axis = axis_of(axis, x.type.rank)
    if parameter.type.rank == 1 and not block_size:
        return ctx.reshape(parameter, (*parameter.shape, *[1] * (x.type.rank - 1 - axis)))
    if not block_size or parameter.type.rank != x.type.rank:
        raise Unsupported(f"parameters {parameter.type!r} for {x.type!r}")
    places = np.arange(x.shape[axis]) // block_size
    return ctx.take(parameter, places, axis)


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
    zero = None if zero_point is None else _per_axis(ctx, zero_point, x, axis, block_size)
    return rounded(ctx, ratio, zero, dtype)


def rounded(ctx: Context, ratio: Node, zero: Node | None, dtype: DType) -> Node:
    """Rounded to the nearest whole number (halves to even), moved by the zero point, and kept in range."""
    if not dtype.is_integer:
        raise Unsupported(f"quantisation to {dtype.short}")
    whole = ctx.emit("round", ratio)
    if zero is not None:
        whole = ctx.add(whole, ctx.cast(zero, ratio.dtype))
    info = np.iinfo(dtype.numpy)
    kept = ctx.emit("clamp", whole, min=float(info.min), max=float(info.max))
    return ctx.cast(ctx.cast(kept, DType.I32), dtype)


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
    dtype = dtype_of(output_dtype) if output_dtype else scale.dtype
    value = ctx.cast(x, DType.I32) if x.dtype.is_integer else x
    if zero_point is not None:
        value = ctx.sub(value, ctx.cast(_per_axis(ctx, zero_point, x, axis, block_size), value.dtype))
    working = DType.F64 if dtype is DType.F64 else DType.F32
    steps = ctx.cast(_per_axis(ctx, scale, x, axis, block_size), working)
    return ctx.cast(ctx.mul(ctx.cast(value, working), steps), dtype)


def centred(ctx: Context, x: Node, zero: Node | None) -> Node:
    """x less its zero point: as it is where that is 0, else in i32."""
    if zero is None or (ctx.statics.is_static(zero) and not ctx.static(zero).any()):
        return x
    return ctx.sub(ctx.cast(x, DType.I32), ctx.cast(zero, DType.I32))


def same_kind(ctx: Context, a: Node, b: Node) -> tuple[Node, Node]:
    """Both as bytes, or both as i32."""
    if is_byte(a) and is_byte(b):
        return a, b
    return ctx.cast(a, DType.I32), ctx.cast(b, DType.I32)


def _along(ctx: Context, parameter: Node | None, rank: int, *, rows: bool) -> Node | None:
    """A parameter of a matrix: one number, or one per row (of a) or per column (of b)."""
    if parameter is None or parameter.type.rank != 1:
        return parameter
    if parameter.type.size == 1:
        return ctx.reshape(parameter, ())
    return ctx.reshape(parameter, (*parameter.shape, 1)) if rows and rank >= 2 else parameter


def integer_product(ctx: Context, a: Node, b: Node, a_zero: Node | None, b_zero: Node | None) -> Node:
    left = centred(ctx, a, _along(ctx, a_zero, a.type.rank, rows=True))
    right = centred(ctx, b, _along(ctx, b_zero, b.type.rank, rows=False))
    return product(ctx, *same_kind(ctx, left, right))


@converter("MatMulInteger")
def matmul_integer(
    ctx: Context, a: Node, b: Node, a_zero: Node | None = None, b_zero: Node | None = None
) -> Node:
    return integer_product(ctx, a, b, a_zero, b_zero)


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
    total = integer_product(ctx, a, b, a_zero, b_zero)
    left = _along(ctx, a_scale, a.type.rank, rows=True)
    right = _along(ctx, b_scale, b.type.rank, rows=False)
    assert left is not None and right is not None
    scale = ctx.mul(ctx.widen(left), ctx.widen(right))
    return requantised(ctx, total, scale, _one(ctx, y_scale), _one(ctx, y_zero), y_zero.dtype)


def _one(ctx: Context, x: Node) -> Node:
    return ctx.reshape(x, ()) if x.type.size == 1 else x


def integer_convolution(
    ctx: Context,
    x: Node,
    w: Node,
    x_zero: Node | None,
    w_zero: Node | None,
    *,
    auto_pad: str,
    dilations: Ints | None,
    group: int,
    kernel_shape: Ints | None,
    pads: Ints | None,
    strides: Ints | None,
) -> Node:
    if x_zero is not None:
        x_zero = _one(ctx, x_zero)
    if w_zero is not None:
        w_zero = ctx.reshape(
            w_zero, (-1 if w_zero.type.size == 0 else w_zero.type.size, *[1] * (w.type.rank - 1))
        )
    data, weight = same_kind(ctx, centred(ctx, x, x_zero), centred(ctx, w, w_zero))
    return convolution(
        ctx,
        data,
        weight,
        None,
        auto_pad=auto_pad,
        dilations=dilations,
        group=group,
        kernel_shape=kernel_shape,
        pads=pads,
        strides=strides,
    )


@converter("ConvInteger")
def conv_integer(
    ctx: Context,
    x: Node,
    w: Node,
    x_zero: Node | None = None,
    w_zero: Node | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Ints | None = None,
    group: int = 1,
    kernel_shape: Ints | None = None,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> Node:
    return integer_convolution(
        ctx,
        x,
        w,
        x_zero,
        w_zero,
        auto_pad=auto_pad,
        dilations=dilations,
        group=group,
        kernel_shape=kernel_shape,
        pads=pads,
        strides=strides,
    )


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
    *,
    auto_pad: str = "NOTSET",
    dilations: Ints | None = None,
    group: int = 1,
    kernel_shape: Ints | None = None,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> Node:
    total = integer_convolution(
        ctx,
        x,
        w,
        x_zero,
        w_zero,
        auto_pad=auto_pad,
        dilations=dilations,
        group=group,
        kernel_shape=kernel_shape,
        pads=pads,
        strides=strides,
    )
    spatial = [1] * (x.type.rank - 2)
    if bias is not None:
        total = ctx.add(total, ctx.reshape(bias, (*bias.shape, *spatial)))
    scale = ctx.mul(ctx.widen(_one(ctx, x_scale)), ctx.widen(_one(ctx, w_scale)))
    if scale.type.rank:
        scale = ctx.reshape(scale, (*scale.shape, *spatial))
    return requantised(ctx, total, scale, _one(ctx, y_scale), _one(ctx, y_zero), y_zero.dtype)
