"""Whole layers that PyTorch has one operator for: the inference fast paths of its attention modules.

`nn.TransformerEncoderLayer` and `nn.MultiheadAttention` in eval mode call these when gradients are off. They are
expanded here to their layers, in the order of the module's own code: a graph captured by Dynamo then has the tasks,
and the tuning results, of the module. With a batch that code puts the length first; here the batch stays first.

A mask marks what is *not* seen: every element that is not zero, also of a float mask, which these operators do not
add to the scores. A query that sees no key at all is NaN, as PyTorch's operators have it.
"""

from __future__ import annotations

import math

from tilewright.frontend.builder import Number, Unsupported
from tilewright.frontend.torch.aten_contraction import addmm
from tilewright.frontend.torch.context import Context
from tilewright.frontend.torch.registry import Result, converter
from tilewright.graph.ir import Node

_QUERIES_BY_KEYS, _PADDED_KEYS, _FULL = 0, 1, 2  # the values of `mask_type`


@converter("aten._transformer_encoder_layer_fwd.default")
def transformer_encoder_layer(
    ctx: Context,
    src: Node,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Node,
    qkv_bias: Node,
    proj_weight: Node,
    proj_bias: Node,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Node,
    norm_bias_1: Node,
    norm_weight_2: Node,
    norm_bias_2: Node,
    ffn_weight_1: Node,
    ffn_bias_1: Node,
    ffn_weight_2: Node,
    ffn_bias_2: Node,
    mask: Node | None = None,
    mask_type: int | None = None,
) -> Node:
    def norm(x: Node, weight: Node, bias: Node) -> Node:
        return ctx.emit("layer_norm", x, weight, bias, dims=1, eps=float(eps))

    def attend(x: Node) -> Node:
        qkv = ctx.emit("linear", x, qkv_weight, qkv_bias)
        query, key, value = _heads(ctx, qkv, num_heads)
        hidden = _hidden(ctx, mask, mask_type)
        return ctx.emit(
            "linear", _joined(ctx, _attention(ctx, query, key, value, hidden)), proj_weight, proj_bias
        )

    def feed_forward(x: Node) -> Node:
        inner = ctx.emit("linear", x, ffn_weight_1, ffn_bias_1)
        inner = ctx.emit("gelu", inner, approximate="none") if use_gelu else ctx.emit("relu", inner)
        return ctx.emit("linear", inner, ffn_weight_2, ffn_bias_2)

    if not src.type.size:
        return src
    if norm_first:
        x = ctx.add(src, attend(norm(src, norm_weight_1, norm_bias_1)))
        return ctx.add(x, feed_forward(norm(x, norm_weight_2, norm_bias_2)))
    x = norm(ctx.add(src, attend(src)), norm_weight_1, norm_bias_1)
    return norm(ctx.add(x, feed_forward(x)), norm_weight_2, norm_bias_2)


