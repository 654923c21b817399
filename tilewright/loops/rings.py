"""Rings in the interpreter: what was filled, has arrived and was released, and multiplications that are under way.

It is as unkind as a GPU may be. A producer runs as far ahead as it is allowed to, so a slot that is released too early
is overwritten while it is still read. Boxes arrive when somebody waits for them, and not before. Multiplications that
are under way read their operands where they are waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tilewright.hw.warpgroups import swizzled_offset
from tilewright.loops.ir import BoxCopy, Buffer, Ring


class UnorderedAccess(Exception):
    """Threads access an element of scratch memory without synchronisation between them, or before the copy that fills
    it was awaited."""


def swizzled(index: int | np.ndarray, pitch: int, element_bytes: int) -> np.ndarray:
    """The place of an element of a matrix with rows of `pitch` elements, whose chunks are swizzled."""
    row_bytes = pitch * element_bytes
    rows, columns = np.divmod(np.asarray(index), pitch)
    found = [
        swizzled_offset(int(row), int(column) * element_bytes, row_bytes) // element_bytes
        for row, column in zip(rows.flat, columns.flat, strict=True)
    ]
    return np.array(found, dtype=np.int64).reshape(rows.shape)


@dataclass
class _Counts:
    filled: int = 0
    arrived: int = 0
    released: int = 0


Elements = Sequence[tuple[Buffer, np.ndarray]]
Boxes = Sequence[tuple[BoxCopy, int, int, int]]  # with the index, row and column of each


@dataclass
class Rings:
    """`memory`: the array of each buffer in scratch and global memory."""

    memory: dict[Buffer, np.ndarray]
    in_flight: dict[Buffer, np.ndarray]  # elements of scratch memory that copies will fill
    counts: dict[Ring, _Counts] = field(default_factory=dict)
    coming: dict[tuple[Ring, int], Boxes] = field(default_factory=dict)
    open: list[Callable[[], object]] = field(default_factory=list)
    groups: list[list[Callable[[], object]]] = field(default_factory=list)
    # The results of what is under way, and the elements of shared memory that it reads.
    multiplying: list[Buffer] = field(default_factory=list)
    reading: list[Elements] = field(default_factory=list)

    def begin(self) -> None:
        """A block begins: its memory and barriers are its own."""
        self.check_ended()
        self.counts.clear()

    def check_ended(self) -> None:
        for ring, number in self.coming:
            raise UnorderedAccess(f"nothing waits for the copies of iteration {number} to {ring.name}")
        if self.open or self.groups:
            raise UnorderedAccess(f"nothing waits for the multiplications into {self.multiplying[0].name}")

    def _of(self, ring: Ring) -> _Counts:
        return self.counts.setdefault(ring, _Counts())

    def may_fill(self, ring: Ring, number: int) -> bool:
        return self._of(ring).released > number - ring.slots

    def fill(self, ring: Ring, number: int, boxes: Boxes) -> None:
        counts = self._of(ring)
        _check_next(ring, number, counts.filled, "filled")
        counts.filled += 1
        if not self.may_fill(ring, number):
            raise UnorderedAccess(
                f"iteration {number} of {ring.name} overwrites a slot that was not released"
            )
        for copy, index, _, _ in boxes:
            self._check_unread(copy, index)
            data = self.memory[copy.buffer]
            flags = self.in_flight.setdefault(copy.buffer, np.zeros(copy.buffer.size, bool))
            data[index : index + copy.box.rows * copy.box.columns] = (
                np.nan if copy.buffer.dtype.is_float else -1
            )
            flags[index : index + copy.box.rows * copy.box.columns] = True
        self.coming[ring, number] = boxes

    def has_come(self, ring: Ring, number: int) -> bool:
        return (ring, number) in self.coming

    def await_filled(self, ring: Ring, number: int) -> None:
        counts = self._of(ring)
        _check_next(ring, number, counts.arrived, "awaited")
        counts.arrived += 1
        if not self.has_come(ring, number):
            raise UnorderedAccess(
                f"it waits for iteration {number} of {ring.name}, which nothing fills: deadlock"
            )
        for box in self.coming.pop((ring, number)):
            self._arrive(*box)

    def _arrive(self, copy: BoxCopy, index: int, row: int, column: int) -> None:
        box, source = copy.box, copy.source
        given = self.memory[source.buffer]
        rows, columns = row + np.arange(box.rows)[:, None], column + np.arange(box.columns)[None]
        inside = (rows >= 0) & (rows < source.rows) & (columns >= 0) & (columns < source.columns)
        positions = np.where(inside, rows * source.stride + columns, 0)
        values = np.where(inside, given[positions], np.zeros((), given.dtype))
        targets = swizzled(index + np.arange(box.rows * box.columns), box.columns, box.dtype.bytes)
        self.memory[copy.buffer][targets] = values.reshape(-1)
        self.in_flight[copy.buffer][targets] = False

    def release(self, ring: Ring, number: int) -> None:
        counts = self._of(ring)
        _check_next(ring, number, counts.released, "released")
        if number >= counts.arrived:
            raise UnorderedAccess(f"iteration {number} of {ring.name} is released before it was awaited")
        counts.released += 1

    # -- multiplications ------------------------------------------------------------------------------------------

    def start(self, result: Buffer, reads: Elements, run: Callable[[], object]) -> None:
        self.open.append(run)
        self.multiplying.append(result)
        self.reading.append(reads)

    def _check_unread(self, copy: BoxCopy, index: int) -> None:
        end = index + copy.box.rows * copy.box.columns
        for reads in self.reading:
            for buffer, positions in reads:
                if buffer == copy.buffer and np.any((positions >= index) & (positions < end)):
                    raise UnorderedAccess(
                        f"{buffer.name}[{index}] is overwritten while multiplications read it"
                    )

    def multiplied(self, pending: int) -> None:
        self.groups.append(self.open)
        self.open = []
        while len(self.groups) > pending:
            for run in self.groups.pop(0):
                run()
                self.multiplying.pop(0)
                self.reading.pop(0)

    def check_multiplied(self, buffer: Buffer) -> None:
        if buffer in self.multiplying:
            raise UnorderedAccess(f"{buffer.name} is accessed while multiplications into it are under way")


def _check_next(ring: Ring, number: int, wanted: int, word: str) -> None:
    """A barrier tells only adjacent phases apart."""
    if number != wanted:
        raise UnorderedAccess(f"iteration {number} of {ring.name} is {word}, and the next one is {wanted}")
