"""Elementwise operators: arithmetic, comparisons, activations, casts. Operands have one type and broadcast as NumPy's.

A formula over 16-bit floats is computed in f32 and rounded once at its end (`widened`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from tilewright.dtypes import DType
from tilewright.frontend.builder import Operand, Unsupported
from tilewright.frontend.onnx.context import Context, axis_of, widened
from tilewright.frontend.onnx.registry import converter
from tilewright.frontend.onnx.types import dtype_of
from tilewright.graph.ir import Node

# ONNX's name -> Tilewright's, if both mean the same.
UNARY = {
    "Abs": "abs",
    "BitwiseNot": "bitwise_not",
    "Ceil": "ceil",
    "Cos": "cos",
    "Erf": "erf",
    "Exp": "exp",
    "Floor": "floor",
    "HardSwish": "hardswish",
    "IsNaN": "isnan",
    "Log": "log",
    "Mish": "mish",
    "Neg": "neg",
    "Not": "logical_not",
    "Reciprocal": "reciprocal",
    "Relu": "relu",
    "Round": "round",
    "Sigmoid": "sigmoid",
    "Sign": "sign",
    "Sin": "sin",
    "Sqrt": "sqrt",
    "Tan": "tan",
    "Tanh": "tanh",
}
BINARY = {
    "Add": "add",
    "And": "logical_and",
    "BitwiseAnd": "bitwise_and",
    "BitwiseOr": "bitwise_or",
    "BitwiseXor": "bitwise_xor",
    "Equal": "eq",
    "Greater": "gt",
    "GreaterOrEqual": "ge",
    "Less": "lt",
    "LessOrEqual": "le",
    "Mul": "mul",
    "Or": "logical_or",
    "Sub": "sub",
    "Xor": "logical_xor",
}
VARIADIC = {"Max": "maximum", "Min": "minimum", "Sum": "add"}


def _unary(name: str, op: str) -> None:
    @converter(name)
    def convert(ctx: Context, x: Node, *, consumed_inputs: object = None) -> Node:
        return ctx.emit(op, x)


def _binary(name: str, op: str) -> None:
    @converter(name)
    def convert(
        ctx: Context,
        a: Node,
        b: Node,
        *,
        axis: int | None = None,
        broadcast: int = 0,
        consumed_inputs: object = None,
    ) -> Node:
        return ctx.emit(op, a, aligned(ctx, a, b, axis, broadcast))


def _variadic(name: str, op: str) -> None:
    @converter(name)
    def convert(ctx: Context, first: Node, *rest: Node, consumed_inputs: object = None) -> Node:
        for operand in rest:
            first = ctx.emit(op, first, operand)
        return first


for _name, _op in UNARY.items():
    _unary(_name, _op)
for _name, _op in BINARY.items():
    _binary(_name, _op)
for _name, _op in VARIADIC.items():
    _variadic(_name, _op)


def aligned(ctx: Context, a: Node, b: Node, axis: int | None, broadcast: int) -> Node:
    """`b` of an operator before opset 7, whose attribute `axis` says which axis of `a` its first one is."""
    if not broadcast or axis is None:
        return b
    start = axis_of(axis, a.type.rank)
    return ctx.reshape(b, (*b.shape, *[1] * max(0, a.type.rank - start - b.type.rank)))


@converter("Mean")
@widened
def mean(ctx: Context, first: Node, *rest: Node) -> Node:
    for operand in rest:
        first = ctx.add(first, operand)
    return ctx.div(first, len(rest) + 1)


# -- arithmetic -------------------------------------------------------------------------------------------------------


@converter("Div")
def div(ctx: Context, a: Node, b: Node, *, axis: int | None = None, broadcast: int = 0) -> Node:
    b = aligned(ctx, a, b, axis, broadcast)
    if a.dtype.is_float:
        return ctx.emit("div", a, b)
    # Integers round towards 0: subtracting the remainder first makes the division exact.
    return ctx.emit("floordiv", ctx.sub(a, ctx.emit("fmod", a, b)), b)


@converter("Mod")
def mod(ctx: Context, a: Node, b: Node, *, fmod: int = 0) -> Node:
    return ctx.emit("fmod" if fmod else "mod", a, b)


@converter("Pow")
def pow(ctx: Context, base: Node, exponent: Node, *, axis: int | None = None, broadcast: int = 0) -> Node:
    exponent = aligned(ctx, base, exponent, axis, broadcast)
    if base.dtype.is_float:
        wide = ctx.widen(base)
        if exponent.dtype is DType.F64 and wide.dtype is not DType.F64:
            wide = ctx.cast(wide, DType.F64)
        return ctx.cast(ctx.emit("pow", wide, ctx.cast(exponent, wide.dtype)), base.dtype)
    if exponent.dtype.is_float:
        power = ctx.emit("pow", ctx.cast(base, DType.F64), ctx.cast(exponent, DType.F64))
        whole = ctx.emit("round", power)  # a power may come out one rounding below the exact integer
        close = ctx.compare(
            "le", ctx.emit("abs", ctx.sub(power, whole)), ctx.mul(ctx.emit("abs", whole), 1e-12)
        )
        return ctx.cast(ctx.select(close, whole, power), base.dtype)
    return _integer_power(ctx, base, ctx.cast(exponent, DType.I64))


def _integer_power(ctx: Context, base: Node, exponent: Node) -> Node:
    """The power of integers by repeated squaring; it wraps around. Any power beyond 63 of a number other than -1, 0 and
    1 has wrapped around anyway."""
    bits = ctx.emit("clamp", exponent, min=0, max=63)
    shape = ctx.mul(base, ctx.cast(exponent, base.dtype)).shape
    result, square = ctx.full(1, base.dtype, shape), base
    for bit in range(6):
        odd = ctx.emit("bitwise_and", ctx.emit("shr", bits, ctx.full(bit, DType.I64)), ctx.full(1, DType.I64))
        result = ctx.select(ctx.compare("ne", odd, 0), ctx.mul(result, square), result)
        square = ctx.mul(square, square) if bit < 5 else square
    if base.dtype.is_unsigned:
        return result
    # Negative exponents: 1 and -1 have whole powers, everything else is 0.
    even = ctx.compare("eq", ctx.emit("bitwise_and", exponent, ctx.full(1, DType.I64)), 0)
    of_minus_one = ctx.select(even, ctx.full(1, base.dtype), ctx.full(-1, base.dtype))
    inverse = ctx.select(ctx.compare("eq", base, -1), of_minus_one, 0)
    inverse = ctx.select(ctx.compare("eq", base, 1), 1, inverse)
    return ctx.select(ctx.compare("lt", exponent, 0), inverse, result)


@converter("BitShift")
def bit_shift(ctx: Context, x: Node, count: Node, *, direction: str) -> Node:
    """A shift by at least the type's width, or by a negative number, shifts all bits out."""
    width = 8 * x.dtype.bytes
    legal = ctx.compare("lt", count, width)
    if not x.dtype.is_unsigned:
        legal = ctx.both(legal, ctx.compare("ge", count, 0))
    near = ctx.select(legal, count, width - 1)
    if direction == "RIGHT" and not x.dtype.is_unsigned:
        return ctx.emit("shr", x, near)  # the sign comes in
    return ctx.select(legal, ctx.emit("shl" if direction == "LEFT" else "shr", x, near), 0)


