"""Operators of ONNX Runtime's own domain, com.microsoft, which its quantiser and optimiser write into models.

Quantised operators compute the same as the standard operators that they were fused from: bytes become floats, and the
result bytes again; sums of byte products stay exact. Fused operators are expanded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tilewright.dtypes import DType
from tilewright.frontend.builder import Absent, Unsupported
from tilewright.frontend.onnx.context import Context, axis_of
from tilewright.frontend.onnx.matmuls import along, integer_matmul, one, product
from tilewright.frontend.onnx.op_contraction import conv, gemm
from tilewright.frontend.onnx.op_quantised import (
    dequantize_linear,
    dynamic_quantize_linear,
    quantize_linear,
    requantised,
    rounded,
)
from tilewright.frontend.onnx.op_recurrent import (
    LstmParameters,
    RecurrentLayer,
    functions,
    lstm_cells,
    recurrent,
)
from tilewright.frontend.onnx.op_window import average_pool
from tilewright.frontend.onnx.registry import converter
from tilewright.graph.ir import Node

DOMAIN = "com.microsoft"

converter("QuantizeLinear", domain=DOMAIN)(quantize_linear)
converter("DequantizeLinear", domain=DOMAIN)(dequantize_linear)

# -- products of bytes ------------------------------------------------------------------------------------------------


@converter("MatMulIntegerToFloat", domain=DOMAIN)
def matmul_integer_to_float(
    ctx: Context,
    a: Node,
    b: Node,
    a_scale: Node,
    b_scale: Node,
    a_zero: Node | None = None,
    b_zero: Node | None = None,
    bias: Node | None = None,
) -> Node:
    left = along(ctx, a_scale, a, rows=True)
    right = along(ctx, b_scale, b, rows=False)
    assert left is not None and right is not None
    total = ctx.cast(integer_matmul(ctx, a, b, a_zero, b_zero), DType.F32)
    result = ctx.mul(total, ctx.mul(left, right))
    return result if bias is None else ctx.add(result, bias)


@converter("DynamicQuantizeMatMul", domain=DOMAIN)
def dynamic_quantize_matmul(
    ctx: Context,
    a: Node,
    b: Node,
    b_scale: Node,
    b_zero: Node | None = None,
    bias: Node | None = None,
) -> Node:
    q, scale, zero = dynamic_quantize_linear(ctx, a)
    return matmul_integer_to_float(ctx, q, b, scale, b_scale, zero, b_zero, bias)


@converter("QGemm", domain=DOMAIN)
def qgemm(
    ctx: Context,
    a: Node,
    a_scale: Node,
    a_zero: Node,
    b: Node,
    b_scale: Node,
    b_zero: Node,
    c: Node | None = None,
    y_scale: Node | None = None,
    y_zero: Node | None = None,
    *,
    alpha: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Node:
    a = ctx.permute(a, (1, 0)) if transA else a
    b = ctx.permute(b, (1, 0)) if transB else b
    total = integer_matmul(ctx, a, b, a_zero, b_zero)
    if c is not None:
        total = ctx.add(total, c)
    scale = ctx.mul(ctx.mul(one(ctx, a_scale), one(ctx, b_scale)), alpha)
    if y_scale is None or y_zero is None:
        return ctx.mul(ctx.cast(total, DType.F32), scale)
    return requantised(ctx, total, scale, one(ctx, y_scale), one(ctx, y_zero), y_zero.dtype)


@converter("DynamicQuantizeLSTM", domain=DOMAIN)
def dynamic_quantize_lstm(
    ctx: Context,
    x: Node,
    w: Node,
    r: Node,
    b: Node | None,
    lengths: Node | None,
    initial_h: Node | None,
    initial_c: Node | None,
    p: Node | None,
    w_scale: Node,
    w_zero: Node,
    r_scale: Node,
    r_zero: Node,
    *,
    activation_alpha: Sequence[float] | None = None,
    activation_beta: Sequence[float] | None = None,
    activations: Sequence[str] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    input_forget: int = 0,
) -> tuple[Node, ...]:
    """An LSTM whose weights are bytes, [directions, inputs, 4 * hidden]. The inputs of all steps are quantised at once,
    the state again at every step."""
    directions = 2 if direction == "bidirectional" else 1
    if w.type.rank != 3 or r.type.rank != 3 or w.shape[0] != directions or r.shape[0] != directions:
        raise Unsupported(f"weights {w.type!r} and {r.type!r} for the direction {direction}")
    if direction not in ("forward", "reverse", "bidirectional"):
        raise Unsupported(f"the direction {direction}")
    if hidden_size is not None and hidden_size != r.shape[1]:
        raise Unsupported(f"hidden_size {hidden_size} with recurrent weights {r.type!r}")

    def by(weight: Node, scale: Node, zero: Node, number: int) -> Callable[[Node], Node]:
        own = [ctx.index_axis(entry, 0, number) for entry in (weight, scale, zero)]
        return lambda value: dynamic_quantize_matmul(ctx, value, *own)

    layer = RecurrentLayer(directions, r.shape[1], x.shape[1], x)
    products = [(by(w, w_scale, w_zero, n), by(r, r_scale, r_zero, n)) for n in range(directions)]
    chosen = functions(
        ctx, activations, ("Sigmoid", "Tanh", "Tanh"), directions, activation_alpha, activation_beta
    )
    parameters = LstmParameters(b, p, initial_h, initial_c, clip, bool(input_forget))
    cells, states = lstm_cells(ctx, layer, products, chosen, parameters, 0)
    return recurrent(ctx, x, cells, states, lengths, direction, 0)


# -- bytes in, bytes out ----------------------------------------------------------------------------------------------


def floats(ctx: Context, x: Node, scale: Node, zero: Node | None) -> Node:
    value = ctx.cast(x, DType.I32)
    if zero is not None:
        value = ctx.sub(value, ctx.cast(one(ctx, zero), DType.I32))
    return ctx.mul(ctx.cast(value, DType.F32), one(ctx, scale))


def bytes_of(ctx: Context, value: Node, scale: Node, zero: Node | None, dtype: DType) -> Node:
    return rounded(ctx, ctx.div(value, one(ctx, scale)), None if zero is None else one(ctx, zero), dtype)


@converter("QLinearAdd", "QLinearMul", domain=DOMAIN)
def qlinear_binary(
    ctx: Context,
    a: Node,
    a_scale: Node,
    a_zero: Node | None,
    b: Node,
    b_scale: Node,
    b_zero: Node | None,
    y_scale: Node,
    y_zero: Node | None = None,
) -> Node:
    join = ctx.add if ctx.proto.op_type == "QLinearAdd" else ctx.mul
    value = join(floats(ctx, a, a_scale, a_zero), floats(ctx, b, b_scale, b_zero))
    return bytes_of(ctx, value, y_scale, y_zero, a.dtype)


@converter("QLinearSigmoid", domain=DOMAIN)
def qlinear_sigmoid(
    ctx: Context, x: Node, x_scale: Node, x_zero: Node | None, y_scale: Node, y_zero: Node | None = None
) -> Node:
    value = ctx.emit("sigmoid", floats(ctx, x, x_scale, x_zero))
    return bytes_of(ctx, value, y_scale, y_zero, x.dtype)


@converter("QLinearLeakyRelu", domain=DOMAIN)
def qlinear_leaky_relu(
    ctx: Context,
    x: Node,
    x_scale: Node,
    x_zero: Node | None,
    y_scale: Node,
    y_zero: Node | None = None,
    *,
    alpha: float = 0.01,
) -> Node:
    value = ctx.emit("leaky_relu", floats(ctx, x, x_scale, x_zero), slope=float(alpha))
    return bytes_of(ctx, value, y_scale, y_zero, x.dtype)


@converter("QLinearSoftmax", domain=DOMAIN)
def qlinear_softmax(
    ctx: Context,
    x: Node,
    x_scale: Node,
    x_zero: Node | None,
    y_scale: Node,
    y_zero: Node,
    *,
    axis: int = -1,
    opset: int,
) -> Node:
    axis = axis_of(axis, x.type.rank)
    if opset < 13 and axis != x.type.rank - 1:
        raise Unsupported("a softmax over several axes at once")
    value = ctx.emit("softmax", floats(ctx, x, x_scale, x_zero), axis=axis)
    return bytes_of(ctx, value, y_scale, y_zero, x.dtype)


@converter("QLinearConcat", domain=DOMAIN)
def qlinear_concat(ctx: Context, y_scale: Node, y_zero: Node, *operands: Node, axis: int) -> Node:
    if not operands or len(operands) % 3:
        raise Unsupported(f"{len(operands)} inputs, which are not tensors with scales and zero points")
    parts = [floats(ctx, *operands[n : n + 3]) for n in range(0, len(operands), 3)]
    joined = ctx.concat(parts, axis_of(axis, parts[0].type.rank))
    return bytes_of(ctx, joined, y_scale, y_zero, y_zero.dtype)


@converter("QLinearGlobalAveragePool", domain=DOMAIN)
def qlinear_global_average_pool(
    ctx: Context,
    x: Node,
    x_scale: Node,
    x_zero: Node,
    y_scale: Node,
    y_zero: Node,
    *,
    channels_last: int = 0,
) -> Node:
    """The sum of an image is exact; its size is part of the scale factor."""
    axes = tuple(range(1, x.type.rank - 1)) if channels_last else tuple(range(2, x.type.rank))
    count = int(np.prod([x.shape[axis] for axis in axes], dtype=np.int64))
    total = ctx.reduce("sum", ctx.cast(x, DType.I32), axes, True)
    total = ctx.sub(total, ctx.mul(ctx.cast(one(ctx, x_zero), DType.I32), count))
    size = ctx.mul(one(ctx, y_scale), float(count))
    return requantised(ctx, total, one(ctx, x_scale), size, one(ctx, y_zero), x.dtype)


@converter("QLinearAveragePool", domain=DOMAIN)
def qlinear_average_pool(
    ctx: Context,
    x: Node,
    x_scale: Node,
    x_zero: Node | None,
    y_scale: Node,
    y_zero: Node | None = None,
    *,
    channels_last: int = 0,
    **attributes: Any,
) -> Node:
    rank = x.type.rank
    value = floats(ctx, x, x_scale, x_zero)
    if channels_last:
        value = ctx.permute(value, (0, rank - 1, *range(1, rank - 1)))
    value = average_pool(ctx, value, **attributes)
    if channels_last:
        value = ctx.permute(value, (0, *range(2, rank), 1))
    return bytes_of(ctx, value, y_scale, y_zero, x.dtype)


# -- fused operators --------------------------------------------------------------------------------------------------


def activated(ctx: Context, x: Node, name: str, params: Sequence[float] | None, alpha: float = 0.01) -> Node:
    """The activation at the end of a fused operator."""
    values = list(params) if params is not None else []
    if name in ("Relu", "Tanh", "Sigmoid"):
        return ctx.emit(name.lower(), x)
    if name == "LeakyRelu":
        return ctx.emit("leaky_relu", x, slope=float(values[0] if values else alpha))
    if name == "Clip" and len(values) == 2:
        return ctx.emit("clamp", x, min=float(values[0]), max=float(values[1]))
    if name == "HardSigmoid" and len(values) == 2:
        return ctx.emit("clamp", ctx.add(ctx.mul(x, values[0]), values[1]), min=0.0, max=1.0)
    if name in ("", "Identity"):
        return x
    raise Unsupported(f"the activation {name}")


@converter("FusedConv", domain=DOMAIN)
def fused_conv(
    ctx: Context,
    x: Node,
    w: Node,
    bias: Node | None = None,
    z: Node | None = None,
    *,
    activation: str = "",
    activation_params: Sequence[float] | None = None,
    **attributes: Any,
) -> Node:
    result = conv(ctx, x, w, bias, **attributes)
    return activated(ctx, result if z is None else ctx.add(result, z), activation, activation_params)


@converter("FusedGemm", domain=DOMAIN)
def fused_gemm(
    ctx: Context,
    a: Node,
    b: Node,
    c: Node | None = None,
    *,
    activation: str = "",
    activation_alpha: float = 0.01,
    **attributes: Any,
) -> Node:
    return activated(ctx, gemm(ctx, a, b, c, **attributes), activation, None, activation_alpha)


@converter("FusedMatMul", "TransposeMatMul", domain=DOMAIN)
def fused_matmul(
    ctx: Context,
    a: Node,
    b: Node,
    *,
    alpha: float = 1.0,
    transA: int = 0,
    transB: int = 0,
    transBatchA: int = 0,
    transBatchB: int = 0,
) -> Node:
    def transposed(x: Node, batch: int, last: int) -> Node:
        order = list(range(x.type.rank))
        if batch and len(order) > 2:  # [M, batch..., K] -> [batch..., M, K]
            order = [*order[1:-1], order[0], order[-1]]
        if last and len(order) > 1:
            order[-2:] = order[:-3:-1]
        return ctx.permute(x, order)

    result = product(ctx, transposed(a, transBatchA, transA), transposed(b, transBatchB, transB))
    return result if alpha == 1 else ctx.mul(result, alpha)


@converter("Gelu", "BiasGelu", domain=DOMAIN)
def gelu(ctx: Context, x: Node, bias: Node | None = None) -> Node:
    return ctx.emit("gelu", x if bias is None else ctx.add(x, bias), approximate="none")


@converter("FastGelu", domain=DOMAIN)
def fast_gelu(ctx: Context, x: Node, bias: Node | None = None) -> Node:
    return ctx.emit("gelu", x if bias is None else ctx.add(x, bias), approximate="tanh")


@converter("QuickGelu", domain=DOMAIN)
def quick_gelu(ctx: Context, x: Node, *, alpha: float = 1.702) -> Node:
    return ctx.mul(x, ctx.emit("sigmoid", ctx.mul(x, alpha)))


STATISTICS = Absent("the mean and deviation of a fused normalisation")


@converter("SkipLayerNormalization", domain=DOMAIN)
def skip_layer_normalization(
    ctx: Context,
    x: Node,
    skip: Node,
    gamma: Node,
    beta: Node | None = None,
    bias: Node | None = None,
    *,
    epsilon: float = 1e-12,
) -> tuple[Any, ...]:
    total = ctx.add(x, skip)
    if bias is not None:
        total = ctx.add(total, bias)
    parameters = [gamma] if beta is None else [gamma, beta]
    return (
        ctx.emit("layer_norm", total, *parameters, dims=1, eps=float(epsilon)),
        STATISTICS,
        STATISTICS,
        total,
    )


@converter("SkipSimplifiedLayerNormalization", domain=DOMAIN)
def skip_rms_normalization(
    ctx: Context, x: Node, skip: Node, gamma: Node, bias: Node | None = None, *, epsilon: float = 1e-12
) -> tuple[Any, ...]:
    total = ctx.add(x, skip)
    if bias is not None:
        total = ctx.add(total, bias)
    return ctx.emit("rms_norm", total, gamma, dims=1, eps=float(epsilon)), STATISTICS, STATISTICS, total


@converter("SimplifiedLayerNormalization")
def simplified_layer_normalization(
    ctx: Context, x: Node, scale: Node, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> tuple[Any, ...]:
    """In the standard's domain, as ONNX Runtime writes it."""
    if axis_of(axis, x.type.rank) != x.type.rank - 1 or scale.dtype is not x.dtype:
        raise Unsupported(f"axis {axis} of {x.type!r} with a scale {scale.type!r}")
    return ctx.emit("rms_norm", x, scale, dims=1, eps=float(epsilon)), STATISTICS


