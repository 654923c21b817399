"""An exam in memory that processes share: one draws it, another holds kernels to it."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable

import msgspec
import numpy as np

from tilewright.dtypes import DType
from tilewright.measure.exam import Case, Exam, Repeats
from tilewright.runtime.plan import ALIGNMENT, aligned


class Stored(msgspec.Struct, frozen=True):
    """An array at an offset of the shared memory."""

    offset: int
    dtype: str
    shape: tuple[int, ...]


class StoredCase(msgspec.Struct, frozen=True):
    name: str
    inputs: tuple[Stored, ...]
    reference: Stored
    allowed: Stored
    spreading: bool
    l2_bound: float | None
    repeats: Stored | None = None
    shapes: tuple[tuple[int, ...] | None, ...] = ()


class StoredExam(msgspec.Struct, frozen=True):
    """What lies where in the shared memory."""

    cases: tuple[StoredCase, ...]
    size: int


def store_exam(exam: Exam, descriptor: int) -> StoredExam:
    """Write an exam into a file. OSError where it has no room."""
    end = 0
    places: dict[int, Stored] = {}

    def stored(values: np.ndarray) -> Stored:
        nonlocal end
        if id(values) not in places:
            dense = np.ascontiguousarray(values)
            places[id(values)] = Stored(end, DType.of(dense).short, dense.shape)
            _write(descriptor, dense.reshape(-1).view(np.uint8).data, end)
            end = aligned(end + max(dense.nbytes, ALIGNMENT))
        return places[id(values)]

    cases = tuple(
        StoredCase(
            case.name,
            tuple(map(stored, case.stored)),
            stored(case.reference),
            stored(case.allowed),
            case.spreading,
            None if case.l2_bound == math.inf else case.l2_bound,
            None if case.repeats is None else stored(case.repeats.rows),
            () if case.repeats is None else case.repeats.shapes,
        )
        for case in exam.cases
    )
    os.ftruncate(descriptor, end)
    return StoredExam(cases, end)


def _write(descriptor: int, data: memoryview, offset: int) -> None:
    while len(data):
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def load_exam(stored: StoredExam, descriptor: int) -> Exam:
    """The exam as it lies in the file, read-only: a kernel that goes astray does not change the answers."""
    memory = np.frombuffer(mmap.mmap(descriptor, stored.size, access=mmap.ACCESS_READ), np.uint8)
    return Exam(tuple(_loaded(case, lambda place: _view(memory, place)) for case in stored.cases))


def _loaded(case: StoredCase, view: Callable[[Stored], np.ndarray]) -> Case:
    return Case(
        case.name,
        tuple(map(view, case.inputs)),
        view(case.reference),
        view(case.allowed),
        case.spreading,
        math.inf if case.l2_bound is None else case.l2_bound,
        None if case.repeats is None else Repeats(view(case.repeats), case.shapes),
    )


def _view(memory: np.ndarray, place: Stored) -> np.ndarray:
    dtype = DType.parse(place.dtype).numpy
    size = math.prod(place.shape) * dtype.itemsize
    return memory[place.offset : place.offset + size].view(dtype).reshape(place.shape)
