"""How a constant is stored for the kernel that reads it.

A kernel that walks an operand tile by tile reads it fastest where each tile's elements lie one after another in the
order in which they are used. A constant is put into that order once, when the model is linked.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np
from numpy.lib.stride_tricks import as_strided


class Packing(msgspec.Struct, frozen=True):
    """An operand cut into tiles of `width` along its contiguous axis of `extent` elements.

    Within a tile, `loops` are the (extent, stride in elements) of the other axes, outermost first; the tile's own
    elements are innermost. The last tile is moved back where the width does not divide the extent, so that it repeats
    elements of its neighbour.
    """

    extent: int
    width: int
    loops: tuple[tuple[int, int], ...]

    @property
    def tiles(self) -> int:
        return -(-self.extent // self.width)

    @property
    def tile_size(self) -> int:
        return self.width * math.prod(extent for extent, _ in self.loops)

    @property
    def size(self) -> int:
        return self.tiles * self.tile_size

    @property
    def original_size(self) -> int:
        return self.extent * math.prod(extent for extent, _ in self.loops)

    def pack(self, array: np.ndarray) -> np.ndarray:
        """The elements of a dense array in packed order."""
        flat = np.ascontiguousarray(array).reshape(-1)
        assert flat.size == self.original_size
        packed = np.empty((self.tiles, self.tile_size), flat.dtype)
        for tile in range(self.tiles):
            packed[tile] = self._view(flat, tile).reshape(-1)
        return packed.reshape(-1)

    def unpack(self, packed: np.ndarray) -> np.ndarray:
        """The dense array, flat: the inverse of `pack`."""
        flat = np.empty(self.original_size, packed.dtype)
        for tile, values in enumerate(packed.reshape(self.tiles, self.tile_size)):
            view = self._view(flat, tile)
            view[...] = values.reshape(view.shape)
        return flat

    def _view(self, flat: np.ndarray, tile: int) -> np.ndarray:
        """The elements of one tile where they are in the dense array."""
        start = min(tile * self.width, self.extent - self.width)
        shape = (*(extent for extent, _ in self.loops), self.width)
        strides = (*(stride * flat.itemsize for _, stride in self.loops), flat.itemsize)
        return as_strided(flat[start:], shape, strides)
