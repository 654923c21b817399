"""Coalescing: layouts in which neighbouring lanes access neighbouring addresses, and how many bytes go at once.

The axis along which addresses are contiguous comes first: a few elements in each thread's registers, as many as one
access takes, then lanes. What limits an access is the contiguity and the divisor of the addresses, and the constancy of
the mask: a vector is accessed as a whole or not at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tilewright.tile.passes.axes import AxisInfo
from tilewright.tile.passes.layouts import LANES, Layout, axis_bits, distributed

ACCESS_BYTES = 16  # at once
SECTOR_BYTES = 32  # what memory transfers at least


def axis_order(shape: Sequence[int], pointers: AxisInfo) -> list[int]:
    """The axes, ordered by the length of their contiguous groups, longest first; of equal ones the last comes first."""
    return sorted(range(len(shape)), key=lambda axis: (-pointers.contiguity[axis], -axis))


def vector_elements(pointers: AxisInfo, mask: Sequence[int] | None, axis: int, size: int) -> int:
    """The number of elements of `size` bytes that one access may have along an axis. `mask`: its constancy for each
    axis."""
    limit = min(
        pointers.contiguity[axis], max(1, ACCESS_BYTES // size), max(1, pointers.divisor[axis] // size)
    )
    if mask is not None:
        limit = min(limit, mask[axis])
    return 1 << (limit.bit_length() - 1)


def memory_layout(
    shape: Sequence[int], pointers: AxisInfo, mask: Sequence[int] | None, size: int, warps: int
) -> Layout:
    """The coalesced layout for an access to a tile of elements of `size` bytes by 2**warps warps."""
    order = axis_order(shape, pointers)
    if not order:
        return distributed((), 0, warps)
    vector = vector_elements(pointers, mask, order[0], size)
    bits = [bit for axis in order for bit in axis_bits(shape, axis)]
    return distributed(bits, int(math.log2(vector)), warps)


def access_elements(
    layout: Layout, shape: Sequence[int], pointers: AxisInfo, mask: Sequence[int] | None, size: int
) -> int:
    """The number of consecutive registers of a thread that one access may have in this layout."""
    best = 1
    for axis in range(len(shape)):
        bits, limit = axis_bits(shape, axis), vector_elements(pointers, mask, axis, size)
        count = 0
        while count < min(len(bits), len(layout.registers)) and layout.registers[count] == bits[count]:
            count += 1
        best = max(best, min(limit, 1 << count))
    return best


def run_bytes(layout: Layout, shape: Sequence[int], pointers: AxisInfo, size: int, vector: int) -> int:
    """The number of contiguous bytes that one instruction of a warp accesses."""
    if not shape:
        return size
    axis = axis_order(shape, pointers)[0]
    together = {*layout.registers[: vector.bit_length() - 1], *layout.lanes}
    count = 0
    for bit in axis_bits(shape, axis):
        if bit not in together or 1 << count >= pointers.contiguity[axis]:
            break
        count += 1
    return size << count


__all__ = [
    "LANES",
    "SECTOR_BYTES",
    "access_elements",
    "axis_order",
    "memory_layout",
    "run_bytes",
    "vector_elements",
]
