"""Operators that combine elements along axes.

- `sum prod amax amin mean any all (axes, keepdims)`: `axes` is a sorted tuple. Integers keep their type (a frontend
  that counts in i64 casts first); `any` and `all` are of bool; `mean` is of floats.
- `argmax argmin (axis, keepdims)`: i64, the first of equals; the first NaN where there is one.
- `var(axes, correction, keepdims)`: the sum of squared deviations from the mean, divided by n - correction.
- `cumsum(axis)`.

16-bit floats are combined in f32. `amax`, `amin`, `argmax` and `argmin` of no elements are type errors.
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
    BOOL,
    FLOAT,
    NUMBER,
    drop_axes,
    expect,
    expect_axes,
    expect_axis,
    expect_fits,
    expect_kind,
    expect_operands,
    finish,
    label,
    merge_axes,
)


def reduced_shape(shape: tuple[int, ...], axes: tuple[int, ...], keepdims: bool) -> tuple[int, ...]:
    if keepdims:
        return tuple(1 if axis in axes else extent for axis, extent in enumerate(shape))
    return drop_axes(shape, axes)


def reduced_count(app: Application) -> int:
    return math.prod(app.inputs[0].shape[axis] for axis in app.attrs["axes"])


def kept_axes(result_axes: Sequence[te.Expr], axes: tuple[int, ...], keepdims: bool) -> tuple[te.Expr, ...]:
    """The part of a reduction result's index for the axes that were not reduced."""
    return tuple(index for d, index in enumerate(result_axes) if not (keepdims and d in axes))


def reduce_stage(
    name: str,
    kind: str,
    x: te.Tensor,
    axes: tuple[int, ...],
    *,
    keepdims: bool = False,
    dtype: DType | None = None,
    of: Callable[[te.Expr, tuple[te.Expr, ...], tuple[te.Var, ...]], te.Expr] | None = None,
) -> te.Compute:
    """The stage that reduces x over `axes`, or `of(element, kept index, reduced index)` instead of x."""
    shape = reduced_shape(x.shape, axes, keepdims)

    def formula(*result_axes: te.Var) -> te.Expr:
        kept = kept_axes(result_axes, axes, keepdims)
        reduced = te.reduce_axes([x.shape[axis] for axis in axes])
        element = x[merge_axes(kept, reduced, axes)]
        body = element if of is None else of(element, kept, reduced)
        return te.reduce_over(kind, body, reduced) if reduced else body

    return te.compute(name, shape, dtype or x.dtype.compute, formula)


def input_size(app: Application) -> int:
    return app.inputs[0].size


# -- one combiner -------------------------------------------------------------------------------------------------


def reduction(
    name: str,
    takes: str,
    kind: str,
    meaning: Callable[..., Any],
    *,
    of_nothing: bool = True,
    mean: bool = False,
) -> None:
    def infer(inputs: Sequence[TensorType], attrs: Attrs) -> TensorType:
        expect_operands(inputs, 1)
        (x,) = inputs
        expect_kind(x.dtype, takes)
        axes = expect_axes(attrs["axes"], x.rank)
        expect_keepdims(attrs)
        expect(
            of_nothing or all(x.shape[axis] for axis in axes), f"is not defined over no elements, got {x!r}"
        )
        return TensorType(reduced_shape(x.shape, axes, attrs["keepdims"]), x.dtype)

    def oracle(attrs: Attrs, x: np.ndarray) -> np.ndarray:
        return np.asarray(meaning(x, axis=attrs["axes"], keepdims=attrs["keepdims"])).astype(
            x.dtype, copy=False
        )

    def lower(app: Application, inputs: Sequence[te.Tensor]) -> te.Tensor:
        (x,) = inputs
        title, axes = label(app, name), app.attrs["axes"]
        last = not mean and x.dtype.compute is app.type.dtype
        combined = reduce_stage(
            title if last else f"{title}_{kind}", kind, x, axes, keepdims=app.attrs["keepdims"]
        )
        if not mean:
            return finish(title, app.type, combined)
        count = reduced_count(app)
        return te.compute(title, app.type.shape, app.type.dtype, lambda *axes: combined[axes] / count)

    register(
        Op(
            name,
            infer=infer,
            oracle=oracle,
            fusion=Fusion.REDUCTION,
            lower=lower,
            flops=(lambda app: app.inputs[0].size + app.type.size) if mean else input_size,
            attrs=("axes", "keepdims"),
        )
    )


