"""The operations of the tile IR that make, move and follow pointers and block pointers. See the head of `ops.py`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tilewright.dtypes import DType
from tilewright.errors import KernelShapeError, KernelTypeError
from tilewright.tile.ir import BlockPointerType, Pointer, TileType, Type
from tilewright.tile.op import BOOL, I64, Attrs, Effect, Machine, check_axis, check_shape, op

ATOMIC_TYPES = (DType.F16, DType.BF16, DType.F32, DType.F64, DType.I32, DType.I64, DType.U32, DType.U64)


def pointer_to(dtype: DType, shape: tuple[int, ...] = ()) -> TileType:
    return TileType(Pointer(dtype), shape)


# -- memory -----------------------------------------------------------------------------------------------------------


def _addptr_rule(types: Sequence[TileType], attrs: Attrs) -> TileType:
    pointer, offset = types
    if not offset.dtype.is_integer or offset.is_pointer:
        raise KernelTypeError(
            f"a pointer moves by integers, got {offset}", remedy="convert the offset with .to(tl.int32)"
        )
    if pointer.shape != offset.shape:
        raise KernelShapeError(f"pointers {pointer} and offsets {offset} have different shapes")
    return pointer


@op("addptr", "pointer offset", _addptr_rule)
def _addptr(machine: Machine, attrs: Attrs, pointer: np.ndarray, offset: np.ndarray) -> np.ndarray:
    return np.asarray(pointer + offset.astype(np.int64) * attrs["bytes"])


def _pointed(type: Type, what: str) -> TileType:
    if not isinstance(type, TileType) or not type.is_pointer:
        raise KernelTypeError(
            f"{what} takes a pointer, got {type}", remedy="pass a tensor parameter plus offsets"
        )
    return type


def _mask_rule(pointer: TileType, masks: Sequence[Type], what: str) -> None:
    for mask in masks:
        if mask != TileType(BOOL, pointer.shape):
            raise KernelTypeError(
                f"the mask of a {what} of {pointer} must be bool{list(pointer.shape)}, got {mask}"
            )


def _load_rule(types: Sequence[Type], attrs: Attrs) -> TileType:
    pointer = _pointed(types[0], "load")
    _mask_rule(pointer, types[1:2], "load")
    value = pointer.of(pointer.dtype)
    if len(types) == 3 and types[2] != value:
        raise KernelTypeError(f"other of a load of {pointer} must be {value}, got {types[2]}")
    return value


@op("load", "pointer mask? other?", _load_rule, Effect.READ)
def _load(
    machine: Machine, attrs: Attrs, pointer: np.ndarray, mask: Any = None, other: Any = None
) -> np.ndarray:
    found = machine.load(pointer, attrs["dtype"], mask)
    return found if other is None else np.where(mask, found, other)


def _store_rule(types: Sequence[Type], attrs: Attrs) -> None:
    pointer = _pointed(types[0], "store")
    if types[1] != pointer.of(pointer.dtype):
        raise KernelTypeError(f"a store to {pointer} takes {pointer.of(pointer.dtype)}, got {types[1]}")
    _mask_rule(pointer, types[2:], "store")


@op("store", "pointer value mask?", _store_rule, Effect.WRITE)
def _store(machine: Machine, attrs: Attrs, pointer: np.ndarray, value: np.ndarray, mask: Any = None) -> None:
    machine.store(pointer, value, mask)


def _atomic_rule(types: Sequence[Type], attrs: Attrs) -> TileType:
    _store_rule(types, attrs)
    pointer = types[0]
    assert isinstance(pointer, TileType)
    if pointer.dtype not in ATOMIC_TYPES:
        names = ", ".join(each.short for each in ATOMIC_TYPES)
        raise KernelTypeError(f"atomic_add takes {names}; got {pointer.dtype.short}")
    return pointer.of(pointer.dtype)


@op("atomic_add", "pointer value mask?", _atomic_rule, Effect.WRITE)
def _atomic_add(machine: Machine, attrs: Attrs, pointer: Any, value: Any, mask: Any = None) -> np.ndarray:
    return machine.atomic("add", pointer, value, mask)


# -- block pointers ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BlockAddress:
    """The value of a block pointer: addresses in bytes, the rest in elements."""

    base: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offsets: tuple[int, ...]

    def locate(self, type: BlockPointerType, check: Sequence[int]) -> tuple[np.ndarray, np.ndarray | None]:
        """The addresses of the block's elements, and which of them lie inside along the axes in `check`."""
        addresses = np.full(type.block, self.base, np.int64)
        inside = np.ones(type.block, np.bool_)
        for axis, extent in enumerate(type.block):
            index = self.offsets[axis] + np.arange(extent, dtype=np.int64)
            along = [-1 if d == axis else 1 for d in range(len(type.block))]
            addresses += (index * self.strides[axis] * type.dtype.bytes).reshape(along)
            if axis in check:
                inside &= ((index >= 0) & (index < self.shape[axis])).reshape(along)
        return addresses, inside if check else None


