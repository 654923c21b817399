"""Lanes being computed: a thin wrapper over `llvmlite.ir` under which an elementary function reads as its formula.

`Emit` knows the builder, the element type and the lane count; `Real`, `Int` and `Mask` are values of it with Python's
operators, each operator one instruction. A Python number alongside one becomes a splat constant. No instruction gets a
fast-math flag: error terms such as `(a - sum) + b` are zero in real arithmetic and must survive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import llvmlite.ir as ir

from tilewright.codegen.llvm.types import number, repeated


@dataclass(frozen=True)
class MathContext:
    """What the machine can do that changes the code of an elementary function.

    has_fma: a fused FMA instruction for float and double. Without one `llvm.fma` becomes a call of libm; the
    code then multiplies and adds, and gets the error of a product by splitting its factors.
    has_scaling: AVX-512's instructions that take the fraction of a vector of floats, and its integers as exponents.
    prefers_tables: a core has room for shuffles alongside its FMAs, but not for more of these.
    """

    has_fma: bool = True
    has_scaling: bool = False
    prefers_tables: bool = False


_TOWARD_BELOW = 0b1001  # how AVX-512 is told to round so, without an exception


class Emit:
    """Makes instructions for one element type and lane count at the builder's place; `lanes` is 0 for a scalar."""

    def __init__(self, builder: ir.IRBuilder, kind: ir.Type, context: MathContext) -> None:
        element = kind.element if isinstance(kind, ir.VectorType) else kind
        if not isinstance(element, (ir.FloatType, ir.DoubleType)):
            raise TypeError(f"elementary functions take float and double, and vectors of them, not {kind}")
        self.builder = builder
        self.context = context
        self.kind = kind
        self.lanes: int = kind.count if isinstance(kind, ir.VectorType) else 0
        self.double = isinstance(element, ir.DoubleType)
        self.bits = 64 if self.double else 32
        self.mantissa = 52 if self.double else 23  # explicit bits
        self.bias = 1023 if self.double else 127
        self.int_kind = self.lanes_of(ir.IntType(self.bits))

    def lanes_of(self, element: ir.Type) -> ir.Type:
        return ir.VectorType(element, self.lanes) if self.lanes else element

    @property
    def suffix(self) -> str:
        """The type as in the name of an overloaded intrinsic: v8f32."""
        return f"{f'v{self.lanes}' if self.lanes else ''}f{self.bits}"

    def real(self, value: float | Real) -> Real:
        return value if isinstance(value, Real) else Real(self, self._splat(self.kind, float(value)))

    def integer(self, value: int | Int) -> Int:
        if isinstance(value, Int):
            return value
        mask, sign = (1 << self.bits) - 1, 1 << (self.bits - 1)
        return Int(self, self._splat(self.int_kind, ((value & mask) ^ sign) - sign))

    def _splat(self, kind: ir.Type, value: float | int) -> ir.Constant:
        return repeated(kind.element, value, self.lanes) if self.lanes else number(kind, value)

    def intrinsic(self, name: str, *args: Real) -> Real:
        function_type = ir.FunctionType(self.kind, [self.kind] * len(args))
        function = self.declare(f"llvm.{name}.{self.suffix}", function_type)
        return Real(self, self.builder.call(function, [a.value for a in args]))

    @property
    def scales(self) -> bool:
        """Whether `fraction`, `scaled`, `floor_bits` and `looked_up` are there for these lanes."""
        return self.context.has_scaling and not self.double and self.lanes == 16

    def fraction(self, x: Real, bits: int = 0) -> Real:
        """x less the largest multiple of 2^-bits that is not above it, exactly; 0 of infinities."""
        return self._avx512("reduce", x.value, ir.IntType(32)(bits << 4 | _TOWARD_BELOW))

    def floor_bits(self, x: Real, bits: int) -> Int:
        """An integer whose low bits are those of the largest one that is not above x 2^bits; any for large x."""
        shift, rounding = self.real(MAGIC_F32 / 2**bits).value, ir.IntType(32)(_TOWARD_BELOW)
        function_type = ir.FunctionType(self.kind, [self.kind, self.kind, rounding.type])
        function = self.declare("llvm.x86.avx512.add.ps.512", function_type)
        return Real(self, self.builder.call(function, [x.value, shift, rounding])).as_bits()

    def looked_up(self, table: Sequence[float], index: Int) -> Real:
        """The element of a table, as long as the vectors, at the low bits of an index."""
        function_type = ir.FunctionType(self.kind, [self.kind, self.int_kind])
        function = self.declare("llvm.x86.avx512.permvar.sf.512", function_type)
        return Real(self, self.builder.call(function, [ir.Constant(self.kind, list(table)), index.value]))

    def scaled(self, x: Real, exponent: Real) -> Real:
        """x times 2 to the largest integer that is not above the exponent."""
        return self._avx512("scalef", x.value, exponent.value)

    def _avx512(self, name: str, *args: ir.Value) -> Real:
        every_lane, rounding_as_set = ir.IntType(16)(-1), ir.IntType(32)(4)
        arguments = [*args, ir.Constant(self.kind, None), every_lane, rounding_as_set]
        function_type = ir.FunctionType(self.kind, [argument.type for argument in arguments])
        function = self.declare(f"llvm.x86.avx512.mask.{name}.ps.512", function_type)
        return Real(self, self.builder.call(function, arguments))

    def declare(self, name: str, function_type: ir.FunctionType) -> ir.Function:
        found = self.builder.module.globals.get(name)
        return found or ir.Function(self.builder.module, function_type, name)

    def doubles(self) -> Emit:
        """The same lanes in double."""
        return Emit(self.builder, self.lanes_of(ir.DoubleType()), self.context)

    def widen(self, x: Real) -> Real:
        wide = self.doubles()
        return Real(wide, self.builder.fpext(x.value, wide.kind))

    def narrow(self, x: Real) -> Real:
        return Real(self, self.builder.fptrunc(x.value, self.kind))

    def at(self, builder: ir.IRBuilder) -> Emit:
        """The same lanes, emitted elsewhere: in a helper function."""
        return Emit(builder, self.kind, self.context)

    def helper(
        self,
        name: str,
        result: ir.Type,
        arguments: Sequence[ir.Type],
        attributes: Sequence[str],
        body: Callable[[ir.IRBuilder, Sequence[ir.Argument]], None],
    ) -> ir.Function:
        """The module's internal function of this name, with `body` emitted into it if it is new."""
        module = self.builder.module
        name = f"tw.math.{name}{'' if self.context.has_fma else '.nofma'}"
        if name in module.globals:
            return module.globals[name]
        function = ir.Function(module, ir.FunctionType(result, arguments), name)
        function.linkage = "internal"
        for attribute in ("nounwind", *attributes):
            function.attributes.add(attribute)
        body(ir.IRBuilder(function.append_basic_block("entry")), function.args)
        return function

    def each_lane(self, function: ir.Function, *args: Real) -> Real:
        """A scalar function applied to every lane, one call after another."""
        values = [a.value for a in args]
        if not self.lanes:
            return Real(self, self.builder.call(function, values))
        result = ir.Constant(self.kind, ir.Undefined)
        for lane in range(self.lanes):
            index = ir.Constant(ir.IntType(32), lane)
            value = self.builder.call(function, [self.builder.extract_element(v, index) for v in values])
            result = self.builder.insert_element(result, value, index)
        return Real(self, result)


