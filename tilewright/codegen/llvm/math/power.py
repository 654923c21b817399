"""pow, rsqrt and fmod."""

from __future__ import annotations

import math
from collections.abc import Sequence

import llvmlite.ir as ir

from . import coefficients as table
from .exponential import LN2_F64, LOG2_E, power_of_two, scale
from .logarithm import split, split_any
from .values import (
    MAGIC_F64,
    Emit,
    Mask,
    Pair,
    Real,
    fast_two_sum,
    fma,
    horner,
    pair_product,
    two_product,
)

TWO_THIRDS = (2 / 3, float.fromhex("0x1.5555555555555p-55"))


def rsqrt(x: Real) -> Real:
    """1 / sqrt(x): two correctly rounded steps."""
    return 1.0 / x.sqrt()


def pow(x: Real, y: Real) -> Real:
    """e^(y log|x|), with the sign and the special cases of C99. An internal function of the module."""
    emit = x.emit

    def body(builder: ir.IRBuilder, args: Sequence[ir.Argument]) -> None:
        here = emit.at(builder)
        x, y = Real(here, args[0]), Real(here, args[1])
        if here.double:
            magnitude = _pow_double(abs(x), y)
        else:
            magnitude = here.narrow(_pow_float(here.widen(abs(x)), here.widen(y)))
        builder.ret(_with_special_cases(magnitude, x, y).value)

    function = emit.helper(f"pow.{emit.suffix}", emit.kind, [emit.kind] * 2, (), body)
    return Real(emit, emit.builder.call(function, [x.value, y.value]))


def _pow_float(x: Real, y: Real) -> Real:
    """pow of floats, computed in double: 2^(y log2 x). log2 x = e + s p(s^2), s = f / (2 + f), p of degree 5 (error
    2^-45); 2^f is a polynomial of degree 8 (2^-39). The error before the last rounding is below 2^-36, for y log2 x
    below 2^8."""
    parts = split(x)
    s = parts.f / (parts.f + 2.0)
    z = s * s
    log2 = fma(s, horner(z, table.LOG2_POW_F32), parts.exponent.to_real())
    product = (y * log2).at_least(-200.0).at_most(200.0)
    shifted = product + (MAGIC_F64 + 1023)
    fraction = product - (shifted - (MAGIC_F64 + 1023))
    return horner(fraction, table.EXP2_POW_F32) * power_of_two(shifted.as_bits())


def _pow_double(x: Real, y: Real) -> Real:
    """The logarithm and its product with y are pairs: |y log x| may reach 745, so log x needs 65 bits.

    Beyond 2^70, y may be taken for 2^70: for every x but 1 the result has long been 0 or infinite.
    """
    y = y.at_least(-(2.0**70)).at_most(2.0**70)
    log = _log_pair(x)
    product = two_product(y, log.hi)
    return _exp_pair(Pair(product.hi, fma(y, log.lo, product.lo)))


def _log_pair(x: Real) -> Pair:
    """log x = e ln 2 + s (2 + z (2/3 + z q(z))) with s = f / (2 + f), z = s^2, q of degree 8 (error 2^-76).

    Pairs but for z q(z), whose rounding is 2^-65 of the result. x positive.
    """
    emit = x.emit
    exponent, f = split_any(x)
    divisor = fast_two_sum(emit.real(2.0), f)
    quotient = f / divisor.hi
    back = two_product(quotient, divisor.hi)
    remainder = fma(quotient, -divisor.lo, (f - back.hi) - back.lo)
    s = Pair(quotient, remainder / divisor.hi)
    z = pair_product(s, s)
    inner = fast_two_sum(emit.real(TWO_THIRDS[0]), fma(z.hi, horner(z.hi, table.LOG_POW_F64), TWO_THIRDS[1]))
    product = pair_product(z, inner)
    factor = fast_two_sum(emit.real(2.0), product.hi)
    rest = pair_product(s, fast_two_sum(factor.hi, factor.lo + product.lo))
    high, low = LN2_F64
    total = fast_two_sum(exponent * high, rest.hi)
    return fast_two_sum(total.hi, total.lo + fma(exponent, low, rest.lo))


def _exp_pair(x: Pair) -> Real:
    """exp(x), with x.lo and the rounding error of r included as a factor 1 + correction."""
    emit = x.hi.emit
    clamped = x.hi.at_least(-746.0).at_most(710.0)
    shift = MAGIC_F64 + 2 * emit.bias
    shifted = fma(clamped, LOG2_E, shift)
    n = shifted - shift
    high, low = LN2_F64
    r = fast_two_sum(fma(n, -high, clamped), n * -low)
    correction = r.lo + (clamped == x.hi).select(x.lo, 0.0)
    head = fast_two_sum(emit.real(1.0), r.hi)
    tail = fma(r.hi * r.hi, horner(r.hi, table.EXP_F64), head.lo)
    return scale(head.hi + fma(head.hi + tail, correction, tail), shifted.as_bits())


