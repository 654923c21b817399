"""The scalar functions of `te.scalars` as CUDA C++, and constants and conversions."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

from tilewright import te
from tilewright.dtypes import DType

_UNSIGNED = {DType.I64: "u64", DType.I32: "u32", DType.I16: "u16", DType.I8: "u8"}

_INFIX = {
    **{"add": "+", "sub": "-", "mul": "*", "div": "/"},
    **{"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "shr": ">>"},
    **{"and": "&", "or": "|", "xor": "^"},
}
_WRAPPING = ("add", "sub", "mul", "shl")  # signed overflow is undefined in C++
_BOOLEAN = {"add": "||", "mul": "&&", "and": "&&", "or": "||", "xor": "!="}
_FUNCTIONS = {  # the name for double; for float an f is added
    **{"fmod": "fmod", "pow": "pow", "atan2": "atan2", "sqrt": "sqrt", "rsqrt": "rsqrt", "exp": "exp"},
    **{"expm1": "expm1", "log": "log", "log1p": "log1p", "sin": "sin", "cos": "cos", "tanh": "tanh"},
    **{"erf": "erf", "floor": "floor", "ceil": "ceil", "trunc": "trunc", "round": "rint"},
    **{"copysign": "copysign", "fma": "fma"},
}


def c_type(dtype: DType) -> str:
    return dtype.short


def constant(expr: te.Const) -> str:
    value, dtype = expr.value, expr.dtype
    if dtype is DType.BOOL:
        return "true" if value else "false"
    if dtype.is_half:
        return f"narrow<{dtype.short}>({_float(float(value))})"
    if dtype is DType.F32:
        return _float(float(value))
    if dtype is DType.F64:
        bits = struct.unpack("<q", struct.pack("<d", float(value)))[0]
        return repr(float(value)) if math.isfinite(value) else f"__longlong_as_double({bits}LL)"
    if dtype is DType.I64:
        return "(-9223372036854775807LL - 1)" if value == -(2**63) else f"{int(value)}LL"
    if dtype is DType.U64:
        return f"{int(value)}ULL"
    return "(-2147483647 - 1)" if value == -(2**31) else f"{c_type(dtype)}({int(value)})"


def _float(value: float) -> str:
    """The nearest f32, exactly."""
    try:
        bits = struct.unpack("<I", struct.pack("<f", value))[0]
    except OverflowError:
        bits = 0x7F800000 if value > 0 else 0xFF800000
    rounded = struct.unpack("<f", struct.pack("<I", bits))[0]
    if not math.isfinite(rounded):
        return f"__int_as_float(0x{bits:08x})"
    text = f"{rounded:.9g}"
    return text + ("f" if any(mark in text for mark in ".e") else ".0f")


def conversion(value: str, source: DType, target: DType) -> str:
    if source.is_half:
        return conversion(f"wide({value})", DType.F32, target)
    if target.is_half:
        return f"narrow<{target.short}>({conversion(value, source, DType.F32)})"
    if target is source:
        return value
    if target is DType.BOOL:
        return f"({value} != 0)"
    if source.is_float and target.is_unsigned and target is not DType.U8:  # negative numbers wrap around
        return f"({value} < 0 ? {c_type(target)}({c_type(DType.I64)}({value})) : {c_type(target)}({value}))"
    return f"{c_type(target)}({value})"


def call(op: str, dtype: DType, args: list[str]) -> str:
    """`op` on operands of one type, as C++ text."""
    if dtype is DType.BOOL and op in _BOOLEAN:
        return f"({args[0]} {_BOOLEAN[op]} {args[1]})"
    if op in _WRAPPING and dtype in _UNSIGNED:
        unsigned = _UNSIGNED[dtype]
        symbol = _INFIX.get(op, "<<")
        return f"{c_type(dtype)}({unsigned}({args[0]}) {symbol} {unsigned}({args[1]}))"
    if op in _INFIX:
        text = f"({args[0]} {_INFIX[op]} {args[1]})"
        computed = dtype in (DType.I16, DType.I8, DType.U16, DType.U8) and op in (
            "and",
            "or",
            "xor",
            "shr",
            "add",
            "sub",
            "mul",
        )
        return f"{c_type(dtype)}{text}" if computed else text
    if op == "shl":
        return f"{c_type(dtype)}({args[0]} << {args[1]})"
    if op in _FUNCTIONS:
        return f"{_FUNCTIONS[op]}{'f' if dtype is DType.F32 else ''}({', '.join(args)})"
    return _SPECIAL[op](dtype, args)


def _typed(name: str) -> Callable[[DType, list[str]], str]:
    return lambda dtype, args: f"{name}<{c_type(dtype)}>({', '.join(args)})"


def _extreme(name: str) -> Callable[[DType, list[str]], str]:
    """Floats have a function of their own; of the others, two types may meet that are the same in an expression."""
    return lambda dtype, args: (
        f"{name}({args[0]}, {args[1]})" if dtype is DType.F32 else _typed(name)(dtype, args)
    )


def _absolute(dtype: DType, args: list[str]) -> str:
    if dtype.is_float:
        return f"fabs{'f' if dtype is DType.F32 else ''}({args[0]})"
    if dtype.is_unsigned or dtype is DType.BOOL:
        return args[0]
    return f"({args[0]} < 0 ? {call('neg', dtype, args)} : {args[0]})"


def _negated(dtype: DType, args: list[str]) -> str:
    if dtype.is_float:
        return f"(-{args[0]})"
    return call("sub", dtype, [f"{c_type(dtype)}(0)", args[0]])


def _inverted(dtype: DType, args: list[str]) -> str:
    return f"(!{args[0]})" if dtype is DType.BOOL else f"{c_type(dtype)}(~{args[0]})"


def _floor_pow2(dtype: DType, args: list[str]) -> str:
    if dtype is DType.F64:
        return f"__longlong_as_double(__double_as_longlong({args[0]}) & 0xfff0000000000000LL)"
    return f"__int_as_float(__float_as_int({args[0]}) & 0xff800000)"


_SPECIAL: dict[str, Callable[[DType, list[str]], str]] = {
    "min": _extreme("minimum"),
    "max": _extreme("maximum"),
    "floordiv": _typed("floor_div"),
    "mod": _typed("floor_mod"),
    "abs": _absolute,
    "neg": _negated,
    "not": _inverted,
    "exp2_nonpositive": lambda dtype, args: f"{'power_of_two' if dtype is DType.F32 else 'exp2'}({args[0]})",
    "exp2_rough": lambda dtype, args: f"{'power_of_two' if dtype is DType.F32 else 'exp2'}({args[0]})",
    "floor_pow2": _floor_pow2,
    "dot4": lambda dtype, args: f"dot4({', '.join(args)})",
}
