"""Reductions, running sums and products, softmax and its kin."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from tilewright.dtypes import DType
from tilewright.frontend.builder import Ints, Unsupported
from tilewright.frontend.onnx.context import Context, axes_of, axis_of, highest, lowest, widened
from tilewright.frontend.onnx.registry import converter
from tilewright.graph.ir import Node

Formula = Callable[[Context, Node, tuple[int, ...], bool], Node]


def _reduction(name: str, formula: Formula, *, wide: bool = False) -> None:
    """`formula` of (x, axes, keepdims). `wide`: it is computed in f32 for 16-bit floats."""

    @converter(name)
    def convert(
        ctx: Context,
        x: Node,
        axes_input: Node | None = None,
        *,
        axes: Ints | None = None,
        keepdims: int = 1,
        noop_with_empty_axes: int = 0,
    ) -> Node:
        named = ctx.ints_or(axes_input, axes)
        if not named and noop_with_empty_axes:
            chosen: tuple[int, ...] = ()
        else:
            chosen = axes_of(named, x.type.rank) if named else tuple(range(x.type.rank))
        value = ctx.widen(x) if wide else x
        return ctx.cast(formula(ctx, value, chosen, bool(keepdims)), x.dtype)


def sum_of(ctx: Context, x: Node, axes: tuple[int, ...], keepdims: bool) -> Node:
    return ctx.reduce("sum", x, axes, keepdims)


def mean_of(ctx: Context, x: Node, axes: tuple[int, ...], keepdims: bool) -> Node:
    if x.dtype.is_float:
        return ctx.reduce("mean", x, axes, keepdims)
    count = math.prod(x.shape[axis] for axis in axes)
    total = ctx.cast(ctx.reduce("sum", ctx.cast(x, DType.I64), axes, keepdims), DType.F64)
    return ctx.emit("trunc", ctx.div(total, count))


def extreme_of(op: str) -> Formula:
    def formula(ctx: Context, x: Node, axes: tuple[int, ...], keepdims: bool) -> Node:
        if x.dtype is DType.BOOL:
            return ctx.reduce("any" if op == "amax" else "all", x, axes, keepdims)
        if any(x.shape[axis] == 0 for axis in axes):
            shape = [1 if d in axes else n for d, n in enumerate(x.shape) if keepdims or d not in axes]
            return ctx.full(lowest(x.dtype) if op == "amax" else highest(x.dtype), x.dtype, shape)
        return ctx.reduce(op, x, axes, keepdims)

    return formula


def log_sum_exp(ctx: Context, x: Node, axes: tuple[int, ...], keepdims: bool) -> Node:
    """log(sum(exp(x))). The maximum is subtracted, if it is finite, so that nothing overflows."""
    x = x if x.dtype.is_float else ctx.cast(x, DType.F64)
    if any(x.shape[axis] == 0 for axis in axes):
        return ctx.emit("log", ctx.reduce("sum", ctx.emit("exp", x), axes, keepdims))
    greatest = ctx.reduce("amax", x, axes, True)
    greatest = ctx.select(ctx.emit("isfinite", greatest), greatest, 0)
    total = ctx.reduce("sum", ctx.emit("exp", ctx.sub(x, greatest)), axes, True)
    result = ctx.add(ctx.emit("log", total), greatest)
    return result if keepdims else ctx.reshape(result, [n for d, n in enumerate(x.shape) if d not in axes])


def log_sum(ctx: Context, x: Node, axes: tuple[int, ...], keepdims: bool) -> Node:
    x = x if x.dtype.is_float else ctx.cast(x, DType.F64)
    return ctx.emit("log", sum_of(ctx, x, axes, keepdims))


def l2(ctx: Context, x: Node, axes: tuple[int, ...], keepdims: bool) -> Node:
    x = x if x.dtype.is_float else ctx.cast(x, DType.F64)
    return ctx.emit("sqrt", sum_of(ctx, ctx.mul(x, x), axes, keepdims))


_reduction("ReduceSum", sum_of)
_reduction("ReduceMean", mean_of)
_reduction("ReduceProd", lambda ctx, x, axes, keepdims: ctx.reduce("prod", x, axes, keepdims))
_reduction("ReduceMax", extreme_of("amax"))
_reduction("ReduceMin", extreme_of("amin"))
_reduction("ReduceL1", lambda ctx, x, axes, keep: sum_of(ctx, ctx.emit("abs", x), axes, keep), wide=True)
_reduction("ReduceL2", l2, wide=True)
_reduction("ReduceLogSum", log_sum, wide=True)
_reduction("ReduceLogSumExp", log_sum_exp, wide=True)
_reduction("ReduceSumSquare", lambda ctx, x, axes, keep: sum_of(ctx, ctx.mul(x, x), axes, keep), wide=True)


def _arg(name: str, op: str) -> None:
    @converter(name)
    def convert(
        ctx: Context, x: Node, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0
    ) -> Node:
        axis = axis_of(axis, x.type.rank)
        if not select_last_index:
            return ctx.emit(op, x, axis=axis, keepdims=bool(keepdims))
        position = ctx.emit(op, ctx.emit("flip", x, axes=(axis,)), axis=axis, keepdims=bool(keepdims))
        return ctx.sub(x.shape[axis] - 1, position)


_arg("ArgMax", "argmax")
_arg("ArgMin", "argmin")


# -- running sums and products ----------------------------------------------------------------------------------------


@converter("CumSum")
def cumsum(ctx: Context, x: Node, axis: Node, *, exclusive: int = 0, reverse: int = 0) -> Node:
    return _running(ctx, x, axis, exclusive, reverse, lambda part, d: ctx.emit("cumsum", part, axis=d), 0)


@converter("CumProd")
def cumprod(ctx: Context, x: Node, axis: Node, *, exclusive: int = 0, reverse: int = 0) -> Node:
    def running(part: Node, d: int) -> Node:
        """Element i is the product of those up to i: quadratic in the extent."""
        count = part.shape[d]
        ctx.check_table(part.type.size * count, "a running product")
        last = ctx.unsqueeze(ctx.move_axis(part, d, part.type.rank - 1), part.type.rank - 1)
        ctx.reserve(count * count, "a running product's table of positions")
        upto = np.tri(count, dtype=np.bool_)
        product = ctx.reduce("prod", ctx.select(ctx.constant(upto), last, 1), (part.type.rank,), False)
        return ctx.move_axis(product, part.type.rank - 1, d)

    return _running(ctx, x, axis, exclusive, reverse, running, 1)


def _running(
    ctx: Context,
    x: Node,
    axis: Node,
    exclusive: int,
    reverse: int,
    running: Callable[[Node, int], Node],
    neutral: int,
) -> Node:
    d = axis_of(ctx.static_int(axis), x.type.rank)
    if not x.shape[d]:
        return x
    if reverse:
        x = ctx.emit("flip", x, axes=(d,))
    if exclusive:
        low, high = [0] * x.type.rank, [0] * x.type.rank
        low[d] = 1
        x = ctx.pad(ctx.slice_axis(x, d, 0, x.shape[d] - 1), low, high, neutral)
    result = running(x, d)
    return ctx.emit("flip", result, axes=(d,)) if reverse else result


# -- softmax ----------------------------------------------------------------------------------------------------------


def _rowwise(name: str, formula: Callable[[Context, Node, int], Node]) -> None:
    """Along one axis; before opset 13, along all axes from `axis` on, flattened."""

    @converter(name, since=13)
    def convert(ctx: Context, x: Node, *, axis: int = -1) -> Node:
        return formula(ctx, x, axis_of(axis, x.type.rank))

    @converter(name)
    def flattened(ctx: Context, x: Node, *, axis: int = 1) -> Node:
        axis = axis_of(axis, x.type.rank) if axis != x.type.rank else axis
        rows = ctx.reshape(x, (math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))
        return ctx.reshape(formula(ctx, rows, 1), x.shape)


def hardmax(ctx: Context, x: Node, axis: int) -> Node:
    best = ctx.emit("argmax", x, axis=axis, keepdims=True)
    return ctx.cast(ctx.compare("eq", ctx.iota(x.shape, axis), best), x.dtype)


_rowwise("Softmax", lambda ctx, x, axis: ctx.emit("softmax", x, axis=axis))
_rowwise("LogSoftmax", lambda ctx, x, axis: ctx.emit("log_softmax", x, axis=axis))
_rowwise("Hardmax", hardmax)


@converter("LpNormalization")
@widened
def lp_normalization(ctx: Context, x: Node, *, axis: int = -1, p: int = 2) -> Node:
    """A row of zeros stays zero."""
    axes = (axis_of(axis, x.type.rank),)
    if p not in (1, 2):
        raise Unsupported(f"the norm p = {p}")
    norm = l2(ctx, x, axes, True) if p == 2 else sum_of(ctx, ctx.emit("abs", x), axes, True)
    return ctx.select(ctx.compare("eq", norm, 0), 0, ctx.div(x, norm))
