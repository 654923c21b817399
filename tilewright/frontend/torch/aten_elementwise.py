"""Elementwise operators that the graph has too: tables of unary and binary ones, casts, selection and clamping."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tilewright.dtypes import DType
from tilewright.frontend.builder import Number, Operand, Unsupported
from tilewright.frontend.torch.context import Context
from tilewright.frontend.torch.registry import Inexpressible, converter
from tilewright.frontend.torch.types import common_dtype, from_torch_dtype
from tilewright.graph.ir import Node

# -- one to one --------------------------------------------------------------------------------------------------

# Float functions: PyTorch brings integers to its default float type first.
_FLOAT_UNARY = {
    "exp": ("exp",),
    "expm1": ("expm1", "special_expm1"),
    "exp2": ("exp2", "special_exp2"),
    "log": ("log",),
    "log2": ("log2",),
    "log1p": ("log1p", "special_log1p"),
    "sqrt": ("sqrt",),
    "rsqrt": ("rsqrt",),
    "reciprocal": ("reciprocal",),
    "sin": ("sin",),
    "cos": ("cos",),
    "tan": ("tan",),
    "tanh": ("tanh",),
    "sigmoid": ("sigmoid", "special_expit"),
    "silu": ("silu",),
    "erf": ("erf", "special_erf"),
    "mish": ("mish",),
    "hardswish": ("hardswish",),
    "hardsigmoid": ("hardsigmoid",),
}
# Functions that leave the type as it is; the second kind does nothing to integers.
_SAME_TYPE_UNARY = {"neg": ("neg", "negative"), "relu": ("relu",)}
_ROUNDING = {"floor": ("floor",), "ceil": ("ceil",), "trunc": ("trunc", "fix"), "round": ("round",)}


def _float_unary(op: str) -> Callable[..., Node]:
    def convert(ctx: Context, x: Node) -> Node:
        return ctx.emit(op, ctx.cast(x, ctx.dtype))

    return convert


def _same_type_unary(op: str) -> Callable[..., Node]:
    def convert(ctx: Context, x: Node) -> Node:
        return ctx.emit(op, x)

    return convert


def _rounding(op: str) -> Callable[..., Node]:
    def convert(ctx: Context, x: Node) -> Node:
        return ctx.emit(op, x) if x.dtype.is_float else x

    return convert


for _make, _names in (
    (_float_unary, _FLOAT_UNARY),
    (_same_type_unary, _SAME_TYPE_UNARY),
    (_rounding, _ROUNDING),
):
    for _op, _aten in _names.items():
        converter(*(f"aten.{name}.default" for name in _aten))(_make(_op))


@converter("aten.abs.default", "aten.absolute.default")
def absolute(ctx: Context, x: Node) -> Node:
    return x if x.dtype in (DType.BOOL, DType.U8) else ctx.emit("abs", x)


@converter("aten.sign.default", "aten.sgn.default")
def sign(ctx: Context, x: Node) -> Node:
    return x if x.dtype is DType.BOOL else ctx.emit("sign", x)


@converter("aten.square.default")
def square(ctx: Context, x: Node) -> Node:
    return ctx.emit("square", ctx.cast(x, ctx.dtype))


@converter("aten.positive.default")
def positive(ctx: Context, x: Node) -> Node:
    return x


@converter("aten.logical_not.default")
def logical_not(ctx: Context, x: Node) -> Node:
    return ctx.emit("logical_not", ctx.truth(x))


@converter("aten.bitwise_not.default")
def bitwise_not(ctx: Context, x: Node) -> Node:
    return ctx.emit("bitwise_not", x)


def _float_test(op: str, of_integers: bool) -> Callable[..., Node]:
    def convert(ctx: Context, x: Node) -> Node:
        return ctx.emit(op, x) if x.dtype.is_float else ctx.full(of_integers, DType.BOOL, x.shape)

    return convert


converter("aten.isnan.default")(_float_test("isnan", False))
converter("aten.isinf.default")(_float_test("isinf", False))
converter("aten.isfinite.default")(_float_test("isfinite", True))


@converter("aten.isposinf.default")
def isposinf(ctx: Context, x: Node) -> Node:
    return ctx.compare("eq", x, math.inf) if x.dtype.is_float else ctx.full(False, DType.BOOL, x.shape)


@converter("aten.isneginf.default")
def isneginf(ctx: Context, x: Node) -> Node:
    return ctx.compare("eq", x, -math.inf) if x.dtype.is_float else ctx.full(False, DType.BOOL, x.shape)


# -- casts and copies: a graph has no storage -------------------------------------------------------------------


@converter(
    "aten.detach.default",
    "aten.detach_copy.default",
    "aten.alias.default",
    "aten.alias_copy.default",
    "aten.clone.default",
    "aten.contiguous.default",
    "aten.lift_fresh.default",
    "aten.lift_fresh_copy.default",
    "aten.resolve_conj.default",
    "aten.resolve_neg.default",
    "aten.conj.default",
    "aten.conj_physical.default",
    "aten.real.default",
    "aten.to.device",
    "aten.to.dtype",
    "aten.to.dtype_layout",
    "aten.to.other",
    "aten.type_as.default",
    "aten._to_copy.default",
    "prims.convert_element_type.default",
    "prims.device_put.default",
    "aten._cast_Float.default",
    "aten._cast_Half.default",
    "aten._cast_Int.default",
    "aten._cast_Long.default",
    "aten._cast_Double.default",
)
def as_typed(ctx: Context, x: Node, *arguments: Any, **keywords: Any) -> Node:
    return ctx.cast(x, ctx.dtype)


@converter("aten.copy.default", "aten.fill.Scalar", "aten.fill.Tensor")
def overwrite(ctx: Context, x: Node, value: Operand, *arguments: Any) -> Node:
    return ctx.broadcast_to(ctx.operand(value, x.dtype), x.shape)


@converter("aten.dropout.default", "aten.feature_dropout.default", "aten.alpha_dropout.default")
def dropout(ctx: Context, input: Node, p: float, train: bool) -> Node:
    if train and p > 0:
        raise Inexpressible("random numbers: dropout in training mode")
    return input


@converter("aten.native_dropout.default")
def native_dropout(ctx: Context, input: Node, p: float, train: bool | None) -> tuple[Node, Node]:
    return dropout(ctx, input, p, bool(train)), ctx.full(True, DType.BOOL, input.shape)


@converter("aten.zero.default")
def zero(ctx: Context, x: Node) -> Node:
    return ctx.full(0, x.dtype, x.shape)


@converter("aten.view.dtype", "aten.view_copy.dtype")
def bitcast(ctx: Context, x: Node, dtype: torch.dtype) -> Node:
    if from_torch_dtype(dtype) is not x.dtype:
        raise Unsupported(f"reads the bits of {x.dtype.short} as {from_torch_dtype(dtype).short}")
    return x


# -- binary -----------------------------------------------------------------------------------------------------


def _scaled(ctx: Context, x: Operand, alpha: Number) -> Operand:
    if alpha == 1:
        return x
    return ctx.mul(ctx.widen(x), alpha) if isinstance(x, Node) else x * alpha


@converter("aten.add.Tensor", "aten.add.Scalar")
def add(ctx: Context, a: Operand, b: Operand, alpha: Number = 1) -> Node:
    b = _scaled(ctx, b, alpha)
    if common_dtype((a, b)) is DType.BOOL:
        return ctx.arithmetic("logical_or", a, b)
    return ctx.arithmetic("add", a, b, dtype=ctx.dtype)


@converter("aten.sub.Tensor", "aten.sub.Scalar", "aten.subtract.Tensor", "aten.subtract.Scalar")
def sub(ctx: Context, a: Operand, b: Operand, alpha: Number = 1) -> Node:
    return ctx.arithmetic("sub", a, _scaled(ctx, b, alpha), dtype=ctx.dtype)


@converter("aten.rsub.Scalar", "aten.rsub.Tensor")
def rsub(ctx: Context, a: Operand, b: Operand, alpha: Number = 1) -> Node:
    return ctx.arithmetic("sub", b, _scaled(ctx, a, alpha), dtype=ctx.dtype)


@converter("aten.mul.Tensor", "aten.mul.Scalar", "aten.multiply.Tensor", "aten.multiply.Scalar")
def mul(ctx: Context, a: Operand, b: Operand) -> Node:
    op = "logical_and" if common_dtype((a, b)) is DType.BOOL else "mul"
    return ctx.arithmetic(op, a, b, dtype=ctx.dtype)


def _as_floats(ctx: Context, *operands: Operand) -> tuple[Operand, ...]:
    """Operands for true division: integers become the result's float type."""
    if common_dtype(operands).is_float:
        return operands
    return tuple(ctx.cast(x, ctx.dtype) if isinstance(x, Node) else float(x) for x in operands)