def expect_keepdims(attrs: Attrs) -> None:
    expect(isinstance(attrs["keepdims"], bool), f"keepdims must be True or False, got {attrs['keepdims']!r}")


def same_type(ufunc: Any) -> Callable[..., Any]:
    """NumPy sums small integers in i64; here they wrap around in their own type."""
    return lambda x, axis, keepdims: ufunc.reduce(x, axis=axis, keepdims=keepdims, dtype=x.dtype)


reduction("sum", NUMBER, "sum", same_type(np.add))
reduction("prod", NUMBER, "prod", same_type(np.multiply))
reduction("amax", NUMBER, "max", np.max, of_nothing=False)
reduction("amin", NUMBER, "min", np.min, of_nothing=False)
reduction("any", BOOL, "any", np.any)
reduction("all", BOOL, "all", np.all)
reduction(
    "mean",
    FLOAT,
    "sum",
    lambda x, axis, keepdims: np.sum(x, axis=axis, keepdims=keepdims) / np.prod([x.shape[d] for d in axis]),
    mean=True,
)


# -- argmax, argmin -----------------------------------------------------------------------------------------------


def arg_reduction(name: str, kind: str, meaning: Callable[..., Any]) -> None:
    def infer(inputs: Sequence[TensorType], attrs: Attrs) -> TensorType:
        expect_operands(inputs, 1)
        (x,) = inputs
        expect_kind(x.dtype, NUMBER)
        axis = expect_axis(attrs["axis"], x.rank)
        expect_keepdims(attrs)
        expect(x.shape[axis] > 0, f"is not defined over no elements, got {x!r}")
        return TensorType(reduced_shape(x.shape, (axis,), attrs["keepdims"]), DType.I64)

    def oracle(attrs: Attrs, x: np.ndarray) -> np.ndarray:
        return np.asarray(meaning(x, axis=attrs["axis"], keepdims=attrs["keepdims"]), dtype=np.int64)

    def lower(app: Application, inputs: Sequence[te.Tensor]) -> te.Tensor:
        (x,) = inputs
        title, axis = label(app, name), app.attrs["axis"]
        extreme = reduce_stage(f"{title}_{kind}", kind, x, (axis,))

        def position(element: te.Expr, kept: tuple[te.Expr, ...], reduced: tuple[te.Var, ...]) -> te.Expr:
            here = te.call("eq", element, extreme[kept])
            if element.dtype.is_float:  # a NaN is the extreme, and equal to nothing
                here = te.call("or", here, te.call("ne", element, element))
            return te.select(here, reduced[0], x.shape[axis])

        return reduce_stage(
            title, "min", x, (axis,), keepdims=app.attrs["keepdims"], dtype=DType.I64, of=position
        )

    register(
        Op(
            name,
            infer=infer,
            oracle=oracle,
            fusion=Fusion.REDUCTION,
            lower=lower,
            flops=input_size,
            attrs=("axis", "keepdims"),
        )
    )


arg_reduction("argmax", "max", np.argmax)
arg_reduction("argmin", "min", np.argmin)


# -- variance -----------------------------------------------------------------------------------------------------


def infer_var(inputs: Sequence[TensorType], attrs: Attrs) -> TensorType:
    expect_operands(inputs, 1)
    (x,) = inputs
    expect_kind(x.dtype, FLOAT)
    axes = expect_axes(attrs["axes"], x.rank)
    expect_keepdims(attrs)
    expect_fits("correction", attrs["correction"], DType.F64)
    return TensorType(reduced_shape(x.shape, axes, attrs["keepdims"]), x.dtype)


