"""exp, exp2, expm1 and tanh: 2^n e^r with |r| <= ln(2) / 2, and a polynomial for e^r."""

from __future__ import annotations

import math
from dataclasses import dataclass

from . import coefficients as table
from .values import Emit, Int, Real, fma, horner, magic

LOG2_E = math.log2(math.e)
TANH_SPLIT = 0.55

# ln 2 in two parts. Times an integer of 8 bits (float) or 11 bits (double) the first is exact, with or without FMA.
LN2_F32 = (float.fromhex("0x1.62e4p-1"), float.fromhex("0x1.7f7d1cp-20"))
LN2_F64 = (float.fromhex("0x1.62e42fefa3800p-1"), float.fromhex("0x1.ef35793c76730p-45"))


def ln2(emit: Emit) -> tuple[float, float]:
    return LN2_F64 if emit.double else LN2_F32


@dataclass(frozen=True)
class ReducedArgument:
    """x = n ln 2 + r + error; `shifted` is an integer whose low bits hold n + offset."""

    r: Real
    error: Real  # of r, to be added to it
    shifted: Int


def reduce(x: Real, offset: int) -> ReducedArgument:
    emit = x.emit
    shift = magic(emit) + offset
    shifted = fma(x, LOG2_E, shift)
    n = shifted - shift
    high, low = ln2(emit)
    first = fma(n, -high, x)
    r = fma(n, -low, first)
    return ReducedArgument(r, fma(n, -low, first - r), shifted.as_bits())


def power_of_two(field: Int) -> Real:
    """2^(field - bias), the field being the low bits of an integer."""
    return (field << field.emit.mantissa).as_real()


def scale(x: Real, shifted: Int) -> Real:
    """x 2^n where `shifted` holds n + 2 bias: in two steps, so that it may underflow gradually, or overflow."""
    half = shifted >> 1
    return x * power_of_two(half) * power_of_two(shifted - half)


def exp_rest(r: Real) -> Real:
    """e^r for |r| <= ln(2) / 2: 1 + r + r^2 q(r), q of degree 4 (float; error 2^-28) or 9 (double; 2^-57)."""
    return horner(r, (1.0, 1.0, *(table.EXP_F64 if r.emit.double else table.EXP_F32)))


def exp(x: Real) -> Real:
    """Cody and Waite's reduction, then `exp_rest`; at the upper end of the clamp the last product gives infinity. Where
    the result is 0 it is not computed: processors take a hundred cycles for a product that underflows, and a softmax
    under a mask is full of them."""
    emit = x.emit
    vanishes = x < (-745.2 if emit.double else -103.98)
    x = vanishes.select(0.0, x).at_most(710.0 if emit.double else 89.0)
    if emit.scales:  # the same bits: both round once where the result is subnormal
        n = fma(x, LOG2_E, magic(emit)) - magic(emit)
        high, low = ln2(emit)
        r = fma(n, -low, fma(n, -high, x))
        return vanishes.select(0.0, emit.scaled(exp_rest(r), n))
    reduced = reduce(x, 2 * emit.bias)
    return vanishes.select(0.0, scale(exp_rest(reduced.r), reduced.shifted))


def exp2(x: Real) -> Real:
    """The fraction is exact; 1 + f q(f), q of degree 5 (float; error 2^-26) or 11 (double; 2^-55)."""
    emit = x.emit
    x = x.at_least(-1076.0 if emit.double else -151.0).at_most(1025.0 if emit.double else 129.0)
    shift = magic(emit) + 2 * emit.bias
    shifted = x + shift
    q = table.EXP2_F64 if emit.double else table.EXP2_F32
    return scale(horner(x - (shifted - shift), (1.0, *q)), shifted.as_bits())


def exp2_nonpositive(x: Real) -> Real:
    """`exp2` where x <= 0 is known and what a sum that has a 1 in it does not notice may be flushed: results below the
    smallest normal number are 0. Two thirds of the instructions, and half where the machine scales by itself."""
    emit = x.emit
    if emit.scales:
        fraction = emit.fraction(x)
        power = emit.scaled(horner(fraction, (1.0, *table.EXP2_WEIGHT_F32)), x)
        return (x < 1.0 - emit.bias).select(0.0, power)
    x = x.at_least(float(-emit.bias))
    shift = magic(emit) + emit.bias
    shifted = x + shift
    q = table.EXP2_F64 if emit.double else table.EXP2_F32
    return horner(x - (shifted - shift), (1.0, *q)) * power_of_two(shifted.as_bits())


def exp2_rough(x: Real) -> Real:
    """`exp2_nonpositive` of any argument, to 20 bits at least: infinity above the finite numbers. Where a core
    multiplies one vector at a time, three of five FMAs become shuffles of tables in registers: in each 16th of
    an octave 2^r is a + b r + c r^2 with numbers of its own."""
    emit = x.emit
    if not emit.scales:
        return exp2_nonpositive(x.at_most(float(emit.bias + 1)))
    if not emit.context.prefers_tables:
        return exp2_nonpositive(x)
    bits = 4
    r, step = emit.fraction(x, bits), emit.floor_bits(x, bits)
    octave = [2.0 ** (n / 16) for n in range(16)]
    a, b, c = (emit.looked_up([number * start for start in octave], step) for number in table.EXP2_ROUGH)
    return (x < 1.0 - emit.bias).select(0.0, emit.scaled(fma(fma(c, r, b), r, a), x))


def expm1(x: Real) -> Real:
    """2^n (e^r - 1) + (2^n - 1), both doubled at the end because 2^n itself may overflow.

    e^r - 1 = r + r^2 q(r), q of degree 5 (float; error 2^-28) or 10 (double; 2^-59), and is all there is where n is 0:
    small arguments keep their relative accuracy. The smallest are their own result, since halving a subnormal would
    cost its last bit, and -0 its sign.
    """
    emit = x.emit
    tiny = 2.0**-54 if emit.double else 2.0**-25
    clamped = x.at_least(-38.0 if emit.double else -18.0).at_most(710.0 if emit.double else 89.0)
    reduced = reduce(clamped, emit.bias - 1)
    r, half_power = reduced.r, power_of_two(reduced.shifted)
    square_term = fma(r * r, horner(r, table.EXPM1_F64 if emit.double else table.EXPM1_F32), reduced.error)
    half = fma(half_power, square_term, fma(half_power, r, half_power - 0.5))
    return (abs(x) < tiny).select(x, half + half)


def tanh(x: Real) -> Real:
    """Up to 0.55: x + x^3 p(x^2), p of degree 4 (float; error 2^-29) or 10 (double; 2^-60). Beyond: 1 - 2 / (e^2x + 1).

    The clamp lies where tanh rounds to 1.
    """
    emit = x.emit
    a = abs(x)
    z = a * a
    near = fma(a * z, horner(z, table.TANH_F64 if emit.double else table.TANH_F32), a)
    reduced = reduce((a + a).at_most(40.0 if emit.double else 19.0), emit.bias)
    far = 1.0 - 2.0 / fma(exp_rest(reduced.r), power_of_two(reduced.shifted), 1.0)
    return (a < TANH_SPLIT).select(near, far).copysign(x)
