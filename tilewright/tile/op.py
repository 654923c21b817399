"""Defines operations of the tile IR and the checks of their types; `ops.py` lists the operations."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tilewright.dtypes import DType
from tilewright.errors import KernelShapeError, KernelTypeError
from tilewright.tile.ir import MAX_ELEMENTS, BlockPointerType, TileType, Type

Attrs = Mapping[str, Any]
Rule = Callable[[Sequence[Any], Attrs], TileType | BlockPointerType | None]
Meaning = Callable[..., Any]

BOOL, I32, I64, F32 = DType.BOOL, DType.I32, DType.I64, DType.F32


class Effect(enum.Enum):
    PURE = "pure"
    READ = "read"
    WRITE = "write"
    OTHER = "other"  # prints and assertions: kept, and kept in order


class Machine(Protocol):
    """The interface of what executes a program instance."""

    debug: bool

    def program_id(self, axis: int) -> int: ...
    def num_programs(self, axis: int) -> int: ...
    def load(self, addresses: np.ndarray, dtype: DType, mask: np.ndarray | None) -> np.ndarray: ...
    def store(self, addresses: np.ndarray, values: np.ndarray, mask: np.ndarray | None) -> None: ...
    def atomic(
        self,
        kind: str,
        addresses: np.ndarray,
        values: np.ndarray,
        mask: np.ndarray | None,
        expected: Any = None,
    ) -> np.ndarray: ...
    def print(self, text: str) -> None: ...


@dataclass(frozen=True)
class OpDef:
    name: str
    operands: tuple[
        str, ...
    ]  # their names; one that ends with "?" may be left out, one with "*" stands for several
    rule: Rule
    meaning: Meaning
    effect: Effect = Effect.PURE


TABLE: dict[str, OpDef] = {}


def op(name: str, operands: str, rule: Rule, effect: Effect = Effect.PURE) -> Callable[[Meaning], Meaning]:
    def register(meaning: Meaning) -> Meaning:
        TABLE[name] = OpDef(name, tuple(operands.split()), rule, meaning, effect)
        return meaning

    return register


# -- what rules ask ---------------------------------------------------------------------------------------------------


def check_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    for size in shape:
        if size < 1 or size & (size - 1):
            raise KernelShapeError(
                f"a tile of shape {shape}: each size must be a power of two, got {size}",
                remedy=f"use {1 << max(size - 1, 0).bit_length()} and mask what lies beyond the data",
            )
    if math.prod(shape) > MAX_ELEMENTS:
        raise KernelShapeError(
            f"a tile of shape {shape} has {math.prod(shape)} elements; at most {MAX_ELEMENTS} are allowed",
            remedy="use smaller blocks, and loop over them",
        )
    return shape


def check_axis(axis: int, rank: int, what: str = "axis") -> int:
    if not -rank <= axis < rank:
        raise KernelShapeError(
            f"{what} {axis} of a tile with {rank} axes",
            remedy=f"use an axis from 0 to {rank - 1}" if rank else "a scalar has no axes: use a tile",
        )
    return axis % rank


def numbers(type: Type, what: str) -> TileType:
    if not isinstance(type, TileType) or type.is_pointer:
        raise KernelTypeError(
            f"{what} takes numbers, got {type}", remedy="load through the pointer with tl.load first"
        )
    return type


def same(types: Sequence[Type], what: str) -> TileType:
    first, *others = types
    for other in others:
        if other != first:
            raise KernelTypeError(f"{what} takes operands of one type, got {first} and {other}")
    assert isinstance(first, TileType)
    return first
