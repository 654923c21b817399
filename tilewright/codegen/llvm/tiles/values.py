"""The forms that values of a tile program take while LLVM IR is emitted."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from tilewright.codegen.llvm.types import I8, I32, I64, element_type, vector_of
from tilewright.dtypes import DType
from tilewright.tile.ir import BlockPointerType, Op, Pointer, TileType

Element = DType | Pointer


def register_type(element: Element) -> ir.Type:
    """The LLVM type of a value in registers. Pointers are integers: their arithmetic is that of offsets."""
    return I64 if isinstance(element, Pointer) else element_type(element)


def memory_type(element: Element) -> ir.Type:
    return I8 if element is DType.BOOL else register_type(element)


def bytes_of(element: Element) -> int:
    return 8 if isinstance(element, Pointer) else element.bytes


@dataclass(frozen=True)
class Chunk:
    """Neighbouring elements along one axis. If `step` is None, `value` holds them (a scalar: all are equal). Otherwise
    `value` is the first, a scalar, and consecutive elements differ by `step`."""

    value: ir.Value
    lanes: int
    step: int | None = None

    @property
    def uniform(self) -> bool:
        return self.step is None and not isinstance(self.value.type, ir.VectorType)


@dataclass(frozen=True)
class Location:
    """The element at `index`, or `lanes` elements along `axis` that start there."""

    index: tuple[ir.Value, ...]
    axis: int = -1
    lanes: int = 1

    @property
    def key(self) -> tuple[Any, ...]:
        parts = tuple(i.constant if isinstance(i, ir.Constant) else id(i) for i in self.index)
        return (parts, self.axis, self.lanes)


@dataclass(eq=False)
class Buffer:
    """A tile in the thread's own memory: dense, the last axis innermost."""

    pointer: ir.Value
    element: Element
    shape: tuple[int, ...]
    shared: bool = False  # by another view of it

    @property
    def strides(self) -> tuple[int, ...]:
        return tuple(math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))


@dataclass(eq=False)
class Lazy:
    """A tile whose elements are computed at each use."""

    op: Op


@dataclass(frozen=True)
class BlockPointer:
    base: ir.Value
    shape: tuple[ir.Value, ...]
    strides: tuple[ir.Value, ...]
    offsets: tuple[ir.Value, ...]
    type: BlockPointerType


def tile_type(value: Any) -> TileType:
    assert isinstance(value.type, TileType)
    return value.type


def lane_numbers(lanes: int, kind: ir.IntType, step: int = 1) -> ir.Constant:
    return ir.Constant(ir.VectorType(kind, lanes), [wrapped(lane * step, kind) for lane in range(lanes)])


def wrapped(number: int, kind: ir.IntType) -> int:
    """The signed number of this type that a number wraps around to."""
    half = 1 << (kind.width - 1)
    return int((number + half) % (2 * half) - half)


__all__ = ["I32", "BlockPointer", "Buffer", "Chunk", "Element", "Lazy", "Location", "bytes_of", "lane_numbers",
           "memory_type", "register_type", "tile_type", "vector_of", "wrapped"]  # fmt: skip
