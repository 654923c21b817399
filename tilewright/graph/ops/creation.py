"""Operators that create a tensor without operands.

- `full(value, shape, dtype)`: every element is `value`.
- `iota(shape, axis, dtype)`: every element is its own index along `axis`.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    expect_fits,
    expect_kind,
    expect_operands,
    expect_shape,
    label,
)


def expect_dtype(dtype: Any) -> DType:
    expect(isinstance(dtype, DType), f"dtype must be an element type, got {dtype!r}")
    return DType(dtype)


def wide(dtype: DType) -> np.dtype[Any]:
    """The type in which the oracle holds values of `dtype`."""
    return np.dtype(np.float64) if dtype.is_float else dtype.numpy


def infer_full(inputs: Sequence[TensorType], attrs: Attrs) -> TensorType:
    expect_operands(inputs, 0)
    dtype = expect_dtype(attrs["dtype"])
    expect_fits("value", attrs["value"], dtype)
    return TensorType(expect_shape(attrs["shape"]), dtype)


def lower_full(app: Application, inputs: Sequence[te.Tensor]) -> te.Tensor:
    value = te.const(app.attrs["value"], app.type.dtype.compute)
    return te.compute(label(app, "full"), app.type.shape, app.type.dtype, lambda *axes: value)


def infer_iota(inputs: Sequence[TensorType], attrs: Attrs) -> TensorType:
    expect_operands(inputs, 0)
    dtype = expect_dtype(attrs["dtype"])
    expect_kind(dtype, NUMBER)
    shape = expect_shape(attrs["shape"])
    expect_axis(attrs["axis"], len(shape))
    return TensorType(shape, dtype)


def iota(attrs: Attrs) -> np.ndarray:
    shape, axis = attrs["shape"], attrs["axis"]
    line = np.arange(shape[axis]).astype(wide(attrs["dtype"]))
    return np.broadcast_to(line.reshape([-1 if d == axis else 1 for d in range(len(shape))]), shape)


def lower_iota(app: Application, inputs: Sequence[te.Tensor]) -> te.Tensor:
    axis, dtype = app.attrs["axis"], app.type.dtype
    return te.compute(
        label(app, "iota"), app.type.shape, dtype, lambda *axes: te.cast(axes[axis], dtype.compute)
    )


register(
    Op(
        "full",
        infer=infer_full,
        oracle=lambda attrs: np.full(attrs["shape"], attrs["value"], wide(attrs["dtype"])),
        fusion=Fusion.INJECTIVE,
        lower=lower_full,
        attrs=("value", "shape", "dtype"),
    )
)
register(
    Op(
        "iota",
        infer=infer_iota,
        oracle=iota,
        fusion=Fusion.INJECTIVE,
        lower=lower_iota,
        attrs=("shape", "axis", "dtype"),
    )
)
