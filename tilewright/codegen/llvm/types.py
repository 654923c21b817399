"""Element types in LLVM: how a value is held in a register, and how it is stored in memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from llvmlite import ir

from tilewright.dtypes import DType

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
PTR = ir.PointerType()


class _BFloat(ir.Type):
    """LLVM's own bfloat16, which llvmlite has no class for."""

    def _to_string(self) -> str:
        return "bfloat"


BFLOAT = _BFloat()  # of conversions alone

# bfloat16 travels as its 16 bits: it is only ever widened, narrowed, moved or selected.
_IN_REGISTER = {
    DType.F64: ir.DoubleType(),
    DType.F32: ir.FloatType(),
    DType.F16: ir.HalfType(),
    DType.BF16: I16,
    DType.I64: I64,
    DType.I32: I32,
    DType.I16: I16,
    DType.I8: I8,
    DType.U64: I64,
    DType.U32: I32,
    DType.U16: I16,
    DType.U8: I8,
    DType.BOOL: I1,
}


@dataclass(frozen=True)
class Typed:
    """A value with its element type; `lanes` is 1 for a scalar."""

    value: ir.Value
    dtype: DType
    lanes: int


def element_type(dtype: DType) -> ir.Type:
    return _IN_REGISTER[dtype]


def stored_type(dtype: DType) -> ir.Type:
    """A bool takes a byte in memory."""
    return I8 if dtype is DType.BOOL else _IN_REGISTER[dtype]


@lru_cache(maxsize=1024)
def vector_of(element: ir.Type, lanes: int) -> ir.Type:
    """One object for each type: types and constants are spelled out once per object."""
    return ir.VectorType(element, lanes) if lanes > 1 else element


def like(value: ir.Value, element: ir.Type) -> ir.Type:
    """The type of `value` with another element type."""
    return vector_of(element, value.type.count) if isinstance(value.type, ir.VectorType) else element


def i64(value: int) -> ir.Constant:
    return number(I64, value)


def number(element: ir.Type, value: float | int | bool) -> ir.Constant:
    """A number, one object for each: a kernel has few, and has them thousands of times."""
    # Not by value alone: 0.0 equals -0.0, and 1 equals True.
    return _number(element, value, repr(value))


@lru_cache(maxsize=8192)
def _number(element: ir.Type, value: float | int | bool, text: str) -> ir.Constant:
    return ir.Constant(element, value)


def repeated(element: ir.Type, value: float | int | bool, lanes: int) -> ir.Constant:
    """A number in every one of `lanes` lanes."""
    return _repeated(element, value, repr(value), lanes)


@lru_cache(maxsize=8192)
def _repeated(element: ir.Type, value: float | int | bool, text: str, lanes: int) -> ir.Constant:
    return ir.Constant(vector_of(element, lanes), number(element, value))


@lru_cache(maxsize=4096)
def numbers(element: ir.Type, values: tuple[int, ...]) -> ir.Constant:
    """A vector of these numbers, such as the lanes that a shuffle picks."""
    return ir.Constant(ir.VectorType(element, len(values)), list(values))


def splat(builder: ir.IRBuilder, typed: Typed, lanes: int) -> Typed:
    """`typed` in every one of `lanes` lanes."""
    if typed.lanes == lanes:
        return typed
    assert typed.lanes == 1, f"{typed.lanes} lanes cannot become {lanes}"
    if isinstance(typed.value, ir.Constant):
        return Typed(repeated(typed.value.type, typed.value.constant, lanes), typed.dtype, lanes)
    undefined, first = _splatting(typed.value.type, lanes)
    single = builder.insert_element(undefined, typed.value, i64(0))
    return Typed(builder.shuffle_vector(single, undefined, first), typed.dtype, lanes)


@lru_cache(maxsize=256)
def _splatting(element: ir.Type, lanes: int) -> tuple[ir.Constant, ir.Constant]:
    """A vector of nothing, and the choice of its first lane for all: each is spelled out lane by lane, and often."""
    undefined = ir.Constant(ir.VectorType(element, lanes), ir.Undefined)
    return undefined, ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
