"""Elementwise operators written as formulas of simpler ones, and activations with arguments.

Of 16-bit floats a formula is computed in f32 and rounded once at its end, as PyTorch does (`widened`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tilewright.dtypes import DType
from tilewright.frontend.builder import Number, Operand
from tilewright.frontend.torch.context import Context, widened
from tilewright.frontend.torch.registry import Inexpressible, converter
from tilewright.frontend.torch.types import common_dtype
from tilewright.graph.ir import Node

# -- activations with arguments ----------------------------------------------------------------------------------


@converter("aten.gelu.default")
def gelu(ctx: Context, x: Node, approximate: str = "none") -> Node:
    return ctx.emit("gelu", x, approximate=approximate)


@converter("aten.elu.default")
@widened
def elu(ctx: Context, x: Node, alpha: Number = 1, scale: Number = 1, input_scale: Number = 1) -> Node:
    if input_scale == 1:
        result = ctx.emit("elu", x, alpha=float(alpha))
        return result if scale == 1 else ctx.mul(result, scale)
    negative = ctx.mul(ctx.emit("expm1", ctx.mul(x, input_scale)), alpha)
    return ctx.mul(ctx.select(ctx.compare("gt", x, 0), x, negative), scale)


@converter("aten.selu.default")
def selu(ctx: Context, x: Node) -> Node:
    return elu(ctx, x, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946)


@converter("aten.celu.default")
@widened
def celu(ctx: Context, x: Node, alpha: Number = 1.0) -> Node:
    return elu(ctx, x, alpha, 1, 1 / alpha)


@converter("aten.leaky_relu.default")
def leaky_relu(ctx: Context, x: Node, negative_slope: Number = 0.01) -> Node:
    return ctx.emit("leaky_relu", x, slope=float(negative_slope))


@converter("aten.rrelu.default")
def rrelu(ctx: Context, x: Node, lower: float = 0.125, upper: float = 1 / 3, training: bool = False) -> Node:
    if training:
        raise Inexpressible("random numbers: rrelu in training mode")
    return ctx.emit("leaky_relu", x, slope=(lower + upper) / 2)


@converter("aten.softplus.default")
def softplus(ctx: Context, x: Node, beta: Number = 1, threshold: Number = 20) -> Node:
    return ctx.emit("softplus", x, beta=float(beta), threshold=float(threshold))


@converter("aten.log_sigmoid.default")
@widened
def log_sigmoid(ctx: Context, x: Node) -> Node:
    # min(x, 0) - log1p(exp(-|x|)), exact at both ends
    tail = ctx.emit("log1p", ctx.emit("exp", ctx.emit("neg", ctx.emit("abs", x))))
    return ctx.sub(ctx.emit("clamp", x, min=None, max=0.0), tail)


@converter("aten.prelu.default", "aten._prelu_kernel.default")
@widened
def prelu(ctx: Context, x: Node, weight: Node) -> Node:
    if weight.type.rank <= 1 and x.type.rank >= 2 and weight.type.size > 1:
        weight = ctx.reshape(weight, (weight.type.size,) + (1,) * (x.type.rank - 2))
    elif weight.type.size == 1:
        weight = ctx.reshape(weight, ())
    return ctx.select(ctx.compare("gt", x, 0), x, ctx.mul(x, weight))


@converter("aten.glu.default")
@widened
def glu(ctx: Context, x: Node, dim: int = -1) -> Node:
    axis = dim % x.type.rank
    half = x.shape[axis] // 2
    gate = ctx.emit("sigmoid", ctx.slice_axis(x, axis, half, 2 * half))
    return ctx.mul(ctx.slice_axis(x, axis, 0, half), gate)


@converter("aten.hardshrink.default")
def hardshrink(ctx: Context, x: Node, lambd: Number = 0.5) -> Node:
    return ctx.select(ctx.compare("le", ctx.emit("abs", x), lambd), 0, x, x.dtype)


@converter("aten.softshrink.default")
@widened
def softshrink(ctx: Context, x: Node, lambd: Number = 0.5) -> Node:
    return ctx.sub(x, ctx.emit("clamp", x, min=-float(lambd), max=float(lambd)))


# -- formulas ---------------------------------------------------------------------------------------------------


def _formula(*names: str) -> Callable[[Callable[[Context, Node], Node]], Callable[[Context, Node], Node]]:
    """A float function of one tensor: integers are first converted to the result's type."""

    def register(function: Callable[[Context, Node], Node]) -> Callable[[Context, Node], Node]:
        @converter(*names)
        def convert(ctx: Context, x: Node) -> Node:
            return ctx.cast(function(ctx, ctx.cast(x, ctx.dtype.compute)), ctx.dtype)

        return function

    return register


@_formula("aten.log10.default")
def log10(ctx: Context, x: Node) -> Node:
    return ctx.mul(ctx.emit("log", x), 1 / math.log(10))


