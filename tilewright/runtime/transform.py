"""Transforms of a constant before it is packed into a kernel's order (`packing.py`).

Winograd's algorithm needs transformed weights, and Winograd's inner-product trick scaled ones. Each is a `Transform`:
a record with a tag, by which a saved model refers to it, and pure NumPy functions. It is defined next to its
algorithm, and `packing.py` lists all: a new algorithm adds a class, not a field.
"""

from __future__ import annotations

import msgspec
import numpy as np

Shape = tuple[int, ...]


class Transform(msgspec.Struct, frozen=True):
    """Maps a contiguous array to another one, which is then split into blocks, and to trailing data."""

    def is_sound(self, shape: Shape) -> bool:
        """Whether it can be applied to an array of this shape: a file may hold anything."""
        raise NotImplementedError

    def shape_after(self, shape: Shape) -> Shape:
        """The shape that an array of `shape` is mapped to."""
        return shape

    def trailing_size(self, shape: Shape) -> int:
        """Elements of the trailing data."""
        raise NotImplementedError

    def apply(self, dense: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(the array that is split into blocks, the trailing data, flat)"""
        raise NotImplementedError

    def undo(self, dense: np.ndarray, trailing: np.ndarray, shape: Shape) -> np.ndarray:
        """The array of `shape` that `apply` received."""
        raise NotImplementedError
