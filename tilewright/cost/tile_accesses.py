"""Analyses the accesses of a tile program: how many contiguous bytes each of them touches.

Addresses are affine in the indices of a tile, in the program's number along each axis of the grid and in the indices of
loops; an address is unknown if it depends on scalar arguments that are unknown. If a row ends where the next one
begins, in the tile or in the next program instance or iteration, both are one contiguous run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tilewright.tile.ir import BlockPointerType, For, Op, TileType, Value

LONG = 1 << 16  # bytes of a contiguous run without an end
_NEXT = "program 0"  # instances along the first axis of the grid come one after the other


@dataclass(frozen=True)
class Affine:
    """first + strides . indices + the sum of each symbol times its factor, in elements."""

    first: int
    strides: tuple[int, ...] = ()
    factors: Mapping[str, int] = field(default_factory=dict)

    def plus(self, other: Affine, sign: int = 1) -> Affine:
        strides = self.strides or (0,) * len(other.strides)
        added = other.strides or (0,) * len(strides)
        factors = dict(self.factors)
        for name, factor in other.factors.items():
            factors[name] = factors.get(name, 0) + sign * factor
        both = tuple(a + sign * b for a, b in zip(strides, added, strict=True))
        return Affine(self.first + sign * other.first, both, factors)

    def times(self, number: int) -> Affine:
        factors = {name: number * factor for name, factor in self.factors.items()}
        return Affine(number * self.first, tuple(number * each for each in self.strides), factors)

    @property
    def number(self) -> int | None:
        """Its value if it is one number, else None."""
        return None if any(self.strides) or any(self.factors.values()) else self.first


@dataclass
class Accesses:
    """The affine values of a program so far. `known`: scalars, by value, that follow from the arguments."""

    known: Mapping[Value, Any]
    affine: dict[Value, Affine | None] = field(default_factory=dict)
    blocks: dict[Value, tuple[tuple[int | None, ...], tuple[Affine | None, ...]]] = field(
        default_factory=dict
    )

    def of(self, value: Value) -> Affine | None:
        if value in self.affine:
            return self.affine[value]
        found = self.known.get(value)
        if found is not None and getattr(found, "dtype", None) is not None and found.dtype.kind in "iub":
            return Affine(int(found))
        if isinstance(value.type, TileType) and value.type.is_pointer and not value.type.shape:
            return Affine(0)  # a tensor's first element
        return None

    def enter(self, node: For) -> None:
        """Enter the body of a loop: its index is a new symbol, and carried values start as their initial values."""
        index, *params = node.body.params
        lower, step = self.of(node.lower), self.of(node.step)
        name = f"loop {id(node)}"
        by = None if step is None else step.number
        self.affine[index] = None if lower is None or by is None else lower.plus(Affine(0, (), {name: by}))
        for param, first in zip(params, node.init, strict=True):
            if first in self.blocks:
                self.blocks[param] = self.blocks[first]
            else:
                self.affine[param] = self.of(first)

    def op(self, op: Op) -> None:
        """Record the affine value of an operation's result."""
        if len(op.results) != 1:
            return
        (result,) = op.results
        if isinstance(result.type, BlockPointerType):
            self._block(op, result)
        else:
            self.affine[result] = self._made(op, result.type)

    def _made(self, op: Op, kind: TileType) -> Affine | None:
        name, attrs = op.name, op.settings
        if name == "program_id":
            return Affine(0, (), {f"program {attrs['axis']}": 1})
        if name == "arange":
            return Affine(attrs["start"], (1,))
        if name == "constant":
            return Affine(int(attrs["value"])) if attrs["dtype"].is_integer else None
        if name not in ("cast", "broadcast", "expand_dims", "add", "sub", "mul", "addptr"):
            return None
        operands = [self.of(each) for each in op.operands]
        first = operands[0]
        if first is None or (name == "cast" and not kind.dtype.is_integer):
            return None
        if name == "cast":
            return first
        if name == "expand_dims":
            axis = attrs["axis"] % len(kind.shape)
            strides = first.strides or (0,) * (len(kind.shape) - 1)
            return Affine(first.first, (*strides[:axis], 0, *strides[axis:]), first.factors)
        if name == "broadcast":
            old = op.operands[0].type
            assert isinstance(old, TileType)
            own = [0 if size == 1 else n for n, size in zip(first.strides, old.shape, strict=False)]
            missing = len(kind.shape) - len(own)
            return Affine(first.first, (*(0,) * missing, *own), first.factors)
        second = operands[1]
        if second is None:
            return None
        if name == "mul":
            for one, other in ((first, second), (second, first)):
                if (number := one.number) is not None:
                    return other.times(number)
            return None
        return first.plus(second, -1 if name == "sub" else 1)

    def _block(self, op: Op, result: Value) -> None:
        if op.name == "advance":
            if op.operands[0] in self.blocks:
                self.blocks[result] = self.blocks[op.operands[0]]
            return
        assert isinstance(result.type, BlockPointerType)
        rank = len(result.type.block)
        numbers = [self.of(each) for each in op.operands[1:]]
        strides = tuple(None if each is None else each.number for each in numbers[rank : 2 * rank])
        self.blocks[result] = strides, tuple(numbers[2 * rank :])

    def run_bytes(self, pointer: Value) -> float | None:
        """The number of contiguous bytes of an access; None if it is unknown."""
        shape = pointer.type.block if isinstance(pointer.type, BlockPointerType) else pointer.type.shape
        size = pointer.type.dtype.bytes
        if not shape:
            return None
        if isinstance(pointer.type, BlockPointerType):
            strides, offsets = self.blocks.get(pointer, ((None,), (None,)))
            if None in strides:
                return None
            steps = tuple(each for each in strides if each is not None)
            factors: dict[str, int] = {}
            for stride, offset in zip(steps, offsets, strict=True):
                for name, factor in (offset.factors if offset is not None else {}).items():
                    factors[name] = factors.get(name, 0) + stride * factor
        else:
            found = self.of(pointer)
            if found is None:
                return None
            steps, factors = found.strides, dict(found.factors)
        run, whole = 1, True
        for extent, step in zip(reversed(shape), reversed(steps), strict=True):
            if extent == 1:
                continue
            if step == 0:  # the same elements again
                continue
            if whole and 0 < step <= run:  # rows that end where the next begins, or are masked there
                run = step * extent
            else:
                whole = False
        if whole and any(0 < factor <= run for factor in factors.values()):
            return float(LONG)
        return float(run * size)
