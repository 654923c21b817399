"""Computes the numbers of `coefficients.py`: `python fit.py` rewrites that file.

Run it after changing a polynomial. The compiler never imports it; it alone needs mpmath.

Every polynomial is a weighted minimax fit: Remez exchange on a Chebyshev grid in 60-digit arithmetic. The weight turns
an error of the polynomial into a relative error of the function it serves, so the number alongside each table is that
function's error from approximation alone, rounded coefficients included. Coefficients are rounded one at a time from
the lowest power, and the rest are fitted again, so that they make up for the rounding.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mpmath as mp  # type: ignore[import-untyped, unused-ignore]

mp.mp.dps = 60
Real = Any  # an mpf
Function = Callable[[Real], Real]

GRID = 500  # points on which the error is looked at
EXCHANGES = 100  # steps of Remez after which the best found is taken


@dataclass(frozen=True)
class Fit:
    """A polynomial in u with `terms` coefficients near `target` for u in `interval`; its error counts by `weight`."""

    name: str
    what: str
    bits: int  # of a coefficient: 24 or 53
    target: Function
    weight: Function
    interval: tuple[Real, Real]
    terms: int


def chebyshev_grid(low: Real, high: Real) -> list[Real]:
    middle, half = (mp.mpf(low) + high) / 2, (mp.mpf(high) - low) / 2
    return [middle + half * mp.cos(mp.pi * (2 * i + 1) / (2 * GRID)) for i in range(GRID)]


def minimax(
    points: list[Real], values: list[Real], weights: list[Real], powers: range
) -> tuple[list[Real], Real]:
    """Coefficients of these powers, and the largest weighted error, which alternates on len(powers) + 1 points."""
    count = len(powers) + 1
    basis = [[w * x**k for k in powers] for x, w in zip(points, weights, strict=True)]
    aims = [w * v for v, w in zip(values, weights, strict=True)]
    reference = [round(i * (len(points) - 1) / (count - 1)) for i in range(count)]
    best: tuple[list[Real], Real] = ([], mp.inf)
    for _ in range(EXCHANGES):
        system = mp.matrix(count, count)
        right = mp.matrix(count, 1)
        for row, index in enumerate(reference):
            for column in range(count - 1):
                system[row, column] = basis[index][column]
            system[row, count - 1] = (-1) ** row
            right[row] = aims[index]
        solution = mp.lu_solve(system, right)
        found, level = list(solution[: count - 1]), abs(solution[count - 1])
        errors = [mp.fdot(row, found) - aim for row, aim in zip(basis, aims, strict=True)]
        worst = max(abs(e) for e in errors)
        if worst < best[1]:
            best = (found, worst)
        if worst <= level * mp.mpf("1.001"):
            break
        reference = _exchange(errors, count)
    return best


def _exchange(errors: list[Real], count: int) -> list[int]:
    """One extremum of each run of equal sign; of too many, the ends with the smaller error are dropped."""
    extrema: list[int] = []
    for index, error in enumerate(errors):
        if extrema and (error > 0) == (errors[extrema[-1]] > 0):
            if abs(error) > abs(errors[extrema[-1]]):
                extrema[-1] = index
        else:
            extrema.append(index)
    while len(extrema) > count:
        extrema.pop(0 if abs(errors[extrema[0]]) < abs(errors[extrema[-1]]) else -1)
    if len(extrema) < count:
        raise ValueError(f"only {len(extrema)} alternations of {count}: the fit ran out of digits")
    return extrema


def rounded(value: Real, bits: int) -> float:
    if bits == 53:
        return float(value)
    # through double: a double rounding only moves a coefficient by a little more than half an ulp
    return float(struct.unpack("f", struct.pack("f", float(value)))[0])


def coefficients(fit: Fit) -> tuple[list[float], Real]:
    points = chebyshev_grid(*fit.interval)
    weights = [abs(fit.weight(x)) for x in points]
    rest = [fit.target(x) for x in points]
    done: list[float] = []
    worst = mp.inf
    for power in range(fit.terms):
        found, _ = minimax(points, rest, weights, range(power, fit.terms))
        done.append(rounded(found[0], fit.bits))
        rest = [r - done[-1] * x**power for r, x in zip(rest, points, strict=True)]
        worst = max(abs(w * r) for w, r in zip(weights, rest, strict=True))
    return done, worst


# --- what is fitted ---------------------------------------------------------------------------------------------------

Interval = tuple[Real, Real]
SLACK = mp.mpf("1.001")  # a reduced argument may lie a rounding beyond its interval


def square(bound: Real) -> Interval:
    return 0, (bound * SLACK) ** 2


HALF: Interval = (-0.5, 0.5)
ABOVE: Interval = (mp.mpf("1e-9"), 1)
SIXTEENTH: Interval = (0, mp.mpf(1) / 16)
LN2_HALF: Interval = (-mp.log(2) / 2 * SLACK, mp.log(2) / 2 * SLACK)
LOG: Interval = (mp.sqrt(0.5) - 1, mp.sqrt(2) - 1)
ATANH = square((mp.sqrt(2) - 1) / (mp.sqrt(2) + 1))
QUARTER = square(mp.pi / 4)
TANH = square(mp.mpf("0.55"))
EIGHTH = square(mp.tan(mp.pi / 8))
ERF: Interval = (0, mp.mpf("3.95"))  # beyond, erf rounds to 1 in float
ERFCX_CENTRE = mp.mpf("2.5")
ERFCX: Interval = ((1 - ERFCX_CENTRE) / (1 + ERFCX_CENTRE), (6 - ERFCX_CENTRE) / (6 + ERFCX_CENTRE))


def exp_rest(r: Real) -> Real:
    return (mp.expm1(r) - r) / r**2


def exp_weight(r: Real) -> Real:
    return r**2 / mp.exp(r)


def expm1_weight(r: Real) -> Real:
    return r**2 / mp.expm1(r)


def exp2(f: Real) -> Real:
    return mp.mpf(2) ** f


def exp2_rest(f: Real) -> Real:
    return mp.expm1(f * mp.log(2)) / f


def log_rest(f: Real) -> Real:
    return (mp.log1p(f) - f + f * f / 2) / f**3


# functions of z, the square of the argument


def atanh(z: Real) -> Real:
    """log((1 + s) / (1 - s)) / s."""
    return 2 * mp.atanh(mp.sqrt(z)) / mp.sqrt(z)


def atanh_rest(z: Real) -> Real:
    return (atanh(z) - 2) / z


def atanh_rest2(z: Real) -> Real:
    return (atanh(z) - 2 - z * 2 / 3) / z**2


def atanh_weight2(z: Real) -> Real:
    return z**2 / atanh(z)


def atanh2(z: Real) -> Real:
    return atanh(z) / mp.log(2)


def sin_rest(z: Real) -> Real:
    return (mp.sin(mp.sqrt(z)) / mp.sqrt(z) - 1) / z


def sin_weight(z: Real) -> Real:
    return z * mp.sqrt(z) / mp.sin(mp.sqrt(z))


def cos_rest(z: Real) -> Real:
    return (mp.cos(mp.sqrt(z)) - 1 + z / 2) / z**2


def cos_weight(z: Real) -> Real:
    return z**2 / mp.cos(mp.sqrt(z))


def tanh(z: Real) -> Real:
    return mp.tanh(mp.sqrt(z)) / mp.sqrt(z)


def tanh_rest(z: Real) -> Real:
    return (tanh(z) - 1) / z


def atan(z: Real) -> Real:
    return mp.atan(mp.sqrt(z)) / mp.sqrt(z)


def atan_rest(z: Real) -> Real:
    return (atan(z) - 1) / z


def erf(z: Real) -> Real:
    return mp.erf(mp.sqrt(z)) / mp.sqrt(z)


# functions of x


def erf_rate(x: Real) -> Real:
    return (-mp.log(mp.erfc(x)) / x - 2 / mp.sqrt(mp.pi)) / x


def erf_rate_weight(x: Real) -> Real:
    return x**2 * mp.erfc(x) / mp.erf(x)


def erfcx_point(u: Real) -> Real:
    """The inverse of u = (x - c) / (x + c)."""
    return ERFCX_CENTRE * (1 + u) / (1 - u)


def erfcx(u: Real) -> Real:
    x = erfcx_point(u)
    return mp.exp(x * x) * mp.erfc(x)


def erfcx_weight(u: Real) -> Real:
    x = erfcx_point(u)
    return mp.exp(-x * x) / mp.erf(x)


FITS = [
    Fit("EXP_F32", "(e^r - 1 - r) / r^2", 24, exp_rest, exp_weight, LN2_HALF, 5),
    Fit("EXP_F64", "(e^r - 1 - r) / r^2", 53, exp_rest, exp_weight, LN2_HALF, 10),
    Fit("EXPM1_F32", "(e^r - 1 - r) / r^2", 24, exp_rest, expm1_weight, LN2_HALF, 6),
    Fit("EXPM1_F64", "(e^r - 1 - r) / r^2", 53, exp_rest, expm1_weight, LN2_HALF, 11),
    Fit("EXP2_F32", "(2^f - 1) / f", 24, exp2_rest, lambda f: f / exp2(f), HALF, 6),
    Fit("EXP2_F64", "(2^f - 1) / f", 53, exp2_rest, lambda f: f / exp2(f), HALF, 12),
    Fit("EXP2_WEIGHT_F32", "(2^f - 1) / f", 24, exp2_rest, lambda f: f / exp2(f), ABOVE, 5),
    Fit("EXP2_ROUGH", "2^r, in double", 53, exp2, lambda r: 1 / exp2(r), SIXTEENTH, 3),
    Fit("LOG_F32", "(log(1 + f) - f + f^2/2) / f^3", 24, log_rest, lambda f: f**3 / mp.log1p(f), LOG, 8),
    Fit("LOG_F64", "(2 atanh(s) / s - 2) / s^2 in s^2", 53, atanh_rest, lambda z: z / atanh(z), ATANH, 7),
    Fit("SIN_F32", "(sin(r) / r - 1) / r^2 in r^2", 24, sin_rest, sin_weight, QUARTER, 3),
    Fit("SIN_F64", "(sin(r) / r - 1) / r^2 in r^2", 53, sin_rest, sin_weight, QUARTER, 6),
    Fit("COS_F32", "(cos(r) - 1 + r^2/2) / r^4 in r^2", 24, cos_rest, cos_weight, QUARTER, 3),
    Fit("COS_F64", "(cos(r) - 1 + r^2/2) / r^4 in r^2", 53, cos_rest, cos_weight, QUARTER, 6),
    Fit("TANH_F32", "(tanh(x) / x - 1) / x^2 in x^2", 24, tanh_rest, lambda z: z / tanh(z), TANH, 5),
    Fit("TANH_F64", "(tanh(x) / x - 1) / x^2 in x^2", 53, tanh_rest, lambda z: z / tanh(z), TANH, 11),
    Fit("ATAN_F32", "atan(t) / t in t^2, in double", 53, atan, lambda z: 1 / atan(z), (0, 1), 11),
    Fit("ATAN_F64", "(atan(t) / t - 1) / t^2 in t^2", 53, atan_rest, lambda z: z / atan(z), EIGHTH, 11),
    Fit("ERF_F32", "(-log(1 - erf(x)) / x - 2/sqrt(pi)) / x", 24, erf_rate, erf_rate_weight, ERF, 8),
    Fit("ERF_F64", "erf(x) / x - 1 in x^2", 53, lambda z: erf(z) - 1, lambda z: 1 / erf(z), (0, 1), 13),
    Fit("ERFCX_F64", "e^(x^2) erfc(x) in (x - 2.5) / (x + 2.5)", 53, erfcx, erfcx_weight, ERFCX, 13),
    Fit(
        "LOG2_POW_F32",
        "2 atanh(s) / s / ln 2 in s^2, in double",
        53,
        atanh2,
        lambda z: 1 / atanh2(z),
        ATANH,
        6,
    ),
    Fit("EXP2_POW_F32", "2^f, in double", 53, exp2, lambda f: 1 / exp2(f), HALF, 9),
    Fit(
        "LOG_POW_F64", "(2 atanh(s) / s - 2 - 2/3 s^2) / s^4 in s^2", 53, atanh_rest2, atanh_weight2, ATANH, 9
    ),
]


# --- writing them down ------------------------------------------------------------------------------------------------

HEAD = '''"""Polynomials of the elementary functions, lowest power first. Written by `fit.py`: do not edit.

The error is that of the function the polynomial serves, relative, from approximation alone.
"""
'''
WORDS = 20  # 64-bit words of 2/pi that Payne and Hanek's reduction may read


def two_over_pi() -> list[int]:
    """The first word is the integer part."""
    with mp.workprec(64 * WORDS + 64):
        digits = int(mp.floor(2 / mp.pi * mp.mpf(2) ** (64 * (WORDS - 1))))
    return [digits >> (64 * (WORDS - 1 - word)) & (2**64 - 1) for word in range(WORDS)]


def main() -> None:
    lines = [HEAD]
    for fit in FITS:
        found, worst = coefficients(fit)
        error = f"2^{float(mp.log(worst, 2)):.1f}"
        print(f"{fit.name:14} {len(found):2} terms, error {error}")
        lines += [f"# {fit.what}; error {error}", f"{fit.name} = (", *(f"    {c!r}," for c in found), ")"]
    lines += ["", "# 2/pi in words of 64 bits, the first one its integer part", "TWO_OVER_PI = ("]
    lines += [*(f"    0x{word:016X}," for word in two_over_pi()), ")", ""]
    Path(__file__).with_name("coefficients.py").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