class Real:
    """Floating-point lanes. Comparisons are ordered: false where a NaN is."""

    __hash__ = None  # type: ignore[assignment]  # `==` makes an instruction

    def __init__(self, emit: Emit, value: ir.Value) -> None:
        self.emit, self.value = emit, value

    def _op(self, name: str, left: float | Real, right: float | Real) -> Real:
        emit = self.emit
        instruction = getattr(emit.builder, name)
        return Real(emit, instruction(emit.real(left).value, emit.real(right).value))

    def __add__(self, other: float | Real) -> Real:
        return self._op("fadd", self, other)

    def __radd__(self, other: float) -> Real:
        return self._op("fadd", other, self)

    def __sub__(self, other: float | Real) -> Real:
        return self._op("fsub", self, other)

    def __rsub__(self, other: float) -> Real:
        return self._op("fsub", other, self)

    def __mul__(self, other: float | Real) -> Real:
        return self._op("fmul", self, other)

    def __rmul__(self, other: float) -> Real:
        return self._op("fmul", other, self)

    def __truediv__(self, other: float | Real) -> Real:
        return self._op("fdiv", self, other)

    def __rtruediv__(self, other: float) -> Real:
        return self._op("fdiv", other, self)

    def __neg__(self) -> Real:
        return Real(self.emit, self.emit.builder.fneg(self.value))

    def __abs__(self) -> Real:
        return self.emit.intrinsic("fabs", self)

    def copysign(self, sign: Real) -> Real:
        return self.emit.intrinsic("copysign", self, sign)

    def sqrt(self) -> Real:
        return self.emit.intrinsic("sqrt", self)

    def at_least(self, bound: float) -> Real:
        """The larger one; NaN stays NaN. The order of operands makes it one `max` instruction on x86."""
        limit = self.emit.real(bound)
        return (limit > self).select(limit, self)

    def at_most(self, bound: float) -> Real:
        limit = self.emit.real(bound)
        return (limit < self).select(limit, self)

    def _compare(self, operator: str, other: float | Real) -> Mask:
        right = self.emit.real(other).value
        return Mask(self.emit, self.emit.builder.fcmp_ordered(operator, self.value, right))

    def __lt__(self, other: float | Real) -> Mask:
        return self._compare("<", other)

    def __le__(self, other: float | Real) -> Mask:
        return self._compare("<=", other)

    def __gt__(self, other: float | Real) -> Mask:
        return self._compare(">", other)

    def __ge__(self, other: float | Real) -> Mask:
        return self._compare(">=", other)

    def __eq__(self, other: object) -> Mask:  # type: ignore[override]
        assert isinstance(other, (int, float, Real))
        return self._compare("==", other)

    def is_nan(self) -> Mask:
        return Mask(self.emit, self.emit.builder.fcmp_unordered("uno", self.value, self.value))

    def as_bits(self) -> Int:
        return Int(self.emit, self.emit.builder.bitcast(self.value, self.emit.int_kind))

    def sign_bit(self) -> Mask:
        return self.as_bits() < 0