def _block_pointer_rule(types: Sequence[Type], attrs: Attrs) -> BlockPointerType:
    base, *numbers = types
    pointer, block, order = _pointed(base, "make_block_ptr"), check_shape(attrs["block"]), attrs["order"]
    if pointer.shape or len(numbers) != 3 * len(block) or any(each != TileType(I64) for each in numbers):
        raise KernelTypeError(
            f"make_block_ptr takes a scalar pointer and, for each of the {len(block)} axes of the block, a size, a"
            " stride and an offset",
            remedy="give shape, strides, offsets and block_shape the same length",
        )
    if sorted(order) != list(range(len(block))):
        raise KernelShapeError(
            f"order {order} does not name each of the {len(block)} axes once",
            remedy="list the axes from the one with the smallest stride, as in order=(1, 0)",
        )
    return BlockPointerType(pointer.dtype, block, order)


@op("make_block_ptr", "base numbers*", _block_pointer_rule)
def _make_block_ptr(machine: Machine, attrs: Attrs, base: np.ndarray, *numbers: np.ndarray) -> BlockAddress:
    rank = len(attrs["block"])
    shape, strides, offsets = (tuple(int(n) for n in numbers[i * rank : (i + 1) * rank]) for i in range(3))
    return BlockAddress(int(base), shape, strides, offsets)


def block_pointer(type: Type, what: str) -> BlockPointerType:
    if not isinstance(type, BlockPointerType):
        raise KernelTypeError(
            f"{what} takes a block pointer, got {type}", remedy="make one with tl.make_block_ptr"
        )
    return type


def _advance_rule(types: Sequence[Type], attrs: Attrs) -> BlockPointerType:
    type = block_pointer(types[0], "advance")
    if len(types) - 1 != len(type.block):
        raise KernelShapeError(f"advance takes {len(type.block)} offsets for {type}, got {len(types) - 1}")
    return type


@op("advance", "pointer offsets*", _advance_rule)
def _advance(machine: Machine, attrs: Attrs, pointer: BlockAddress, *offsets: np.ndarray) -> BlockAddress:
    moved = tuple(old + int(by) for old, by in zip(pointer.offsets, offsets, strict=True))
    return replace(pointer, offsets=moved)


def _check_rule(type: BlockPointerType, attrs: Attrs) -> TileType:
    for axis in attrs["check"]:
        check_axis(axis, len(type.block), "boundary_check of axis")
    return TileType(type.dtype, type.block)


def _load_block_rule(types: Sequence[Type], attrs: Attrs) -> TileType:
    if attrs["padding"] not in ("zero", "nan"):
        raise KernelTypeError(
            f"padding_option must be zero or nan, got {attrs['padding']!r}", remedy='use "zero" or "nan"'
        )
    type = block_pointer(types[0], "load")
    if attrs["padding"] == "nan" and not type.dtype.is_float:
        raise KernelTypeError(f"padding with nan of {type}, which holds no floats", remedy='use "zero"')
    return _check_rule(type, attrs)


@op("load_block", "pointer", _load_block_rule, Effect.READ)
def _load_block(machine: Machine, attrs: Attrs, pointer: BlockAddress) -> np.ndarray:
    type: BlockPointerType = attrs["type"]
    addresses, inside = pointer.locate(type, attrs["check"])
    found = machine.load(addresses, type.dtype, inside)
    padding = type.dtype.numpy.type(math.nan if attrs["padding"] == "nan" else 0)
    return found if inside is None else np.where(inside, found, padding)


def _store_block_rule(types: Sequence[Type], attrs: Attrs) -> None:
    wanted = _check_rule(block_pointer(types[0], "store"), attrs)
    if types[1] != wanted:
        raise KernelTypeError(f"a store to {types[0]} takes {wanted}, got {types[1]}")


@op("store_block", "pointer value", _store_block_rule, Effect.WRITE)
def _store_block(machine: Machine, attrs: Attrs, pointer: BlockAddress, value: np.ndarray) -> None:
    addresses, inside = pointer.locate(attrs["type"], attrs["check"])
    machine.store(addresses, value, inside)
