"""Transforms of a constant before it is packed into a kernel's order (`packing.py`).

Winograd's algorithm wants its weights transformed, Winograd's inner-product trick wants them scaled. Each is a
`Transform`: a record with a tag, which a saved model names it by, and pure functions in NumPy. It stands alongside the
algorithm that it serves, and `packing.py` lists all: another algorithm adds a class and not a field.
"""

from __future__ import annotations

import msgspec
import numpy as np

Shape = tuple[int, ...]


class Transform(msgspec.Struct, frozen=True):
    """From a dense array to another one, which is then cut into blocks, and to what is stored behind these."""

    def is_sound(self, shape: Shape) -> bool:
        """Whether it can be applied to an array of this shape: one from a file may hold anything."""
        raise NotImplementedError

    def shape_after(self, shape: Shape) -> Shape:
        """Of the array that an array of `shape` becomes."""
        return shape

    def trailing_size(self, shape: Shape) -> int:
        """Elements that are stored behind the blocks."""
        raise NotImplementedError

    def apply(self, dense: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(What is cut into blocks, what is stored behind them, flat.)"""
        raise NotImplementedError

    def undo(self, dense: np.ndarray, trailing: np.ndarray, shape: Shape) -> np.ndarray:
        """The array of `shape` that `apply` was given."""
        raise NotImplementedError