class Int:
    """Integer lanes as wide as the reals alongside them; `>>` keeps the sign."""

    def __init__(self, emit: Emit, value: ir.Value) -> None:
        self.emit, self.value = emit, value

    def _op(self, name: str, other: int | Int) -> Int:
        instruction = getattr(self.emit.builder, name)
        return Int(self.emit, instruction(self.value, self.emit.integer(other).value))

    def __add__(self, other: int | Int) -> Int:
        return self._op("add", other)

    def __sub__(self, other: int | Int) -> Int:
        return self._op("sub", other)

    def __and__(self, other: int | Int) -> Int:
        return self._op("and_", other)

    def __xor__(self, other: int | Int) -> Int:
        return self._op("xor", other)

    def __lshift__(self, other: int | Int) -> Int:
        return self._op("shl", other)

    def __rshift__(self, other: int | Int) -> Int:
        return self._op("ashr", other)

    def __lt__(self, other: int | Int) -> Mask:
        right = self.emit.integer(other).value
        return Mask(self.emit, self.emit.builder.icmp_signed("<", self.value, right))

    def differs(self, other: int | Int) -> Mask:
        right = self.emit.integer(other).value
        return Mask(self.emit, self.emit.builder.icmp_signed("!=", self.value, right))

    def as_real(self) -> Real:
        """The bits, taken for a float."""
        return Real(self.emit, self.emit.builder.bitcast(self.value, self.emit.kind))

    def to_real(self) -> Real:
        """The number (of at most 50 bits in double), converted. Only AVX-512 converts vectors of 64-bit integers."""
        emit = self.emit
        if not emit.double:
            return Real(emit, emit.builder.sitofp(self.value, emit.kind))
        return (self + MAGIC_BITS_F64).as_real() - MAGIC_F64


