"""log, log2 and log1p: x = 2^e (1 + f) with 1 + f between sqrt(1/2) and sqrt(2)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from . import coefficients as table
from .exponential import ln2, power_of_two
from .values import Int, Pair, Real, fast_two_sum, fma, horner, two_product, two_sum

SQRT_HALF_BITS_F32 = 0x3F35_04F3
SQRT_HALF_BITS_F64 = 0x3FE6_A09E_667F_3BCD

# log2(e) in two parts
LOG2_E_F32 = (float.fromhex("0x1.715476p+0"), float.fromhex("0x1.4ae0cp-26"))
LOG2_E_F64 = (float.fromhex("0x1.71547652b82fep+0"), float.fromhex("0x1.777d0ffda0d24p-56"))


@dataclass(frozen=True)
class Split:
    """x = 2^exponent (1 + f), exactly."""

    exponent: Int
    f: Real


def split(x: Real) -> Split:
    """Split a positive normal number. For other numbers the result is undefined, and the caller replaces it."""
    emit = x.emit
    bits = x.as_bits()
    exponent = (bits - (SQRT_HALF_BITS_F64 if emit.double else SQRT_HALF_BITS_F32)) >> emit.mantissa
    return Split(exponent, (bits - (exponent << emit.mantissa)).as_real() - 1.0)


def split_any(x: Real) -> tuple[Real, Real]:
    """exponent (as a real) and f of any positive number: subnormal ones are scaled up first."""
    emit = x.emit
    smallest_normal = 2.0 ** (1 - emit.bias)
    up = emit.mantissa + 2
    subnormal = x < smallest_normal
    parts = split(subnormal.select(x * 2.0**up, x))
    exponent = parts.exponent.to_real()
    return subnormal.select(exponent - float(up), exponent), parts.f


def log_of_rest(f: Real) -> Pair:
    """log(1 + f) as an unevaluated sum, |lo| < |hi| / 4.

    float: f - f^2/2 + f^3 q(f), q of degree 7 (error 2^-27).
    double: with s = f / (2 + f), 2 atanh(s) = f - f^2/2 + s (f^2/2 + s^2 q(s^2)), q of degree 6 (error 2^-59): a
    division, but half the degree, and s multiplies only what is small compared with f.
    """
    emit = f.emit
    if not emit.double:
        return Pair(f, f * f * fma(f, horner(f, table.LOG_F32), -0.5))
    half_square = f * f * 0.5
    s = f / (f + 2.0)
    z = s * s
    hi = f - half_square
    return Pair(hi, fma(s, fma(z, horner(z, table.LOG_F64), half_square), (f - hi) - half_square))


def with_poles(y: Real, x: Real) -> Real:
    """The log of x, which is y for positive numbers: -inf at 0, NaN below, inf and NaN as they are."""
    y = (x < math.inf).select(y, x)
    return (x <= 0.0).select((x < 0.0).select(math.nan, -math.inf), y)


def log(x: Real) -> Real:
    """e ln 2 + log(1 + f), ln 2 in two parts."""
    exponent, f = split_any(x)
    rest = log_of_rest(f)
    high, low = ln2(x.emit)
    return with_poles(fma(exponent, high, rest.hi + fma(exponent, low, rest.lo)), x)


def log2(x: Real) -> Real:
    """e + log(1 + f) log2(e), the product in twice the precision since it is the whole result near 1."""
    exponent, f = split_any(x)
    rest = log_of_rest(f)
    factor, factor_rest = LOG2_E_F64 if x.emit.double else LOG2_E_F32
    product = two_product(rest.hi, factor)
    total = fast_two_sum(exponent, product.hi)
    small = fma(rest.lo, factor, fma(rest.hi, factor_rest, product.lo))
    return with_poles(total.hi + (total.lo + small), x)


def log1p(x: Real) -> Real:
    """1 + x = u + c exactly; u = 2^e (1 + f0), and f = f0 + 2^-e c, which is x itself where e is 0.

    From 2^60 on c is negligible compared with u, so that 2^-e need not follow e to where it would be subnormal.
    """
    emit = x.emit
    total = two_sum(1.0, x)
    parts = split(total.hi)
    exponent = parts.exponent
    inverse = power_of_two(emit.integer(emit.bias) - exponent)
    f = fma(total.lo, (x < 2.0**60).select(inverse, 0.0), parts.f)
    rest = log_of_rest(f)
    high, low = ln2(emit)
    e = exponent.to_real()
    y = fma(e, high, rest.hi + fma(e, low, rest.lo))
    y = (x < math.inf).select(y.copysign(x), x)
    return (x <= -1.0).select((x < -1.0).select(math.nan, -math.inf), y)