def degrees_of_freedom(count: int, correction: float) -> float:
    return max(count - correction, 0)  # 0 gives NaN or infinity, as the framework does


def var(attrs: Attrs, x: np.ndarray) -> np.ndarray:
    axes, keepdims = attrs["axes"], attrs["keepdims"]
    count = math.prod(x.shape[axis] for axis in axes)
    squares = np.square(x - np.sum(x, axis=axes, keepdims=True) / np.float64(count))
    total = np.sum(squares, axis=axes, keepdims=keepdims)
    return np.asarray(total / np.float64(degrees_of_freedom(count, attrs["correction"])))


def squared_deviations(
    title: str, x: te.Tensor, axes: tuple[int, ...], *, keepdims: bool = False
) -> tuple[te.Tensor, te.Compute]:
    """The mean over `axes` (dropped from its shape), and the sum of squared deviations from it: two passes, for
    accuracy. Three stages; the middle one divides one number per row."""
    count = math.prod(x.shape[axis] for axis in axes)
    total = reduce_stage(f"{title}_sum", "sum", x, axes)
    mean = te.compute(f"{title}_mean", total.shape, total.dtype, lambda *rows: total[rows] / count)

    def square(element: te.Expr, kept: tuple[te.Expr, ...], reduced: tuple[te.Var, ...]) -> te.Expr:
        deviation = element - mean[kept]
        return deviation * deviation

    return mean, reduce_stage(f"{title}_squares", "sum", x, axes, keepdims=keepdims, of=square)


def lower_var(app: Application, inputs: Sequence[te.Tensor]) -> te.Tensor:
    title, axes = label(app, "var"), app.attrs["axes"]
    _, squares = squared_deviations(title, inputs[0], axes, keepdims=app.attrs["keepdims"])
    divisor = degrees_of_freedom(reduced_count(app), app.attrs["correction"])
    return te.compute(title, app.type.shape, app.type.dtype, lambda *axes: squares[axes] / divisor)


register(
    Op(
        "var",
        infer=infer_var,
        oracle=var,
        fusion=Fusion.REDUCTION,
        lower=lower_var,
        flops=lambda app: 4 * app.inputs[0].size,
        attrs=("axes", "correction", "keepdims"),
    )
)


# -- running sum --------------------------------------------------------------------------------------------------


def infer_cumsum(inputs: Sequence[TensorType], attrs: Attrs) -> TensorType:
    expect_operands(inputs, 1)
    (x,) = inputs
    expect_kind(x.dtype, NUMBER)
    expect_axis(attrs["axis"], x.rank)
    return x


def lower_cumsum(app: Application, inputs: Sequence[te.Tensor]) -> te.Tensor:
    """Element i is the sum of those up to i: quadratic in the extent, which suits the short axes it is used on."""
    (x,) = inputs
    title, axis, dtype = label(app, "cumsum"), app.attrs["axis"], x.dtype.compute

    def formula(*axes: te.Var) -> te.Expr:
        (r,) = te.reduce_axes([x.shape[axis]])
        element = x[(*axes[:axis], r, *axes[axis + 1 :])]
        return te.reduce_over("sum", te.select(te.call("le", r, axes[axis]), element, 0), [r])

    total = te.compute(title if dtype is app.type.dtype else f"{title}_sum", app.type.shape, dtype, formula)
    return finish(title, app.type, total)


register(
    Op(
        "cumsum",
        infer=infer_cumsum,
        oracle=lambda attrs, x: np.cumsum(x, axis=attrs["axis"], dtype=x.dtype),
        fusion=Fusion.REDUCTION,
        lower=lower_cumsum,
        flops=input_size,
        attrs=("axis",),
    )
)
