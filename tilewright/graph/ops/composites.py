"""Composite operators, kept whole until lowering so that rewrites and templates recognise them.

- `softmax(axis)`, `log_softmax(axis)`. A row with only -inf gives NaN, as does one with +inf or NaN.
- `layer_norm(dims, eps)` of (x), (x, w) or (x, w, b): over the last `dims` axes, whose shape w and b have.
- `rms_norm(dims, eps)` of (x) or (x, w): the same without the mean.
- `group_norm(groups, eps)` of (x) or (x, w [C], b [C]): x is N C spatial; over the channels of a group and its space.
- `batch_norm(eps)` of (x, w, b, mean, var), each [C]: the channel axis is 1. Decomposed before lowering.
- `attention(causal, scale)` of (q [..., T, D], k [..., S, D], v [..., S, E]) and maybe a mask that broadcasts to
  [..., T, S]: softmax(scale q k' + mask) v. A bool mask is True where there is attention, a float one is added.
  Causal: query t sees keys 0 to t. Leading axes broadcast. A query without visible keys (every score is -inf) gives
  0, as in PyTorch. Decomposed, unless one kernel computes all of it; its lowering defines that kernel's meaning.

All operands are floats of one type. The lowering, in f32 or f64, has reduction stages with one element per row, and a
last stage that is elementwise given these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tilewright import te
from tilewright.dtypes import DType
from tilewright.graph.ir import Attrs, TensorType
from tilewright.graph.op import Application, Fusion, Op, register
from tilewright.graph.ops.common import (
    FLOAT,
    broadcast_indices,
    broadcast_shapes,
    divided,
    expect,
    expect_axis,
    expect_fits,
    expect_kind,
    expect_operands,
    expect_same_dtype,
    is_int,
    label,
    scaled,
)
from tilewright.graph.ops.reductions import reduce_stage, squared_deviations


def expect_floats(inputs: Sequence[TensorType]) -> None:
    expect_kind(expect_same_dtype(inputs), FLOAT)


def expect_eps(attrs: Attrs) -> None:
    expect_fits("eps", attrs["eps"], DType.F64)


def expect_parameters(parameters: Sequence[TensorType], shape: tuple[int, ...]) -> None:
    for parameter in parameters:
        expect(parameter.shape == shape, f"parameters must have shape {list(shape)}, got {parameter!r}")


# -- softmax, log_softmax -----------------------------------------------------------------------------------------


def infer_softmax(inputs: Sequence[TensorType], attrs: Attrs) -> TensorType:
    expect_operands(inputs, 1)
    (x,) = inputs
    expect_floats(inputs)
    expect_axis(attrs["axis"], x.rank)
    return x


def softmax_parts(x: np.ndarray, axis: int) -> tuple[Any, Any]:
    """x minus the row's maximum, and the row's sum of exponentials."""
    below = x - np.max(x, axis=axis, keepdims=True, initial=-np.inf)
    return below, np.sum(np.exp(below), axis=axis, keepdims=True)


def softmax(attrs: Attrs, x: np.ndarray) -> np.ndarray:
    below, total = softmax_parts(x, attrs["axis"])
    return np.asarray(np.exp(below) / total)


def log_softmax(attrs: Attrs, x: np.ndarray) -> np.ndarray:
    below, total = softmax_parts(x, attrs["axis"])
    return np.asarray(below - np.log(total))


def lower_softmax(
    name: str, last: Callable[[te.Expr, te.Expr], te.Expr]
) -> Callable[[Application, Sequence[te.Tensor]], te.Tensor]:
    """`last(x - maximum of the row, sum of exponentials of the row)` is the result."""

    def lower(app: Application, inputs: Sequence[te.Tensor]) -> te.Tensor:
        (x,) = inputs
        title, axis = label(app, name), app.attrs["axis"]
        maximum = reduce_stage(f"{title}_max", "max", x, (axis,))

        def exponential(element: te.Expr, row: tuple[te.Expr, ...], reduced: tuple[te.Var, ...]) -> te.Expr:
            return te.call("exp", element - maximum[row])

        total = reduce_stage(f"{title}_sum", "sum", x, (axis,), of=exponential)

        def formula(*axes: te.Var) -> te.Expr:
            row = axes[:axis] + axes[axis + 1 :]
            return last(x[axes] - maximum[row], total[row])

        return te.compute(title, app.type.shape, app.type.dtype, formula)

    return lower


register(
    Op(
        "softmax",
        infer=infer_softmax,
        oracle=softmax,
        fusion=Fusion.REDUCTION,
        lower=lower_softmax("softmax", lambda below, total: te.call("exp", below) / total),
        flops=lambda app: 5 * app.type.size,
        attrs=("axis",),
    )
)
register(
    Op(
        "log_softmax",
        infer=infer_softmax,
        oracle=log_softmax,
        fusion=Fusion.REDUCTION,
        lower=lower_softmax("log_softmax", lambda below, total: below - te.call("log", total)),
        flops=lambda app: 5 * app.type.size,
        attrs=("axis",),
    )
)


# -- layer_norm, rms_norm -----------------------------------------------------------------------------------------


def infer_row_norm(most: int) -> Callable[[Sequence[TensorType], Attrs], TensorType]:
    def infer(inputs: Sequence[TensorType], attrs: Attrs) -> TensorType:
        expect_operands(inputs, *range(1, most + 1))
        expect_floats(inputs)
        x, dims = inputs[0], attrs["dims"]
        expect(
            is_int(dims) and 1 <= dims <= x.rank, f"dims must be 1 to {x.rank}, the rank of x; got {dims!r}"
        )
        expect_eps(attrs)
        expect_parameters(inputs[1:], x.shape[x.rank - dims :])
        return x

    return infer


def last_axes(rank: int, dims: int) -> tuple[int, ...]:
    return tuple(range(rank - dims, rank))


def layer_norm(
    attrs: Attrs, x: np.ndarray, w: np.ndarray | None = None, b: np.ndarray | None = None
) -> np.ndarray:
    axes = last_axes(x.ndim, attrs["dims"])
    centred = x - row_mean(x, axes)
    result = centred / np.sqrt(row_mean(np.square(centred), axes) + attrs["eps"])
    if w is not None:
        result = result * w
    return np.asarray(result if b is None else result + b)


def row_mean(x: np.ndarray, axes: tuple[int, ...]) -> Any:
    return np.sum(x, axis=axes, keepdims=True) / np.float64(math.prod(x.shape[axis] for axis in axes))


def rms_norm(attrs: Attrs, x: np.ndarray, w: np.ndarray | None = None) -> np.ndarray:
    result = x / np.sqrt(row_mean(np.square(x), last_axes(x.ndim, attrs["dims"])) + attrs["eps"])
    return np.asarray(result if w is None else result * w)


def inverse_deviation(title: str, squares: te.Tensor, count: int, eps: float) -> te.Tensor:
    """One number per row: the reciprocal of the standard deviation, from the sum of squares."""
    return te.compute(
        f"{title}_rstd",
        squares.shape,
        squares.dtype,
        lambda *rows: te.call("rsqrt", squares[rows] / count + eps),
    )


def lower_row_norm(app: Application, inputs: Sequence[te.Tensor], *, centred: bool) -> te.Tensor:
    x, parameters = inputs[0], inputs[1:]
    title = label(app, "layer_norm" if centred else "rms_norm")
    rank = len(x.shape)
    axes = last_axes(rank, app.attrs["dims"])
    count = math.prod(x.shape[axis] for axis in axes)
    mean: te.Tensor | None = None
    if centred:
        mean, squares = squared_deviations(title, x, axes)
    else:
        squares = reduce_stage(
            f"{title}_squares", "sum", x, axes, of=lambda element, row, _: element * element
        )
    scale = inverse_deviation(title, squares, count, app.attrs["eps"])

    def formula(*index: te.Var) -> te.Expr:
        row, column = index[: axes[0]], index[axes[0] :]
        value = x[index] if mean is None else x[index] - mean[row]
        value = value * scale[row]
        if len(parameters) >= 1:
            value = value * parameters[0][column]
        return value + parameters[1][column] if len(parameters) == 2 else value

    return te.compute(title, app.type.shape, app.type.dtype, formula)


register(
    Op(
        "layer_norm",
        infer=infer_row_norm(3),
        oracle=layer_norm,
        fusion=Fusion.REDUCTION,
        lower=lambda app, inputs: lower_row_norm(app, inputs, centred=True),
        flops=lambda app: (5 + len(app.inputs)) * app.type.size,
        attrs=("dims", "eps"),
    )
)
register(
    Op(
        "rms_norm",
        infer=infer_row_norm(2),
        oracle=rms_norm,
        fusion=Fusion.REDUCTION,
        lower=lambda app, inputs: lower_row_norm(app, inputs, centred=False),
        flops=lambda app: (2 + len(app.inputs)) * app.type.size,
        attrs=("dims", "eps"),
    )
)


# -- group_norm, batch_norm ---------------------------------------------------------------------------------------


def infer_group_norm(inputs: Sequence[TensorType], attrs: Attrs) -> TensorType:
    expect_operands(inputs, 1, 3)
    expect_floats(inputs)
    x, groups = inputs[0], attrs["groups"]
    expect(x.rank >= 2, f"x must be N C spatial, got {x!r}")
    legal = is_int(groups) and groups >= 1 and x.shape[1] % groups == 0
    expect(legal, f"groups must divide the {x.shape[1]} channels, got {groups!r}")
    expect_eps(attrs)
    expect_parameters(inputs[1:], (x.shape[1],))
    return x


def along_channels(parameter: np.ndarray, rank: int) -> np.ndarray:
    return parameter.reshape(-1, *[1] * (rank - 2))


def group_norm(
    attrs: Attrs, x: np.ndarray, w: np.ndarray | None = None, b: np.ndarray | None = None
) -> np.ndarray:
    groups = attrs["groups"]
    grouped = x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
    rows = {"dims": grouped.ndim - 2, "eps": attrs["eps"]}
    result = layer_norm(rows, grouped).reshape(x.shape)
    if w is None or b is None:
        return result
    return np.asarray(result * along_channels(w, x.ndim) + along_channels(b, x.ndim))


def lower_group_norm(app: Application, inputs: Sequence[te.Tensor]) -> te.Tensor:
    x, parameters = inputs[0], inputs[1:]
    title, dtype = label(app, "group_norm"), x.dtype.compute
    batch, channels, *space = x.shape
    groups = app.attrs["groups"]
    width = channels // groups
    count = width * math.prod(space)

    def over_groups(name: str, of: Callable[[te.Expr, tuple[te.Expr, ...]], te.Expr]) -> te.Tensor:
        """The sum of `of(element, row)` over every group: a stage of shape [N, groups]."""

        def formula(n: te.Var, group: te.Var) -> te.Expr:
            reduced = te.reduce_axes([width, *space] if width > 1 else space)
            channel, position = (reduced[0], reduced[1:]) if width > 1 else (None, reduced)
            first = scaled(group, width)
            element = x[(n, first if channel is None else first + channel, *position)]
            body = of(element, (n, group))
            return te.reduce_over("sum", body, reduced) if reduced else body

        return te.compute(name, (batch, groups), dtype, formula)

    def square(element: te.Expr, row: tuple[te.Expr, ...]) -> te.Expr:
        return (element - mean[row]) * (element - mean[row])

    total = over_groups(f"{title}_sum", lambda element, row: element)
    mean = te.compute(f"{title}_mean", total.shape, dtype, lambda *row: total[row] / count)
    scale = inverse_deviation(title, over_groups(f"{title}_squares", square), count, app.attrs["eps"])

    def formula(*index: te.Var) -> te.Expr:
        row = (index[0], te.as_index(0) if groups == 1 else divided(index[1], width))
        value = (x[index] - mean[row]) * scale[row]
        return value * parameters[0][index[1]] + parameters[1][index[1]] if parameters else value

    return te.compute(title, app.type.shape, app.type.dtype, formula)


def infer_batch_norm(inputs: Sequence[TensorType], attrs: Attrs) -> TensorType:
    expect_operands(inputs, 5)
    expect_floats(inputs)
    x = inputs[0]
    expect(x.rank >= 2, f"x must be N C spatial, got {x!r}")
    expect_eps(attrs)
    expect_parameters(inputs[1:], (x.shape[1],))
    return x


def batch_norm(
    attrs: Attrs, x: np.ndarray, w: np.ndarray, b: np.ndarray, mean: np.ndarray, var: np.ndarray
) -> np.ndarray:
    scale = w / np.sqrt(var + attrs["eps"])
    return np.asarray(
        (x - along_channels(mean, x.ndim)) * along_channels(scale, x.ndim) + along_channels(b, x.ndim)
    )


register(
    Op(
        "group_norm",
        infer=infer_group_norm,
        oracle=group_norm,
        fusion=Fusion.REDUCTION,
        lower=lower_group_norm,
        flops=lambda app: (5 + len(app.inputs)) * app.type.size,
        attrs=("groups", "eps"),
    )
)
register(
    Op(
        "batch_norm",
        infer=infer_batch_norm,
        oracle=batch_norm,
        fusion=Fusion.ELEMENTWISE,
        flops=lambda app: 4 * app.type.size,
        attrs=("eps",),
    )
)


# -- attention ----------------------------------------------------------------------------------------------------


def infer_attention(inputs: Sequence[TensorType], attrs: Attrs) -> TensorType:
    expect_operands(inputs, 3, 4)
    q, k, v = inputs[:3]
    expect_floats((q, k, v))
    expect(
        min(q.rank, k.rank, v.rank) >= 2, f"q, k and v must be [..., length, width], got {q!r}, {k!r}, {v!r}"
    )
    expect(q.shape[-1] == k.shape[-1], f"q and k differ in width: {q.shape[-1]} and {k.shape[-1]}")
    expect(k.shape[-2] == v.shape[-2], f"k and v differ in length: {k.shape[-2]} and {v.shape[-2]}")
    expect(isinstance(attrs["causal"], bool), f"causal must be True or False, got {attrs['causal']!r}")
    expect_fits("scale", attrs["scale"], DType.F64)
    scores = (*broadcast_shapes(q.shape[:-2], k.shape[:-2]), q.shape[-2], k.shape[-2])
    if len(inputs) == 4:
        mask = inputs[3]
        expect(mask.dtype in (DType.BOOL, q.dtype), f"the mask must be bool or {q.dtype.short}, got {mask!r}")
        fits = broadcast_shapes(mask.shape, scores)[-2:] == scores[-2:]
        expect(fits, f"the mask must broadcast to {list(scores)}, got {mask!r}")
        scores = broadcast_shapes(mask.shape, scores)
    batch = broadcast_shapes(scores[:-2], v.shape[:-2])
    return TensorType((*batch, q.shape[-2], v.shape[-1]), q.dtype)


def attention(
    attrs: Attrs, q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray | None = None
) -> np.ndarray:
    scores = np.matmul(q, np.swapaxes(k, -1, -2)) * attrs["scale"]
    if mask is not None:
        scores = np.where(mask, scores, -np.inf) if mask.dtype == np.bool_ else scores + mask
    if attrs["causal"]:
        scores = np.where(np.tri(*scores.shape[-2:], dtype=np.bool_), scores, -np.inf)
    weights = softmax({"axis": scores.ndim - 1}, scores)
    blind = np.all(scores == -np.inf, axis=-1, keepdims=True)
    return np.asarray(np.matmul(np.where(blind, 0, weights), v))


def attention_flops(app: Application) -> int:
    """Operations for the pairs of a query and a visible key."""
    q, k = app.inputs[:2]
    batch, queries, width = math.prod(app.type.shape[:-2]), app.type.shape[-2], app.type.shape[-1]
    pairs = queries * k.shape[-2]
    if app.attrs["causal"]:
        pairs = sum(min(query + 1, k.shape[-2]) for query in range(queries))
    return batch * pairs * (2 * q.shape[-1] + 2 * width + 5)


def lower_attention(app: Application, inputs: Sequence[te.Tensor]) -> te.Tensor:
    """Scores, their rows' maxima, weights and the weights' sums, weighted values; the division comes last."""
    q, k, v, *masks = inputs
    title, dtype = label(app, "attention"), app.type.dtype.compute
    *lead, queries, _ = app.type.shape
    keys, width = k.shape[-2:]
    scores_shape = (*lead, queries, keys)

    def element(x: te.Tensor, batch: Sequence[te.Expr], row: te.Expr, column: te.Expr) -> te.Expr:
        return x[(*broadcast_indices(batch, x.shape[:-2], lead), row, column)]

    def product(*axes: te.Var) -> te.Expr:
        (d,) = te.reduce_axes([width])
        *batch, row, key = axes
        return te.reduce_over("sum", element(q, batch, row, d) * element(k, batch, key, d), [d])

    products = te.compute(f"{title}_products", scores_shape, dtype, product)

    def score(*axes: te.Var) -> te.Expr:
        value = products[axes] * app.attrs["scale"]
        for mask in masks:
            other = mask[broadcast_indices(axes, mask.shape, scores_shape)]
            value = te.select(other, value, -math.inf) if mask.dtype is DType.BOOL else value + other
        return (
            te.select(te.call("le", axes[-1], axes[-2]), value, -math.inf) if app.attrs["causal"] else value
        )

    scores = te.compute(f"{title}_scores", scores_shape, dtype, score)
    top = reduce_stage(f"{title}_max", "max", scores, (len(lead) + 1,))

    def weight(*axes: te.Var) -> te.Expr:
        row = axes[:-1]
        sees_nothing = te.call("eq", top[row], -math.inf)
        return te.call("exp", scores[axes] - te.select(sees_nothing, 0.0, top[row]))

    weights = te.compute(f"{title}_weights", scores_shape, dtype, weight)
    total = reduce_stage(f"{title}_sum", "sum", weights, (len(lead) + 1,))

    def weighted(*axes: te.Var) -> te.Expr:
        (key,) = te.reduce_axes([keys])
        *batch, row, column = axes
        return te.reduce_over("sum", weights[(*batch, row, key)] * element(v, batch, key, column), [key])

    sums = te.compute(f"{title}_weighted", app.type.shape, dtype, weighted)

    def divided_by_total(*axes: te.Var) -> te.Expr:
        row = axes[:-1]
        return te.select(te.call("eq", total[row], 0.0), sums[axes], sums[axes] / total[row])

    return te.compute(title, app.type.shape, app.type.dtype, divided_by_total)


register(
    Op(
        "attention",
        infer=infer_attention,
        oracle=attention,
        fusion=Fusion.COMPLEX,
        lower=lower_attention,
        flops=attention_flops,
        attrs=("causal", "scale"),
    )
)
