"""Matmuls and convolutions."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tilewright.frontend.builder import Ints, Number, Unsupported
from tilewright.frontend.torch.context import Context, axis_of
from tilewright.frontend.torch.registry import converter
from tilewright.graph.ir import Node

# -- matmuls ---------------------------------------------------------------------------------------------


@converter("aten.linear.default")
def linear(ctx: Context, x: Node, weight: Node, bias: Node | None = None) -> Node:
    matrix = (
        ctx.unsqueeze(weight, 0) if weight.type.rank == 1 else weight
    )  # one output without an axis of its own
    if bias is not None and bias.shape == matrix.shape[:1] and x.dtype.is_float:
        return ctx.reshape(ctx.emit("linear", x, matrix, bias), ctx.shape)
    result = ctx.reshape(ctx.emit("linear", x, matrix), (*x.shape[:-1], *weight.shape[:-1]))
    result = ctx.cast(result, ctx.dtype)
    return result if bias is None else ctx.add(result, bias)


@converter(
    "aten.matmul.default",
    "aten.linalg_matmul.default",
    "aten.mm.default",
    "aten.bmm.default",
    "aten.mv.default",
)
def matmul(ctx: Context, a: Node, b: Node) -> Node:
    """A vector on the left is a row, on the right a column; its axis is dropped from the result."""
    left = ctx.unsqueeze(a, 0) if a.type.rank == 1 else a
    right = ctx.unsqueeze(b, 1) if b.type.rank == 1 else b
    return ctx.cast(ctx.reshape(ctx.emit("matmul", left, right), ctx.shape), ctx.dtype)


@converter("aten.mm.dtype", "aten.bmm.dtype")
def matmul_into(ctx: Context, a: Node, b: Node, out_dtype: object) -> Node:
    return ctx.emit("matmul", ctx.cast(a, ctx.dtype), ctx.cast(b, ctx.dtype))


@converter("aten.dot.default", "aten.vdot.default", "aten.inner.default")
def inner(ctx: Context, a: Node, b: Node) -> Node:
    if a.type.rank == 0 or b.type.rank == 0:
        return ctx.mul(a, b)
    if a.type.rank == b.type.rank == 1:
        return matmul(ctx, a, b)
    columns = ctx.reshape(b, (math.prod(b.shape[:-1]), b.shape[-1]))
    return ctx.reshape(ctx.emit("linear", a, columns), ctx.shape)


@converter("aten.outer.default", "aten.ger.default")
def outer(ctx: Context, a: Node, b: Node) -> Node:
    return ctx.mul(ctx.unsqueeze(a, 1), ctx.unsqueeze(b, 0))


def _combined(ctx: Context, x: Node, product: Node, beta: Number, alpha: Number) -> Node:
    """beta x + alpha product; with beta 0, x is not read."""
    if alpha != 1:
        product = ctx.mul(ctx.widen(product), alpha)
    if beta == 0:
        return ctx.cast(ctx.broadcast_to(product, ctx.shape), ctx.dtype)
    scaled = x if beta == 1 else ctx.mul(ctx.widen(x), beta)
    return ctx.cast(ctx.add(product, scaled), ctx.dtype)


@converter("aten.addmm.default", "aten.baddbmm.default")
def addmm(ctx: Context, x: Node, a: Node, b: Node, *, beta: Number = 1, alpha: Number = 1) -> Node:
    return _combined(ctx, x, ctx.emit("matmul", a, b), beta, alpha)


@converter("aten.addbmm.default")
def addbmm(ctx: Context, x: Node, a: Node, b: Node, *, beta: Number = 1, alpha: Number = 1) -> Node:
    product = ctx.emit("sum", ctx.emit("matmul", a, b), axes=(0,), keepdims=False)
    return _combined(ctx, x, product, beta, alpha)


@converter("aten.addmv.default")
def addmv(ctx: Context, x: Node, a: Node, b: Node, *, beta: Number = 1, alpha: Number = 1) -> Node:
    product = ctx.squeeze(ctx.emit("matmul", a, ctx.unsqueeze(b, 1)), 1)
    return _combined(ctx, x, product, beta, alpha)


@converter("aten.addr.default")
def addr(ctx: Context, x: Node, a: Node, b: Node, *, beta: Number = 1, alpha: Number = 1) -> Node:
    return _combined(ctx, x, outer(ctx, a, b), beta, alpha)


@converter("aten.tensordot.default")
def tensordot(ctx: Context, a: Node, b: Node, dims_self: Ints, dims_other: Ints) -> Node:
    left, right = ([axis_of(d, x.type.rank) for d in dims] for x, dims in ((a, dims_self), (b, dims_other)))
    if any(a.shape[i] != b.shape[j] for i, j in zip(left, right, strict=True)):
        raise Unsupported("tensordot that broadcasts a summed axis")
    kept_left = [axis for axis in range(a.type.rank) if axis not in left]
    kept_right = [axis for axis in range(b.type.rank) if axis not in right]
    depth = math.prod(a.shape[axis] for axis in left)
    rows = ctx.permute(a, (*kept_left, *left))
    columns = ctx.permute(b, (*right, *kept_right))
    rows = ctx.reshape(rows, (math.prod(a.shape[axis] for axis in kept_left), depth))
    columns = ctx.reshape(columns, (depth, math.prod(b.shape[axis] for axis in kept_right)))
    return ctx.cast(ctx.reshape(ctx.emit("matmul", rows, columns), ctx.shape), ctx.dtype)


@converter("aten.bilinear.default")
def bilinear(ctx: Context, x1: Node, x2: Node, weight: Node, bias: Node | None = None) -> Node:
    """x1 W_o x2 for every output o: x1 times all W_o at once, then each row times x2."""
    outputs, first, second = weight.shape
    rows = ctx.reshape(ctx.permute(weight, (0, 2, 1)), (outputs * second, first))
    mapped = ctx.reshape(ctx.emit("linear", x1, rows), (*x1.shape[:-1], outputs, second))
    result = ctx.squeeze(ctx.emit("matmul", mapped, ctx.unsqueeze(x2, x2.type.rank)), x1.type.rank)
    return result if bias is None else ctx.add(result, bias)


@converter("aten.linalg_matrix_power.default", "aten.matrix_power.default")
def matrix_power(ctx: Context, x: Node, n: int) -> Node:
    if n < 0:
        raise Unsupported("a negative power of a matrix")
    if n == 0:
        matrix = x.shape[-2:]
        one = ctx.cast(ctx.emit("eq", ctx.iota(matrix, 0), ctx.iota(matrix, 1)), x.dtype)
        return ctx.broadcast_to(one, x.shape)
    result: Node | None = None
    for bit in bin(n)[2:]:
        result = ctx.emit("matmul", result, result) if result is not None else None
        if bit == "1":
            result = ctx.emit("matmul", result, x) if result is not None else x
    assert result is not None
    return result


# -- convolutions -----------------------------------------------------------------------------------------------


def spatial(values: int | Ints, rank: int) -> tuple[int, ...]:
    """One number per spatial axis; a single one stands for all."""
    listed = (values,) if isinstance(values, int) else tuple(int(value) for value in values)
    return listed * rank if len(listed) == 1 else listed


def _convolve(
    ctx: Context,
    x: Node,
    weight: Node,
    bias: Node | None,
    stride: int | Ints,
    padding: Sequence[tuple[int, int]],
    dilation: int | Ints,
    groups: int,
) -> Node:
    rank = weight.type.rank - 2
    batched = x if x.type.rank == rank + 2 else ctx.unsqueeze(x, 0)
    operands = (batched, weight) if bias is None else (batched, weight, bias)
    result = ctx.emit(
        "conv",
        *operands,
        stride=spatial(stride, rank),
        padding=tuple(padding),
        dilation=spatial(dilation, rank),
        groups=groups,
        layout="channels_first",
    )
    return result if batched is x else ctx.squeeze(result, 0)


@converter("aten.conv1d.default", "aten.conv2d.default", "aten.conv3d.default")
def conv(
    ctx: Context,
    x: Node,
    weight: Node,
    bias: Node | None = None,
    stride: int | Ints = 1,
    padding: int | Ints = 0,
    dilation: int | Ints = 1,
    groups: int = 1,
) -> Node:
    around = [(p, p) for p in spatial(padding, weight.type.rank - 2)]
    return _convolve(ctx, x, weight, bias, stride, around, dilation, groups)


@converter("aten.conv1d.padding", "aten.conv2d.padding", "aten.conv3d.padding")
def conv_named_padding(
    ctx: Context,
    x: Node,
    weight: Node,
    bias: Node | None = None,
    stride: int | Ints = 1,
    padding: str = "valid",
    dilation: int | Ints = 1,
    groups: int = 1,
) -> Node:
    kernel = weight.shape[2:]
    around = [(0, 0)] * len(kernel)
    if padding == "same":  # an odd remainder goes to the end
        totals = [d * (k - 1) for d, k in zip(spatial(dilation, len(kernel)), kernel, strict=True)]
        around = [(total // 2, total - total // 2) for total in totals]
    return _convolve(ctx, x, weight, bias, stride, around, dilation, groups)


@converter("aten.conv_transpose1d.default", "aten.conv_transpose2d.input", "aten.conv_transpose3d.input")
def conv_transpose(
    ctx: Context,
    x: Node,
    weight: Node,
    bias: Node | None = None,
    stride: int | Ints = 1,
    padding: int | Ints = 0,
    output_padding: int | Ints = 0,
    groups: int = 1,
    dilation: int | Ints = 1,
) -> Node:
    rank = weight.type.rank - 2
    batched = x if x.type.rank == rank + 2 else ctx.unsqueeze(x, 0)
    operands = (batched, weight) if bias is None else (batched, weight, bias)
    result = ctx.emit(
        "conv_transpose",
        *operands,
        stride=spatial(stride, rank),
        padding=spatial(padding, rank),
        output_padding=spatial(output_padding, rank),
        dilation=spatial(dilation, rank),
        groups=groups,
    )
    return result if batched is x else ctx.squeeze(result, 0)


@converter("aten.convolution.default")
def convolution(
    ctx: Context,
    x: Node,
    weight: Node,
    bias: Node | None,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    transposed: bool,
    output_padding: Ints,
    groups: int,
) -> Node:
    if transposed:
        return conv_transpose(ctx, x, weight, bias, stride, padding, output_padding, groups, dilation)
    return conv(ctx, x, weight, bias, stride, padding, dilation, groups)


@converter("aten._int_mm.default")
def int_mm(ctx: Context, a: Node, b: Node) -> Node:
    return ctx.emit("matmul", a, b)
