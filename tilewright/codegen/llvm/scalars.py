"""The scalar functions of `te.scalars` that are instructions, on scalars and vectors alike, and conversions.

The elementary functions (exp, tanh, ...) are in `math`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from llvmlite import ir

from tilewright import te
from tilewright.codegen.llvm.math.exponential import exp2_nonpositive, exp2_rough
from tilewright.codegen.llvm.math.values import Emit, MathContext, Real
from tilewright.codegen.llvm.types import (
    BFLOAT,
    I1,
    I8,
    I16,
    I32,
    I64,
    Typed,
    element_type,
    like,
    number,
    repeated,
)
from tilewright.dtypes import DType
from tilewright.errors import CodegenError
from tilewright.hw import CpuMachine


@dataclass(frozen=True)
class ScalarContext:
    builder: ir.IRBuilder
    dtype: DType  # of the operands
    flags: tuple[str, ...]  # fast-math flags that the numerics allow
    machine: CpuMachine


Emitter = Callable[..., ir.Value]


def constant(expr: te.Const) -> int | float | bool:
    if expr.dtype is DType.BF16:
        import numpy as np

        return int(np.asarray(expr.value, expr.dtype.numpy).view(np.uint16))
    return expr.value


def _number(value: ir.Value, wanted: float) -> ir.Constant:
    """A constant of the type of `value`."""
    if isinstance(value.type, ir.VectorType):
        return repeated(value.type.element, wanted, value.type.count)
    return number(value.type, wanted)


def _is_number(value: ir.Value) -> bool:
    """Whether it is known when the code is written, and no NaN."""
    if not isinstance(value, ir.Constant):
        return False
    if isinstance(value.type, ir.VectorType):
        return isinstance(value.constant, (list, tuple)) and all(map(_is_number, value.constant))
    return isinstance(value.constant, float) and not math.isnan(value.constant)


def _function(
    builder: ir.IRBuilder, name: str, result: ir.Type, *args: ir.Value, flags: tuple[str, ...] = ()
) -> ir.Value:
    function = builder.module.globals.get(name) or ir.Function(
        builder.module, ir.FunctionType(result, [arg.type for arg in args]), name
    )
    return builder.call(function, args, fastmath=flags)


def _intrinsic(builder: ir.IRBuilder, name: str, *args: ir.Value, flags: tuple[str, ...] = ()) -> ir.Value:
    kind = args[0].type
    element = kind.element if isinstance(kind, ir.VectorType) else kind
    short = {"float": "f32", "double": "f64"}.get(str(element), str(element))
    full = f"llvm.{name}.v{kind.count}{short}" if isinstance(kind, ir.VectorType) else f"llvm.{name}.{short}"
    return _function(builder, full, kind, *args, flags=flags)


# -- arithmetic -------------------------------------------------------------------------------------------------------


def _arithmetic(name: str) -> Emitter:
    def emit(context: ScalarContext, a: ir.Value, b: ir.Value) -> ir.Value:
        if context.dtype.is_float:
            return getattr(context.builder, "f" + name)(a, b, flags=context.flags)
        if context.dtype is DType.BOOL:  # as torch: sum of bools is "or", product is "and"
            return context.builder.or_(a, b) if name == "add" else context.builder.and_(a, b)
        return getattr(context.builder, name)(a, b)

    return emit


def _neg(context: ScalarContext, a: ir.Value) -> ir.Value:
    return context.builder.fneg(a) if context.dtype.is_float else context.builder.neg(a)


def _abs(context: ScalarContext, a: ir.Value) -> ir.Value:
    if context.dtype.is_float:
        return _intrinsic(context.builder, "fabs", a)
    if context.dtype.is_unsigned or context.dtype is DType.BOOL:
        return a
    negative = context.builder.icmp_signed("<", a, _number(a, 0))
    return context.builder.select(negative, context.builder.neg(a), a)


def _extreme(comparison: str) -> Emitter:
    """min and max; a NaN in either operand is the result."""

    def emit(context: ScalarContext, a: ir.Value, b: ir.Value) -> ir.Value:
        builder = context.builder
        if context.dtype.is_float and _is_number(b):
            # One instruction: where a is NaN the comparison is false, and a is taken.
            return builder.select(_compared(context, comparison, b, a), b, a)
        if context.dtype.is_float and "nsz" in context.flags:
            # Three instructions, of which a chain of them waits for two; with signs of zero it would be six.
            return _intrinsic(builder, "maximum" if comparison == ">" else "minimum", b, a, flags=("nsz",))
        better = _compared(context, comparison, a, b)
        best = builder.select(better, a, b)
        if not context.dtype.is_float:
            return best
        # The comparison is false where b is NaN, and b is taken; where a is NaN it must be taken explicitly.
        return builder.select(builder.fcmp_unordered("uno", a, a), a, best)

    return emit


def _floor_division(context: ScalarContext, a: ir.Value, b: ir.Value) -> tuple[ir.Value, ir.Value]:
    """(quotient, remainder), rounded towards minus infinity. Division by zero does not trap: the quotient is 0 and the
    remainder the dividend."""
    builder = context.builder
    zero, one = _number(a, 0), _number(a, 1)
    divisor_is_zero = builder.icmp_signed("==", b, zero)
    safe = builder.select(divisor_is_zero, one, b)
    if context.dtype.is_unsigned:
        quotient, remainder = builder.udiv(a, safe), builder.urem(a, safe)
    else:
        # The most negative number over -1 overflows and traps: negation wraps around instead.
        minus_one = _number(a, -1)
        by_minus_one = builder.icmp_signed("==", safe, minus_one)
        divisor = builder.select(by_minus_one, one, safe)
        quotient, remainder = builder.sdiv(a, divisor), builder.srem(a, divisor)
        quotient = builder.select(by_minus_one, builder.neg(a), quotient)
        signs_differ = builder.icmp_signed("<", builder.xor(remainder, divisor), zero)
        adjust = builder.and_(signs_differ, builder.icmp_signed("!=", remainder, zero))
        quotient = builder.select(adjust, builder.sub(quotient, one), quotient)
        remainder = builder.select(adjust, builder.add(remainder, divisor), remainder)
    return (
        builder.select(divisor_is_zero, zero, quotient),
        builder.select(divisor_is_zero, a, remainder),
    )


def _floordiv(context: ScalarContext, a: ir.Value, b: ir.Value) -> ir.Value:
    return _floor_division(context, a, b)[0]


def _mod(context: ScalarContext, a: ir.Value, b: ir.Value) -> ir.Value:
    return _floor_division(context, a, b)[1]


def _div(context: ScalarContext, a: ir.Value, b: ir.Value) -> ir.Value:
    return context.builder.fdiv(a, b, flags=context.flags)


def _fma(context: ScalarContext, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    # fmuladd is fused exactly where the machine can; fma would call a library function where it cannot.
    return _intrinsic(context.builder, "fma" if context.machine.has_fma else "fmuladd", a, b, c)


def _power_of_two(function: Callable[[Real], Real]) -> Emitter:
    def emit(context: ScalarContext, x: ir.Value) -> ir.Value:
        machine = context.machine
        can = MathContext(
            has_fma=machine.has_fma,
            has_scaling="avx512dq" in machine.features,
            prefers_tables=machine.throughput.fmas <= 1,
        )
        return function(Real(Emit(context.builder, x.type, can), x)).value

    return emit


# -- four bytes at a time ---------------------------------------------------------------------------------------------

_PAIRS_X86 = {
    4: ("sse2", "sse2.pmadd.wd"),
    8: ("avx2", "avx2.pmadd.wd"),
    16: ("avx512bw", "avx512.pmaddw.d.512"),
}


def _dot4(context: ScalarContext, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    builder, machine = context.builder, context.machine
    lanes = a.type.count if isinstance(a.type, ir.VectorType) else 1
    x86 = machine.triple.startswith("x86_64")
    if lanes in (4, 8, 16) and 4 * lanes <= machine.dot4_bytes:
        if x86:
            return _function(builder, f"llvm.x86.avx512.vpdpbusd.{32 * lanes}", c.type, c, a, b)
        quads = ir.VectorType(I8, 16)
        bytes_of = [builder.bitcast(x, quads) for x in (a, b)]
        return _function(builder, "llvm.aarch64.neon.usdot.v4i32.v16i8", c.type, c, *bytes_of)
    feature, name = _PAIRS_X86.get(lanes, ("", ""))
    if x86 and feature in machine.features:
        return _dot4_of_pairs(context, f"llvm.x86.{name}", a, b, c)
    return _dot4_of_bytes(context, a, b, c)


def _dot4_of_pairs(context: ScalarContext, name: str, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """The even and the odd bytes as 16-bit numbers, whose products are summed in pairs: exact, as no 8-bit
    FMA of the older instruction sets is."""
    builder = context.builder
    halves = ir.VectorType(I16, 2 * a.type.count)
    unsigned, signed = builder.bitcast(a, halves), builder.bitcast(b, halves)
    eight = _number(unsigned, 8)
    even = _function(
        builder,
        name,
        c.type,
        builder.and_(unsigned, _number(unsigned, 255)),
        builder.ashr(builder.shl(signed, eight), eight),
    )
    odd = _function(builder, name, c.type, builder.lshr(unsigned, eight), builder.ashr(signed, eight))
    return builder.add(c, builder.add(even, odd))


def _dot4_of_bytes(context: ScalarContext, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    builder, top = context.builder, _number(a, 24)
    for shift in (24, 16, 8, 0):
        left = _number(a, shift)
        unsigned, signed = (builder.shl(x, left) for x in (a, b))
        c = builder.add(c, builder.mul(builder.lshr(unsigned, top), builder.ashr(signed, top)))
    return c


def _rounding(name: str) -> Emitter:
    def emit(context: ScalarContext, a: ir.Value) -> ir.Value:
        return _intrinsic(context.builder, name, a)

    return emit


def _floor_pow2(context: ScalarContext, a: ir.Value) -> ir.Value:
    """The sign and the exponent, without the fraction."""
    builder, double = context.builder, context.dtype is DType.F64
    word = like(a, ir.IntType(64) if double else I32)
    kept = -(1 << 52) if double else -(1 << 23)
    bits = builder.bitcast(a, word)
    return builder.bitcast(builder.and_(bits, _number(bits, kept)), a.type)


# -- comparisons and bits ---------------------------------------------------------------------------------------------


def _compared(context: ScalarContext, sign: str, a: ir.Value, b: ir.Value) -> ir.Value:
    if context.dtype.is_float:
        # Ordered comparisons are false on NaN; != is true on NaN.
        compare = context.builder.fcmp_unordered if sign == "!=" else context.builder.fcmp_ordered
        return compare(sign, a, b)
    unsigned = context.dtype.is_unsigned or context.dtype is DType.BOOL
    return (context.builder.icmp_unsigned if unsigned else context.builder.icmp_signed)(sign, a, b)


def _comparison(sign: str) -> Emitter:
    return lambda context, a, b: _compared(context, sign, a, b)


def _bits(name: str) -> Emitter:
    return lambda context, a, b: getattr(context.builder, name)(a, b)


def _shift(context: ScalarContext, a: ir.Value, b: ir.Value, *, left: bool) -> ir.Value:
    """A shift by the width or more gives what an infinitely wide integer would."""
    builder = context.builder
    width = context.dtype.bytes * 8
    arithmetic = not left and not context.dtype.is_unsigned
    limit = _number(b, width - 1)
    too_far = builder.icmp_unsigned(">", b, limit)
    amount = builder.select(too_far, limit if arithmetic else _number(b, 0), b)
    shifted = (
        builder.shl(a, amount) if left else builder.ashr(a, amount) if arithmetic else builder.lshr(a, amount)
    )
    return shifted if arithmetic else builder.select(too_far, _number(a, 0), shifted)


EMITTERS: dict[str, Emitter] = {
    "add": _arithmetic("add"),
    "sub": _arithmetic("sub"),
    "mul": _arithmetic("mul"),
    "min": _extreme("<"),
    "max": _extreme(">"),
    "neg": _neg,
    "abs": _abs,
    "floordiv": _floordiv,
    "mod": _mod,
    "div": _div,
    "fma": _fma,
    "dot4": _dot4,
    "exp2_nonpositive": _power_of_two(exp2_nonpositive),
    "exp2_rough": _power_of_two(exp2_rough),
    "sqrt": _rounding("sqrt"),
    "floor_pow2": _floor_pow2,
    "floor": _rounding("floor"),
    "ceil": _rounding("ceil"),
    "trunc": _rounding("trunc"),
    "round": _rounding("rint"),
    "copysign": lambda context, a, b: _intrinsic(context.builder, "copysign", a, b),
    "eq": _comparison("=="),
    "ne": _comparison("!="),
    "lt": _comparison("<"),
    "le": _comparison("<="),
    "and": _bits("and_"),
    "or": _bits("or_"),
    "xor": _bits("xor"),
    "not": lambda context, a: context.builder.not_(a),
    "shl": lambda context, a, b: _shift(context, a, b, left=True),
    "shr": lambda context, a, b: _shift(context, a, b, left=False),
}


# -- conversions ------------------------------------------------------------------------------------------------------


def from_memory(builder: ir.IRBuilder, raw: ir.Value, dtype: DType) -> ir.Value:
    return builder.icmp_unsigned("!=", raw, _number(raw, 0)) if dtype is DType.BOOL else raw


def to_memory(builder: ir.IRBuilder, value: ir.Value, dtype: DType) -> ir.Value:
    return builder.zext(value, like(value, I8)) if dtype is DType.BOOL else value


def convert(
    builder: ir.IRBuilder, typed: Typed, dtype: DType, machine: CpuMachine, *, exact: bool = True
) -> Typed:
    """Convert as C does; see `te.Cast`. If not `exact`, subnormal bfloat16 numbers may become 0."""
    if typed.dtype is dtype:
        return typed
    value = _converted(builder, typed.value, typed.dtype, dtype, machine, exact)
    return Typed(value, dtype, typed.lanes)


def _converted(
    builder: ir.IRBuilder, value: ir.Value, source: DType, to: DType, machine: CpuMachine, exact: bool
) -> ir.Value:
    if source.is_half:
        wide = _widen(builder, value, source, machine)
        return wide if to is DType.F32 else _converted(builder, wide, DType.F32, to, machine, exact)
    if to.is_half:
        # Through f32: exact for every integer that 16 bits can tell apart; f64 rounds twice, in the last place only.
        single = (
            value if source is DType.F32 else _converted(builder, value, source, DType.F32, machine, exact)
        )
        return _narrow(builder, single, to, machine, exact)
    kind = like(value, element_type(to))
    if to is DType.BOOL:
        zero = _number(value, 0)
        return (
            builder.fcmp_unordered("!=", value, zero)
            if source.is_float
            else builder.icmp_signed("!=", value, zero)
        )
    if source.is_float and to.is_float:
        return builder.fpext(value, kind) if to.bytes > source.bytes else builder.fptrunc(value, kind)
    if source.is_float:
        return _float_to_integer(builder, value, to)
    unsigned = source.is_unsigned or source is DType.BOOL
    if to.is_float:
        return builder.uitofp(value, kind) if unsigned else builder.sitofp(value, kind)
    if source is DType.BOOL or to.bytes > source.bytes:
        return builder.zext(value, kind) if unsigned else builder.sext(value, kind)
    return value if to.bytes == source.bytes else builder.trunc(value, kind)


def _float_to_integer(builder: ir.IRBuilder, value: ir.Value, to: DType) -> ir.Value:
    """Truncation through a wider integer, as the frameworks' x86 code does it; out of range is what then remains."""
    if to is DType.I64:
        return builder.fptosi(value, like(value, element_type(to)))
    if to is DType.U64:
        return _float_to_u64(builder, value)
    if to is DType.U32:
        return builder.trunc(builder.fptosi(value, like(value, I64)), like(value, I32))
    wide = builder.fptosi(value, like(value, I32))
    return wide if to is DType.I32 else builder.trunc(wide, like(value, element_type(to)))