@converter(
    "aten.div.Tensor",
    "aten.div.Scalar",
    "aten.divide.Tensor",
    "aten.divide.Scalar",
    "aten.true_divide.Tensor",
    "aten.true_divide.Scalar",
)
def div(ctx: Context, a: Operand, b: Operand) -> Node:
    return ctx.arithmetic("div", *_as_floats(ctx, a, b), dtype=ctx.dtype)


@converter(
    "aten.div.Tensor_mode", "aten.div.Scalar_mode", "aten.divide.Tensor_mode", "aten.divide.Scalar_mode"
)
def div_mode(ctx: Context, a: Operand, b: Operand, rounding_mode: str | None = None) -> Node:
    if rounding_mode is None:
        return div(ctx, a, b)
    if rounding_mode == "floor":
        return floor_divide(ctx, a, b)
    if common_dtype((a, b)).is_float:
        working = ctx.working_dtype(a, b)
        quotient = ctx.emit("div", ctx.operand(a, working), ctx.operand(b, working))
        return ctx.cast(ctx.emit("trunc", quotient), ctx.dtype)
    dtype = common_dtype((a, b))
    left, right = ctx.operand(a, dtype), ctx.operand(b, dtype)
    if dtype is DType.U8:
        return ctx.emit("floordiv", left, right)
    magnitude = ctx.emit("floordiv", ctx.emit("abs", left), ctx.emit("abs", right))
    return ctx.emit("mul", ctx.emit("mul", ctx.emit("sign", left), ctx.emit("sign", right)), magnitude)


