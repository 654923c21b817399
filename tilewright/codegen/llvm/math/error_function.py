"""erf."""

from __future__ import annotations

import math

from . import coefficients as table
from .exponential import LOG2_E, exp, ln2, power_of_two
from .values import MAGIC_F32, Real, careful_fma, fma, horner, two_product

# 2 / sqrt(pi) in two floats
SLOPE = float.fromhex("0x1.20dd76p+0")
SLOPE_REST = 2 / math.sqrt(math.pi) - SLOPE


def erf(x: Real) -> Real:
    """Two methods: few instructions for float, accuracy for double."""
    return _erf_double(x) if x.emit.double else _erf_float(x)


def _erf_float(x: Real) -> Real:
    """1 - e^-v with v = -log(1 - erf|x|) = |x| (2/sqrt(pi) + |x| q(|x|)), q of degree 7 (error 2^-27).

    v is smooth from 0 to where erf rounds to 1, and proportional to x near 0: with expm1's formula for 1 - e^-v one
    polynomial serves the whole range, and an error of v is never magnified.
    """
    a = abs(x).at_most(4.0)
    v = careful_fma(a, SLOPE, a * fma(a, horner(a, table.ERF_F32), SLOPE_REST))
    shifted = fma(v, -LOG2_E, MAGIC_F32 + 127)
    n = shifted - (MAGIC_F32 + 127)
    high, low = ln2(x.emit)
    r = fma(n, low, fma(n, high, v))
    power = power_of_two(shifted.as_bits())
    alternating = [c if k % 2 else -c for k, c in enumerate(table.EXPM1_F32)]
    rest = fma(r * r, horner(r, alternating), r)
    return fma(power, rest, 1.0 - power).copysign(x)


def _erf_double(x: Real) -> Real:
    """Up to 1: x + x q(x^2), q of degree 12 (error 2^-56). Beyond: 1 - e^(-x^2) g, where g = e^(x^2) erfc(x) is a
    polynomial of degree 12 (2^-60) in (x - 2.5) / (x + 2.5), and x^2 is taken in twice the precision."""
    a = abs(x).at_most(6.0)
    z = a * a
    near = fma(a, horner(z, table.ERF_F64), a)
    square = two_product(a, a)
    g = horner((a - 2.5) / (a + 2.5), table.ERFCX_F64) * exp(-square.hi)
    far = 1.0 - fma(g, -square.lo, g)
    return (a < 1.0).select(near, far).copysign(x)
