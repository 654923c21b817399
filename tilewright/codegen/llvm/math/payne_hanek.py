"""The angle of a number of any size, less its multiple of pi/2: Payne and Hanek's reduction, for one scalar.

Let x = m 2^e, m an integer of 53 bits. In x * 2/pi, the bits of 2/pi of weight 2^(2-e) and more give multiples of 4:
whole turns, which are skipped. The 192 bits after them, times m, hold two bits of quadrant and 190 of fraction, wrong
by 2^-137 at most. No double comes nearer than 2^-62 to a multiple of pi/2, so 75 good bits remain.
"""

from __future__ import annotations

import llvmlite.ir as ir

from .coefficients import TWO_OVER_PI
from .values import Int, Pair, Real, pair_product

I64, I128 = ir.IntType(64), ir.IntType(128)
# pi / 2 in two parts
HALF_PI = (float.fromhex("0x1.921fb54442d18p+0"), float.fromhex("0x1.1a62633145c07p-54"))
FRACTION_HALF = 1 << 61  # of the top word: two bits of quadrant, then the fraction


def far_reduction(x: Real) -> tuple[Pair, Int]:
    """(r, quadrant) of a positive finite scalar double of 2^18 or more; for any other value the result is undefined."""
    emit, build = x.emit, x.emit.builder
    assert emit.double and not emit.lanes

    def word(value: int) -> ir.Constant:
        return ir.Constant(I64, value)

    def funnel(high: ir.Value, low: ir.Value, count: ir.Value) -> ir.Value:
        """The upper word of high:low shifted left, count < 64."""
        shift = emit.declare("llvm.fshl.i64", ir.FunctionType(I64, [I64] * 3))
        return build.call(shift, [high, low, count])

    bits = x.as_bits().value
    exponent = build.lshr(bits, word(52))
    mantissa = build.or_(build.and_(bits, word((1 << 52) - 1)), word(1 << 52))

    # The window begins at the bit of weight 2^(1-e), e = exponent - 1075; bit 0 of the table has weight 2^63.
    start = build.sub(exponent, word(1075 + 1 - 63))
    start = build.select(build.icmp_signed("<", start, word(0)), word(0), start)
    index, count = build.lshr(start, word(6)), build.and_(start, word(63))
    bits_table = _two_over_pi(build.module)
    loaded = [
        build.load(build.gep(bits_table, [word(0), build.add(index, word(k))], inbounds=True), typ=I64)
        for k in range(4)
    ]
    window = [funnel(loaded[k], loaded[k + 1], count) for k in range(3)]  # highest first

    # mantissa * window modulo 2^192
    product = [word(0)] * 3
    carry: ir.Value = ir.Constant(I128, 0)
    for k in (2, 1, 0):
        term = build.mul(build.zext(mantissa, I128), build.zext(window[k], I128))
        term = build.add(term, carry)
        product[k] = build.trunc(term, I64)
        carry = build.lshr(term, ir.Constant(I128, 64))

    quadrant = build.lshr(build.add(product[0], word(FRACTION_HALF)), word(62))
    signed = build.sub(product[0], build.shl(quadrant, word(62)))
    sign = build.ashr(signed, word(63))
    high, middle, low = (build.xor(part, sign) for part in (signed, product[1], product[2]))

    # fraction = (high:middle:low) 2^-190: bring its first one to the top
    empty = build.icmp_unsigned("==", high, word(0))
    high, middle, low = (
        build.select(empty, middle, high),
        build.select(empty, low, middle),
        build.select(empty, word(0), low),
    )
    leading_zeros = emit.declare("llvm.ctlz.i64", ir.FunctionType(I64, [I64, ir.IntType(1)]))
    zeros = build.call(leading_zeros, [high, ir.Constant(ir.IntType(1), 0)])
    high, middle = funnel(high, middle, zeros), funnel(middle, low, zeros)
    shift = build.add(zeros, build.select(empty, word(64), word(0)))

    # two doubles of 53 bits each, then times pi/2
    unit = Int(emit, build.shl(build.sub(word(1023), shift), word(52))).as_real()
    rest = build.or_(build.shl(build.and_(high, word(0x7FF)), word(42)), build.lshr(middle, word(22)))
    upper = Real(emit, build.sitofp(build.lshr(high, word(11)), emit.kind)) * (unit * 2.0**-51)
    lower = Real(emit, build.sitofp(rest, emit.kind)) * (unit * 2.0**-104)
    r = pair_product(Pair(upper, lower), Pair(emit.real(HALF_PI[0]), emit.real(HALF_PI[1])))
    negative = Int(emit, sign) < 0
    return Pair(negative.select(-r.hi, r.hi), negative.select(-r.lo, r.lo)), Int(emit, quadrant)


def _two_over_pi(module: ir.Module) -> ir.GlobalVariable:
    name = "tw.math.two_over_pi"
    if name in module.globals:
        return module.globals[name]
    kind = ir.ArrayType(I64, len(TWO_OVER_PI))
    variable = ir.GlobalVariable(module, kind, name)
    variable.linkage = "internal"
    variable.global_constant = True
    variable.initializer = ir.Constant(kind, [ir.Constant(I64, value) for value in TWO_OVER_PI])
    return variable
