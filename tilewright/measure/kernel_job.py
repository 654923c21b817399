"""A launch of a kernel as plain data, for the processes that build, check and time it.

The kernel travels as text (`support/bundle.py`), the bytes of its tensors lie in a file. What it must compute is a
reference's result, which the user's process has computed, or the interpreter's, which a builder computes.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.lib.stride_tricks import as_strided

from tilewright.dtypes import DType
from tilewright.errors import MeasurementError
from tilewright.runtime.plan import ALIGNMENT, aligned
from tilewright.space.space import Config
from tilewright.support.bundle import Bundle, Reference

Scalar = bool | int | float
Grid3 = tuple[int, int, int]


class StoredArray(msgspec.Struct, frozen=True):
    """An array at an offset of a file, its elements in the order of its axes."""

    name: str
    offset: int
    dtype: str  # NumPy's name
    shape: tuple[int, ...]


class MemoryRegion(msgspec.Struct, frozen=True):
    """Bytes that one tensor, or several that share memory, take up. `phase`: its address modulo the alignment."""

    offset: int
    size: int
    phase: int


class KernelTensor(msgspec.Struct, frozen=True):
    """A tensor parameter. `start`: of its element with index 0, in bytes from its region's begin; strides in
    elements."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    region: int
    start: int


class KernelSpec(msgspec.Struct, frozen=True):
    """One launch but for its config. `language`: "tile" or "triton". `start`: the config whose results, in the
    interpreter, the others must agree with where there is no reference. `options`: knobs that go to the code generator.
    `tolerance`: relative; None: by the type of the elements."""

    language: str
    bundle: Bundle
    kind: str  # where its tensors are: "cpu", "cuda"
    described: str  # the machine
    threads: int
    data: str  # the file with the bytes of regions and expected arrays
    size: int
    regions: tuple[MemoryRegion, ...]
    tensors: tuple[KernelTensor, ...]
    scalars: tuple[tuple[str, Scalar], ...]
    constants: tuple[tuple[str, Reference], ...]
    options: tuple[str, ...]
    start: Config
    start_grid: Grid3
    expected: tuple[StoredArray, ...] = ()
    tolerance: float | None = None


class BuiltKernel(msgspec.Struct, frozen=True, tag=True):
    """A config of a launch that a builder has compiled. Its machine code is in the cache on disk."""

    config: Config
    grid: Grid3


class Expected(msgspec.Struct, frozen=True, tag=True):
    """The expected contents of tensors after the launch, in the file that comes with it (or in the spec's own).
    `masks`: the known elements of each; none: all."""

    arrays: tuple[StoredArray, ...]
    masks: tuple[StoredArray, ...]
    size: int
    in_spec: bool


@dataclass(frozen=True, eq=False)
class KernelJob:
    """A launch to tune, in the process of the user. `grid`: of a config, which may run the user's own function."""

    spec: KernelSpec
    grid: Callable[[Config], Grid3]


# -- bytes ------------------------------------------------------------------------------------------------------------


class DataFile:
    """The bytes of a launch's tensors, in a file that only this user may read and that is gone when it is closed."""

    def __init__(self) -> None:
        shared = Path("/dev/shm")
        folder = shared if shared.is_dir() and os.access(shared, os.W_OK) else None
        try:
            self._descriptor, self.path = tempfile.mkstemp(prefix="tilewright-", dir=folder)
        except OSError as error:
            raise MeasurementError(f"no file for the tensors of a kernel can be made: {error}") from None
        self.size = 0

    @classmethod
    def on(cls, descriptor: int) -> DataFile:
        """In a file that is open already, and belongs to somebody else."""
        made = cls.__new__(cls)
        made._descriptor, made.path, made.size = descriptor, "", 0
        return made

    def add(self, data: np.ndarray) -> int:
        """Bytes; returns their offset."""
        offset = self.size
        view = data.data
        position = offset
        try:
            while view:
                written = os.pwrite(self._descriptor, view, position)
                view, position = view[written:], position + written
        except OSError as error:
            raise MeasurementError(f"cannot store the tensors of a kernel: {error}") from None
        self.size = aligned(offset + max(data.size, ALIGNMENT))
        return offset

    def store(self, name: str, values: np.ndarray) -> StoredArray:
        dense = np.ascontiguousarray(values)
        offset = self.add(dense.reshape(-1).view(np.uint8))
        return StoredArray(name, offset, dense.dtype.name, dense.shape)

    def finish(self) -> int:
        os.ftruncate(self._descriptor, max(1, self.size))
        return max(1, self.size)

    def close(self) -> None:
        os.close(self._descriptor)
        Path(self.path).unlink(missing_ok=True)


def bytes_at(address: int, size: int) -> np.ndarray:
    if not size:
        return np.zeros(0, np.uint8)
    return np.frombuffer(memoryview((ctypes.c_ubyte * size).from_address(address)), np.uint8)


