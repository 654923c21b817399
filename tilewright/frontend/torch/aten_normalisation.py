"""Normalisation, softmax and attention: composites that stay whole until lowering."""

from __future__ import annotations

import math

import torch

from tilewright.dtypes import DType
from tilewright.frontend.builder import Absent, Ints, Unsupported
from tilewright.frontend.torch.aten_movement import repeated_elements
from tilewright.frontend.torch.context import Context, axis_of
from tilewright.frontend.torch.registry import Inexpressible, Result, converter
from tilewright.graph.ir import Node

_NO_STATISTICS = Absent("the statistics that training saves are not computed")


def _in_dtype_of_weights(ctx: Context, x: Node, *weights: Node | None) -> tuple[Node, list[Node | None]]:
    """The operands in one type: 16-bit activations with f32 weights are computed in f32."""
    given = [weight for weight in weights if weight is not None]
    dtype = DType.F32 if any(weight.dtype is not x.dtype for weight in given) else x.dtype
    return ctx.cast(x, dtype), [None if weight is None else ctx.cast(weight, dtype) for weight in weights]


# -- batch norm -------------------------------------------------------------------------------------------------


def _batch_norm(
    ctx: Context, x: Node, weight: Node | None, bias: Node | None, mean: Node, variance: Node, eps: float
) -> Node:
    if x.type.rank < 2:
        raise Unsupported("batch norm of a tensor without an axis of channels")
    result = x.dtype
    x, (weight, bias, mean_, variance_) = _in_dtype_of_weights(ctx, x, weight, bias, mean, variance)
    assert mean_ is not None and variance_ is not None
    channels = (x.shape[1],)
    weight = ctx.full(1, x.dtype, channels) if weight is None else weight
    bias = ctx.full(0, x.dtype, channels) if bias is None else bias
    return ctx.cast(ctx.emit("batch_norm", x, weight, bias, mean_, variance_, eps=float(eps)), result)


@converter("aten.batch_norm.default")
def batch_norm(
    ctx: Context,
    x: Node,
    weight: Node | None,
    bias: Node | None,
    running_mean: Node | None,
    running_var: Node | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = False,
) -> Node:
    if running_mean is not None and running_var is not None:
        if training:
            raise Unsupported("batch norm in training mode updates its running statistics")
        return _batch_norm(ctx, x, weight, bias, running_mean, running_var, eps)
    # A module without running statistics normalises with those of the batch, in eval mode too.
    wide = ctx.widen(x)
    axes = tuple(axis for axis in range(x.type.rank) if axis != 1)
    mean = ctx.emit("mean", wide, axes=axes, keepdims=False)
    variance = ctx.emit("var", wide, axes=axes, correction=0, keepdims=False)
    return ctx.cast(_batch_norm(ctx, wide, weight, bias, mean, variance, eps), x.dtype)


@converter("aten._native_batch_norm_legit_no_training.default")
def native_batch_norm(
    ctx: Context,
    x: Node,
    weight: Node | None,
    bias: Node | None,
    running_mean: Node,
    running_var: Node,
    momentum: float,
    eps: float,
) -> Result:
    result = _batch_norm(ctx, x, weight, bias, running_mean, running_var, eps)
    return result, _NO_STATISTICS, _NO_STATISTICS


