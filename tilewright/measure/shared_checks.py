"""Validation inputs in shared memory: one process makes them, another checks kernels against them."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable

import msgspec
import numpy as np

from tilewright.dtypes import DType
from tilewright.measure.validation import CheckCase, Repeats, Validation
from tilewright.runtime.plan import ALIGNMENT, aligned


class SharedArray(msgspec.Struct, frozen=True):
    """An array at an offset in shared memory."""

    offset: int
    dtype: str
    shape: tuple[int, ...]


class SharedCase(msgspec.Struct, frozen=True):
    name: str
    inputs: tuple[SharedArray, ...]
    reference: SharedArray
    allowed: SharedArray
    nan_spreads: bool
    l2_bound: float | None
    repeats: SharedArray | None = None
    shapes: tuple[tuple[int, ...] | None, ...] = ()


class SharedValidation(msgspec.Struct, frozen=True, tag=True):
    """The layout of the shared memory."""

    cases: tuple[SharedCase, ...]
    size: int


def share_validation(validation: Validation, descriptor: int) -> SharedValidation:
    """Write a validation into a file. Raises OSError if there is no space."""
    end = 0
    positions: dict[int, SharedArray] = {}

    def stored(values: np.ndarray) -> SharedArray:
        nonlocal end
        if id(values) not in positions:
            dense = np.ascontiguousarray(values)
            positions[id(values)] = SharedArray(end, DType.of(dense).short, dense.shape)
            _write(descriptor, dense.reshape(-1).view(np.uint8).data, end)
            end = aligned(end + max(dense.nbytes, ALIGNMENT))
        return positions[id(values)]

    cases = tuple(
        SharedCase(
            case.name,
            tuple(map(stored, case.stored)),
            stored(case.reference),
            stored(case.allowed),
            case.nan_spreads,
            None if case.l2_bound == math.inf else case.l2_bound,
            None if case.repeats is None else stored(case.repeats.rows),
            () if case.repeats is None else case.repeats.shapes,
        )
        for case in validation.cases
    )
    os.ftruncate(descriptor, end)
    return SharedValidation(cases, end)


def _write(descriptor: int, data: memoryview, offset: int) -> None:
    while len(data):
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def load_validation(stored: SharedValidation, descriptor: int) -> Validation:
    """The validation in the file, read-only, so that a faulty kernel cannot change the reference."""
    memory = np.frombuffer(mmap.mmap(descriptor, stored.size, access=mmap.ACCESS_READ), np.uint8)
    return Validation(tuple(_loaded(case, lambda position: _view(memory, position)) for case in stored.cases))


def _loaded(case: SharedCase, view: Callable[[SharedArray], np.ndarray]) -> CheckCase:
    return CheckCase(
        case.name,
        tuple(map(view, case.inputs)),
        view(case.reference),
        view(case.allowed),
        case.nan_spreads,
        math.inf if case.l2_bound is None else case.l2_bound,
        None if case.repeats is None else Repeats(view(case.repeats), case.shapes),
    )


def _view(memory: np.ndarray, position: SharedArray) -> np.ndarray:
    dtype = DType.parse(position.dtype).numpy
    size = math.prod(position.shape) * dtype.itemsize
    return memory[position.offset : position.offset + size].view(dtype).reshape(position.shape)