@converter("aten._native_multi_head_attention.default")
def native_multi_head_attention(
    ctx: Context,
    query: Node,
    key: Node,
    value: Node,
    embed_dim: int,
    num_head: int,
    qkv_weight: Node,
    qkv_bias: Node,
    proj_weight: Node,
    proj_bias: Node,
    mask: Node | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> Result:
    if not query.type.size:
        return query, ctx.full(0, query.dtype, (0,))
    if query is key is value:
        q, k, v = _heads(ctx, ctx.emit("linear", query, qkv_weight, qkv_bias), num_head)
    else:
        width = query.shape[-1]
        q, k, v = (
            _heads(
                ctx,
                ctx.emit(
                    "linear",
                    x,
                    ctx.slice_axis(qkv_weight, 0, part * width, (part + 1) * width),
                    ctx.slice_axis(qkv_bias, 0, part * width, (part + 1) * width),
                ),
                num_head,
                parts=1,
            )[0]
            for part, x in enumerate((query, key, value))
        )
    hidden = _hidden(ctx, mask, mask_type)
    if not need_weights:
        mixed, weights = _attention(ctx, q, k, v, hidden), ctx.full(0, query.dtype, (0,))
    else:
        scores = ctx.emit("matmul", ctx.mul(q, 1 / math.sqrt(q.shape[-1])), ctx.permute(k, (0, 1, 3, 2)))
        if hidden is not None:
            scores = ctx.select(hidden, -math.inf, scores, scores.dtype)
        weights = ctx.emit("softmax", scores, axis=3)
        mixed = ctx.emit("matmul", weights, v)
        if average_attn_weights:
            weights = ctx.emit("mean", weights, axes=(1,), keepdims=False)
    return ctx.emit("linear", _joined(ctx, mixed), proj_weight, proj_bias), weights


@converter("aten._transform_bias_rescale_qkv.default")
def transform_bias_rescale_qkv(ctx: Context, qkv: Node, qkv_bias: Node, num_heads: int) -> Result:
    query, key, value = _heads(ctx, ctx.add(qkv, qkv_bias), num_heads)
    return ctx.mul(query, 1 / math.sqrt(query.shape[-1])), key, value


@converter("aten._masked_softmax.default")
def masked_softmax(
    ctx: Context, x: Node, mask: Node, dim: int | None = None, mask_type: int | None = None
) -> Node:
    axis = x.type.rank - 1 if dim is None else dim % x.type.rank
    hidden = _hidden(ctx, mask, mask_type) if x.type.rank == 4 and mask_type != _FULL else ctx.truth(mask)
    assert hidden is not None
    return ctx.emit("softmax", ctx.select(hidden, -math.inf, x, x.dtype), axis=axis)


@converter("aten._addmm_activation.default")
def addmm_activation(
    ctx: Context, x: Node, a: Node, b: Node, *, beta: Number = 1, alpha: Number = 1, use_gelu: bool = False
) -> Node:
    result = addmm(ctx, x, a, b, beta=beta, alpha=alpha)
    return ctx.emit("gelu", result, approximate="none") if use_gelu else ctx.emit("relu", result)


def _heads(ctx: Context, projected: Node, heads: int, parts: int = 3) -> list[Node]:
    """The parts of [batch, length, parts x width], each as [batch, heads, length, width / heads]."""
    batch, length, total = projected.shape
    if batch == 1:
        by_position = ctx.reshape(projected, (length, 1, parts, total // parts))
        return [
            ctx.permute(
                ctx.reshape(
                    ctx.index_axis(by_position, 2, part), (1, length, heads, total // parts // heads)
                ),
                (0, 2, 1, 3),
            )
            for part in range(parts)
        ]
    split = ctx.reshape(projected, (batch, length, parts, heads, total // parts // heads))
    split = ctx.permute(split, (2, 0, 3, 1, 4))
    return [ctx.index_axis(split, 0, part) for part in range(parts)]


def _joined(ctx: Context, x: Node) -> Node:
    """[batch, heads, length, width / heads] as [batch, length, width]."""
    batch, heads, length, width = x.shape
    if batch == 1:
        return ctx.reshape(ctx.permute(x, (2, 0, 1, 3)), (1, length, heads * width))
    return ctx.reshape(ctx.permute(x, (0, 2, 1, 3)), (batch, length, heads * width))


def _hidden(ctx: Context, mask: Node | None, mask_type: int | None) -> Node | None:
    """The mask as one that broadcasts to [batch, heads, queries, keys], True at what is not seen."""
    if mask is None:
        return None
    if mask_type == _PADDED_KEYS:
        return ctx.reshape(ctx.truth(mask), (mask.shape[0], 1, 1, mask.shape[1]))
    if mask_type in (_QUERIES_BY_KEYS, _FULL):
        return ctx.truth(_narrow(ctx, mask))
    raise Unsupported(f"a mask of type {mask_type}")


def _narrow(ctx: Context, x: Node) -> Node:
    """`x` before it was broadcast, with the same rank: PyTorch's modules broadcast a mask to every head."""
    if x.op == "broadcast_to":
        source = x.inputs[0]
        return ctx.reshape(source, (1,) * (x.type.rank - source.type.rank) + source.shape)
    if x.op == "add" and all(operand.type.rank == x.type.rank for operand in x.inputs):
        return ctx.emit("add", *(_narrow(ctx, operand) for operand in x.inputs))
    return x


def _attention(ctx: Context, query: Node, key: Node, value: Node, hidden: Node | None) -> Node:
    operands = [query, key, value]
    if hidden is not None:
        # Added to the scores. A row of NaN, where nothing is seen, becomes one of the result.
        blind = ctx.emit("all", hidden, axes=(hidden.type.rank - 1,), keepdims=True)
        added = ctx.select(hidden, -math.inf, 0, query.dtype)
        operands.append(ctx.select(blind, math.nan, added, query.dtype))
    return ctx.emit("attention", *operands, causal=False, scale=1 / math.sqrt(query.shape[-1]))
