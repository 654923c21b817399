"""Normalisations. An operator that the standard defines as a function is expanded, unless Tilewright has it too."""

from __future__ import annotations

import math

from tilewright.frontend.builder import Unsupported
from tilewright.frontend.onnx.context import Context, axis_of, widened
from tilewright.frontend.onnx.registry import FallBack, converter
from tilewright.graph.ir import Node
from tilewright.graph.ops.common import broadcast_shapes


@converter("BatchNormalization")
def batch_normalization(
    ctx: Context,
    x: Node,
    scale: Node,
    bias: Node,
    mean: Node,
    var: Node,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    spatial: int = 1,
    is_test: int = 0,
    training_mode: int = 0,
    consumed_inputs: object = None,
) -> Node | tuple[Node, ...]:
    if not spatial:
        raise Unsupported("statistics per element (spatial = 0)")
    if training_mode:
        return _training(ctx, x, scale, bias, mean, var, epsilon, momentum)
    if ctx.opset < 14 and any(ctx.wants(output) for output in range(1, 5)):
        raise Unsupported("training mode")
    x1 = x if x.type.rank > 1 else ctx.unsqueeze(x, 1)
    result = ctx.emit(
        "batch_norm",
        ctx.widen(x1),
        *(ctx.cast(p, x.dtype.compute) for p in (scale, bias, mean, var)),
        eps=float(epsilon),
    )
    return ctx.cast(ctx.reshape(result, x.shape), x.dtype)


def _training(
    ctx: Context, x: Node, scale: Node, bias: Node, mean: Node, var: Node, epsilon: float, momentum: float
) -> tuple[Node, ...]:
    axes = (0, *range(2, x.type.rank))
    wide = ctx.widen(x)
    now = ctx.reduce("mean", wide, axes, False)
    spread = ctx.emit("var", wide, axes=axes, correction=0, keepdims=False)
    parameters = [ctx.cast(p, wide.dtype) for p in (scale, bias)]
    result = ctx.emit("batch_norm", wide, *parameters, now, spread, eps=float(epsilon))

    def running(old: Node, new: Node) -> Node:
        kept = ctx.mul(ctx.cast(old, wide.dtype), momentum)
        return ctx.cast(ctx.add(kept, ctx.mul(new, 1 - momentum)), old.dtype)

    return ctx.cast(result, x.dtype), running(mean, now), running(var, spread)


@converter("InstanceNormalization")
def instance_normalization(
    ctx: Context, x: Node, scale: Node, bias: Node, *, epsilon: float = 1e-5, consumed_inputs: object = None
) -> Node:
    return ctx.emit("group_norm", x, scale, bias, groups=x.shape[1], eps=float(epsilon))


@converter("GroupNormalization", since=21)
def group_normalization(
    ctx: Context,
    x: Node,
    scale: Node,
    bias: Node,
    *,
    epsilon: float = 1e-5,
    num_groups: int,
    stash_type: int = 1,
) -> Node:
    return ctx.emit("group_norm", x, scale, bias, groups=int(num_groups), eps=float(epsilon))


@converter("LayerNormalization")
def layer_normalization(
    ctx: Context,
    x: Node,
    scale: Node,
    bias: Node | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> Node:
    axis = axis_of(axis, x.type.rank)
    if ctx.wants(1) or ctx.wants(2):
        raise FallBack
    shape = x.shape[axis:]
    parameters = [ctx.broadcast_to(p, shape) for p in (scale, bias) if p is not None]
    return ctx.emit("layer_norm", x, *parameters, dims=x.type.rank - axis, eps=float(epsilon))


@converter("RMSNormalization")
def rms_normalization(
    ctx: Context, x: Node, scale: Node, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Node:
    axis = axis_of(axis, x.type.rank)
    if broadcast_shapes(scale.shape, x.shape) != x.shape:
        raise Unsupported(f"a scale {scale.type!r} for {x.type!r}")
    if scale.dtype is not x.dtype or stash_type != 1:
        raise FallBack
    shape = x.shape[axis:]
    if len(scale.shape) > len(shape):
        raise FallBack
    return ctx.emit(
        "rms_norm", x, ctx.broadcast_to(scale, shape), dims=x.type.rank - axis, eps=float(epsilon)
    )


@converter("LRN")
@widened
def lrn(
    ctx: Context, x: Node, *, alpha: float = 0.0001, beta: float = 0.75, bias: float = 1.0, size: int
) -> Node:
    """Divided by a power of the sum of squares over a few neighbouring channels."""
    squares = ctx.mul(x, x)
    channels = x.shape[1]
    flat = ctx.reshape(squares, (x.shape[0], 1, channels, math.prod(x.shape[2:])))
    below, above = (size - 1) // 2, size // 2
    padded = ctx.pad(flat, (0, 0, below, 0), (0, 0, above, 0), 0)
    total = ctx.emit(
        "avg_pool",
        padded,
        kernel=(size, 1),
        stride=(1, 1),
        padding=(0, 0),
        ceil_mode=False,
        count_include_pad=True,
        divisor=1,
        layout="channels_first",
    )
    base = ctx.add(ctx.mul(ctx.reshape(total, x.shape), alpha / size), bias)
    return ctx.div(x, ctx.arithmetic("pow", base, beta))
