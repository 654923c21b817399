"""How far each element of a tensor expression may be off: its value in double precision, and a bound of the error.

A running error analysis, as of Higham's "Accuracy and Stability of Numerical Algorithms": every operation adds half a
unit in the last place of its type to what the errors of its operands make of its result. A sum of n terms, in whatever
order, is off by n units of roundoff times the sum of the sizes of its terms. So a sum that cancels may be off by more
than its own size, and a maximum by nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tilewright import te
from tilewright.dtypes import DType
from tilewright.te.scalars import SCALARS

ROUNDOFF = {DType.F64: 2.0**-53, DType.F32: 2.0**-24, DType.F16: 2.0**-11, DType.BF16: 2.0**-8}
_LARGEST = {DType.F64: math.inf, DType.F32: 2.0**128, DType.F16: 65520.0, DType.BF16: 2.0**128}
# Half the smallest number of the type; in all but f16, what lies below the normal numbers may be taken for zero.
_TINY = {DType.F64: 2.0**-1022, DType.F32: 2.0**-126, DType.F16: 2.0**-25, DType.BF16: 2.0**-126}
_ROUNDINGS = {"exp": 4, "expm1": 4, "log": 4, "log1p": 4, "sin": 4, "cos": 4, "tanh": 4, "erf": 4, "pow": 16}
_EXACT = {"min", "max", "neg", "abs", "floor", "ceil", "trunc", "round", "copysign", "floor_pow2"}


@dataclass(frozen=True)
class Bounded:
    """Floats in double precision; `error` of a bool is 1 where it may as well be the other."""

    value: np.ndarray
    error: np.ndarray


def assert_within_bounds(
    got: np.ndarray, output: te.Tensor, inputs: Mapping[te.Tensor, np.ndarray], message: str = ""
) -> None:
    """That `got`, of any shape, is what the expression is for these inputs, but for the rounding of its operations."""
    expected = bounded(output, inputs)
    with np.errstate(all="ignore"):
        found, value = got.reshape(expected.value.shape).astype(np.float64), expected.value.astype(np.float64)
        off = np.abs(found - value)
        close = (off <= expected.error) | np.isinf(expected.error)
        same = (found == value) | (np.isnan(found) & np.isnan(value))
        if output.dtype.is_float:  # near the largest number, a rounding may overflow
            largest = _LARGEST[output.dtype]
            same |= (np.abs(value) + expected.error >= largest) & (found == np.copysign(np.inf, value))
    wrong = np.argwhere(~(close | same))
    if len(wrong):
        at = tuple(wrong[0])
        raise AssertionError(
            f"{len(wrong)} of {found.size} elements are wrong, the first at {tuple(map(int, at))}: {found[at]!r},"
            f" expected {value[at]!r} within {expected.error[at]:.3g}. {message}"
        )


def bounded(output: te.Tensor, inputs: Mapping[te.Tensor, np.ndarray]) -> Bounded:
    values: dict[object, Bounded] = {}
    for tensor, array in inputs.items():
        wide = array.astype(np.float64) if tensor.dtype.is_float else array
        values[tensor] = Bounded(wide, np.zeros(array.shape))
    with np.errstate(all="ignore"):
        for stage in te.stages(output):
            values[stage] = _stage(stage, values)
    return values[output]


def _stage(stage: te.Compute, values: Mapping[object, Bounded]) -> Bounded:
    reduction = stage.reduction
    axes = (*stage.axes, *(reduction.axes if reduction is not None else ()))
    shape = tuple(axis.extent for axis in axes)
    grid = {
        axis: np.arange(axis.extent).reshape([-1 if d == n else 1 for d in range(len(axes))])
        for n, axis in enumerate(axes)
    }
    found = _Lanes(values, grid).of(stage.body if reduction is None else reduction.body)
    whole = Bounded(np.broadcast_to(found.value, shape), np.broadcast_to(found.error, shape))
    if reduction is None:
        return _rounded(whole, stage.dtype)
    rank = len(stage.shape)
    flat = (*stage.shape, math.prod(shape[rank:]))
    return _combined(reduction, Bounded(whole.value.reshape(flat), whole.error.reshape(flat)))


def _combined(reduction: te.Reduce, terms: Bounded) -> Bounded:
    dtype, count = reduction.dtype, terms.value.shape[-1]
    combine = SCALARS[te.REDUCE_COMBINERS[reduction.kind]].numpy
    start = te.reduce_identity(reduction.kind, dtype).value
    held = terms.value.dtype if not dtype.is_float else np.dtype(np.float64)
    value = np.asarray(combine.reduce(terms.value, axis=-1, initial=held.type(start), dtype=held))  # type: ignore[attr-defined]
    if not dtype.is_float:
        value = value.astype(dtype.numpy)
    sizes = np.abs(terms.value.astype(np.float64)) + terms.error
    if reduction.kind == "sum" and dtype.is_float:
        error = terms.error.sum(-1) + _growth(count, dtype) * sizes.sum(-1)
    elif reduction.kind == "prod" and dtype.is_float:
        largest = np.prod(sizes, -1)
        error = largest - np.abs(value) + _growth(count, dtype) * largest
    elif reduction.kind in ("max", "min"):
        error = terms.error.max(-1, initial=0.0)
    else:  # any, all; sums of integers, whose terms may themselves be in doubt
        error = terms.error.sum(-1)
        error = np.minimum(error, 1.0) if dtype is DType.BOOL else error
    return Bounded(value, error)


def _growth(count: int, dtype: DType) -> float:
    product = (count + 1) * ROUNDOFF[dtype]
    return product / (1 - product)


def _rounded(found: Bounded, dtype: DType, units: float = 1.0) -> Bounded:
    """With the error of `units` roundings to a type."""
    if not dtype.is_float:
        return Bounded(found.value.astype(dtype.numpy), found.error)
    value = found.value.astype(np.float64)
    size = np.abs(value) + found.error
    error = found.error + units * ROUNDOFF[dtype] * size + _TINY[dtype] * (size > 0)
    error = np.where(np.isnan(error), np.inf, error)
    return Bounded(value, error)


@dataclass(frozen=True)
class _Lanes:
    """All index tuples of one stage at once; every value broadcasts over them."""

    values: Mapping[object, Bounded]
    grid: Mapping[te.Var, np.ndarray]

    def of(self, expr: te.Expr) -> Bounded:
        if isinstance(expr, te.Const):
            held = np.float64 if expr.dtype.is_float else expr.dtype.numpy
            return _exact(np.asarray(np.asarray(expr.value, expr.dtype.numpy), held))
        if isinstance(expr, te.Var):
            return _exact(self.grid[expr])
        if isinstance(expr, te.Load):
            return self._load(expr)
        if isinstance(expr, te.Cast):
            return _cast(self.of(expr.value), expr.value.dtype, expr.dtype)
        if isinstance(expr, te.Select):
            return self._select(expr)
        assert isinstance(expr, te.Call)
        return _called(expr, [self.of(arg) for arg in expr.args])

    def _load(self, load: te.Load) -> Bounded:
        source = self.values[load.source]
        if not source.value.size:
            return _exact(np.zeros((), source.value.dtype))
        positions = [
            np.clip(self.of(index).value, 0, extent - 1)
            for index, extent in zip(load.indices, source.value.shape, strict=True)
        ]
        return Bounded(np.asarray(source.value[tuple(positions)]), np.asarray(source.error[tuple(positions)]))

    def _select(self, select: te.Select) -> Bounded:
        cond, then, other = self.of(select.cond), self.of(select.then), self.of(select.other)
        value = np.where(cond.value, then.value, other.value)
        error = np.where(cond.value, then.error, other.error)
        apart = np.abs(then.value.astype(np.float64) - other.value.astype(np.float64))
        either = apart + np.maximum(then.error, other.error)
        return Bounded(value, np.where(cond.error > 0, np.where(np.isnan(either), np.inf, either), error))


def _exact(value: np.ndarray) -> Bounded:
    return Bounded(value, np.zeros(value.shape))


def _cast(found: Bounded, source: DType, dtype: DType) -> Bounded:
    if dtype is DType.BOOL:
        unsure = (found.error > 0) & (np.abs(found.value) <= found.error)
        return Bounded(found.value != 0, unsure.astype(np.float64))
    if dtype.is_float:
        exact = source.is_float and ROUNDOFF[source] >= ROUNDOFF[dtype]
        return _rounded(found, dtype, 0.0 if exact else 1.0)
    value = found.value.astype(dtype.numpy)
    if not source.is_float:
        return Bounded(value, found.error)
    low, high = np.trunc(found.value - found.error), np.trunc(found.value + found.error)
    return Bounded(value, high - low)


def _called(call: te.Call, args: Sequence[Bounded]) -> Bounded:
    """The change of the result by that of each operand, tried; and the rounding of the operation itself."""
    scalar = SCALARS[call.op]
    value = np.asarray(scalar.numpy(*(arg.value for arg in args)))
    if scalar.predicate:
        left, right = args
        error = left.error + right.error
        unsure = (error > 0) & (np.abs(left.value.astype(float) - right.value.astype(float)) <= error)
        return Bounded(value, unsure.astype(np.float64))
    if call.dtype is DType.BOOL:
        return Bounded(value, np.asarray(np.minimum(sum(arg.error for arg in args), 1.0)))
    if not call.dtype.is_float:
        # Integers are exact. One that comes from a float may be off, and then anything may be.
        unsure = np.asarray(sum(arg.error for arg in args)) > 0
        return Bounded(value.astype(call.dtype.numpy), np.where(unsure, np.inf, 0.0))
    if call.op in ("min", "max"):
        error = np.asarray(np.maximum(args[0].error, args[1].error))
    else:
        error = np.asarray(sum(_effect(scalar.numpy, args, n, value) for n in range(len(args))))
    units = 0.0 if call.op in _EXACT else _ROUNDINGS.get(call.op, 1)
    return _rounded(Bounded(value, error), call.dtype, units)


def _effect(function: object, args: Sequence[Bounded], number: int, value: np.ndarray) -> np.ndarray:
    """How far the result moves where one operand is as far off as it may be, to either side."""
    assert callable(function)
    arg = args[number]
    if not arg.error.any():
        return np.zeros(())
    moved = []
    for sign in (1.0, -1.0):
        others = [a.value if n != number else arg.value + sign * arg.error for n, a in enumerate(args)]
        moved.append(np.abs(function(*others) - value))
    largest = np.maximum(*moved)
    return np.where(arg.error > 0, np.where(np.isnan(largest), np.inf, largest), 0.0)
