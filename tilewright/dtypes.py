"""The element types of tensors: one table that every package uses.

bfloat16 has no NumPy type of its own; `ml_dtypes` registers one.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class _Info:
    short: str
    numpy: np.dtype
    kind: str  # "float", "int", "uint" or "bool"


class DType(enum.Enum):
    F64 = _Info("f64", np.dtype(np.float64), "float")
    F32 = _Info("f32", np.dtype(np.float32), "float")
    F16 = _Info("f16", np.dtype(np.float16), "float")
    BF16 = _Info("bf16", np.dtype(ml_dtypes.bfloat16), "float")
    I64 = _Info("i64", np.dtype(np.int64), "int")
    I32 = _Info("i32", np.dtype(np.int32), "int")
    I16 = _Info("i16", np.dtype(np.int16), "int")
    I8 = _Info("i8", np.dtype(np.int8), "int")
    U64 = _Info("u64", np.dtype(np.uint64), "uint")
    U32 = _Info("u32", np.dtype(np.uint32), "uint")
    U16 = _Info("u16", np.dtype(np.uint16), "uint")
    U8 = _Info("u8", np.dtype(np.uint8), "uint")
    BOOL = _Info("bool", np.dtype(np.bool_), "bool")

    __hash__ = object.__hash__  # each member exists once; Enum would hash its name

    # `_value_` is `value` without the descriptor of Enum: these are read hundreds of thousands of times.

    @property
    def short(self) -> str:
        """The name in text forms: `f32`, `i64`, `bool`."""
        return self._value_.short

    @property
    def numpy(self) -> np.dtype:
        return self._value_.numpy

    @property
    def bytes(self) -> int:
        return self._value_.numpy.itemsize

    @property
    def is_float(self) -> bool:
        return self._value_.kind == "float"

    @property
    def is_integer(self) -> bool:
        return self._value_.kind in ("int", "uint")

    @property
    def is_unsigned(self) -> bool:
        """Whether it is an integer type without a sign."""
        return self._value_.kind == "uint"

    @property
    def is_half(self) -> bool:
        """Whether values are stored in 16 bits and computed in 32."""
        return self in (DType.F16, DType.BF16)

    @property
    def compute(self) -> DType:
        """The type in which arithmetic on this type is done."""
        return DType.F32 if self.is_half else self

    def __repr__(self) -> str:
        return self.short

    @staticmethod
    def parse(short: str) -> DType:
        return _BY_SHORT[short]

    @staticmethod
    def of(array: np.ndarray) -> DType:
        """The element type of a NumPy array; raises KeyError for one that tensors cannot have."""
        return _BY_NUMPY[array.dtype]


_BY_SHORT = {dtype.short: dtype for dtype in DType}
_BY_NUMPY = {dtype.numpy: dtype for dtype in DType}