@_formula("aten.erfc.default", "aten.special_erfc.default")
def erfc(ctx: Context, x: Node) -> Node:
    return ctx.sub(1, ctx.emit("erf", x))


@_formula("aten.frac.default")
def frac(ctx: Context, x: Node) -> Node:
    return ctx.sub(x, ctx.emit("trunc", x))


def _cathetus(ctx: Context, x: Node) -> Node:
    """sqrt(1 - x^2), without cancellation near 1."""
    return ctx.emit("sqrt", ctx.mul(ctx.sub(1, x), ctx.add(x, 1)))


@_formula("aten.asin.default", "aten.arcsin.default")
def asin(ctx: Context, x: Node) -> Node:
    return ctx.emit("atan2", x, _cathetus(ctx, x))


@_formula("aten.acos.default", "aten.arccos.default")
def acos(ctx: Context, x: Node) -> Node:
    return ctx.emit("atan2", _cathetus(ctx, x), x)


@_formula("aten.atan.default", "aten.arctan.default")
def atan(ctx: Context, x: Node) -> Node:
    return ctx.emit("atan2", x, ctx.full(1, x.dtype))


@_formula("aten.sinh.default")
def sinh(ctx: Context, x: Node) -> Node:
    # With e = exp(|x|) - 1: (e + e / (e + 1)) / 2, accurate near 0. Beyond, e / (e + 1) is 1 and e may overflow.
    magnitude = ctx.emit("abs", x)
    e = ctx.emit("expm1", magnitude)
    fraction = ctx.emit("neg", ctx.emit("expm1", ctx.emit("neg", magnitude)))
    return ctx.mul(ctx.emit("sign", x), ctx.mul(ctx.add(e, fraction), 0.5))


@_formula("aten.cosh.default")
def cosh(ctx: Context, x: Node) -> Node:
    return ctx.mul(ctx.add(ctx.emit("exp", x), ctx.emit("exp", ctx.emit("neg", x))), 0.5)


@_formula("aten.asinh.default", "aten.arcsinh.default")
def asinh(ctx: Context, x: Node) -> Node:
    # sign(x) log1p(|x| + x^2 / (1 + sqrt(1 + x^2)))
    magnitude, squared = ctx.emit("abs", x), ctx.emit("square", x)
    root = ctx.add(ctx.emit("sqrt", ctx.add(squared, 1)), 1)
    return ctx.mul(ctx.emit("sign", x), ctx.emit("log1p", ctx.add(magnitude, ctx.div(squared, root))))


@_formula("aten.acosh.default", "aten.arccosh.default")
def acosh(ctx: Context, x: Node) -> Node:
    above = ctx.sub(x, 1)
    return ctx.emit("log1p", ctx.add(above, ctx.emit("sqrt", ctx.mul(above, ctx.add(x, 1)))))


@_formula("aten.atanh.default", "aten.arctanh.default")
def atanh(ctx: Context, x: Node) -> Node:
    return ctx.mul(ctx.emit("log1p", ctx.div(ctx.mul(x, 2), ctx.sub(1, x))), 0.5)


@_formula("aten.deg2rad.default")
def deg2rad(ctx: Context, x: Node) -> Node:
    return ctx.mul(x, math.pi / 180)


@_formula("aten.rad2deg.default")
def rad2deg(ctx: Context, x: Node) -> Node:
    return ctx.mul(x, 180 / math.pi)


@_formula("aten.sinc.default")
def sinc(ctx: Context, x: Node) -> Node:
    angle = ctx.mul(x, math.pi)
    return ctx.select(ctx.compare("eq", x, 0), 1, ctx.div(ctx.emit("sin", angle), angle), x.dtype)


@converter("aten.round.decimals")
@widened
def round_decimals(ctx: Context, x: Node, decimals: int) -> Node:
    if not x.dtype.is_float:
        return x
    scale = 10.0 ** abs(decimals)
    up, down = (ctx.mul, ctx.div) if decimals >= 0 else (ctx.div, ctx.mul)
    return down(ctx.emit("round", up(x, scale)), scale)


@converter("aten.addcmul.default")
@widened
def addcmul(ctx: Context, x: Node, tensor1: Node, tensor2: Node, value: Number = 1) -> Node:
    product = ctx.mul(tensor1, tensor2)
    return ctx.add(x, product if value == 1 else ctx.mul(product, value))


@converter("aten.addcdiv.default")
@widened
def addcdiv(ctx: Context, x: Node, tensor1: Node, tensor2: Node, value: Number = 1) -> Node:
    quotient = ctx.div(tensor1, tensor2)
    return ctx.add(x, quotient if value == 1 else ctx.mul(quotient, value))


