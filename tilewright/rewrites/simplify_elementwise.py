"""Rules of `simplify` for elementwise operators."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from tilewright.dtypes import DType
from tilewright.graph.ir import Node, constant
from tilewright.graph.op import Fusion, apply, op_of
from tilewright.rewrites.shapes import reshape_operand
from tilewright.rewrites.simplify_rules import Rule, Simplifier, is_scalar, scalar_array, scalar_value

# -- arithmetic ---------------------------------------------------------------------------------------------------


def add_zero(node: Node, build: Simplifier) -> Node | None:
    """x + 0 -> x; 0 + x -> x"""
    a, b = node.inputs
    if is_scalar(b, 0) and a.type == node.type:
        return a
    if is_scalar(a, 0) and b.type == node.type:
        return b
    return None


def add_negated(node: Node, build: Simplifier) -> Node | None:
    """x + -y -> x - y"""
    a, b = node.inputs
    if b.op == "neg":
        return build("sub", a, b.inputs[0])
    if a.op == "neg":
        return build("sub", b, a.inputs[0])
    return None


def subtract_zero(node: Node, build: Simplifier) -> Node | None:
    """x - 0 -> x; x - -y -> x + y"""
    a, b = node.inputs
    if is_scalar(b, 0) and a.type == node.type:
        return a
    return build("add", a, b.inputs[0]) if b.op == "neg" else None


def multiply_one(node: Node, build: Simplifier) -> Node | None:
    """x * 1 -> x; 1 * x -> x"""
    a, b = node.inputs
    if is_scalar(b, 1) and a.type == node.type:
        return a
    if is_scalar(a, 1) and b.type == node.type:
        return b
    return None


def divide_one(node: Node, build: Simplifier) -> Node | None:
    """x / 1 -> x; 1 / x -> reciprocal(x)"""
    a, b = node.inputs
    if is_scalar(b, 1) and a.type == node.type:
        return a
    if is_scalar(a, 1) and b.type == node.type:
        return build("reciprocal", b)
    return None


def divide_constant(node: Node, build: Simplifier) -> Node | None:
    """x / c -> x * (1 / c), if 1 / c is exact, or nearly exact in fast mode"""
    x, divisor = node.inputs
    array = divisor.data if divisor.is_constant else scalar_array(divisor)
    if array is None:
        return None
    wide = array.astype(np.float64)
    tiny = float(np.finfo(np.float32).tiny)
    with np.errstate(all="ignore"):
        factor = (1 / wide).astype(node.dtype.numpy)
        exact = (np.abs(np.frexp(wide)[0]) == 0.5).all()
        normal = np.isfinite(wide).all() and np.isfinite(factor).all() and (np.abs(1 / wide) >= tiny).all()
    # In 16 bits the rounding of the reciprocal would double the error of the quotient.
    if not normal or not (exact or (build.fast and not node.dtype.is_half)):
        return None
    return build("mul", x, constant(factor))


def reciprocal_of_root(node: Node, build: Simplifier) -> Node | None:
    """reciprocal(sqrt(x)) -> rsqrt(x)"""
    (x,) = node.inputs
    return build("rsqrt", x.inputs[0]) if x.op == "sqrt" else None


def constant_power(node: Node, build: Simplifier) -> Node | None:
    """x ** 2 -> square(x), and other exponents with a cheaper form"""
    x, exponent = node.inputs
    value = scalar_value(exponent)
    if value is None or x.type != node.type:
        return None
    if value == 1:
        return x
    if value == 2:
        return build("square", x)
    if value == 3:
        return build("mul", build("square", x), x)
    if value == 0.5:
        return build("sqrt", x)
    if value == -1:
        return build("reciprocal", x)
    if value == -0.5:
        return build("rsqrt", x)
    return None


def twice_is_not(node: Node, build: Simplifier) -> Node | None:
    """neg(neg(x)) -> x, and the other operators that are their own inverse"""
    (x,) = node.inputs
    return x.inputs[0] if x.op == node.op else None


def twice_is_once(node: Node, build: Simplifier) -> Node | None:
    """relu(relu(x)) -> relu(x), and the other idempotent operators"""
    (x,) = node.inputs
    return x if x.op == node.op else None


# -- clamping -----------------------------------------------------------------------------------------------------


def bounds(node: Node) -> tuple[float | None, float | None] | None:
    """The interval that a node clamps its operand to; None if it is not a clamp."""
    if node.op == "relu":
        return 0, None
    return (node.attrs["min"], node.attrs["max"]) if node.op == "clamp" else None


def clamp_free(node: Node, build: Simplifier) -> Node | None:
    """clamp(x, None, None) -> x; clamp(x, 0, None) -> relu(x)"""
    low, high = node.attrs["min"], node.attrs["max"]
    if high is not None:
        return None
    if low is None:
        return node.inputs[0]
    return build("relu", node.inputs[0]) if low == 0 else None


def clamp_twice(node: Node, build: Simplifier) -> Node | None:
    """clamp(clamp(x, a, b), c, d) -> clamp(x, ...)"""
    (x,) = node.inputs
    inner, outer = bounds(x), bounds(node)
    if inner is None or outer is None:
        return None

    def ordered(low: float | None, high: float | None) -> bool:
        return low is None or high is None or low <= high  # false for NaN

    def into(value: float | None, otherwise: float | None) -> float | None:
        """`value` after the outer clamp; an unbounded side gets the outer bound."""
        if value is None:
            return otherwise
        if outer[0] is not None and value < outer[0]:
            return outer[0]
        return outer[1] if outer[1] is not None and value > outer[1] else value

    if not ordered(*inner) or not ordered(*outer):
        return None
    return build("clamp", x.inputs[0], min=into(inner[0], outer[0]), max=into(inner[1], outer[1]))


def extreme_of_constant(node: Node, build: Simplifier) -> Node | None:
    """maximum(x, c) -> clamp(x, c, None); minimum(x, c) -> clamp(x, None, c)"""
    for x, other in (node.inputs, node.inputs[::-1]):
        value = scalar_value(other)
        if value is not None and not math.isnan(value) and x.type == node.type:
            low, high = (value, None) if node.op == "maximum" else (None, value)
            return build("clamp", x, min=low, max=high)
    return None


# -- conversion and selection -------------------------------------------------------------------------------------

# The significant bits of a type (for integers, also whether it is signed).
_INTEGER_BITS = {
    DType.BOOL: (1, False),
    DType.U8: (8, False),
    DType.U16: (16, False),
    DType.U32: (32, False),
    DType.U64: (64, False),
    DType.I8: (7, True),
    DType.I16: (15, True),
    DType.I32: (31, True),
    DType.I64: (63, True),
}
_FLOAT_BITS = {DType.BF16: 8, DType.F16: 11, DType.F32: 24, DType.F64: 53}
_WIDER_FLOATS = {
    (DType.F16, DType.F32),
    (DType.F16, DType.F64),
    (DType.BF16, DType.F32),
    (DType.BF16, DType.F64),
} | {(DType.F32, DType.F64)}


def lossless(source: DType, target: DType) -> bool:
    """Whether `target` holds every value of `source`."""
    if source is target:
        return True
    if source.is_float:
        return (source, target) in _WIDER_FLOATS
    bits, signed = _INTEGER_BITS[source]
    if target.is_float:
        return bits <= _FLOAT_BITS[target]
    wide, target_signed = _INTEGER_BITS[target]
    return target is not DType.BOOL and bits <= wide and (target_signed or not signed)


def needless_cast(node: Node, build: Simplifier) -> Node | None:
    """cast to its own type -> x; cast(cast(x)) -> cast(x) if the inner one is lossless"""
    (x,) = node.inputs
    if x.dtype is node.dtype:
        return x
    if x.op == "cast" and lossless(x.inputs[0].dtype, x.dtype):
        return build("cast", x.inputs[0], dtype=node.dtype)
    return None


def select_known(node: Node, build: Simplifier) -> Node | None:
    """select(true, a, b) -> a; select(false, a, b) -> b; select(c, a, a) -> a"""
    condition, a, b = node.inputs
    if a is b and a.type == node.type:
        return a
    known = scalar_value(condition)
    if (
        known is None
        and condition.is_constant
        and condition.data is not None
        and condition.type.size <= 1 << 20
    ):
        known = True if condition.data.all() else None if condition.data.any() else False
    if known is None:
        return None
    chosen = a if known else b
    return chosen if chosen.type == node.type else build("broadcast_to", chosen, shape=node.shape)


# -- any elementwise operator -------------------------------------------------------------------------------------


def scalar_operands(node: Node, build: Simplifier) -> Node | None:
    """An operand with one value everywhere -> a constant of rank 0; a broadcast operand -> its source"""
    operands = list(node.inputs)
    for position, operand in enumerate(operands):
        value = scalar_array(operand)
        if value is not None and not (operand.is_constant and operand.type.rank == 0):
            operands[position] = constant(value, operand.name)
        elif operand.op == "broadcast_to":
            operands[position] = operand.inputs[0]
    if all(a is b for a, b in zip(operands, node.inputs, strict=True)):
        return None
    better = apply(node.op, *operands, name=node.name, source=node.source, **node.attrs)
    if better.type == node.type:
        return better
    # Replacing all of them would lose the result's shape; replacing some may not.
    for position, operand in enumerate(operands):
        single = (*node.inputs[:position], operand, *node.inputs[position + 1 :])
        better = apply(node.op, *single, name=node.name, source=node.source, **node.attrs)
        if operand is not node.inputs[position] and better.type == node.type:
            return better
    return None


def sink_reshape(node: Node, build: Simplifier) -> Node | None:
    """f(reshape(y), z) -> reshape(f(y, reshape(z))), which moves a matmul's consumers next to it

    Applied if no new reshape is needed, or if y comes from a contraction that f could join and z does not. Then the
    reshape of z is a view of a value in memory, and the order of preference prevents cycles.
    """
    if node.type.size <= 1:
        return None
    for operand in node.inputs:
        if operand.op != "reshape" or operand.shape != node.shape or not build.single_use(operand):
            continue
        y = operand.inputs[0]
        if y.is_input or y.is_constant:
            continue
        moved = [reshape_operand(other, node.shape, y.shape) for other in node.inputs]
        if any(other is None for other in moved):
            continue
        new = [
            other
            for other in node.inputs
            if other.type.size > 1 and not other.is_constant and not _undone(other, y.shape)
        ]
        rank = anchor_rank(y, build)
        if new and rank <= max(anchor_rank(other, build) for other in new):
            continue
        operands = [build.simplify(other) for other in moved if other is not None]
        inner = apply(node.op, *operands, name=node.name, source=node.source, **node.attrs)
        return build("reshape", build.simplify(inner), shape=node.shape)
    return None


def _undone(node: Node, shape: tuple[int, ...]) -> bool:
    return node.op == "reshape" and node.inputs[0].shape == shape


def anchor_rank(node: Node, build: Simplifier, depth: int = 8) -> int:
    """The kind of group that an elementwise consumer of `node` could be fused into: 2 a contraction's, 1 a reduction's,
    0 neither."""
    if depth == 0 or node.is_input or node.is_constant or not build.single_use(node):
        return 0
    fusion = op_of(node.op).fusion
    if fusion is Fusion.COMPLEX:
        return 2
    if fusion is Fusion.REDUCTION:
        return 1
    if fusion is not Fusion.ELEMENTWISE:
        return 0
    following = (operand for operand in node.inputs if operand.shape == node.shape)
    return max((anchor_rank(operand, build, depth - 1) for operand in following), default=0)


RULES: Mapping[str, Sequence[Rule]] = {
    "add": (add_zero, add_negated),
    "sub": (subtract_zero,),
    "mul": (multiply_one,),
    "div": (divide_one, divide_constant),
    "pow": (constant_power,),
    "neg": (twice_is_not,),
    "logical_not": (twice_is_not,),
    "bitwise_not": (twice_is_not,),
    "abs": (twice_is_once,),
    "sign": (twice_is_once,),
    "floor": (twice_is_once,),
    "ceil": (twice_is_once,),
    "trunc": (twice_is_once,),
    "round": (twice_is_once,),
    "relu": (twice_is_once, clamp_twice),
    "clamp": (clamp_free, clamp_twice),
    "maximum": (extreme_of_constant,),
    "minimum": (extreme_of_constant,),
    "reciprocal": (reciprocal_of_root,),
    "cast": (needless_cast,),
    "select": (select_known,),
}
ANY_ELEMENTWISE: Sequence[Rule] = (scalar_operands, sink_reshape)
