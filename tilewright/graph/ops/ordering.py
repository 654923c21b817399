"""Operators that order elements along an axis, or run along it.

- `argsort(axis, descending)`: i64, the position of each element if the axis were sorted; equal ones keep their order
  (a stable sort). NaN is greater than every number. `put_along` with the result as indices sorts the elements or
  their indices; into a shorter tensor it computes a top-k.
- `cumprod cummax cummin (axis)`: element i is the product, maximum, minimum of those up to i. NaN propagates.

Each is quadratic in the extent of its axis: an element's position is the number of elements before it. That is exact,
needs one number of scratch memory per element, and suits the short axes that models sort.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tilewright import te
from tilewright.dtypes import DType
from tilewright.graph.ir import Attrs, TensorType
from tilewright.graph.op import Application, Fusion, Op, register
from tilewright.graph.ops.common import (
    NUMBER,
    expect,
    expect_axis,
    expect_kind,
    expect_operands,
    finish,
    label,
)


def at(axes: Sequence[te.Expr], axis: int, index: te.Expr) -> tuple[te.Expr, ...]:
    """The index `axes` with one entry replaced by `index`."""
    return (*axes[:axis], index, *axes[axis + 1 :])


# -- sorting ------------------------------------------------------------------------------------------------------


def infer_argsort(inputs: Sequence[TensorType], attrs: Attrs) -> TensorType:
    expect_operands(inputs, 1)
    (x,) = inputs
    expect_kind(x.dtype, NUMBER)
    expect_axis(attrs["axis"], x.rank)
    expect(
        isinstance(attrs["descending"], bool),
        f"descending must be True or False, got {attrs['descending']!r}",
    )
    return TensorType(x.shape, DType.I64)


def argsort(attrs: Attrs, x: np.ndarray) -> np.ndarray:
    axis, extent = attrs["axis"], x.shape[attrs["axis"]]
    if attrs["descending"]:  # stable when reversed
        order = np.flip(extent - 1 - np.argsort(np.flip(x, axis), axis=axis, kind="stable"), axis)
    else:
        order = np.argsort(x, axis=axis, kind="stable")
    return np.argsort(order, axis=axis, kind="stable")


def comes_before(a: te.Expr, b: te.Expr, descending: bool) -> tuple[te.Expr, te.Expr]:
    """(whether a sorts before b, whether they are equal), NaN being the greatest."""
    small, large = (b, a) if descending else (a, b)
    before, equal = te.call("lt", small, large), te.call("eq", a, b)
    if not a.dtype.is_float:
        return before, equal
    small_is_nan, large_is_nan = te.call("ne", small, small), te.call("ne", large, large)
    before = te.call("or", before, te.call("and", large_is_nan, te.call("not", small_is_nan)))
    return before, te.call("or", equal, te.call("and", small_is_nan, large_is_nan))


def lower_argsort(app: Application, inputs: Sequence[te.Tensor]) -> te.Tensor:
    """Count the elements that come before each."""
    (x,) = inputs
    axis = app.attrs["axis"]

    def position(*axes: te.Var) -> te.Expr:
        (j,) = te.reduce_axes([x.shape[axis]])
        before, equal = comes_before(x[at(axes, axis, j)], x[axes], app.attrs["descending"])
        first = te.call("or", before, te.call("and", equal, te.call("lt", j, axes[axis])))
        return te.reduce_over("sum", te.cast(first, DType.I64), [j])

    return te.compute(label(app, "argsort"), x.shape, DType.I64, position)


def quadratic(app: Application) -> int:
    return app.inputs[0].size * app.inputs[0].shape[app.attrs["axis"]]


register(
    Op(
        "argsort",
        infer=infer_argsort,
        oracle=argsort,
        fusion=Fusion.REDUCTION,
        lower=lower_argsort,
        flops=quadratic,
        attrs=("axis", "descending"),
    )
)


# -- running combinations -----------------------------------------------------------------------------------------


def running(name: str, kind: str, ufunc: Any, other: Callable[[te.Expr], te.Expr]) -> None:
    """`other(element i)`: the neutral replacement for elements after i."""

    def infer(inputs: Sequence[TensorType], attrs: Attrs) -> TensorType:
        expect_operands(inputs, 1)
        (x,) = inputs
        expect_kind(x.dtype, NUMBER)
        expect_axis(attrs["axis"], x.rank)
        return x

    def lower(app: Application, inputs: Sequence[te.Tensor]) -> te.Tensor:
        (x,) = inputs
        title, axis, dtype = label(app, name), app.attrs["axis"], x.dtype.compute

        def formula(*axes: te.Var) -> te.Expr:
            (r,) = te.reduce_axes([x.shape[axis]])
            up_to = te.call("le", r, axes[axis])
            return te.reduce_over(kind, te.select(up_to, x[at(axes, axis, r)], other(x[axes])), [r])

        whole = te.compute(
            title if dtype is app.type.dtype else f"{title}_wide", app.type.shape, dtype, formula
        )
        return finish(title, app.type, whole)

    register(
        Op(
            name,
            infer=infer,
            oracle=lambda attrs, x: ufunc.accumulate(x, axis=attrs["axis"], dtype=x.dtype),
            fusion=Fusion.REDUCTION,
            lower=lower,
            flops=quadratic,
            attrs=("axis",),
        )
    )


running("cumprod", "prod", np.multiply, lambda element: te.const(1, element.dtype))
running("cummax", "max", np.maximum, lambda element: element)
running("cummin", "min", np.minimum, lambda element: element)