def _with_special_cases(magnitude: Real, x: Real, y: Real) -> Real:
    """pow(x, y) from |x|^y, right for finite y and finite |x| > 0. From the rarest to the strongest rule."""
    ax, ay = abs(x), abs(y)
    integer = _is_integer(ay)
    odd = integer & ~_is_integer(ay * 0.5)
    zero_or_infinite = (ax == 0.0) | (ax == math.inf)
    grows = (ax > 1.0) ^ (y < 0.0)

    result = (zero_or_infinite | (ay == math.inf)).select(grows.select(math.inf, 0.0), magnitude)
    result = (odd & x.sign_bit()).select(-result, result)
    result = ((x < 0.0) & ~integer & ~zero_or_infinite).select(math.nan, result)
    result = (x.is_nan() | y.is_nan()).select(math.nan, result)
    one = (x == 1.0) | (y == 0.0) | ((x == -1.0) & (ay == math.inf))
    return one.select(1.0, result)


def _is_integer(a: Real) -> Mask:
    """Whether a number >= 0 is an integer. Adding 2^mantissa rounds to one; from there on every number is one."""
    unit = 2.0**a.emit.mantissa
    return (a >= unit) | ((a + unit) - unit == a)


def fmod(x: Real, y: Real) -> Real:
    """The exact remainder, with the sign of x: long division of the mantissas, lane by lane, in a helper with a loop.

    Each step takes as many bits as 64-bit integers allow: 40 for float (at most 7 steps), 11 for double (at most 186).
    """
    emit = x.emit
    kind = ir.DoubleType() if emit.double else ir.FloatType()

    def body(builder: ir.IRBuilder, args: Sequence[ir.Argument]) -> None:
        _fmod_scalar(Emit(builder, kind, emit.context), *args)

    function = emit.helper(f"fmod.f{emit.bits}", kind, [kind, kind], ("noinline",), body)
    return emit.each_lane(function, x, y)


def _fmod_scalar(emit: Emit, x: ir.Value, y: ir.Value) -> None:
    build, i64 = emit.builder, ir.IntType(64)
    mantissa, step = emit.mantissa, 64 - (emit.mantissa + 1)
    infinity = ((1 << (emit.bits - 1 - mantissa)) - 1) << mantissa

    def word(value: int) -> ir.Constant:
        return ir.Constant(i64, value)

    def magnitude(value: ir.Value) -> ir.Value:
        bits = build.bitcast(value, emit.int_kind)
        bits = bits if emit.double else build.zext(bits, i64)
        return build.and_(bits, word((1 << (emit.bits - 1)) - 1))

    def decompose(bits: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Exponent and mantissa; of a subnormal, exponent 1 and no implicit bit: the same scale as its neighbours."""
        exponent = build.lshr(bits, word(mantissa))
        fraction = build.and_(bits, word((1 << mantissa) - 1))
        subnormal = build.icmp_unsigned("==", exponent, word(0))
        return (
            build.select(subnormal, word(1), exponent),
            build.select(subnormal, fraction, build.or_(fraction, word(1 << mantissa))),
        )

    ax, ay = magnitude(x), magnitude(y)
    undefined = build.icmp_unsigned("==", ay, word(0))
    undefined = build.or_(undefined, build.icmp_unsigned(">=", ax, word(infinity)))
    undefined = build.or_(undefined, build.icmp_unsigned(">", ay, word(infinity)))
    with build.if_then(undefined, likely=False):
        build.ret(ir.Constant(emit.kind, math.nan))
    with build.if_then(build.icmp_unsigned("<", ax, ay)):
        build.ret(x)

    x_exponent, x_mantissa = decompose(ax)
    y_exponent, y_mantissa = decompose(ay)
    first = build.urem(x_mantissa, y_mantissa)
    distance = build.sub(x_exponent, y_exponent)
    before = build.block
    loop, done = build.append_basic_block("digits"), build.append_basic_block("done")
    build.cbranch(build.icmp_unsigned("==", distance, word(0)), done, loop)

    build.position_at_end(loop)
    remainder, left = build.phi(i64), build.phi(i64)
    count = build.select(build.icmp_unsigned("<", left, word(step)), left, word(step))
    next_remainder = build.urem(build.shl(remainder, count), y_mantissa)
    next_left = build.sub(left, count)
    for phi, start, following in ((remainder, first, next_remainder), (left, distance, next_left)):
        phi.add_incoming(start, before)
        phi.add_incoming(following, loop)
    build.cbranch(build.icmp_unsigned("==", next_left, word(0)), done, loop)

    # remainder * 2^y_exponent as a float: shift its first one to the implicit bit, or as far as subnormals go
    build.position_at_end(done)
    rest = build.phi(i64)
    rest.add_incoming(first, before)
    rest.add_incoming(next_remainder, loop)
    leading_zeros = emit.declare("llvm.ctlz.i64", ir.FunctionType(i64, [i64, ir.IntType(1)]))
    wanted = build.sub(build.call(leading_zeros, [rest, ir.Constant(ir.IntType(1), 0)]), word(63 - mantissa))
    possible = build.sub(y_exponent, word(1))
    shift = build.select(build.icmp_unsigned("<", wanted, possible), wanted, possible)
    exponent = build.shl(build.sub(possible, shift), word(mantissa))
    bits = build.add(build.shl(rest, shift), exponent)
    bits = build.select(build.icmp_unsigned("==", rest, word(0)), word(0), bits)
    bits = bits if emit.double else build.trunc(bits, emit.int_kind)
    result = Real(emit, build.bitcast(bits, emit.kind))
    build.ret(result.copysign(Real(emit, x)).value)