@converter("Clip")
def clip(
    ctx: Context,
    x: Node,
    low: Node | None = None,
    high: Node | None = None,
    *,
    min: float | None = None,
    max: float | None = None,
    consumed_inputs: object = None,
) -> Node:
    for bound in (low, high):
        if bound is not None and bound.type.size != 1:
            raise Unsupported(f"a bound {bound.type!r}: must be one number")
    bottom: Operand | None = low if low is not None else min
    top: Operand | None = high if high is not None else max
    if bottom is not None:
        x = ctx.arithmetic("maximum", x, bottom)
    return x if top is None else ctx.arithmetic("minimum", x, top)


@converter("IsInf")
def is_inf(ctx: Context, x: Node, *, detect_negative: int = 1, detect_positive: int = 1) -> Node:
    if detect_negative and detect_positive:
        return ctx.emit("isinf", x)
    if not detect_negative and not detect_positive:
        return ctx.full(False, DType.BOOL, x.shape)
    return ctx.compare("eq", x, math.inf if detect_positive else -math.inf)


@converter("Where")
def where(ctx: Context, condition: Node, a: Node, b: Node) -> Node:
    return ctx.emit("select", condition, a, b)


# -- inverse and hyperbolic functions ---------------------------------------------------------------------------------


def _leg(ctx: Context, x: Node) -> Node:
    return ctx.emit("sqrt", ctx.mul(ctx.sub(1, x), ctx.add(1, x)))


