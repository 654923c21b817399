"""sin, cos and atan2."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import llvmlite.ir as ir

from . import coefficients as table
from .payne_hanek import HALF_PI, far_reduction
from .values import MAGIC_F64, Emit, Int, Mask, Real, fast_two_sum, fma, horner, two_product

# pi / 2 as three parts of 33 bits, exact times an integer of 20 bits, and the rest
PARTS_OF_HALF_PI = (
    float.fromhex("0x1.921fb544p+0"),
    float.fromhex("0x1.0b4611a6p-34"),
    float.fromhex("0x1.3198a2ep-69"),
    float.fromhex("0x1.b839a252049c1p-104"),
)

NEAR = 2.0**18  # up to here the fast reduction is right
TAN_EIGHTH = math.sqrt(2) - 1


@dataclass(frozen=True)
class Angle:
    """quadrant * pi/2 + r + lo, |r| <= pi/4; only the last two bits of the quadrant count."""

    r: Real
    lo: Real | None
    quadrant: Int


def reduce_near(a: Real) -> Angle:
    """Cody and Waite's reduction for 0 <= a < 2^18; every product by a part of pi/2 but the last is exact.

    A float is reduced in double, where two parts do. For a double near a multiple of pi/2 the first two differences
    may cancel down to 2^-56, so that the third part must enter exactly as well.
    """
    emit = a.emit
    wide = a if emit.double else emit.widen(a)
    shifted = fma(wide, 2 / math.pi, MAGIC_F64)
    n = shifted - MAGIC_F64
    c1, c2, c3, c4 = PARTS_OF_HALF_PI
    first = fma(n, -c1, wide)
    if not emit.double:
        r = fma(n, -(c2 + c3), first)
        return Angle(emit.narrow(r), None, _low_half(shifted.as_bits(), emit))
    second = fast_two_sum(first, n * -c2)
    third = fast_two_sum(second.hi, n * -c3)
    total = fast_two_sum(third.hi, fma(n, -c4, second.lo + third.lo))
    return Angle(total.hi, total.lo, shifted.as_bits())


def _low_half(x: Int, emit: Emit) -> Int:
    return Int(emit, emit.builder.trunc(x.value, emit.int_kind))


def sin_of(angle: Angle) -> Real:
    """r + r^3 p(r^2), p of degree 2 (float; error 2^-27) or 5 (double; 2^-57, with the first order in lo)."""
    r, lo = angle.r, angle.lo
    z = r * r
    if lo is None:
        return fma(r * z, horner(z, table.SIN_F32), r)
    return r + fma(r * z, horner(z, table.SIN_F64), fma(lo, z * -0.5, lo))


def cos_of(angle: Angle) -> Real:
    """1 - r^2/2 + r^4 p(r^2), p of degree 2 (float; error 2^-32) or 5 (double; 2^-63); the error of 1 - r^2/2 is
    added back."""
    r, lo = angle.r, angle.lo
    z = r * r
    half = z * 0.5
    head = 1.0 - half
    tail = (1.0 - head) - half
    if lo is None:
        return head + fma(z * z, horner(z, table.COS_F32), tail)
    return head + fma(z * z, horner(z, table.COS_F64), fma(r, -lo, tail))


def combine(x: Real, angle: Angle, turns: int) -> Real:
    """sin(x) of the angle of |x| (turns = 0), or cos(x) = sin(|x| + pi/2) (turns = 1)."""
    emit = x.emit
    quadrant = angle.quadrant + turns
    y = (quadrant & 1).differs(0).select(cos_of(angle), sin_of(angle))
    sign = quadrant << (emit.bits - 2)
    if not turns:
        sign = sign ^ x.as_bits()
    return (y.as_bits() ^ (sign & (1 << (emit.bits - 1)))).as_real()


def sin(x: Real) -> Real:
    """Up to 2^18 by `reduce_near`, beyond by Payne and Hanek; see `_circular`."""
    return _circular("sin", x, 0)


def cos(x: Real) -> Real:
    """The cosine: the sine, a quarter turn further."""
    return _circular("cos", x, 1)


def _circular(name: str, x: Real, turns: int) -> Real:
    """The near path in line for all lanes; if any is beyond it, a call that does such lanes one by one.

    It is an internal function, always inlined, because it branches and the caller's block is to stay one block.
    """
    emit = x.emit
    suffix = f"{name}.{emit.suffix}"

    def body(builder: ir.IRBuilder, args: Sequence[ir.Argument]) -> None:
        here = emit.at(builder)
        x = Real(here, args[0])
        near = combine(x, reduce_near(abs(x)), turns)
        far = _is_far(x).any()
        far_block, end = builder.append_basic_block("far"), builder.append_basic_block("end")
        near_block = builder.block
        builder.cbranch(far, far_block, end).set_weights([1, 10000])
        builder.position_at_end(far_block)
        patch = emit.helper(f"{suffix}.far", emit.kind, [emit.kind] * 2, ("noinline", "cold"), far_body)
        patched = builder.call(patch, [x.value, near.value])
        builder.branch(end)
        builder.position_at_end(end)
        result = builder.phi(emit.kind)
        result.add_incoming(near.value, near_block)
        result.add_incoming(patched, far_block)
        builder.ret(result)

    def far_body(builder: ir.IRBuilder, args: Sequence[ir.Argument]) -> None:
        here = emit.at(builder)
        x, near = Real(here, args[0]), Real(here, args[1])
        far = here.each_lane(_far_scalar(name, here, turns), x)
        builder.ret(_is_far(x).select(far, near).value)

    function = emit.helper(suffix, emit.kind, [emit.kind], ("alwaysinline",), body)
    return Real(emit, emit.builder.call(function, [x.value]))


def _is_far(x: Real) -> Mask:
    a = abs(x)
    return (a >= NEAR) & (a < math.inf)  # of an infinity and a NaN the near path makes a NaN


def _far_scalar(name: str, emit: Emit, turns: int) -> ir.Function:
    kind = ir.DoubleType() if emit.double else ir.FloatType()

    def body(builder: ir.IRBuilder, args: Sequence[ir.Argument]) -> None:
        here = Emit(builder, kind, emit.context)
        x = Real(here, args[0])
        a = abs(x) if here.double else here.widen(abs(x))
        r, quadrant = far_reduction(a)
        if here.double:
            angle = Angle(r.hi, r.lo, quadrant)
        else:
            angle = Angle(here.narrow(r.hi), None, _low_half(quadrant, here))
        builder.ret(combine(x, angle, turns).value)

    return emit.helper(f"{name}.far.scalar.f{emit.bits}", kind, [kind], ("noinline", "cold"), body)


def atan2(y: Real, x: Real) -> Real:
    """The angle of the smaller over the larger of |x| and |y|, then moved to its octant. float: in double."""
    emit = x.emit
    if emit.double:
        result = _atan2_double(y, x)
    else:
        result = emit.narrow(_atan2_float(emit.widen(y), emit.widen(x)))
    unordered = Mask(emit, emit.builder.fcmp_unordered("uno", x.value, y.value))
    return unordered.select(x + y, result)


def _octant(y: Real, x: Real) -> tuple[Real, Real, Mask]:
    """min and max of |x| and |y|, and whether y is the larger. Where the quotient would be NaN but the angle is known,
    numbers of the same angle."""
    ax, ay = abs(x), abs(y)
    steep = ay > ax
    small, large = steep.select(ax, ay), steep.select(ay, ax)
    small = (small == math.inf).select(1.0, (large == math.inf).select(0.0, small))
    large = (large == math.inf).select(1.0, (large == 0.0).select(1.0, large))
    return small, large, steep


def _atan2_float(y: Real, x: Real) -> Real:
    """atan(t) = t p(t^2) for 0 <= t <= 1, p of degree 10 (error 2^-31), all in double."""
    small, large, steep = _octant(y, x)
    t = small / large
    angle = t * horner(t * t, table.ATAN_F32)
    angle = steep.select(math.pi / 2 - angle, angle)
    angle = x.sign_bit().select(math.pi - angle, angle)
    return angle.copysign(y)


def _atan2_double(y: Real, x: Real) -> Real:
    """atan(t) = t + t^3 p(t^2) for |t| <= tan(pi/8), p of degree 10 (error 2^-59).

    Where small/large exceeds that, t = (small - large) / (small + large) is turned by pi/4; the roundings of its parts
    and of the quotient are kept in t_rest. All turns add up to one multiple of pi/4, added once, as a pair.
    """
    small, large, steep = _octant(y, x)
    factor = (large > 2.0**1000).select(2.0**-200, (large < 2.0**-800).select(2.0**200, 1.0))
    small, large = small * factor, large * factor
    transposed = small > large * TAN_EIGHTH
    top, bottom = fast_two_sum(-large, small), fast_two_sum(large, small)
    numerator, denominator = transposed.select(top.hi, small), transposed.select(bottom.hi, large)
    t = numerator / denominator
    back = two_product(t, denominator)
    remainder = ((numerator - back.hi) - back.lo) + transposed.select(fma(t, -bottom.lo, top.lo), 0.0)
    t_rest = (abs(t) > 2.0**-100).select(remainder / denominator, 0.0)  # of a smaller t it might be subnormal
    z = t * t
    rest = fma(t * z, horner(z, table.ATAN_F64), t_rest)

    # angle = quarters * pi/4 +- (t + rest); the first product is exact, for pi ends in three zero bits
    quarters = transposed.select(1.0, 0.0)
    quarters = steep.select(2.0 - quarters, quarters)
    left = x.sign_bit()
    quarters = left.select(4.0 - quarters, quarters)
    negative = steep ^ left
    t, rest = negative.select(-t, t), negative.select(-rest, rest)
    head = fast_two_sum(quarters * (HALF_PI[0] / 2), t)
    angle = head.hi + (head.lo + fma(quarters, HALF_PI[1] / 2, rest))
    return angle.copysign(y)