@converter("aten.lerp.Scalar", "aten.lerp.Tensor")
@widened
def lerp(ctx: Context, x: Node, end: Node, weight: Operand) -> Node:
    """From the nearer end, so that both ends are exact."""
    span = ctx.sub(end, x)
    from_start = ctx.add(x, ctx.mul(span, weight))
    from_end = ctx.sub(end, ctx.mul(span, ctx.sub(1, weight) if isinstance(weight, Node) else 1 - weight))
    if not isinstance(weight, Node):
        return from_start if abs(weight) < 0.5 else from_end
    return ctx.select(ctx.compare("lt", ctx.emit("abs", weight), 0.5), from_start, from_end)


@converter("aten.logaddexp.default")
@widened
def logaddexp(ctx: Context, a: Node, b: Node) -> Node:
    # max + log1p(exp(-|a - b|)); equal infinities have no difference
    dtype = common_dtype((a, b))
    a, b = ctx.cast(a, dtype), ctx.cast(b, dtype)
    largest = ctx.emit("maximum", a, b)
    gap = ctx.emit("neg", ctx.emit("abs", ctx.sub(a, b)))
    smooth = ctx.add(largest, ctx.emit("log1p", ctx.emit("exp", gap)))
    return ctx.select(ctx.emit("isinf", largest), largest, smooth)


@converter("aten.xlogy.Tensor", "aten.xlogy.Scalar_Other", "aten.special_xlogy.default")
@widened
def xlogy(ctx: Context, x: Node, other: Operand) -> Node:
    dtype = ctx.dtype.compute
    x, y = ctx.cast(x, dtype), ctx.operand(other, dtype)
    product = ctx.select(ctx.compare("eq", x, 0), 0, ctx.mul(x, ctx.emit("log", y)), dtype)
    return ctx.select(ctx.emit("isnan", y), math.nan, product, dtype)


@converter("aten.hypot.default")
@widened
def hypot(ctx: Context, a: Node, b: Node) -> Node:
    a, b = ctx.cast(a, ctx.dtype.compute), ctx.cast(b, ctx.dtype.compute)
    return ctx.emit("sqrt", ctx.add(ctx.emit("square", a), ctx.emit("square", b)))


@converter("aten.logit.default")
@widened
def logit(ctx: Context, x: Node, eps: float | None = None) -> Node:
    x = ctx.cast(x, ctx.dtype.compute)
    if eps is not None:
        x = ctx.emit("clamp", x, min=float(eps), max=1 - float(eps))
    return ctx.emit("log", ctx.div(x, ctx.sub(1, x)))


@converter("aten.heaviside.default")
def heaviside(ctx: Context, x: Node, values: Node) -> Node:
    step = ctx.cast(ctx.compare("gt", x, 0), x.dtype)
    return ctx.select(ctx.compare("eq", x, 0), values, step, x.dtype)


def _is_negative(ctx: Context, x: Node) -> Node:
    """Whether the sign is negative, including that of a zero, whose reciprocal is an infinity of that sign."""
    below = ctx.compare("lt", x, 0)
    if not x.dtype.is_float:
        return below
    return ctx.emit("logical_or", below, ctx.compare("lt", ctx.emit("reciprocal", x), 0))


@converter("aten.signbit.default")
def signbit(ctx: Context, x: Node) -> Node:
    return ctx.full(False, ctx.dtype, x.shape) if x.dtype is DType.BOOL else _is_negative(ctx, x)


@converter("aten.copysign.Tensor", "aten.copysign.Scalar")
def copysign(ctx: Context, x: Node, other: Operand) -> Node:
    magnitude = ctx.emit("abs", ctx.cast(x, ctx.dtype))
    negated = ctx.emit("neg", magnitude)
    if isinstance(other, Node):
        return ctx.emit("select", _is_negative(ctx, other), negated, magnitude)
    return negated if math.copysign(1, other) < 0 else magnitude


@_formula("aten.angle.default")
def angle(ctx: Context, x: Node) -> Node:
    """The angle of a real number is 0 or pi, or NaN."""
    plain = ctx.select(ctx.compare("lt", x, 0), math.pi, 0.0, x.dtype)
    return ctx.select(ctx.emit("isnan", x), x, plain, x.dtype)


@converter("aten.isin.Tensor_Tensor", "aten.isin.Tensor_Scalar", "aten.isin.Scalar_Tensor")
def isin(
    ctx: Context, elements: Operand, test: Operand, *, assume_unique: bool = False, invert: bool = False
) -> Node:
    dtype = common_dtype((elements, test))
    x, those = ctx.operand(elements, dtype), ctx.operand(test, dtype)
    those = ctx.reshape(those, (those.type.size,))
    found = ctx.emit("eq", ctx.unsqueeze(x, x.type.rank), those)
    found = ctx.emit("any", found, axes=(x.type.rank,), keepdims=False)
    return ctx.emit("logical_not", found) if invert else found