def _float_to_u64(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Through i64, so that negative numbers wrap around; `fptoui` of one is whatever the processor does. Numbers from
    2**63 on are reduced by 2**63, which is exact, and get it back as the top bit."""
    kind = like(value, I64)
    none = ir.Constant(kind, None)
    limit = _number(value, 2.0**63)
    large = builder.fcmp_ordered(">=", value, limit)
    within = builder.fptosi(builder.select(large, builder.fsub(value, limit), value), kind)
    return builder.xor(within, builder.select(large, _number(none, -(2**63)), _number(none, 0)))


def _widen(builder: ir.IRBuilder, value: ir.Value, source: DType, machine: CpuMachine) -> ir.Value:
    single = like(value, ir.FloatType())
    if source is DType.F16:
        _needs_half_conversion(machine)
        return builder.fpext(value, single)
    bits = builder.shl(
        builder.zext(value, like(value, I32)), _number(ir.Constant(like(value, I32), None), 16)
    )
    return builder.bitcast(bits, single)


def _narrow(builder: ir.IRBuilder, value: ir.Value, to: DType, machine: CpuMachine, exact: bool) -> ir.Value:
    if to is DType.F16:
        _needs_half_conversion(machine)
        return builder.fptrunc(value, like(value, ir.HalfType()))
    if not exact and "avx512bf16" in machine.features:
        # One instruction instead of nine. It takes subnormal numbers for 0.
        return builder.bitcast(builder.fptrunc(value, like(value, BFLOAT)), like(value, I16))
    # bfloat16 is the upper half of an f32, rounded to nearest, ties to even; a NaN stays one (and quiet).
    words = like(value, I32)
    bits = builder.bitcast(value, words)
    lowest = builder.and_(builder.lshr(bits, _number(bits, 16)), _number(bits, 1))
    rounded = builder.add(bits, builder.add(lowest, _number(bits, 0x7FFF)))
    quiet = builder.or_(bits, _number(bits, 0x400000))
    is_nan = builder.fcmp_unordered("uno", value, value)
    chosen = builder.select(is_nan, quiet, rounded)
    return builder.trunc(builder.lshr(chosen, _number(bits, 16)), like(value, I16))


def _needs_half_conversion(machine: CpuMachine) -> None:
    if machine.triple.startswith("x86_64") and "f16c" not in machine.features:
        raise CodegenError(
            "float16 needs the processor's f16c instructions, which this target does not have",
            remedy="use float32 or bfloat16 on this machine",
        )


__all__ = ["EMITTERS", "I1", "ScalarContext", "constant", "convert", "from_memory", "to_memory"]