@converter("aten.floor_divide.default", "aten.floor_divide.Scalar")
def floor_divide(ctx: Context, a: Operand, b: Operand) -> Node:
    return ctx.arithmetic("floordiv", a, b, dtype=ctx.dtype)


@converter("aten.remainder.Tensor", "aten.remainder.Scalar", "aten.remainder.Scalar_Tensor")
def remainder(ctx: Context, a: Operand, b: Operand) -> Node:
    return ctx.arithmetic("mod", a, b, dtype=ctx.dtype)


@converter("aten.fmod.Tensor", "aten.fmod.Scalar")
def fmod(ctx: Context, a: Operand, b: Operand) -> Node:
    return ctx.arithmetic("fmod", a, b, dtype=ctx.dtype)


@converter("aten.atan2.default", "aten.arctan2.default")
def atan2(ctx: Context, a: Operand, b: Operand) -> Node:
    return ctx.arithmetic("atan2", *_as_floats(ctx, a, b), dtype=ctx.dtype)


@converter("aten.maximum.default", "aten.max.other")
def maximum(ctx: Context, a: Operand, b: Operand) -> Node:
    op = "logical_or" if common_dtype((a, b)) is DType.BOOL else "maximum"
    return ctx.arithmetic(op, a, b, dtype=ctx.dtype)


@converter("aten.minimum.default", "aten.min.other")
def minimum(ctx: Context, a: Operand, b: Operand) -> Node:
    op = "logical_and" if common_dtype((a, b)) is DType.BOOL else "minimum"
    return ctx.arithmetic(op, a, b, dtype=ctx.dtype)