class Mask:
    """Truth lanes."""

    def __init__(self, emit: Emit, value: ir.Value) -> None:
        self.emit, self.value = emit, value

    def __and__(self, other: Mask) -> Mask:
        return Mask(self.emit, self.emit.builder.and_(self.value, other.value))

    def __or__(self, other: Mask) -> Mask:
        return Mask(self.emit, self.emit.builder.or_(self.value, other.value))

    def __xor__(self, other: Mask) -> Mask:
        return Mask(self.emit, self.emit.builder.xor(self.value, other.value))

    def __invert__(self) -> Mask:
        return Mask(self.emit, self.emit.builder.not_(self.value))

    def select(self, then: float | Real, otherwise: float | Real) -> Real:
        emit = self.emit
        return Real(emit, emit.builder.select(self.value, emit.real(then).value, emit.real(otherwise).value))

    def any(self) -> ir.Value:
        """An i1: one lane at least is true."""
        if not self.emit.lanes:
            return self.value
        whole = ir.IntType(self.emit.lanes)
        return self.emit.builder.icmp_unsigned(
            "!=", self.emit.builder.bitcast(self.value, whole), ir.Constant(whole, 0)
        )


# --- arithmetic -------------------------------------------------------------------------------------------------------

# Added to a small number, it leaves the number rounded to an integer (ties to even) in the low bits of the sum; taken
# off again, the rounded number remains. Unlike llvm.rint this needs no SSE4.1, and gives the integer for free.
MAGIC_F32 = 1.5 * 2.0**23
MAGIC_F64 = 1.5 * 2.0**52
MAGIC_BITS_F64 = 0x4338_0000_0000_0000


def magic(emit: Emit) -> float:
    return MAGIC_F64 if emit.double else MAGIC_F32


def fma(a: Real, b: float | Real, c: float | Real) -> Real:
    """a * b + c: rounded once where the machine can, else twice (never a call of libm)."""
    emit = a.emit
    return emit.intrinsic("fma" if emit.context.has_fma else "fmuladd", a, emit.real(b), emit.real(c))


def horner(x: Real, coefficients: Sequence[float]) -> Real:
    """c0 + c1 x + c2 x^2 + ...: the fewest instructions; other elements fill its latency."""
    value = x.emit.real(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = fma(value, x, coefficient)
    return value


@dataclass(frozen=True)
class Pair:
    """The unevaluated sum hi + lo, |lo| at most about an ulp of hi: twice the precision."""

    hi: Real
    lo: Real


def two_sum(a: float | Real, b: Real) -> Pair:
    """a + b exactly, whatever their sizes."""
    a = b.emit.real(a)
    total = a + b
    part = total - a
    return Pair(total, (a - (total - part)) + (b - part))


def fast_two_sum(a: Real, b: Real) -> Pair:
    """a + b exactly where |a| >= |b| or a == 0."""
    total = a + b
    return Pair(total, b - (total - a))


def two_product(a: Real, b: float | Real) -> Pair:
    """a * b; exactly with FMA, else (both halves of each factor multiplied apart) to about twice the precision."""
    emit = a.emit
    b = emit.real(b)
    product = a * b
    if emit.context.has_fma:
        return Pair(product, fma(a, b, -product))
    a_high, b_high = _upper_half(a), _upper_half(b)
    a_low, b_low = a - a_high, b - b_high
    error = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
    return Pair(product, error)


def _upper_half(x: Real) -> Real:
    return (x.as_bits() & (-1 << (27 if x.emit.double else 12))).as_real()


def careful_fma(a: Real, b: float | Real, c: Real) -> Real:
    """a * b + c with the error of one rounding, even without FMA."""
    if a.emit.context.has_fma:
        return fma(a, b, c)
    product = two_product(a, b)
    return product.hi + (product.lo + c)


def pair_product(a: Pair, b: Pair) -> Pair:
    product = two_product(a.hi, b.hi)
    return fast_two_sum(product.hi, product.lo + (a.hi * b.lo + a.lo * b.hi))
