"""Loads of block pointers by the tensor copy engine: whether one can be, and the tensor map that it needs.

A tensor map is encoded before the launch, so what it says has to follow from the kernel's arguments: the tensor is a
parameter, its sizes and strides are parameters, constants, or sums and products of them (`HostNumber`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilewright.codegen.cuda.tiles.contraction import shared_tile
from tilewright.dtypes import DType
from tilewright.hw.bulk_copies import ALIGNMENT, MAX_BOX, Box, copy_box
from tilewright.hw.gpu import GpuMachine
from tilewright.hw.warpgroups import PANEL_BYTES
from tilewright.tile.ir import BlockPointerType, For, If, Op, TileProgram, Value, While, walk
from tilewright.tile.passes.axes import BlockInfo, Info
from tilewright.tile.passes.layouts import bits_of

_ARITHMETIC = ("add", "sub", "mul")


@dataclass(frozen=True)
class HostNumber:
    """A number that the host computes from a launch's arguments: "parameter" (its index), "constant", or an
    operation."""

    name: str
    value: int = 0
    operands: tuple[HostNumber, ...] = ()

    def of(self, values: Sequence[int]) -> int:
        if self.name == "parameter":
            return int(values[self.value])
        if self.name == "constant":
            return self.value
        a, b = (each.of(values) for each in self.operands)
        return a + b if self.name == "add" else a - b if self.name == "sub" else a * b


@dataclass(frozen=True)
class TensorMap:
    """The tensor map of a matrix: a parameter is its address; `columns` are contiguous, rows are `stride` elements
    apart."""

    parameter: int
    rows: HostNumber
    columns: HostNumber
    stride: HostNumber
    box: Box


@dataclass(frozen=True)
class BulkCopy:
    """A load as `panels` adjacent boxes. `inner`: the contiguous axis."""

    map: TensorMap
    inner: int
    panels: int

    @property
    def bytes(self) -> int:
        return self.map.box.bytes * self.panels


class BulkCopies:
    """The known facts about a program's block pointers."""

    def __init__(self, program: TileProgram, axes: Mapping[Value, Info], machine: GpuMachine) -> None:
        self.program, self.axes, self.machine = program, axes, machine
        self.definitions = {
            result: node for node in walk(program.body) if isinstance(node, Op) for result in node.results
        }
        self.sources: dict[Value, list[Value]] = {}
        for node in walk(program.body):
            if isinstance(node, Op):
                continue
            if isinstance(node, If):
                for result, *values in zip(node.results, node.then.yields, node.other.yields, strict=True):
                    self.sources[result] = values
                continue
            groups = [node.body.params[1:]] if isinstance(node, For) else [node.body.params]
            groups += [node.condition.params] if isinstance(node, While) else []
            for group in (*groups, node.results):
                for value, *values in zip(group, node.init, node.body.yields, strict=True):
                    self.sources[value] = values

    def plan(self, op: Op, masks: tuple[int, ...]) -> BulkCopy | str:
        """The bulk copy that loads to shared memory with these address masks, or why there is none."""
        pointer = op.operands[0]
        if not isinstance(pointer.type, BlockPointerType):
            return "it has no block pointer"
        made, info = self._made(pointer), self.axes[pointer]
        if made is None:
            return "its block pointer is made in several places"
        block, dtype = pointer.type.block, pointer.type.dtype
        if len(block) != 2:
            return "its block must have two axes"
        if {axis % 2 for axis in op.settings["check"]} != {0, 1} or op.settings["padding"] != "zero":
            return "not all of its boundaries are checked and zero outside"
        assert isinstance(info, BlockInfo)
        inner = next((axis for axis in (1, 0) if info.strides[axis].value == 1), None)
        if inner is None:
            return "no axis of its tensor is known to be contiguous"
        outer = 1 - inner
        distance = info.strides[outer].everywhere * dtype.bytes
        if info.base.everywhere % ALIGNMENT or distance % ALIGNMENT:
            return f"its rows are not known to begin at multiples of {ALIGNMENT} bytes"
        columns = min(block[inner], PANEL_BYTES // dtype.bytes)
        box = Box(dtype, block[outer], columns)
        if box.rows > MAX_BOX or box.row_bytes < 32 or copy_box(box).missing(self.machine):
            return "no box of the copy engine is as large"
        tile = shared_tile(bits_of(block[:1]), bits_of(block[1:]), 0, dtype.bytes, by_rows=inner == 1)
        if tile.masks != masks:
            return "its rows lie otherwise in shared memory"
        base, *numbers = made.operands
        if base not in self.program.params:
            return "its tensor does not begin where a parameter does"
        hosted = [self.number(each) for each in (numbers[inner], numbers[outer], numbers[2 + outer])]
        if any(each is None for each in hosted):
            return "its sizes do not follow from the arguments alone"
        width, height, stride = (each for each in hosted if each is not None)
        found = TensorMap(self.program.params.index(base), height, width, stride, box)
        return BulkCopy(found, inner, block[inner] // columns)

    def _made(self, pointer: Value) -> Op | None:
        """The `make_block_ptr` that a block pointer comes from, possibly through `advance`."""
        found: set[Op] = set()
        waiting, seen = [pointer], {pointer}
        while waiting:
            value = waiting.pop()
            op = self.definitions.get(value)
            if op is not None and op.name == "make_block_ptr":
                found.add(op)
                continue
            values = [op.operands[0]] if op is not None else self.sources[value]
            fresh = [each for each in values if each not in seen]
            seen.update(fresh)
            waiting += fresh
        return found.pop() if len(found) == 1 else None

    def number(self, value: Value) -> HostNumber | None:
        if value in self.program.params:
            return HostNumber("parameter", self.program.params.index(value))
        op = self.definitions.get(value)
        if op is None:
            return None
        if op.name == "constant":
            return HostNumber("constant", int(op.settings["value"]))
        if op.name == "cast" and op.settings["dtype"] in (DType.I32, DType.I64):
            return self.number(op.operands[0])
        if op.name not in _ARITHMETIC:
            return None
        parts = [self.number(each) for each in op.operands]
        if any(each is None for each in parts):
            return None
        return HostNumber(op.name, 0, tuple(each for each in parts if each is not None))