def mapped(path: str, size: int) -> np.ndarray:
    """A file of a launch, read-only: a kernel that goes astray does not change the answers."""
    with open(path, "rb") as file:
        return mapped_descriptor(file.fileno(), size)


def mapped_descriptor(descriptor: int, size: int) -> np.ndarray:
    return np.frombuffer(mmap.mmap(descriptor, size, access=mmap.ACCESS_READ), np.uint8)


def stored_view(memory: np.ndarray, stored: StoredArray) -> np.ndarray:
    dtype = _numpy_type(stored.dtype)
    size = math.prod(stored.shape) * dtype.itemsize
    return memory[stored.offset : stored.offset + size].view(dtype).reshape(stored.shape)


def _numpy_type(name: str) -> np.dtype[Any]:
    known = {dtype.numpy.name: dtype.numpy for dtype in DType}
    return np.dtype(known.get(name, name))


# -- in the processes that measure ------------------------------------------------------------------------------------

_GUARD = 4096
_CANARY = 0xA5


class LaunchMemory:
    """The regions of a launch in this process, with canaries around each."""

    def __init__(self, spec: KernelSpec, data: np.ndarray) -> None:
        self._spec, self._data = spec, data
        self._spans = []
        end = 0
        for region in spec.regions:
            begin = aligned(end + _GUARD) + region.phase
            end = begin + region.size
            self._spans.append((begin, end))
        block = np.empty(end + _GUARD + ALIGNMENT, np.uint8)
        shift = -block.ctypes.data % ALIGNMENT
        self._memory = block[shift : shift + end + _GUARD]
        edges = [0, *(edge for span in self._spans for edge in span), end + _GUARD]
        self._gaps = list(zip(edges[::2], edges[1::2], strict=True))
        for begin, stop in self._gaps:
            self._memory[begin:stop] = _CANARY

    def fill(self) -> None:
        """Every region as the user gave it."""
        for region, (begin, end) in zip(self._spec.regions, self._spans, strict=True):
            self._memory[begin:end] = self._data[region.offset : region.offset + region.size]

    def region(self, number: int) -> np.ndarray:
        begin, end = self._spans[number]
        return self._memory[begin:end]

    def original(self, number: int) -> np.ndarray:
        region = self._spec.regions[number]
        return self._data[region.offset : region.offset + region.size]

    @property
    def is_intact(self) -> bool:
        """Whether nothing was written around the regions."""
        return all((self._memory[begin:end] == _CANARY).all() for begin, end in self._gaps)

    def arrays(self) -> dict[str, np.ndarray]:
        """The tensors of the launch as NumPy arrays."""
        return {tensor.name: array_of(tensor, self.region(tensor.region)) for tensor in self._spec.tensors}


def array_of(tensor: KernelTensor, region: np.ndarray) -> np.ndarray:
    dtype = DType.parse(tensor.dtype).numpy
    strides = tuple(stride * dtype.itemsize for stride in tensor.strides)
    if 0 in tensor.shape:
        return np.empty(tensor.shape, dtype)
    first = region[tensor.start : tensor.start + dtype.itemsize].view(dtype)
    return as_strided(first, tensor.shape, strides)


_TOLERANCES = {"float64": 1e-9, "float32": 2e-4, "float16": 1e-2, "bfloat16": 5e-2}


def difference(
    result: np.ndarray, expected: np.ndarray, mask: np.ndarray | None, tolerance: float | None
) -> tuple[float, str]:
    """(largest error in units of what is allowed, what is wrong; "" where nothing is).

    An element may be off by the tolerance times its own magnitude and the root mean square of all."""
    got, want = np.asarray(result).reshape(-1), np.asarray(expected).reshape(-1)
    if mask is not None:
        keep = mask.reshape(-1)
        got, want = got[keep], want[keep]
    if not got.size:
        return 0.0, ""
    if tolerance is None:
        tolerance = _TOLERANCES.get(result.dtype.name, 0.0)
    got, want = got.astype(np.float64), want.astype(np.float64)
    odd = ~np.isfinite(want)
    if not np.array_equal(got[odd], want[odd], equal_nan=True):
        return math.inf, "not a number or infinite where the other is not"
    got, want = got[~odd], want[~odd]
    if not got.size:
        return 0.0, ""
    if not np.isfinite(got).all():
        return math.inf, "not a number or infinite where the other is not"
    allowed = tolerance * (np.abs(want) + np.sqrt(np.mean(want * want)))
    error = np.abs(got - want)
    if not (error > allowed).any():
        return float(np.max(error / np.maximum(allowed, 1e-300), initial=0.0)), ""
    worst = int(np.argmax(error - allowed))
    off = int((error > allowed).sum())
    return (
        math.inf,
        f"{off} of {got.size} elements differ, the worst is {got[worst]:g} instead of {want[worst]:g}",
    )