@converter("aten._native_batch_norm_legit.no_stats")
def native_batch_norm_of_batch(
    ctx: Context,
    x: Node,
    weight: Node | None,
    bias: Node | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Result:
    return (
        batch_norm(ctx, x, weight, bias, None, None, training, momentum, eps),
        _NO_STATISTICS,
        _NO_STATISTICS,
    )


# -- layer, group, instance, rms norm ---------------------------------------------------------------------------


def _affine(ctx: Context, x: Node, weight: Node | None, bias: Node | None, shape: Ints) -> list[Node]:
    """The operands after x: none, a weight, or a weight and a bias."""
    if bias is not None and weight is None:
        weight = ctx.full(1, x.dtype, shape)
    return [operand for operand in (weight, bias) if operand is not None]


@converter("aten.layer_norm.default")
def layer_norm(
    ctx: Context,
    x: Node,
    normalized_shape: Ints,
    weight: Node | None = None,
    bias: Node | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Node:
    result = x.dtype
    x, (weight, bias) = _in_dtype_of_weights(ctx, x, weight, bias)
    affine = _affine(ctx, x, weight, bias, normalized_shape)
    return ctx.cast(ctx.emit("layer_norm", x, *affine, dims=len(normalized_shape), eps=float(eps)), result)


@converter("aten.native_layer_norm.default")
def native_layer_norm(
    ctx: Context, x: Node, normalized_shape: Ints, weight: Node | None, bias: Node | None, eps: float
) -> Result:
    return layer_norm(ctx, x, normalized_shape, weight, bias, eps), _NO_STATISTICS, _NO_STATISTICS


def _group_norm(
    ctx: Context, x: Node, groups: int, weight: Node | None, bias: Node | None, eps: float
) -> Node:
    result = x.dtype
    x, (weight, bias) = _in_dtype_of_weights(ctx, x, weight, bias)
    channels = (x.shape[1],)
    if weight is not None and bias is None:
        bias = ctx.full(0, x.dtype, channels)
    affine = _affine(ctx, x, weight, bias, channels)
    return ctx.cast(ctx.emit("group_norm", x, *affine, groups=groups, eps=float(eps)), result)


@converter("aten.group_norm.default")
def group_norm(
    ctx: Context,
    x: Node,
    num_groups: int,
    weight: Node | None = None,
    bias: Node | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Node:
    return _group_norm(ctx, x, num_groups, weight, bias, eps)


@converter("aten.native_group_norm.default")
def native_group_norm(
    ctx: Context,
    x: Node,
    weight: Node | None,
    bias: Node | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    eps: float,
) -> Result:
    groups = ctx.widen(ctx.reshape(x, (N, group, x.type.size // max(N * group, 1))))
    mean = ctx.emit("mean", groups, axes=(2,), keepdims=False)
    variance = ctx.emit("var", groups, axes=(2,), correction=0, keepdims=False)
    deviation = ctx.emit("rsqrt", ctx.add(variance, eps))
    result = _group_norm(ctx, x, group, weight, bias, eps)
    return result, ctx.cast(mean, x.dtype), ctx.cast(deviation, x.dtype)


@converter("aten.instance_norm.default")
def instance_norm(
    ctx: Context,
    x: Node,
    weight: Node | None,
    bias: Node | None,
    running_mean: Node | None,
    running_var: Node | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = False,
) -> Node:
    if use_input_stats:
        if running_mean is not None:
            raise Unsupported("instance norm in training mode updates its running statistics")
        return _group_norm(ctx, x, x.shape[1], weight, bias, eps)
    if running_mean is None or running_var is None:
        raise Unsupported("instance norm without statistics of its own or of the input")
    return _batch_norm(ctx, x, weight, bias, running_mean, running_var, eps)


@converter("aten.rms_norm.default", "aten._fused_rms_norm.default")
def rms_norm(
    ctx: Context, x: Node, normalized_shape: Ints, weight: Node | None = None, eps: float | None = None
) -> Result:
    if eps is None:
        eps = torch.finfo({DType.F64: torch.float64}.get(x.dtype, torch.float32)).eps
    wide, (weight,) = _in_dtype_of_weights(ctx, x, weight)
    affine = [] if weight is None else [weight]
    result = ctx.emit("rms_norm", wide, *affine, dims=len(normalized_shape), eps=float(eps))
    result = ctx.cast(result, ctx.dtype)
    return (result, _NO_STATISTICS) if isinstance(ctx.value, (tuple, list)) else result


# -- softmax ----------------------------------------------------------------------------------------------------


def _softmax(ctx: Context, op: str, x: Node, dim: int) -> Node:
    x = ctx.cast(x, ctx.dtype)
    if x.type.rank == 0:
        return ctx.reshape(ctx.emit(op, ctx.reshape(x, (1,)), axis=0), ())
    return ctx.emit(op, x, axis=axis_of(dim, x.type.rank))


@converter("aten.softmax.int", "aten.special_softmax.default")
def softmax(ctx: Context, x: Node, dim: int, dtype: torch.dtype | None = None) -> Node:
    return _softmax(ctx, "softmax", x, dim)


@converter("aten.log_softmax.int", "aten.special_log_softmax.default")
def log_softmax(ctx: Context, x: Node, dim: int, dtype: torch.dtype | None = None) -> Node:
    return _softmax(ctx, "log_softmax", x, dim)


@converter("aten._softmax.default")
def inner_softmax(ctx: Context, x: Node, dim: int, half_to_float: bool) -> Node:
    return _softmax(ctx, "softmax", x, dim)


@converter("aten._log_softmax.default")
def inner_log_softmax(ctx: Context, x: Node, dim: int, half_to_float: bool) -> Node:
    return _softmax(ctx, "log_softmax", x, dim)


@converter("aten._safe_softmax.default")
def safe_softmax(ctx: Context, x: Node, dim: int, dtype: torch.dtype | None = None) -> Node:
    """Zero, not NaN, where a whole row is -inf."""
    x = ctx.cast(x, ctx.dtype)
    axis = axis_of(dim, x.type.rank)
    masked = ctx.emit("all", ctx.compare("eq", x, -math.inf), axes=(axis,), keepdims=True)
    return ctx.select(masked, 0, ctx.emit("softmax", x, axis=axis), x.dtype)


# -- attention --------------------------------------------------------------------------------------------------


@converter("aten.scaled_dot_product_attention.default")
def attention(
    ctx: Context,
    query: Node,
    key: Node,
    value: Node,
    attn_mask: Node | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Node:
    if dropout_p > 0:
        raise Inexpressible("random numbers: attention with dropout")
    if enable_gqa:
        heads = query.shape[-3]
        key = repeated_elements(ctx, key, heads // key.shape[-3], key.type.rank - 3)
        value = repeated_elements(ctx, value, heads // value.shape[-3], value.type.rank - 3)
    operands = [query, key, value]
    if attn_mask is not None:
        operands.append(attn_mask if attn_mask.dtype is DType.BOOL else ctx.cast(attn_mask, query.dtype))
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    return ctx.emit("attention", *operands, causal=bool(is_causal), scale=factor)
