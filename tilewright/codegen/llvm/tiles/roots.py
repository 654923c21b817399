"""Roots: which expressions become one loop over a tile, and what is kept in buffers. See the head of `emit.py`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from llvmlite import ir

from tilewright.codegen.llvm.shuffles import transposed
from tilewright.codegen.llvm.tiles.along import Along
from tilewright.codegen.llvm.tiles.values import (
    Buffer,
    Chunk,
    Lazy,
    Location,
    bytes_of,
    tile_type,
)
from tilewright.codegen.llvm.types import I32, PTR
from tilewright.dtypes import DType
from tilewright.hw import CpuMachine
from tilewright.tile.executors import Facts
from tilewright.tile.ir import (
    Block,
    Op,
    TileProgram,
    TileType,
    Value,
    blocks_of,
    operands_of,
)
from tilewright.tile.passes.axes import analyse_axes

_VIEWS = ("broadcast", "expand_dims", "trans", "arange")
_CHEAP = ("add", "sub", "mul", "eq", "ne", "lt", "le", "and", "or", "not", "cast", "addptr")
_SHORT = frozenset(
    [
        *_CHEAP,
        "min",
        "max",
        "neg",
        "abs",
        "load",
        "load_block",
        "select",
        "fma",
        "bitcast",
        "xor",
        "shl",
        "shr",
    ]
)  # of one or two instructions
_ALONG = ("reduce", "cumsum", "sort", "dot", "reshape", "join")


class Roots(Along):
    def __init__(self, module: ir.Module, machine: CpuMachine, program: TileProgram, facts: Facts) -> None:
        super().__init__(module, machine)
        self.program, self.facts = program, facts
        self._find_users(program.body)
        self.axes = analyse_axes(program)
        self.done: set[Any] = set()  # operations whose code is written for good
        self.keeping: dict[Value, Buffer] = {}
        self.ahead: dict[
            Value, int
        ] = {}  # tiles, and the axis along which the next iteration loads what follows
        self.pending: dict[Value, None] = {}  # lazy tiles that cost something, in order
        self.origins: dict[Value, Value | None] = {}
        self.trips: list[ir.Value] = []  # of the loops around, about, as doubles

    def _find_users(self, block: Block) -> None:
        for node in block.nodes:
            if isinstance(node, Op):
                self.made_by.update((result, node) for result in node.results)
            for operand in operands_of(node):
                self.users.setdefault(operand, []).append(node)
            for inner in blocks_of(node):
                self._find_users(inner)
        for value in block.yields:
            self.users.setdefault(value, []).append(block)

    def _cheap(self, op: Op) -> bool:
        if op.name in _VIEWS:
            return True
        if op.name not in _CHEAP:
            return False
        return op.name == "addptr" or not tile_type(op.operands[0]).dtype.is_float

    # -- roots -------------------------------------------------------------------------------------------------------

    def prepare(self, roots: Iterable[Value], shape: tuple[int, ...]) -> None:
        """Write tiles to buffers if they would be recomputed repeatedly, and transposes that use whole vectors."""
        waiting = [(root, False, True) for root in roots]  # repeated, and lanes still along the last axis
        seen: set[tuple[Value, bool, bool]] = set()
        while waiting:
            value, repeated, lanes = waiting.pop()
            known = self.env.get(value)
            if not isinstance(known, Lazy) or (value, repeated, lanes) in seen:
                continue
            seen.add((value, repeated, lanes))
            op = known.op
            again = repeated and not self._cheap(op) and not (lanes and self._contiguous(op))
            if again or (not repeated and self.transposes(op)):
                self.materialise(value)
                continue
            under = repeated or op.name in ("broadcast", "trans")
            lanes = lanes and not self.loses_lanes(op)
            waiting += [(each, under, lanes) for each in op.operands if isinstance(each.type, TileType)]

    def _contiguous(self, op: Op) -> bool:
        """Whether a value is a load of vectors: reading memory again costs no more than reading a buffer."""
        if op.name == "load_block":
            stride = self.env[op.operands[0]].strides[-1]
            return isinstance(stride, ir.Constant) and stride.constant == 1
        return (
            op.name == "load"
            and tile_type(op.results[0]).shape[-1] > 1
            and self.lane_step(op.operands[0]) == 1
        )

    def transposes(self, op: Op) -> bool:
        """Whether an operation is a transpose of the last two axes that is done in squares of vectors."""
        if op.name != "trans":
            return False
        order, shape = op.settings["order"], tile_type(op.results[0]).shape
        rank, element = len(shape), tile_type(op.results[0]).element
        if (
            rank < 2
            or tuple(order) != (*range(rank - 2), rank - 1, rank - 2)
            or not isinstance(element, DType)
        ):
            return False
        return element.bytes in (2, 4) and self.lanes > 1 and min(shape[-2:]) >= self.lanes

    def _transpose(self, value: Value, target: Buffer) -> None:
        """Write a transpose to a buffer, a square of vectors at a time."""
        (source,) = self.env[value].op.operands
        *outer, rows, columns = target.shape
        lanes, rank = self.lanes, len(target.shape)
        evaluated = self.begin([source], tile_type(source).shape)
        with (
            self._nest(list(outer)) as index,
            self.loop(columns, lanes) as column,
            self.loop(rows, lanes) as row,
        ):
            self.memo = {}
            vectors = []
            for lane in range(lanes):
                location = Location((*index, self.plus(column, lane), row), rank - 1, lanes)
                vectors.append(self.spread(self.at(source, location), lanes))
                self.kept(location)
            for lane, vector in enumerate(transposed(self.builder, vectors, lanes)):
                location = Location((*index, self.plus(row, lane), column), rank - 1, lanes)
                self.write(target, location, Chunk(vector, lanes))
        self.memo = {}
        self.finish(evaluated)

    def unrolled(self, evaluated: Iterable[Value]) -> int:
        """The number of vectors of an expression per iteration."""
        cost = 0
        for value in evaluated:
            known = self.env.get(value)
            if isinstance(known, Lazy) and not self._cheap(known.op):
                cost += 1 if known.op.name in _SHORT else 6
        return 4 if cost <= 8 else (2 if cost <= 16 else 1)

    def begin(self, roots: Sequence[Value], shape: tuple[int, ...]) -> list[Value]:
        """Choose which tiles to keep; called before the loop over the roots."""
        self.root += 1
        self.prepare(roots, shape)
        inside = self.expression(roots)
        members = set(inside)
        later: dict[Value, bool] = {}

        def needed(value: Value) -> bool:
            if value not in later:
                later[value] = False
                later[value] = any(self._needs(user, members, needed) for user in self.users.get(value, ()))
            return later[value]

        self.keeping = {
            value: self.buffer(tile_type(value).element, shape)
            for value in inside
            if tile_type(value).shape == shape and self._worth_keeping(self.env[value].op) and needed(value)
        }
        return [value for value in inside if value in self.keeping or not needed(value)]

    def _worth_keeping(self, op: Op) -> bool:
        """Whether to keep a tile in a buffer: not if it is cheap, or a load of vectors, which can be repeated."""
        return not self._cheap(op) and not self._contiguous(op)

    def _needs(self, user: Any, members: set[Value], needed: Any) -> bool:
        if user in self.done:
            return False
        if isinstance(user, Op) and user.results and user.results[0] in members:
            return self._cheap(user) and needed(user.results[0])
        return True

    def kept(self, location: Location) -> None:
        for value, buffer in self.keeping.items():
            self.write(buffer, location, self.at(value, location))

    def finish(self, evaluated: Iterable[Value]) -> None:
        for value in evaluated:
            self.done.add(self.env[value].op)
            self.pending.pop(value, None)
        self.env.update(self.keeping)
        self.keeping = {}

    def materialise(self, value: Value, into: Buffer | None = None) -> Buffer:
        known = self.env[value]
        if isinstance(known, Buffer) and into is None:
            return known
        kind = tile_type(value)
        if isinstance(known, Lazy) and self.transposes(known.op):
            target = into or self.buffer(kind.element, kind.shape)
            self._transpose(value, target)
            self.done.add(known.op)
            if into is None:
                self.env[value] = target
                self.pending.pop(value, None)
            return target
        evaluated = self.begin([value], kind.shape)
        target = into or self.keeping.get(value) or self.buffer(kind.element, kind.shape)
        self.keeping.pop(value, None)

        def written(locations: list[Location]) -> None:
            self.prefetch(value, locations)
            for location in locations:
                self.memo = {}
                self.write(target, location, self.at(value, location))
                self.kept(location)

        self.each([value], kind.shape, self.unrolled(evaluated), written)
        self.memo = {}
        self.finish(evaluated)
        if into is None:
            self.env[value] = target
            self.pending.pop(value, None)
        return target

    def prefetch(self, value: Value, locations: Sequence[Location]) -> None:
        """Prefetch to L2, a line at a time, the data that the loop's next iteration probably loads for a tile that is
        `ahead`: its rows are not contiguous, so the hardware prefetchers are late."""
        if value not in self.ahead or not self.trips or self.lanes == 1:
            return
        axis, shape = self.ahead[value], tile_type(value).shape
        for each in self.expression([value]):
            op = self.env[each].op
            kind = tile_type(each)
            if kind.shape != shape or not self._contiguous(op):
                continue
            for number, location in enumerate(locations):
                if number * location.lanes * bytes_of(kind.element) % self.machine.line_bytes:
                    continue
                index = list(location.index)
                index[axis] = self.plus(index[axis], shape[axis])
                self.memo = {}
                address, _ = self.address(op, Location(tuple(index), location.axis, location.lanes))
                pointer = self.builder.inttoptr(address.value, PTR)
                self.intrinsic("llvm.prefetch.p0", ir.VoidType(), pointer, I32(0), I32(2), I32(1))
        self.memo = {}

    def settle(self, values: Iterable[Value]) -> None:
        """Write to buffers the tiles that are still needed, the last first, since it may contain the others."""
        for value in reversed(list(values)):
            if isinstance(self.env.get(value), Lazy) and any(
                u not in self.done for u in self.users.get(value, ())
            ):
                self.materialise(value)
            self.pending.pop(value, None)