@converter("EmbedLayerNormalization", domain=DOMAIN)
def embed_layer_normalization(
    ctx: Context,
    ids: Node,
    segments: Node | None,
    words: Node,
    positions: Node,
    segment_table: Node | None,
    gamma: Node,
    beta: Node,
    mask: Node | None = None,
    position_ids: Node | None = None,
    *,
    epsilon: float = 1e-12,
    mask_index_type: int = 1,
) -> tuple[Any, ...]:
    """(normalised sum of the embeddings, number of unmasked tokens, sum of the embeddings)."""
    batch, length = ids.shape
    slots = np.arange(length) if position_ids is None else position_ids
    total = ctx.add(ctx.take(words, ids, 0), ctx.take(positions, slots, 0))
    if segments is not None and segment_table is not None:
        total = ctx.add(total, ctx.take(segment_table, segments, 0))
    kept = ctx.full(0, DType.I32, (batch,))
    if mask is not None and mask_index_type == 1:
        kept = ctx.reduce("sum", ctx.cast(mask, DType.I32), (1,), False)
    return ctx.emit("layer_norm", total, gamma, beta, dims=1, eps=float(epsilon)), kept, total


@converter("Attention", domain=DOMAIN)
def attention(
    ctx: Context,
    x: Node,
    weights: Node,
    bias: Node | None = None,
    mask_index: Node | None = None,
    past: Node | None = None,
    attention_bias: Node | None = None,
    *,
    num_heads: int,
    unidirectional: int = 0,
    scale: float = 0.0,
    mask_filter_value: float = -10000.0,
    qkv_hidden_sizes: Sequence[int] | None = None,
) -> Node:
    """Compute queries, keys and values by one product with [inputs, 3 * hidden], then attention per head."""
    if past is not None or ctx.wants(1) or (qkv_hidden_sizes and len(set(qkv_hidden_sizes)) > 1):
        raise Unsupported("keys and values of earlier calls, or of another width")
    batch, length, _ = x.shape
    hidden = weights.shape[1] // 3
    joined = product(ctx, x, weights)
    joined = joined if bias is None else ctx.add(joined, bias)
    parts = ctx.permute(
        ctx.reshape(joined, (batch, length, 3, num_heads, hidden // num_heads)), (2, 0, 3, 1, 4)
    )
    operands = [ctx.index_axis(parts, 0, n) for n in range(3)]
    mask = attention_bias
    if mask_index is not None:
        hidden_keys = _hidden_keys(ctx, mask_index, batch, length)
        added = ctx.select(hidden_keys, ctx.full(mask_filter_value, x.dtype), 0)
        mask = added if mask is None else ctx.add(mask, added)
    if mask is not None:
        operands.append(
            ctx.broadcast_to(mask, (batch, num_heads if mask.shape[1] > 1 else 1, length, length))
        )
    factor = float(scale) or (hidden // num_heads) ** -0.5
    result = ctx.emit("attention", *operands, causal=bool(unidirectional), scale=factor)
    return ctx.reshape(ctx.permute(result, (0, 2, 1, 3)), (batch, length, hidden))


def _hidden_keys(ctx: Context, mask_index: Node, batch: int, length: int) -> Node:
    """The masked keys, [batch, 1, 1 or queries, keys], from the number of valid keys or from a mask of them."""
    if mask_index.shape == (batch,):
        counts = ctx.reshape(ctx.cast(mask_index, DType.I64), (batch, 1, 1, 1))
        return ctx.compare("ge", ctx.iota((batch, 1, 1, length), 3), counts)
    if mask_index.shape == (batch, length):
        return ctx.compare("eq", ctx.reshape(mask_index, (batch, 1, 1, length)), 0)
    if mask_index.shape == (batch, length, length):
        return ctx.compare("eq", ctx.reshape(mask_index, (batch, 1, length, length)), 0)
    raise Unsupported(f"a mask {mask_index.type!r}")
