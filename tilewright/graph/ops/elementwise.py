"""Elementwise operators: one result element from the same element of each operand, operands broadcast as in NumPy.

Operands of arithmetic have one element type; comparisons and the `is...` tests give bool, everything else the type of
its operands. The second column of the tables below gives the types that each takes.

Where PyTorch has a choice, these follow it: `sign` of NaN is 0; `maximum`, `minimum`, `clamp` and `relu` propagate
NaN; `round` rounds halves to even; `mod` has the divisor's sign and `fmod` the dividend's; float `floordiv` is the
floor of the exact quotient; `silu`, `gelu`, `mish` and `hardswish` of -inf are NaN (-inf times 0).

Integer `floordiv`, `mod` and `fmod` by 0 give 0, where PyTorch raises an error: generated code must neither trap nor
test. Shifts by a negative count, or by at least the width of the type, are undefined.

Additional error of the formulas in f32: `exp2` is exp(x ln 2), with a relative error of about |x| * 6e-8; `log2` is
log(x) / ln 2, about 1 ulp more than log; `tan` is sin / cos, about 2 ulp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tilewright import te
from tilewright.dtypes import DType
from tilewright.graph.ir import Attrs, TensorType
from tilewright.graph.op import Application, Fusion, Op, register
from tilewright.graph.ops.common import (
    ANY,
    BITS,
    BOOL,
    FLOAT,
    INTEGER,
    NUMBER,
    broadcast_indices,
    broadcast_shapes,
    expect,
    expect_choice,
    expect_fits,
    expect_kind,
    expect_operands,
    expect_same_dtype,
    label,
)
from tilewright.te import Expr, call, const, select
from tilewright.te.scalars import SCALARS

Formula = Callable[..., Expr]  # formula(*operands, **attributes)
Meaning = Callable[..., Any]  # the same in NumPy, on arrays

INF = float("inf")


def elementwise(
    name: str,
    takes: str,
    meaning: Meaning,
    formula: Formula | str,
    *,
    operands: int = 1,
    gives: DType | None = None,
    attrs: tuple[str, ...] = (),
    check: Callable[[DType, Attrs], None] | None = None,
) -> Op:
    """Register an operator whose operands have one element type. `formula` may be the name of a scalar function."""
    built: Formula = (lambda *args: call(formula, *args)) if isinstance(formula, str) else formula

    def infer(inputs: Sequence[TensorType], given: Attrs) -> TensorType:
        expect_operands(inputs, operands)
        dtype = expect_same_dtype(inputs)
        expect_kind(dtype, takes)
        if check is not None:
            check(dtype, given)
        return TensorType(broadcast_shapes(*(type.shape for type in inputs)), gives or dtype)

    return register(
        Op(
            name,
            infer=infer,
            oracle=lambda given, *arrays: np.asarray(meaning(*arrays, **given)),
            fusion=Fusion.ELEMENTWISE,
            lower=lowering(name, built),
            attrs=attrs,
        )
    )


def lowering(name: str, formula: Formula) -> Callable[[Application, Sequence[te.Tensor]], te.Tensor]:
    def lower(app: Application, inputs: Sequence[te.Tensor]) -> te.Tensor:
        def element(*axes: te.Var) -> Expr:
            operands = [tensor[broadcast_indices(axes, tensor.shape, app.type.shape)] for tensor in inputs]
            return formula(*operands, **app.attrs)

        return te.compute(label(app, name), app.type.shape, app.type.dtype, element)

    return lower


# -- formulas -----------------------------------------------------------------------------------------------------


def lt(a: Expr | te.Const | float, b: Expr | float) -> Expr:
    return call("lt", a, b)


def zero(x: Expr) -> Expr:
    return const(0, x.dtype)


def either(a: Expr, b: Expr) -> Expr:
    return call("or", a, b)


def both(a: Expr, b: Expr) -> Expr:
    return call("and", a, b)


def sign(x: Expr) -> Expr:
    return te.cast(lt(zero(x), x), x.dtype) - te.cast(lt(x, zero(x)), x.dtype)


def sigmoid(x: Expr) -> Expr:
    return 1.0 / (1.0 + call("exp", -x))  # exp may overflow to infinity, whose reciprocal is correctly 0


def softplus(x: Expr, beta: float, threshold: float) -> Expr:
    scaled = x if beta == 1 else x * beta
    smooth = call("log1p", call("exp", scaled))
    return select(lt(const(threshold, x.dtype), scaled), x, smooth if beta == 1 else smooth / beta)


def softplus_meaning(x: np.ndarray, beta: float, threshold: float) -> Any:
    return np.where(x * beta > threshold, x, np.log1p(np.exp(x * beta)) / beta)


GELU_SLOPE, GELU_CUBIC = math.sqrt(2 / math.pi), 0.044715


def gelu(x: Expr, approximate: str) -> Expr:
    if approximate == "tanh":
        bend = call("tanh", GELU_SLOPE * (x + GELU_CUBIC * (x * x * x)))
    else:
        bend = call("erf", x * math.sqrt(0.5))
    return 0.5 * x * (1.0 + bend)


def gelu_meaning(x: np.ndarray, approximate: str) -> Any:
    if approximate == "tanh":
        bend = np.tanh(GELU_SLOPE * (x + GELU_CUBIC * x**3))
    else:
        bend = SCALARS["erf"].numpy(x * math.sqrt(0.5))
    return 0.5 * x * (1 + bend)


def hardsigmoid(x: Expr) -> Expr:
    return call("min", call("max", x + 3.0, 0.0), 6.0) / 6.0


def hardsigmoid_meaning(x: np.ndarray) -> Any:
    return np.minimum(np.maximum(x + 3, 0), 6) / 6


def mish(x: Expr) -> Expr:
    return x * call("tanh", call("log1p", call("exp", x)))


def clamp(x: Expr, min: float | None, max: float | None) -> Expr:
    if min is not None:
        x = call("max", x, min)
    return x if max is None else call("min", x, max)


def clamp_meaning(x: np.ndarray, min: float | None, max: float | None) -> Any:
    if min is not None:
        x = np.maximum(x, x.dtype.type(min))
    return x if max is None else np.minimum(x, x.dtype.type(max))


def signs_differ(a: Expr, b: Expr) -> Expr:
    return call("xor", lt(a, zero(a)), lt(b, zero(b)))


def safe_divisor(b: Expr) -> Expr:
    """1 if division would trap: for 0, and for -1, whose quotient may not be representable."""
    risky = call("eq", b, zero(b))
    if not b.dtype.is_unsigned:
        risky = either(risky, call("eq", b, -1))
    return select(risky, 1, b)


def floordiv(a: Expr, b: Expr) -> Expr:
    if b.dtype.is_float:
        return float_floordiv(a, b)
    quotient = a // safe_divisor(b)
    if not b.dtype.is_unsigned:
        quotient = select(call("eq", b, -1), -a, quotient)
    return select(call("eq", b, zero(b)), zero(b), quotient)


def float_floordiv(a: Expr, b: Expr) -> Expr:
    """The floor of the exact quotient: subtracting the remainder first makes the division exact."""
    remainder = call("fmod", a, b)
    quotient = (a - remainder) / b
    below = both(call("ne", remainder, 0.0), signs_differ(remainder, b))
    quotient = select(below, quotient - 1.0, quotient)
    floor = call("floor", quotient)
    rounded = select(lt(const(0.5, a.dtype), quotient - floor), floor + 1.0, floor)
    return select(call("eq", b, 0.0), a / b, rounded)


def mod(a: Expr, b: Expr) -> Expr:
    if not b.dtype.is_float:
        return a % safe_divisor(b)  # the remainder by 1, -1 and 0 is 0
    remainder = call("fmod", a, b)
    wrong_side = both(call("ne", remainder, 0.0), signs_differ(remainder, b))
    return select(wrong_side, remainder + b, remainder)


def fmod(a: Expr, b: Expr) -> Expr:
    if b.dtype.is_float:
        return call("fmod", a, b)
    divisor = safe_divisor(b)
    remainder = a % divisor
    wrong_side = both(call("ne", remainder, zero(a)), signs_differ(a, divisor))
    return select(wrong_side, remainder - divisor, remainder)


# -- attribute checks ---------------------------------------------------------------------------------------------


def numbers(*names: str) -> Callable[[DType, Attrs], None]:
    def check(dtype: DType, attrs: Attrs) -> None:
        for name in names:
            expect_fits(name, attrs[name], DType.F64)

    return check


def check_clamp(dtype: DType, attrs: Attrs) -> None:
    for name in ("min", "max"):
        if attrs[name] is not None:
            expect_fits(name, attrs[name], dtype)


def check_softplus(dtype: DType, attrs: Attrs) -> None:
    numbers("beta", "threshold")(dtype, attrs)
    expect(attrs["beta"] != 0, "beta must not be 0")


def check_gelu(dtype: DType, attrs: Attrs) -> None:
    expect_choice("approximate", attrs["approximate"], "none", "tanh")


# -- the operators ------------------------------------------------------------------------------------------------

LN2 = math.log(2)

# name, takes, meaning, formula
UNARY: list[tuple[str, str, Meaning, Formula | str]] = [
    ("neg", NUMBER, np.negative, "neg"),
    ("abs", NUMBER, np.abs, "abs"),
    ("sign", NUMBER, lambda x: np.where(x != x, 0, np.sign(x)).astype(x.dtype), sign),
    ("square", NUMBER, np.square, lambda x: x * x),
    ("relu", NUMBER, lambda x: np.maximum(x, x.dtype.type(0)), lambda x: call("max", x, 0)),
    ("exp", FLOAT, np.exp, "exp"),
    ("expm1", FLOAT, np.expm1, "expm1"),
    ("exp2", FLOAT, np.exp2, lambda x: call("exp", x * LN2)),
    ("log", FLOAT, np.log, "log"),
    ("log2", FLOAT, np.log2, lambda x: call("log", x) * (1 / LN2)),
    ("log1p", FLOAT, np.log1p, "log1p"),
    ("sqrt", FLOAT, np.sqrt, "sqrt"),
    ("rsqrt", FLOAT, lambda x: 1 / np.sqrt(x), "rsqrt"),
    ("reciprocal", FLOAT, lambda x: 1 / x, lambda x: 1.0 / x),
    ("sin", FLOAT, np.sin, "sin"),
    ("cos", FLOAT, np.cos, "cos"),
    ("tan", FLOAT, np.tan, lambda x: call("sin", x) / call("cos", x)),
    ("tanh", FLOAT, np.tanh, "tanh"),
    ("sigmoid", FLOAT, lambda x: 1 / (1 + np.exp(-x)), sigmoid),
    ("silu", FLOAT, lambda x: x / (1 + np.exp(-x)), lambda x: x / (1.0 + call("exp", -x))),
    ("erf", FLOAT, SCALARS["erf"].numpy, "erf"),
    ("floor", FLOAT, np.floor, "floor"),
    ("ceil", FLOAT, np.ceil, "ceil"),
    ("trunc", FLOAT, np.trunc, "trunc"),
    ("round", FLOAT, np.rint, "round"),
    ("hardswish", FLOAT, lambda x: x * hardsigmoid_meaning(x), lambda x: x * hardsigmoid(x)),
    ("hardsigmoid", FLOAT, hardsigmoid_meaning, hardsigmoid),
    ("mish", FLOAT, lambda x: x * np.tanh(np.log1p(np.exp(x))), mish),
    ("logical_not", BOOL, np.logical_not, "not"),
    ("bitwise_not", BITS, np.invert, "not"),
]

BINARY: list[tuple[str, str, Meaning, Formula | str]] = [
    ("add", NUMBER, np.add, "add"),
    ("sub", NUMBER, np.subtract, "sub"),
    ("mul", NUMBER, np.multiply, "mul"),
    ("maximum", NUMBER, np.maximum, "max"),
    ("minimum", NUMBER, np.minimum, "min"),
    ("div", FLOAT, np.divide, "div"),
    ("pow", FLOAT, np.power, "pow"),
    ("atan2", FLOAT, np.arctan2, "atan2"),
    ("floordiv", NUMBER, np.floor_divide, floordiv),
    ("mod", NUMBER, np.mod, mod),
    ("fmod", NUMBER, np.fmod, fmod),
    ("logical_and", BOOL, np.logical_and, "and"),
    ("logical_or", BOOL, np.logical_or, "or"),
    ("logical_xor", BOOL, np.logical_xor, "xor"),
    ("bitwise_and", BITS, np.bitwise_and, "and"),
    ("bitwise_or", BITS, np.bitwise_or, "or"),
    ("bitwise_xor", BITS, np.bitwise_xor, "xor"),
    ("shl", INTEGER, np.left_shift, "shl"),
    ("shr", INTEGER, np.right_shift, "shr"),
]

# name, takes, meaning, formula, operands; the result is bool
TESTS: list[tuple[str, str, Meaning, Formula | str, int]] = [
    ("isnan", FLOAT, np.isnan, lambda x: call("ne", x, x), 1),
    ("isinf", FLOAT, np.isinf, lambda x: call("eq", call("abs", x), INF), 1),
    ("isfinite", FLOAT, np.isfinite, lambda x: lt(call("abs", x), INF), 1),
    ("eq", ANY, np.equal, "eq", 2),
    ("ne", ANY, np.not_equal, "ne", 2),
    ("lt", ANY, np.less, "lt", 2),
    ("le", ANY, np.less_equal, "le", 2),
    ("gt", ANY, np.greater, lambda a, b: call("lt", b, a), 2),
    ("ge", ANY, np.greater_equal, lambda a, b: call("le", b, a), 2),
]

for name, takes, meaning, formula in UNARY:
    elementwise(name, takes, meaning, formula)
for name, takes, meaning, formula in BINARY:
    elementwise(name, takes, meaning, formula, operands=2)
for name, takes, meaning, formula, operands in TESTS:
    elementwise(name, takes, meaning, formula, operands=operands, gives=DType.BOOL)

elementwise(
    "softplus", FLOAT, softplus_meaning, softplus, attrs=("beta", "threshold"), check=check_softplus
)  # log(1 + exp(beta x)) / beta, and x itself where beta x is above the threshold
elementwise("gelu", FLOAT, gelu_meaning, gelu, attrs=("approximate",), check=check_gelu)
elementwise(
    "elu",
    FLOAT,
    lambda x, alpha: np.where(x > 0, x, alpha * np.expm1(x)),
    lambda x, alpha: select(lt(zero(x), x), x, alpha * call("expm1", x)),
    attrs=("alpha",),
    check=numbers("alpha"),
)
elementwise(
    "leaky_relu",
    FLOAT,
    lambda x, slope: np.where(x > 0, x, slope * x),
    lambda x, slope: select(lt(zero(x), x), x, slope * x),
    attrs=("slope",),
    check=numbers("slope"),
)
elementwise("clamp", NUMBER, clamp_meaning, clamp, attrs=("min", "max"), check=check_clamp)


# -- operators with a type rule of their own ----------------------------------------------------------------------


def infer_cast(inputs: Sequence[TensorType], attrs: Attrs) -> TensorType:
    expect_operands(inputs, 1)
    expect(isinstance(attrs["dtype"], DType), f"dtype must be an element type, got {attrs['dtype']!r}")
    return TensorType(inputs[0].shape, attrs["dtype"])


def cast_meaning(attrs: Attrs, x: np.ndarray) -> np.ndarray:
    """A cast to any float type is a cast to f64: the oracle itself rounds results, if at all."""
    dtype: DType = attrs["dtype"]
    if dtype is DType.BOOL:
        return np.asarray(x != 0)
    return x.astype(np.float64 if dtype.is_float else dtype.numpy)


def infer_select(inputs: Sequence[TensorType], attrs: Attrs) -> TensorType:
    expect_operands(inputs, 3)
    condition, then, other = inputs
    expect(condition.dtype is DType.BOOL, f"the condition must be bool, got {condition.dtype.short}")
    dtype = expect_same_dtype((then, other))
    return TensorType(broadcast_shapes(*(type.shape for type in inputs)), dtype)


register(
    Op(
        "cast",
        infer=infer_cast,
        oracle=cast_meaning,
        fusion=Fusion.ELEMENTWISE,
        lower=lowering("cast", te.cast),
        attrs=("dtype",),
    )
)
register(
    Op(
        "select",
        infer=infer_select,
        oracle=lambda attrs, condition, then, other: np.asarray(np.where(condition, then, other)),
        fusion=Fusion.ELEMENTWISE,
        lower=lowering("select", select),
    )
)
