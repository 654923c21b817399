"""Pack constants for the kernels that read them.

A kernel that reads an operand tile by tile is fastest if each tile is contiguous in the order of use. A constant is
packed in that order once, when the model is linked, after its kernel's transforms (`transform.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from tilewright.runtime.paired import PairedWeights
from tilewright.runtime.transform import Shape, Transform
from tilewright.runtime.winograd import WinogradWeights


class SeparateTail(Transform, frozen=True, tag="last_apart"):
    """The last `count` elements along an axis are in no block. They are stored after the blocks, in sequence, each
    with the other axes in their order."""

    axis: int
    count: int

    def is_sound(self, shape: Shape) -> bool:
        return 0 <= self.axis < len(shape) and 0 <= self.count < shape[self.axis]

    def shape_after(self, shape: Shape) -> Shape:
        return tuple(
            extent - self.count if axis == self.axis else extent for axis, extent in enumerate(shape)
        )

    def trailing_size(self, shape: Shape) -> int:
        return self.count * math.prod(self._others(shape))

    def apply(self, dense: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        first, last = np.split(dense, [dense.shape[self.axis] - self.count], axis=self.axis)
        return first, np.moveaxis(last, self.axis, 0).reshape(-1)

    def undo(self, dense: np.ndarray, trailing: np.ndarray, shape: Shape) -> np.ndarray:
        last = np.moveaxis(trailing.reshape(self.count, *self._others(shape)), 0, self.axis)
        return np.concatenate([dense, last], axis=self.axis)

    def _others(self, shape: Shape) -> Shape:
        return tuple(extent for axis, extent in enumerate(shape) if axis != self.axis)


AnyTransform = SeparateTail | PairedWeights | WinogradWeights  # those that a saved model may name


class Packing(msgspec.Struct, frozen=True):
    """The layout of a constant: a contiguous array of `shape` is transformed, split into blocks along each axis, and
    the block axes are permuted.

    `transforms` are applied in order; the trailing data of the last one comes first after the blocks. Then an axis of
    n elements in blocks of b becomes two: ceil(n / b) blocks, and b indices in one. If b does not divide n, the last
    block overlaps its neighbour; for axes in `zero_filled` it is zero-padded instead. `order` is a permutation of
    (blocks of axis 0, indices of axis 0, blocks of axis 1, ...), the outermost first.
    """

    shape: tuple[int, ...]
    blocks: tuple[int, ...]
    order: tuple[int, ...]
    zero_filled: tuple[int, ...] = ()
    transforms: tuple[AnyTransform, ...] = ()

    @property
    def is_sound(self) -> bool:
        """Whether the values are consistent: a file may hold anything."""
        axes = range(len(self.shape))
        return (
            len(self.blocks) == len(axes)
            and sorted(self.order) == list(range(2 * len(axes)))
            and set(self.zero_filled) <= set(axes)
            and min((*self.shape, *self.blocks, 1)) >= 1
            and all(each.is_sound(shape) for each, shape in zip(self.transforms, self._shapes, strict=False))
            and all(
                block <= max(extent, 1) or n in self.zero_filled
                for n, (block, extent) in enumerate(zip(self.blocks, self.walked, strict=True))
            )
        )

    @property
    def _shapes(self) -> list[Shape]:
        """The shape before each of the transforms, and after the last."""
        shapes = [self.shape]
        for transform in self.transforms:
            shapes.append(transform.shape_after(shapes[-1]))
        return shapes

    @property
    def _trailing_sizes(self) -> list[int]:
        """The sizes of the trailing data of each transform."""
        return [each.trailing_size(shape) for each, shape in zip(self.transforms, self._shapes, strict=False)]

    @property
    def walked(self) -> tuple[int, ...]:
        """The shape that is split into blocks."""
        return self._shapes[-1]

    @property
    def packed_shape(self) -> tuple[int, ...]:
        """Extents in storage order."""
        split = self._split()
        return tuple(split[axis] for axis in self.order)

    @property
    def size(self) -> int:
        return math.prod(self.packed_shape) + sum(self._trailing_sizes)

    @property
    def original_size(self) -> int:
        return math.prod(self.shape)

    def begin_of(self, transform: Transform) -> int:
        """The start of the trailing data of a transform."""
        return self.size - sum(self._trailing_sizes[: self.transforms.index(transform) + 1])

    def pack(self, array: np.ndarray) -> np.ndarray:
        """The elements of a contiguous array in packed order, flat."""
        dtype = array.dtype
        dense = np.ascontiguousarray(array).reshape(self.shape)
        trailing: list[np.ndarray] = []
        for transform in self.transforms:
            dense, more = transform.apply(dense)
            trailing.insert(0, more)
        for axis, (extent, block) in enumerate(zip(self.walked, self.blocks, strict=True)):
            if block == extent:
                continue
            if axis in self.zero_filled:
                missing = -extent % block
                dense = np.pad(dense, [(0, missing if a == axis else 0) for a in range(dense.ndim)])
            else:
                dense = dense.take(self._places(extent, block), axis=axis)
        packed = np.ascontiguousarray(dense.reshape(self._split()).transpose(self.order), dtype).reshape(-1)
        return np.concatenate([packed, *trailing], dtype=dtype) if trailing else packed

    def unpack(self, packed: np.ndarray) -> np.ndarray:
        """The contiguous array, flat: the inverse of `pack`."""
        dtype = packed.dtype
        back = np.argsort(self.order)
        ends = np.cumsum([math.prod(self.packed_shape), *reversed(self._trailing_sizes)])
        packed, *trailing = np.split(packed, ends[:-1])
        blocks = packed.reshape(self.packed_shape).transpose(back)
        padded = [outer * inner for outer, inner in self._pairs()]
        dense = blocks.reshape(padded)
        for axis, (extent, block) in enumerate(zip(self.walked, self.blocks, strict=True)):
            if axis in self.zero_filled or extent % block == 0:
                dense = dense.take(np.arange(extent), axis=axis)
            else:
                dense = dense.take(np.unique(self._places(extent, block), return_index=True)[1], axis=axis)
        before = reversed(self._shapes[:-1])
        for transform, more, shape in zip(reversed(self.transforms), trailing, before, strict=True):
            dense = transform.undo(dense, more, shape)
        return np.array(dense, dtype, order="C").reshape(-1)

    @staticmethod
    def _places(extent: int, block: int) -> np.ndarray:
        """The element at each position of the split axis."""
        starts = np.minimum(np.arange(0, extent, block), extent - block)
        places: np.ndarray = (starts[:, None] + np.arange(block)).reshape(-1)
        return places

    def _pairs(self) -> list[tuple[int, int]]:
        return [(-(-n // b), b) for n, b in zip(self.walked, self.blocks, strict=True)]

    def _split(self) -> list[int]:
        return [extent for pair in self._pairs() for extent in pair]


def dense_order(extents: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """The axes from the outermost to the innermost, if together they enumerate a contiguous array exactly once; else
    None."""
    order = sorted(range(len(extents)), key=lambda axis: -strides[axis])
    expected = 1
    for axis in reversed(order):
        if strides[axis] != expected:
            return None
        expected *= extents[axis]
    return tuple(order)
