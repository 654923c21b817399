"""Finds the Gemmini instructions in a tile kernel's loops: a `dot` by the test on access matrices (`space/mapping.py`),
and the operations that a store can apply to results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tilewright import te
from tilewright.dtypes import DType
from tilewright.hw.gemmini import ACCUMULATOR, SCRATCHPAD
from tilewright.hw.gemmini_intrinsics import multiply
from tilewright.loops.ir import Buffer, Store
from tilewright.space.mapping import access_matrix, is_valid, matchings
from tilewright.te.index import coefficient

_DIM = 16  # of the instruction that is matched: its access matrix is the same for every array
_BYTE = (-128, 127)


@dataclass(frozen=True)
class Multiply:
    """`sums[m, n] += left[m, k] * right[k, n]`: the extents, and the first element of each operand."""

    extents: tuple[int, int, int]
    sums: te.Load
    left: te.Load
    right: te.Load


@dataclass(frozen=True)
class Epilogue:
    """How sums are stored. If `scale` is None, all 32 bits are stored."""

    sums: te.Load
    scale: float | None
    relu: bool


def operands_of(stmt: Store, axes: Sequence[te.Var], tiles: Mapping[str, tuple[int, int]]) -> Multiply | str:
    """The operands of the instruction that a store is, inside loops over `axes`; or why it is not one."""
    value = stmt.value
    if not (isinstance(value, te.Call) and value.op == "add" and isinstance(value.args[0], te.Load)):
        return "the accelerator adds products to sums"
    sums, product = value.args
    assert isinstance(sums, te.Load)
    factors = [_bytes(each) for each in product.args] if isinstance(product, te.Call) else []
    if len(factors) != 2 or None in factors:
        return "dot takes tiles as they were loaded: the accelerator computes nothing before it multiplies"
    loads = [each for each in factors if each is not None]
    if any(not isinstance(each.source, Buffer) or each.source.scope is not SCRATCHPAD for each in loads):
        return "dot takes tiles that were loaded from int8 tensors"
    # An axis of one element leaves no trace in an index: it is as if it were longer.
    marked = {axis: axis for axis in axes if axis.extent > 1}
    rows = [_depends(each, marked) for each in (sums, *loads)]
    for axis, missing in zip(axes, ((0, 1), (0, 2), (1, 2)), strict=True):
        if axis not in marked:
            for row in missing:
                rows[row].add(axis)
    iterations, target = access_matrix(multiply(_DIM))
    for left, right, order in ((0, 1, (0, 1, 2)), (1, 0, (0, 2, 1))):
        algorithm = tuple(tuple(axis in rows[row] for axis in axes) for row in order)
        for matching in matchings(axes, [axes[2]], len(iterations)):
            matrix = tuple(tuple(matching.get(axis) == at for axis in axes) for at in range(len(iterations)))
            if len(matching) < len(axes) or not is_valid(algorithm, target, matrix):
                continue
            m, n, k = (next(axis for axis in axes if matching[axis] == at) for at in range(3))
            found = Multiply((m.extent, n.extent, k.extent), sums, loads[left], loads[right])
            if (
                _walks(found.sums, m, n, tiles)
                and _walks(found.left, m, k, tiles)
                and _walks(found.right, k, n, tiles)
            ):
                return found
    return (
        "the accelerator multiplies rows of the first operand by columns of the second in memory order, and one"
        " of these is transposed: store that tensor transposed"
    )


def _bytes(expr: te.Expr) -> te.Load | None:
    if isinstance(expr, te.Cast) and isinstance(expr.value, te.Load) and expr.value.dtype is DType.I8:
        return expr.value
    return None


def _depends(load: te.Load, axes: Mapping[te.Var, te.Var]) -> set[te.Var]:
    return te.variables(load.indices[0]) & set(axes)


def _walks(load: te.Load, row: te.Var, col: te.Var, tiles: Mapping[str, tuple[int, int]]) -> bool:
    """Whether the tile's rows are along one axis and its columns along the other."""
    assert isinstance(load.source, Buffer)
    _, width = tiles[load.source.name]
    steps = ((row, width), (col, 1))
    return all(axis.extent == 1 or coefficient(load.indices[0], axis) == step for axis, step in steps)


def epilogue(value: te.Expr) -> Epilogue | str:
    """The operations that the accelerator applies to sums when it stores them; or why it cannot store such a value."""
    wrong = (
        "Gemmini stores int32 sums, or clamp(round(sums * scale), -128, 127) as int8, both with ReLU or without:"
        " this value is another"
    )
    if value.dtype is DType.I32:
        relu, inner = _at_least_zero(value)
        sums = _sums(inner)
        return wrong if sums is None else Epilogue(sums, None, relu)
    if not isinstance(value, te.Cast) or value.dtype is not DType.I8:
        return wrong
    low, high, inner = _bounds(value.value)
    if (
        not (isinstance(inner, te.Call) and inner.op == "round")
        or high != _BYTE[1]
        or low not in (_BYTE[0], 0)
    ):
        return wrong
    relu, inner = _at_least_zero(inner.args[0])
    scale = 1.0
    if isinstance(inner, te.Call) and inner.op == "mul":
        factors = [arg for arg in inner.args if not isinstance(arg, te.Const)]
        constants = [arg for arg in inner.args if isinstance(arg, te.Const)]
        if len(factors) != 1 or len(constants) != 1 or inner.dtype is not DType.F32:
            return wrong
        scale, inner = float(np.float32(constants[0].value)), factors[0]
    if (low == 0 or relu) and scale < 0:
        return wrong
    if not isinstance(inner, te.Cast) or inner.dtype is not DType.F32:
        return wrong
    before, inner = _at_least_zero(inner.value)
    sums = _sums(inner)
    return wrong if sums is None else Epilogue(sums, scale, relu or before or low == 0)


def _sums(expr: te.Expr) -> te.Load | None:
    is_sum = (
        isinstance(expr, te.Load) and isinstance(expr.source, Buffer) and expr.source.scope is ACCUMULATOR
    )
    return expr if is_sum and isinstance(expr, te.Load) else None


def _at_least_zero(expr: te.Expr) -> tuple[bool, te.Expr]:
    if isinstance(expr, te.Call) and expr.op == "max":
        for value, bound in (expr.args, expr.args[::-1]):
            if isinstance(bound, te.Const) and bound.value == 0:
                return True, value
    return False, expr


def _bounds(expr: te.Expr) -> tuple[float | None, float | None, te.Expr]:
    """The bounds that `min` and `max` set around an expression."""
    low: float | None = None
    high: float | None = None
    while isinstance(expr, te.Call) and expr.op in ("min", "max"):
        constants = [arg for arg in expr.args if isinstance(arg, te.Const)]
        others = [arg for arg in expr.args if not isinstance(arg, te.Const)]
        if len(constants) != 1:
            break
        bound = float(constants[0].value)
        if expr.op == "min":
            high = bound if high is None else min(high, bound)
        else:
            low = bound if low is None else max(low, bound)
        expr = others[0]
    return low, high, expr