def _ignoring_nan(op: str) -> Callable[..., Node]:
    def convert(ctx: Context, a: Node, b: Node) -> Node:
        dtype = common_dtype((a, b))
        a, b = ctx.cast(a, dtype), ctx.cast(b, dtype)
        if not dtype.is_float:
            return maximum(ctx, a, b) if op == "maximum" else minimum(ctx, a, b)
        either = ctx.emit("select", ctx.emit("isnan", b), a, ctx.emit(op, a, b))
        return ctx.emit("select", ctx.emit("isnan", a), b, either)

    return convert


converter("aten.fmax.default")(_ignoring_nan("maximum"))
converter("aten.fmin.default")(_ignoring_nan("minimum"))


@converter("aten.pow.Tensor_Tensor", "aten.pow.Scalar")
def pow_tensor(ctx: Context, a: Operand, b: Operand) -> Node:
    if not common_dtype((a, b)).is_float:
        raise Unsupported("integer power with a tensor of exponents")
    return ctx.arithmetic("pow", a, b, dtype=ctx.dtype)


@converter("aten.pow.Tensor_Scalar")
def pow_scalar(ctx: Context, x: Node, exponent: Number) -> Node:
    """Small powers as the products and roots that they are."""
    x = ctx.cast(x, ctx.dtype)
    if exponent == 0:
        return ctx.full(1, x.dtype, x.shape)
    if exponent == 1:
        return x
    if exponent == 2:
        return ctx.emit("square", x)
    if exponent == 3:
        return ctx.emit("mul", ctx.emit("square", x), x)
    if x.dtype.is_float:
        special = {0.5: "sqrt", -0.5: "rsqrt", -1.0: "reciprocal"}.get(float(exponent))
        return ctx.emit(special, x) if special else ctx.arithmetic("pow", x, exponent, dtype=ctx.dtype)
    if exponent < 0 or exponent != int(exponent):
        raise Unsupported(f"integer power {exponent}")
    result: Node | None = None
    for bit in bin(int(exponent))[2:]:
        result = ctx.emit("square", result) if result is not None else None
        if bit == "1":
            result = ctx.emit("mul", result, x) if result is not None else x
    assert result is not None
    return result


_COMPARISONS = {
    "eq": ("eq",),
    "ne": ("ne", "not_equal"),
    "lt": ("lt", "less"),
    "le": ("le", "less_equal"),
    "gt": ("gt", "greater"),
    "ge": ("ge", "greater_equal"),
}


def _comparison(op: str) -> Callable[..., Node]:
    def convert(ctx: Context, a: Operand, b: Operand) -> Node:
        return ctx.compare(op, a, b)

    return convert


for _op, _aten in _COMPARISONS.items():
    converter(*(f"aten.{name}.{overload}" for name in _aten for overload in ("Tensor", "Scalar")))(
        _comparison(_op)
    )


def _logical(op: str) -> Callable[..., Node]:
    def convert(ctx: Context, a: Node, b: Node) -> Node:
        return ctx.emit(op, ctx.truth(a), ctx.truth(b))

    return convert


for _op in ("logical_and", "logical_or", "logical_xor"):
    converter(f"aten.{_op}.default")(_logical(_op))


def _bitwise(op: str) -> Callable[..., Node]:
    def convert(ctx: Context, a: Operand, b: Operand) -> Node:
        return ctx.arithmetic(op, a, b, dtype=ctx.dtype)

    return convert


for _op, _short in {"bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor"}.items():
    converter(*(f"aten.{_op}.{overload}" for overload in ("Tensor", "Scalar", "Scalar_Tensor")))(
        _bitwise(_op)
    )
    converter(f"aten.__{_short}__.Tensor", f"aten.__{_short}__.Scalar")(_bitwise(_op))
