"""Atomic operations: what each does to an element, and the table's entries of all but `atomic_add`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tilewright.dtypes import DType
from tilewright.errors import KernelTypeError
from tilewright.tile.ir import Op, TileType, Type, Value
from tilewright.tile.op import BOOL, Attrs, Effect, Machine, Meaning, Rule, op

_WORDS = (DType.I32, DType.I64, DType.U32, DType.U64)
_ANY = (*_WORDS, DType.F32, DType.F64)
TYPES: dict[str, tuple[DType, ...]] = {
    "max": _WORDS, "min": _WORDS, "and": _WORDS, "or": _WORDS, "xor": _WORDS, "xchg": _ANY, "cas": _WORDS,
}  # fmt: skip
ATOMICS = frozenset(["atomic_add", *(f"atomic_{kind}" for kind in TYPES)])

# The element after the step, from what it was, the operand and, of cas, what it was expected to be.
COMBINE: dict[str, Callable[[Any, Any, Any], Any]] = {
    "add": lambda old, value, expected: old + value,
    "max": lambda old, value, expected: np.maximum(old, value),
    "min": lambda old, value, expected: np.minimum(old, value),
    "and": lambda old, value, expected: old & value,
    "or": lambda old, value, expected: old | value,
    "xor": lambda old, value, expected: old ^ value,
    "xchg": lambda old, value, expected: value,
    "cas": lambda old, value, expected: np.where(old == expected, value, old),
}


def mask_of(op: Op) -> Value | None:
    """The mask of a load, a store or an atomic operation by pointers."""
    at = 1 if op.name == "load" else 2
    return op.operands[at] if len(op.operands) > at and op.name != "atomic_cas" else None


def _rule(kind: str) -> Rule:
    def rule(types: Sequence[Type], attrs: Attrs) -> TileType:
        pointer, name = types[0], f"atomic_{kind}"
        if not isinstance(pointer, TileType) or not pointer.is_pointer:
            raise KernelTypeError(
                f"{name} takes a pointer, got {pointer}", remedy="pass a tensor parameter plus offsets"
            )
        if pointer.dtype not in TYPES[kind]:
            raise KernelTypeError(
                f"{name} takes {', '.join(each.short for each in TYPES[kind])}; got {pointer.dtype.short}",
                remedy="keep the tensor in one of these types",
            )
        values = types[1:3] if kind == "cas" else types[1:2]
        for value in values:
            if value != pointer.of(pointer.dtype):
                raise KernelTypeError(f"{name} of {pointer} takes {pointer.of(pointer.dtype)}, got {value}")
        for mask in () if kind == "cas" else types[2:]:
            if mask != TileType(BOOL, pointer.shape):
                raise KernelTypeError(f"the mask of {name} must be bool{list(pointer.shape)}, got {mask}")
        return pointer.of(pointer.dtype)

    return rule


def _meaning(kind: str) -> Meaning:
    if kind == "cas":
        return lambda machine, attrs, pointer, expected, value: machine.atomic(
            kind, pointer, value, None, expected
        )

    def meaning(machine: Machine, attrs: Attrs, pointer: Any, value: Any, mask: Any = None) -> np.ndarray:
        return machine.atomic(kind, pointer, value, mask)

    return meaning


for _kind in TYPES:
    _operands = "pointer expected value" if _kind == "cas" else "pointer value mask?"
    op(f"atomic_{_kind}", _operands, _rule(_kind), Effect.WRITE)(_meaning(_kind))
