"""Guarded memory: canaries around every buffer, a comparison of inputs afterwards, and guard pages between
buffers."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Iterator, Sequence

import numpy as np

from tilewright.dtypes import DType
from tilewright.measure.validation import OutOfBoundsWrite
from tilewright.runtime.executor import aligned_empty
from tilewright.runtime.plan import ALIGNMENT, TensorSpec, aligned

_GUARD = 4096  # bytes on both sides of every buffer
_INPUT_CANARY = 0xFF  # NaN: values read from here show in the result
_OUTPUT_CANARY = 0xA5
_POISON = 0xFF  # NaN in every type of float
_MAX_KEPT = 12  # blocks
_MAX_WASTED = 4  # maximum block size relative to the request; a larger block is left for others
_NO_ACCESS, _READ_AND_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE


class BlockPool:
    """A pool of reusable memory: fresh pages cost more than most kernels take."""

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []

    def take(self, size: int) -> np.ndarray:
        fits = [block for block in self._free if size <= block.size <= _MAX_WASTED * max(size, 1 << 20)]
        if not fits:
            return aligned_empty(size)
        block = min(fits, key=lambda block: block.size)
        self._free = [other for other in self._free if other is not block]
        return block

    def give_back(self, block: np.ndarray) -> None:
        self._free.append(block)
        if len(self._free) > _MAX_KEPT:
            self._free = sorted(self._free, key=lambda block: block.size)[1:]


class GuardedMemory:
    """The buffers of one kernel, in one block with canaries between them. `shifted`: one element away from alignment,
    except for those in `aligned_ones`."""

    def __init__(
        self,
        blocks: BlockPool,
        specs: Sequence[TensorSpec],
        *,
        shifted: bool = False,
        aligned_ones: frozenset[int] = frozenset(),
    ) -> None:
        self._blocks = blocks
        self._spans: list[tuple[int, int]] = []
        end = 0
        for number, spec in enumerate(specs):
            shift = DType.parse(spec.dtype).bytes if shifted and number not in aligned_ones else 0
            begin = aligned(end + _GUARD) + shift
            end = begin + spec.bytes
            self._spans.append((begin, end))
        edges = [0, *(edge for span in self._spans for edge in span), end + _GUARD]
        self._gaps = list(zip(edges[::2], edges[1::2], strict=True))
        self._canaries = [_INPUT_CANARY] * (len(specs) - 1) + [_OUTPUT_CANARY] * 2
        self._block = blocks.take(end + _GUARD)
        self._memory = self._block[: end + _GUARD]
        self.addresses = [self._memory.ctypes.data + begin for begin, _ in self._spans]
        self.output = self._memory[slice(*self._spans[-1])].view(DType.parse(specs[-1].dtype).numpy)

    def fill(self, inputs: Sequence[np.ndarray]) -> None:
        """Write the inputs, poison the output, and fill canaries everywhere else."""
        for gap, canary in zip(self._gaps, self._canaries, strict=True):
            self._memory[slice(*gap)] = canary
        for span, values in zip(self._spans, inputs, strict=False):
            self._memory[slice(*span)] = _bytes(values)
        self._memory[slice(*self._spans[-1])] = _POISON

    def verify(self, inputs: Sequence[np.ndarray]) -> None:
        """Raise OutOfBoundsWrite unless everything except the output is as `fill` left it."""
        for number, values in enumerate(inputs):
            if not np.array_equal(self._memory[slice(*self._spans[number])], _bytes(values)):
                raise OutOfBoundsWrite(f"it writes into its input {number}")
        for number, (gap, canary) in enumerate(zip(self._gaps, self._canaries, strict=True)):
            if (self._memory[slice(*gap)] != canary).any():
                neighbour = f"input {number}" if number < len(inputs) else "its output"
                raise OutOfBoundsWrite(f"it writes outside of its buffers, alongside {neighbour}")

    def release(self) -> None:
        self._blocks.give_back(self._block)


class GuardPages:
    """Buffers between guard pages. Canaries detect out-of-bounds writes, and reads whose value is used; here even an
    unused read crashes, as it might in a model at the end of a page."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None

    @contextlib.contextmanager
    def around(
        self,
        specs: Sequence[TensorSpec],
        inputs: Sequence[np.ndarray],
        *,
        at_end: bool,
        aligned_ones: frozenset[int] = frozenset(),
    ) -> Iterator[tuple[list[int], np.ndarray]]:
        """The addresses of filled buffers, and the output. Each buffer ends at a guard page (those in `aligned_ones`
        as closely as possible), or begins at one."""
        guard_pages, begins, end = [0], [], mmap.PAGESIZE
        for number, spec in enumerate(specs):
            room = -(-max(1, spec.bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
            step = ALIGNMENT if number in aligned_ones else DType.parse(spec.dtype).bytes
            begins.append(end + ((room - spec.bytes) // step * step if at_end else 0))
            guard_pages.append(end + room)
            end += room + mmap.PAGESIZE
        memory = self._of(end)
        buffers = [memory[begin : begin + spec.bytes] for begin, spec in zip(begins, specs, strict=True)]
        for buffer, values in zip(buffers, inputs, strict=False):
            buffer[:] = _bytes(values)
        buffers[-1][:] = _POISON
        base = int(memory.ctypes.data)
        try:
            for fence in guard_pages:
                _protect(base + fence, _NO_ACCESS)
            yield [base + begin for begin in begins], buffers[-1].view(DType.parse(specs[-1].dtype).numpy)
        finally:
            for fence in guard_pages:
                _protect(base + fence, _READ_AND_WRITE)

    def _of(self, size: int) -> np.ndarray:
        if self._memory is None or len(self._memory) < size:
            self._memory = mmap.mmap(-1, size)
        return np.frombuffer(self._memory, np.uint8)


def _protect(address: int, how: int) -> None:
    ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE), how)


def _bytes(values: np.ndarray) -> np.ndarray:
    return values.reshape(-1).view(np.uint8)