def _with_sign(ctx: Context, x: Node, formula: Callable[[Node], Node]) -> Node:
    """An odd function, from its formula for non-negative values."""
    value = formula(ctx.emit("abs", x))
    return ctx.select(ctx.compare("lt", x, 0), ctx.emit("neg", value), value)


@converter("Asin")
@widened
def asin(ctx: Context, x: Node) -> Node:
    return ctx.emit("atan2", x, _leg(ctx, x))


@converter("Acos")
@widened
def acos(ctx: Context, x: Node) -> Node:
    return ctx.emit("atan2", _leg(ctx, x), x)


@converter("Atan")
@widened
def atan(ctx: Context, x: Node) -> Node:
    return ctx.arithmetic("atan2", x, 1)


@converter("Sinh")
@widened
def sinh(ctx: Context, x: Node) -> Node:
    def formula(size: Node) -> Node:
        # Above 1 the plain formula with the exponent halved: exp overflows before sinh does.
        small = ctx.emit("expm1", size)
        half = ctx.emit("exp", ctx.mul(size, 0.5))
        large = ctx.mul(ctx.mul(half, 0.5), half)
        precise = ctx.mul(ctx.add(small, ctx.div(small, ctx.add(small, 1))), 0.5)
        return ctx.select(ctx.compare("lt", size, 20), precise, large)

    return _with_sign(ctx, x, formula)


@converter("Cosh")
@widened
def cosh(ctx: Context, x: Node) -> Node:
    half = ctx.emit("exp", ctx.mul(ctx.emit("abs", x), 0.5))
    growing = ctx.mul(ctx.mul(half, 0.5), half)
    return ctx.add(growing, ctx.div(0.25, growing))


@converter("Asinh")
@widened
def asinh(ctx: Context, x: Node) -> Node:
    def formula(size: Node) -> Node:
        square = ctx.mul(size, size)
        root = ctx.emit("sqrt", ctx.add(square, 1))
        near = ctx.emit("log1p", ctx.add(size, ctx.div(square, ctx.add(root, 1))))
        far = ctx.add(ctx.emit("log", size), math.log(2))
        return ctx.select(ctx.compare("lt", size, 1e8), near, far)

    return _with_sign(ctx, x, formula)


@converter("Acosh")
@widened
def acosh(ctx: Context, x: Node) -> Node:
    above = ctx.sub(x, 1)
    near = ctx.emit("log1p", ctx.add(above, ctx.emit("sqrt", ctx.mul(above, ctx.add(x, 1)))))
    far = ctx.add(ctx.emit("log", x), math.log(2))
    return ctx.select(ctx.compare("lt", x, 1e8), near, far)


@converter("Atanh")
@widened
def atanh(ctx: Context, x: Node) -> Node:
    return _with_sign(
        ctx, x, lambda size: ctx.mul(ctx.emit("log1p", ctx.div(ctx.mul(size, 2), ctx.sub(1, size))), 0.5)
    )


# -- activations ------------------------------------------------------------------------------------------------------


@converter("LeakyRelu")
def leaky_relu(ctx: Context, x: Node, *, alpha: float = 0.01, consumed_inputs: object = None) -> Node:
    return ctx.emit("leaky_relu", x, slope=float(alpha))


@converter("PRelu")
def prelu(ctx: Context, x: Node, slope: Node, *, consumed_inputs: object = None) -> Node:
    if ctx.opset < 7 and slope.type.rank == 1 and slope.type.size > 1 and x.type.rank > 1:
        slope = ctx.reshape(slope, (slope.type.size, *[1] * (x.type.rank - 2)))  # one per channel
    return ctx.select(ctx.compare("lt", x, 0), ctx.mul(x, slope), x)


@converter("Elu")
@widened
def elu(ctx: Context, x: Node, *, alpha: float = 1.0, consumed_inputs: object = None) -> Node:
    return ctx.emit("elu", x, alpha=float(alpha))


@converter("Selu")
@widened
def selu(
    ctx: Context,
    x: Node,
    *,
    alpha: float | None = None,
    gamma: float | None = None,
    consumed_inputs: object = None,
) -> Node:
    old = ctx.opset < 6
    alpha = (1.6732 if old else 1.67326319217681884765625) if alpha is None else alpha
    gamma = (1.0507 if old else 1.05070102214813232421875) if gamma is None else gamma
    return ctx.mul(ctx.emit("elu", x, alpha=float(alpha)), gamma)