for _op, _side in {"shl": "left", "shr": "right"}.items():
    _overloads = ("Tensor", "Tensor_Scalar", "Scalar_Tensor")
    converter(*(f"aten.bitwise_{_side}_shift.{overload}" for overload in _overloads))(_bitwise(_op))
    converter(f"aten.__{_side[0]}shift__.Tensor", f"aten.__{_side[0]}shift__.Scalar")(_bitwise(_op))


# -- selection and clamping -------------------------------------------------------------------------------------


@converter("aten.where.self", "aten.where.ScalarOther", "aten.where.ScalarSelf", "aten.where.Scalar")
def where(ctx: Context, condition: Node, a: Operand, b: Operand) -> Node:
    return ctx.broadcast_to(ctx.select(ctx.truth(condition), a, b, ctx.dtype), ctx.shape)


@converter("aten.masked_fill.Scalar", "aten.masked_fill.Tensor")
def masked_fill(ctx: Context, x: Node, mask: Node, value: Operand) -> Node:
    return ctx.select(ctx.truth(mask), value, x, x.dtype)


@converter("aten.clamp.default", "aten.clip.default")
def clamp(ctx: Context, x: Node, min: Number | None = None, max: Number | None = None) -> Node:
    return _clamp(ctx, x, min, max)


@converter("aten.hardtanh.default")
def hardtanh(ctx: Context, x: Node, min_val: Number = -1, max_val: Number = 1) -> Node:
    return _clamp(ctx, x, min_val, max_val)


def _clamp(ctx: Context, x: Node, low: Number | None, high: Number | None) -> Node:
    dtype = ctx.dtype
    x = ctx.cast(x, dtype)
    low = _bound(low, dtype, math.ceil)
    high = _bound(high, dtype, math.floor)
    return x if low is None and high is None else ctx.emit("clamp", x, min=low, max=high)


def _bound(value: Number | None, dtype: DType, towards: Callable[[float], int]) -> Number | None:
    """A bound as a value of `dtype`; None if it is infinite or outside the integers of the type."""
    if value is None or (isinstance(value, float) and math.isinf(value) and not dtype.is_float):
        return None
    if dtype.is_float:
        return float(value)
    limits = np.iinfo(dtype.numpy)
    return int(np.clip(towards(value), limits.min, limits.max))


@converter("aten.clamp_min.default", "aten.clamp_min.Tensor")
def clamp_min(ctx: Context, x: Node, min: Operand) -> Node:
    return maximum(ctx, x, min) if isinstance(min, Node) else _clamp(ctx, x, min, None)


@converter("aten.clamp_max.default", "aten.clamp_max.Tensor")
def clamp_max(ctx: Context, x: Node, max: Operand) -> Node:
    return minimum(ctx, x, max) if isinstance(max, Node) else _clamp(ctx, x, None, max)


@converter("aten.clamp.Tensor", "aten.clip.Tensor")
def clamp_tensor(ctx: Context, x: Node, min: Node | None = None, max: Node | None = None) -> Node:
    x = ctx.cast(x, ctx.dtype)
    x = x if min is None else ctx.emit("maximum", x, ctx.cast(min, ctx.dtype))
    return x if max is None else ctx.emit("minimum", x, ctx.cast(max, ctx.dtype))


@converter("aten.relu6.default")
def relu6(ctx: Context, x: Node) -> Node:
    return _clamp(ctx, x, 0, 6)


@converter("aten.threshold.default")
def threshold(ctx: Context, x: Node, threshold: Number, value: Number) -> Node:
    # The condition is negated, so that a NaN is kept.
    return ctx.select(ctx.compare("le", x, threshold), value, x, x.dtype)


@converter("aten.nan_to_num.default")
def nan_to_num(
    ctx: Context, x: Node, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Node:
    if not x.dtype.is_float:
        return x
    limit = torch.finfo(ctx.value.dtype).max
    result = ctx.select(ctx.emit("isnan", x), nan or 0.0, x, x.dtype)
    result = ctx.select(ctx.compare("eq", x, math.inf), limit if posinf is None else posinf, result, x.dtype)
    return ctx.select(ctx.compare("eq", x, -math.inf), -limit if neginf is None else neginf, result, x.dtype)
