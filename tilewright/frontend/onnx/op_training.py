"""Optimiser steps of the training preview, each a formula applied to every tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewright.dtypes import DType
from tilewright.frontend.builder import Operand, Unsupported
from tilewright.frontend.onnx.context import Context
from tilewright.frontend.onnx.registry import converter
from tilewright.graph.ir import Node

DOMAIN = "ai.onnx.preview.training"


def _each(tensors: Sequence[Node], kinds: int, update: Callable[..., tuple[Node, ...]]) -> tuple[Node, ...]:
    """`update` of the tensors of one kind each, for every group; results grouped by kind."""
    if len(tensors) % kinds:
        raise Unsupported(f"{len(tensors)} tensors in groups of {kinds}")
    count = len(tensors) // kinds
    results = [update(*(tensors[kind * count + n] for kind in range(kinds))) for n in range(count)]
    return tuple(part for kind in zip(*results, strict=True) for part in kind)


def _regularised(ctx: Context, x: Node, gradient: Node, coefficient: float) -> Node:
    return ctx.add(ctx.mul(x, coefficient), gradient) if coefficient else gradient


@converter("Adagrad", domain=DOMAIN)
def adagrad(
    ctx: Context,
    rate: Node,
    time: Node,
    *tensors: Node,
    decay_factor: float = 0.0,
    epsilon: float = 0.0,
    norm_coefficient: float = 0.0,
) -> tuple[Node, ...]:
    step = ctx.div(rate, ctx.add(ctx.mul(ctx.cast(time, rate.dtype), decay_factor), 1))

    def update(x: Node, gradient: Node, squares: Node) -> tuple[Node, Node]:
        g = _regularised(ctx, x, gradient, norm_coefficient)
        total = ctx.add(squares, ctx.mul(g, g))
        scaled = ctx.div(ctx.mul(step, g), ctx.add(ctx.emit("sqrt", total), epsilon))
        return ctx.sub(x, scaled), total

    return _each(tensors, 3, update)


@converter("Adam", domain=DOMAIN)
def adam(
    ctx: Context,
    rate: Node,
    time: Node,
    *tensors: Node,
    alpha: float = 0.9,
    beta: float = 0.999,
    epsilon: float = 0.0,
    norm_coefficient: float = 0.0,
    norm_coefficient_post: float = 0.0,
) -> tuple[Node, ...]:
    t = ctx.cast(time, DType.F64)
    corrected = ctx.div(
        ctx.emit("sqrt", ctx.sub(1, ctx.arithmetic("pow", ctx.full(beta, DType.F64), t))),
        ctx.sub(1, ctx.arithmetic("pow", ctx.full(alpha, DType.F64), t)),
    )
    factor = ctx.select(ctx.compare("gt", t, 0), corrected, 1)
    step = ctx.mul(rate, ctx.cast(factor, rate.dtype))

    def update(x: Node, gradient: Node, momentum: Node, squares: Node) -> tuple[Node, Node, Node]:
        g = _regularised(ctx, x, gradient, norm_coefficient)
        v = _mixed(ctx, momentum, g, alpha)
        h = _mixed(ctx, squares, ctx.mul(g, g), beta)
        moved = ctx.sub(x, ctx.mul(step, ctx.div(v, ctx.add(ctx.emit("sqrt", h), epsilon))))
        return ctx.mul(moved, 1 - norm_coefficient_post), v, h

    return _each(tensors, 4, update)


def _mixed(ctx: Context, old: Node, new: Node, share: float) -> Node:
    return ctx.add(ctx.mul(old, share), ctx.mul(new, 1 - share))


@converter("Momentum", domain=DOMAIN)
def momentum(
    ctx: Context,
    rate: Node,
    time: Node,
    *tensors: Node,
    alpha: float,
    beta: float,
    mode: str,
    norm_coefficient: float,
) -> tuple[Node, ...]:
    first = ctx.compare("gt", ctx.cast(time, DType.I64), 0)
    weight: Operand = ctx.select(first, ctx.full(beta, rate.dtype), 1.0)

    def update(x: Node, gradient: Node, velocity: Node) -> tuple[Node, Node]:
        g = _regularised(ctx, x, gradient, norm_coefficient)
        v = ctx.add(ctx.mul(velocity, alpha), ctx.mul(g, weight))
        move = v if mode == "standard" else ctx.add(g, ctx.mul(v, alpha))
        return ctx.sub(x, ctx.mul(rate, move)), v

    return _each(tensors, 3, update)
