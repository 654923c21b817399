"""How a constant is stored for the kernel that reads it.

A kernel that walks an operand tile by tile reads it fastest where each tile's elements lie one after another in the
order in which they are used. A constant is put into that order once, when the model is linked; one that a kernel wants
transformed (Winograd's algorithm) or scaled (products in pairs) is so then too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from tilewright.runtime import paired, winograd


class Packing(msgspec.Struct, frozen=True):
    """The constant as a dense array of `shape`, each axis cut into blocks, the blocks put into another order.

    An axis of n elements in blocks of b becomes two: ceil(n / b) blocks, and b places in one. Where b does not divide
    n, the last block is moved back and repeats elements of its neighbour; for axes in `zero_filled` it is filled up
    with zeros instead. `order` is a permutation of (blocks of axis 0, places of axis 0, blocks of axis 1, ...), the
    outermost first. `winograd`: the two leading axes, a window of 3 x 3, are first replaced by their transform for so
    many outputs (0: they are not), and the weights themselves come behind all else, for tiles that must be computed
    directly. `tail`: (an axis, a number): so many of its last elements are no part of this; they
    come behind all else, one after the other, each with the other axes as they were. `taps`: the axes of a sum in which
    two products are computed by one multiplication, outermost first (none: there is no such sum); behind all else come,
    for each column, its correction, then for each its size, by which it is divided, then for each the ratio that a row
    must have to be multiplied with it so, and then the signs of all pairs (`runtime/paired.py`).
    """

    shape: tuple[int, ...]
    blocks: tuple[int, ...]
    order: tuple[int, ...]
    zero_filled: tuple[int, ...] = ()
    winograd: int = 0
    tail: tuple[int, int] = (0, 0)
    taps: tuple[int, ...] = ()

    @property
    def is_sound(self) -> bool:
        """Whether the numbers fit each other: one from a file may hold anything."""
        axes = range(len(self.shape))
        axis, last = self.tail
        return (
            len(self.blocks) == len(axes)
            and sorted(self.order) == list(range(2 * len(axes)))
            and {*self.zero_filled, *self.taps} <= set(axes)
            and len(set(self.taps)) == len(self.taps)
            and min((*self.shape, *self.blocks, 1)) >= 1
            and (not last or (axis in axes and 0 <= last < self.shape[axis]))
            and (not self.winograd or (len(axes) > 2 and self.shape[:2] == (3, 3) and 1 < self.winograd <= 8))
            and all(
                block <= max(extent, 1) or n in self.zero_filled
                for n, (block, extent) in enumerate(zip(self.blocks, self.walked, strict=True))
            )
        )

    @property
    def walked(self) -> tuple[int, ...]:
        """The shape that is cut into blocks."""
        if not self.winograd:
            axis, last = self.tail
            return tuple(extent - last if n == axis else extent for n, extent in enumerate(self.shape))
        points = self.winograd + winograd.TAPS - 1
        return (points, points, *self.shape[2:])

    @property
    def packed_shape(self) -> tuple[int, ...]:
        """Extents in the order of storage."""
        split = self._split()
        return tuple(split[axis] for axis in self.order)

    @property
    def size(self) -> int:
        return (
            math.prod(self.packed_shape)
            + self._tail_size
            + 3 * self.columns
            + self.pairs
            + self.untransformed
        )

    @property
    def untransformed(self) -> int:
        """Elements of the weights as they were, behind their transform."""
        return self.original_size if self.winograd else 0

    @property
    def columns(self) -> int:
        """Columns that have a correction, a size and a ratio."""
        return math.prod(self._column_shape) if self.taps else 0

    @property
    def pairs(self) -> int:
        """Pairs that have a sign."""
        return paired.pair_count(self._tap_count) if self.taps else 0

    @property
    def _tap_count(self) -> int:
        return math.prod(self.shape[axis] for axis in self.taps)

    @property
    def _column_shape(self) -> tuple[int, ...]:
        return tuple(extent for axis, extent in enumerate(self.shape) if axis not in self.taps)

    @property
    def _tail_size(self) -> int:
        axis, last = self.tail
        return last * math.prod(extent for n, extent in enumerate(self.shape) if n != axis)

    @property
    def original_size(self) -> int:
        return math.prod(self.shape)

    def pack(self, array: np.ndarray) -> np.ndarray:
        """The elements of a dense array in packed order, flat."""
        dtype = array.dtype
        dense = np.ascontiguousarray(array).reshape(self.shape)
        behind: list[np.ndarray] = []
        if self.winograd:
            behind.append(dense)
            dense = winograd.transform_weights(dense, self.winograd)
        if self.taps:
            columns, *behind = paired.prepare_weights(self._taps_first(dense))
            behind.append(paired.pair_signs(self._tap_count).astype(dtype))
            dense = self._taps_in_place(columns)
        tail_axis, last = self.tail
        if last:
            dense, tail = np.split(dense, [dense.shape[tail_axis] - last], axis=tail_axis)
            behind.insert(0, np.moveaxis(tail, tail_axis, 0))
        for axis, (extent, block) in enumerate(zip(self.walked, self.blocks, strict=True)):
            if block == extent:
                continue
            if axis in self.zero_filled:
                missing = -extent % block
                dense = np.pad(dense, [(0, missing if a == axis else 0) for a in range(dense.ndim)])
            else:
                dense = dense.take(self._places(extent, block), axis=axis)
        packed = np.ascontiguousarray(dense.reshape(self._split()).transpose(self.order), dtype).reshape(-1)
        return np.concatenate([packed, *(array.reshape(-1) for array in behind)]) if behind else packed

    def unpack(self, packed: np.ndarray) -> np.ndarray:
        """The dense array, flat: the inverse of `pack`."""
        if self.winograd:
            return packed[-self.untransformed :].copy()
        dtype = packed.dtype
        back = np.argsort(self.order)
        ends = np.cumsum([math.prod(self.packed_shape), self._tail_size, *[self.columns] * 3])
        packed, behind, _, sizes, _, _ = np.split(packed, ends)
        blocks = packed.reshape(self.packed_shape).transpose(back)
        padded = [outer * inner for outer, inner in self._pairs()]
        dense = blocks.reshape(padded)
        for axis, (extent, block) in enumerate(zip(self.walked, self.blocks, strict=True)):
            if axis in self.zero_filled or extent % block == 0:
                dense = dense.take(np.arange(extent), axis=axis)
            else:
                dense = dense.take(np.unique(self._places(extent, block), return_index=True)[1], axis=axis)
        axis, last = self.tail
        if last:
            others = [extent for n, extent in enumerate(self.shape) if n != axis]
            tail = np.moveaxis(behind.reshape(last, *others), 0, axis)
            dense = np.concatenate([dense, tail], axis=axis)
        if self.taps:
            columns = paired.restore_weights(self._taps_first(dense), sizes.reshape(self._column_shape))
            dense = self._taps_in_place(columns)
        return np.ascontiguousarray(dense, dtype).reshape(-1)

    def _taps_first(self, dense: np.ndarray) -> np.ndarray:
        """The taps as one axis, in front of all others."""
        return np.moveaxis(dense, self.taps, range(len(self.taps))).reshape(-1, *self._column_shape)

    def _taps_in_place(self, taps_first: np.ndarray) -> np.ndarray:
        taps = [self.shape[axis] for axis in self.taps]
        return np.moveaxis(taps_first.reshape(*taps, *self._column_shape), range(len(taps)), self.taps)

    @staticmethod
    def _places(extent: int, block: int) -> np.ndarray:
        """Which element stands at each place of the cut axis."""
        starts = np.minimum(np.arange(0, extent, block), extent - block)
        places: np.ndarray = (starts[:, None] + np.arange(block)).reshape(-1)
        return places

    def _pairs(self) -> list[tuple[int, int]]:
        return [(-(-n // b), b) for n, b in zip(self.walked, self.blocks, strict=True)]

    def _split(self) -> list[int]:
        return [extent for pair in self._pairs() for extent in pair]


def dense_order(extents: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """The axes from the outermost to the innermost, if together they walk a dense array exactly once; else None."""
    order = sorted(range(len(extents)), key=lambda axis: -strides[axis])
    expected = 1
    for axis in reversed(order):
        if strides[axis] != expected:
            return None
        expected *= extents[axis]
    return tuple(order)