@converter("Celu")
@widened
def celu(ctx: Context, x: Node, *, alpha: float = 1.0) -> Node:
    negative = ctx.mul(ctx.emit("expm1", ctx.mul(x, 1 / alpha)), alpha)
    return ctx.select(ctx.compare("gt", x, 0), x, negative)


@converter("ThresholdedRelu")
def thresholded_relu(ctx: Context, x: Node, *, alpha: float = 1.0) -> Node:
    return ctx.select(ctx.compare("gt", x, alpha), x, 0)


@converter("HardSigmoid")
@widened
def hard_sigmoid(
    ctx: Context, x: Node, *, alpha: float = 0.2, beta: float = 0.5, consumed_inputs: object = None
) -> Node:
    return ctx.emit("clamp", ctx.add(ctx.mul(x, alpha), beta), min=0.0, max=1.0)


@converter("Softplus")
@widened
def softplus(ctx: Context, x: Node) -> Node:
    # max(x, 0) + log1p(exp(-|x|)): nothing overflows.
    tail = ctx.emit("log1p", ctx.emit("exp", ctx.emit("neg", ctx.emit("abs", x))))
    return ctx.add(ctx.emit("relu", x), tail)


@converter("Softsign")
@widened
def softsign(ctx: Context, x: Node) -> Node:
    return ctx.div(x, ctx.add(ctx.emit("abs", x), 1))


@converter("Gelu")
def gelu(ctx: Context, x: Node, *, approximate: str = "none") -> Node:
    return ctx.emit("gelu", x, approximate=approximate)


@converter("Swish")
@widened
def swish(ctx: Context, x: Node, *, alpha: float = 1.0) -> Node:
    return ctx.emit("silu", x) if alpha == 1 else ctx.mul(x, ctx.emit("sigmoid", ctx.mul(x, alpha)))


@converter("Shrink")
@widened
def shrink(ctx: Context, x: Node, *, bias: float = 0.0, lambd: float = 0.5) -> Node:
    above = ctx.select(ctx.compare("gt", x, lambd), ctx.sub(x, bias), 0) if x.dtype.is_float else None
    if above is None:
        return ctx.cast(shrink(ctx, ctx.cast(x, DType.F32), bias=bias, lambd=lambd), x.dtype)
    return ctx.select(ctx.compare("lt", x, -lambd), ctx.add(x, bias), above)


@converter("Dropout")
def dropout(
    ctx: Context,
    x: Node,
    ratio_input: Node | None = None,
    training: Node | None = None,
    *,
    ratio: float = 0.5,
    seed: int = 0,
    is_test: int = 1,
    consumed_inputs: object = None,
) -> tuple[Node, Node]:
    if training is not None and bool(ctx.static(training).reshape(-1)[0]):
        probability = 0.5 if ratio_input is None else float(ctx.static(ratio_input).reshape(-1)[0])
        if probability > 0:
            raise Unsupported("random numbers: dropout in training mode")
    mask = DType.BOOL if ctx.opset >= 10 else x.dtype
    return x, ctx.full(1, mask, x.shape)


# -- types ------------------------------------------------------------------------------------------------------------


@converter("Identity")
def identity(ctx: Context, x: Node) -> Node:
    return x


@converter("Cast")
def cast(ctx: Context, x: Node, *, to: int | str, saturate: int = 1, round_mode: str = "up") -> Node:
    if isinstance(to, str):  # before opset 6
        import onnx

        to = int(onnx.TensorProto.DataType.Value(to))
    return converted(ctx, x, dtype_of(to))


@converter("CastLike")
def cast_like(ctx: Context, x: Node, target: Node, *, saturate: int = 1, round_mode: str = "up") -> Node:
    return converted(ctx, x, target.dtype)


def converted(ctx: Context, x: Node, dtype: DType) -> Node:
    if x.dtype.is_float and dtype.is_integer and dtype.bytes < 4:
        # By way of i32, so that what is out of range wraps around instead of being whatever the machine does.
        x = ctx.cast(x, DType.I32)
    return ctx.cast(x, dtype)


def number(array: np.ndarray) -> float:
    return float(array.reshape(-1)[0])
