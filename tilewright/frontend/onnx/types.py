"""Convert ONNX's element types and tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from tilewright.dtypes import DType
from tilewright.errors import ModelFileError
from tilewright.frontend.builder import Unsupported
from tilewright.frontend.onnx.external import ExternalData
from tilewright.support.budget import MAX_RANK, Budget

_DTYPES: dict[int, DType] = {
    TensorProto.DOUBLE: DType.F64,
    TensorProto.FLOAT: DType.F32,
    TensorProto.FLOAT16: DType.F16,
    TensorProto.BFLOAT16: DType.BF16,
    TensorProto.INT64: DType.I64,
    TensorProto.INT32: DType.I32,
    TensorProto.INT16: DType.I16,
    TensorProto.INT8: DType.I8,
    TensorProto.UINT8: DType.U8,
    TensorProto.BOOL: DType.BOOL,
}
# Bytes of a number in a Python list, and of the list's slot, because protobuf returns lists.
_PER_NUMBER = 64
_ELEMENTS = {dtype: element for element, dtype in _DTYPES.items()}


def dtype_of(element: int) -> DType:
    """The element type; Unsupported for one that tensors cannot have here."""
    found = _DTYPES.get(element)
    if found is None:
        raise Unsupported(f"tensors of {element_name(element)}")
    return found


def element_name(element: int) -> str:
    if element in TensorProto.DataType.values():
        return str(TensorProto.DataType.Name(element)).lower()
    return f"the unknown element type {element}"


def element_of(dtype: DType) -> int:
    return _ELEMENTS[dtype]


def checked_shape(dims: Sequence[int], dtype: DType, budget: Budget, what: str) -> tuple[int, ...]:
    """The shape, if it is valid and its bytes are within the limit. No dimension is multiplied before it is
    checked."""
    if len(dims) > MAX_RANK:
        raise Unsupported(f"{what} has {len(dims)} axes, and a tensor at most {MAX_RANK}")
    shape = tuple(int(extent) for extent in dims)
    if any(extent < 0 for extent in shape):
        raise ModelFileError(f"{what} has the shape {list(shape)}")
    budget.fits(spanned(shape) * dtype.bytes, f"{what} of shape {list(shape)}")
    return shape


def spanned(shape: Sequence[int]) -> int:
    """The number of elements, ignoring empty axes: an axis of 0 does not make one of 2^60 harmless."""
    return math.prod(extent for extent in shape if extent)


def array_of(tensor: TensorProto, external: ExternalData, budget: Budget) -> np.ndarray:
    """The values of a tensor, without a copy if possible."""
    what = f"tensor {tensor.name!r}"
    dtype = dtype_of(tensor.data_type)
    shape = checked_shape(tensor.dims, dtype, budget, what)
    size = math.prod(shape) * dtype.bytes
    if tensor.HasField("segment"):
        raise Unsupported("tensors in segments")
    if tensor.data_location == TensorProto.EXTERNAL:
        return external.read(tensor, size, budget).view(dtype.numpy).reshape(shape)
    if tensor.HasField("raw_data"):
        if len(tensor.raw_data) != size:
            raise ModelFileError(
                f"{what} has {len(tensor.raw_data)} bytes of data, and its shape {list(shape)} and type need {size}"
            )
        budget.data(size, math.prod(shape), what)
        return (
            np.frombuffer(tensor.raw_data, dtype.numpy.newbyteorder("<"))
            .astype(dtype.numpy, copy=False)
            .reshape(shape)
        )
    field = onnx.helper.tensor_dtype_to_field(tensor.data_type)
    if len(getattr(tensor, field)) != math.prod(shape):
        raise ModelFileError(
            f"{what} has {len(getattr(tensor, field))} elements of data, and its shape {list(shape)} needs"
            f" {math.prod(shape)}"
        )
    budget.fits(_PER_NUMBER * math.prod(shape), what)
    budget.data(size, math.prod(shape), what)
    return np.asarray(numpy_helper.to_array(tensor)).astype(dtype.numpy, copy=False)
