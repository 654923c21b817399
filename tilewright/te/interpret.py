"""The reference interpreter of tensor expressions: it evaluates every stage over its whole index grid in NumPy.

It is for small shapes in tests, because a reduction materialises the grid of all its elements. It makes a check that
no code generator can make: a load out of range, in a lane that a `Select` did not exclude, is an `IndexError` that
names the stage, the tensor and the index. That is how wrong lowerings are found.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewright.dtypes import DType
from tilewright.te.expr import (
    REDUCE_COMBINERS,
    Call,
    Cast,
    Compute,
    Const,
    Expr,
    Load,
    Reduce,
    Select,
    Source,
    Tensor,
    Var,
    reduce_identity,
    stages,
)
from tilewright.te.scalars import SCALARS


def interpret(output: Tensor, inputs: Mapping[Tensor, np.ndarray]) -> np.ndarray:
    """The value of `output`, given the values of the input tensors that it reads."""
    values: dict[Source, np.ndarray] = {}
    for tensor, array in inputs.items():
        assert array.shape == tensor.shape, f"{tensor.name}: shape {array.shape}, expected {tensor.shape}"
        assert array.dtype == tensor.dtype.numpy, f"{tensor.name}: {array.dtype}, expected {tensor.dtype}"
        values[tensor] = array
    with np.errstate(all="ignore"):
        for stage in stages(output):
            values[stage] = _stage(stage, values)
    return values[output]


def _stage(stage: Compute, values: Mapping[Source, np.ndarray]) -> np.ndarray:
    reduction = stage.reduction
    reduced = reduction.axes if reduction is not None else ()
    shape = stage.shape + tuple(axis.extent for axis in reduced)
    lanes = _Lanes(stage.name, values, _grid((*stage.axes, *reduced), shape))
    body = stage.body if reduction is None else reduction.body
    any_lane = np.bool_(0 not in shape)
    elements = np.broadcast_to(lanes.value(body, any_lane), shape)
    if reduction is None:
        return np.array(elements, dtype=stage.dtype.numpy)
    return _combine(reduction, elements, rank=len(stage.shape))


def _grid(axes: Sequence[Var], shape: tuple[int, ...]) -> dict[Var, np.ndarray]:
    """The values of each axis, shaped to broadcast over the grid of all axes."""
    rank = len(shape)
    return {
        axis: np.arange(axis.extent, dtype=np.int64).reshape(
            [-1 if d == position else 1 for d in range(rank)]
        )
        for position, axis in enumerate(axes)
    }


def _combine(reduction: Reduce, elements: np.ndarray, rank: int) -> np.ndarray:
    """Reduce all axes from `rank` on at once, starting from the identity."""
    dtype = reduction.dtype
    combine: Any = SCALARS[REDUCE_COMBINERS[reduction.kind]].numpy
    flat = elements.reshape(*elements.shape[:rank], math.prod(elements.shape[rank:]))
    identity = dtype.numpy.type(reduce_identity(reduction.kind, dtype).value)
    # NumPy widens integer sums unless given the type; here integers wrap around.
    result = combine.reduce(flat, axis=rank, initial=identity, dtype=dtype.numpy)
    return np.asarray(result, dtype=dtype.numpy)


@dataclass(frozen=True)
class _Lanes:
    """The index tuples of one stage, evaluated at once; every value broadcasts over them."""

    stage: str
    values: Mapping[Source, np.ndarray]
    grid: Mapping[Var, np.ndarray]

    def value(self, expr: Expr, taken: np.ndarray | np.bool_) -> np.ndarray:
        """The value of `expr` in every lane. Lanes where `taken` is false hold anything, and may load anywhere."""
        if isinstance(expr, Const):
            return np.asarray(expr.value, dtype=expr.dtype.numpy)
        if isinstance(expr, Var):
            return self.grid[expr]
        if isinstance(expr, Load):
            return self._load(expr, taken)
        if isinstance(expr, Call):
            args = [self.value(arg, taken) for arg in expr.args]
            return np.asarray(SCALARS[expr.op].numpy(*args)).astype(expr.dtype.numpy, copy=False)
        if isinstance(expr, Cast):
            return _converted(self.value(expr.value, taken), expr.dtype)
        if isinstance(expr, Select):
            cond = self.value(expr.cond, taken)
            then = self.value(expr.then, taken & cond)
            other = self.value(expr.other, taken & ~cond)
            return np.where(cond, then, other)
        raise AssertionError(f"{self.stage}: {type(expr).__name__} inside an expression")

    def _load(self, load: Load, taken: np.ndarray | np.bool_) -> np.ndarray:
        array = self.values[load.source]
        safe = []
        for axis, (index, extent) in enumerate(zip(load.indices, array.shape, strict=True)):
            position = self.value(index, taken)
            outside = taken & ((position < 0) | (position >= extent))
            if np.any(outside):
                found = int(np.broadcast_to(position, outside.shape)[outside].flat[0])
                raise IndexError(
                    f"{self.stage}: load of {load.source.name}{list(array.shape)} at index {found} of axis {axis}"
                )
            safe.append(np.clip(position, 0, max(extent - 1, 0)))
        if (
            array.size == 0
        ):  # no lane is taken here: there was an index to check for every axis, or no lane at all
            return np.zeros((), dtype=array.dtype)
        return np.asarray(array[tuple(safe)])


def _converted(value: np.ndarray, dtype: DType) -> np.ndarray:
    if dtype is DType.BOOL:
        return np.asarray(value != 0)
    return value.astype(dtype.numpy)
