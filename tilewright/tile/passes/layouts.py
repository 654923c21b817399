"""Layouts of tiles over threads: which register of which thread holds which element.

All sizes are powers of two, so an element's number in its tile (row-major) is a string of bits, and so are the number
of a register, of a lane in its warp and of a warp in its block. A `Layout` says which bit of the element's number each
of those bits is:

    shape (8, 32), 2 registers      element   r r r c c c c c        row, column
    registers (0,)                            . . . . . . . R
    lanes (1, 2, 3, 4, 5)                     . . L L L L L .
    warps (6, 7)                              W W . . . . . .

A bit of a lane or a warp that is REPLICATED changes nothing: these threads hold the same elements. Every operation on
shapes moves bits, so its result has a layout in which no element moves to another thread: `Layout.mapped`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

REPLICATED = -1
LANES = 5  # bits of a lane's number


def bits_of(shape: Sequence[int]) -> int:
    return math.prod(shape).bit_length() - 1


def axis_bits(shape: Sequence[int], axis: int) -> range:
    """The bits of an element's index that are its index along an axis, lowest first."""
    low = bits_of(shape[axis + 1 :])
    return range(low, low + bits_of((shape[axis],)))


@dataclass(frozen=True)
class Layout:
    """Maps bits of the register, lane and warp numbers to bits of the element's index; the lowest come first."""

    registers: tuple[int, ...]
    lanes: tuple[int, ...]
    warps: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of registers per thread."""
        return 1 << len(self.registers)

    @property
    def threads(self) -> tuple[int, ...]:
        """The element bit of each bit of the thread's number in its block."""
        return self.lanes + self.warps

    @property
    def replicated(self) -> int:
        """A mask of the thread bits that do not change the element."""
        return sum(1 << n for n, bit in enumerate(self.threads) if bit == REPLICATED)

    def mapped(self, bits: Mapping[int, int]) -> Layout:
        """The layout with element bits replaced. A bit that is not in the mapping disappears: there are fewer
        registers, and threads are replicated."""
        return Layout(
            tuple(bits[bit] for bit in self.registers if bit in bits),
            tuple(bits.get(bit, REPLICATED) for bit in self.lanes),
            tuple(bits.get(bit, REPLICATED) for bit in self.warps),
        )

    def kept_registers(self, bits: Iterable[int]) -> tuple[int, ...]:
        """The positions of the register bits that are among `bits`."""
        wanted = set(bits)
        return tuple(n for n, bit in enumerate(self.registers) if bit in wanted)

    def extended(self, bits: Iterable[int]) -> Layout:
        """The layout with further bits: in replicated threads first, then in registers."""
        waiting = list(bits)
        lanes, warps = list(self.lanes), list(self.warps)
        for part in (lanes, warps):
            for n, bit in enumerate(part):
                if bit == REPLICATED and waiting:
                    part[n] = waiting.pop(0)
        return Layout((*self.registers, *waiting), tuple(lanes), tuple(warps))

    def holds(self, other: Layout) -> bool:
        """Whether each thread holds, in its registers, all elements that it holds in the other layout."""
        for own, wanted in zip(self.threads, other.threads, strict=True):
            if own != REPLICATED and own != wanted:
                return False
        return True


def distributed(order: Sequence[int], vector: int, warps: int) -> Layout:
    """Assigns bits in this order: the given number to registers, then to lanes, to `warps` bits of warps, and the rest
    to registers again. Fewer go to registers first if threads would otherwise have no elements."""
    first = max(0, min(vector, len(order) - LANES - warps))
    rest = list(order[first:])
    lanes, rest = rest[:LANES], rest[LANES:]
    shared, rest = rest[:warps], rest[warps:]
    return Layout(
        (*order[:first], *rest),
        (*lanes, *(REPLICATED,) * (LANES - len(lanes))),
        (*shared, *(REPLICATED,) * (warps - len(shared))),
    )


def uniform(warps: int) -> Layout:
    """The layout of a scalar: every thread holds it."""
    return Layout((), (REPLICATED,) * LANES, (REPLICATED,) * warps)


# -- shapes: the bits of the result, by those of the operand ----------------------------------------------------------


def transposed_bits(shape: Sequence[int], order: Sequence[int]) -> dict[int, int]:
    """Maps the bits of an operand of this shape to those of the permuted result."""
    after = tuple(shape[axis] for axis in order)
    return {
        old: new
        for position, axis in enumerate(order)
        for old, new in zip(axis_bits(shape, axis), axis_bits(after, position), strict=True)
    }


def broadcast_bits(old: Sequence[int], new: Sequence[int]) -> dict[int, int]:
    cut = len(new) - len(old)
    return {
        before: after
        for axis in range(len(old))
        if old[axis] == new[axis + cut]
        for before, after in zip(axis_bits(old, axis), axis_bits(new, axis + cut), strict=True)
    }


def reduced_bits(shape: Sequence[int], axis: int) -> dict[int, int]:
    """Maps bits to those without the axis."""
    kept = (*shape[:axis], *shape[axis + 1 :])
    return {
        old: new
        for position, a in enumerate(a for a in range(len(shape)) if a != axis)
        for old, new in zip(axis_bits(shape, a), axis_bits(kept, position), strict=True)
    }


def joined_bits(shape: Sequence[int]) -> dict[int, int]:
    """Maps an operand's bits to the result's, which has one more, the lowest."""
    return {bit: bit + 1 for bit in range(bits_of(shape))}


def inverse(bits: Mapping[int, int]) -> dict[int, int]:
    return {new: old for old, new in bits.items()}
