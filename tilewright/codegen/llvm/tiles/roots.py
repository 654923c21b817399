"""Roots: which expressions become one loop over a tile, and what is kept in buffers. See the head of `emit.py`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from llvmlite import ir

from tilewright.codegen.llvm.tiles.along import Along
from tilewright.codegen.llvm.tiles.values import (
    Buffer,
    Lazy,
    Location,
    tile_type,
)
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

_VIEWS = ("broadcast", "expand_dims", "trans", "arange")
_CHEAP = ("add", "sub", "mul", "eq", "ne", "lt", "le", "and", "or", "not", "cast", "addptr")
_ALONG = ("reduce", "cumsum", "sort", "dot", "reshape", "join")


class Roots(Along):
    def __init__(self, module: ir.Module, machine: CpuMachine, program: TileProgram, facts: Facts) -> None:
        super().__init__(module, machine)
        self.program, self.facts = program, facts
        self.users: dict[Value, list[Any]] = {}
        self._find_users(program.body)
        self.done: set[Any] = set()  # operations whose code is written for good
        self.keeping: dict[Value, Buffer] = {}
        self.pending: dict[Value, None] = {}  # lazy tiles that cost something, in order
        self.origins: dict[Value, Value | None] = {}

    def _find_users(self, block: Block) -> None:
        for node in block.nodes:
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

    def expression(self, roots: Iterable[Value]) -> list[Value]:
        """The lazy tiles that roots are computed from."""
        found: dict[Value, None] = {}
        waiting = list(roots)
        while waiting:
            value = waiting.pop()
            if value in found or not isinstance(self.env.get(value), Lazy):
                continue
            found[value] = None
            waiting += [each for each in self.env[value].op.operands if isinstance(each.type, TileType)]
        return list(found)

    def prepare(self, roots: Iterable[Value], shape: tuple[int, ...]) -> None:
        """Puts into buffers what would be computed again and again."""
        waiting = [(root, False) for root in roots]
        seen: set[tuple[Value, bool]] = set()
        while waiting:
            value, repeated = waiting.pop()
            known = self.env.get(value)
            if not isinstance(known, Lazy) or (value, repeated) in seen:
                continue
            seen.add((value, repeated))
            if repeated and not self._cheap(known.op):
                self.materialise(value)
                continue
            under = repeated or known.op.name in ("broadcast", "trans")
            waiting += [(each, under) for each in known.op.operands if isinstance(each.type, TileType)]

    def begin(self, roots: Sequence[Value], shape: tuple[int, ...]) -> list[Value]:
        """Before the loop of roots: decides what it keeps."""
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
            if tile_type(value).shape == shape and not self._cheap(self.env[value].op) and needed(value)
        }
        return [value for value in inside if value in self.keeping or not needed(value)]

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
        evaluated = self.begin([value], kind.shape)
        target = into or self.keeping.get(value) or self.buffer(kind.element, kind.shape)
        self.keeping.pop(value, None)
        with self.over(kind.shape, 4 if len(evaluated) < 12 else 1) as locations:
            for location in locations:
                self.memo = {}
                self.write(target, location, self.at(value, location))
                self.kept(location)
        self.memo = {}
        self.finish(evaluated)
        if into is None:
            self.env[value] = target
            self.pending.pop(value, None)
        return target

    def settle(self, values: Iterable[Value]) -> None:
        """Puts those tiles into buffers that somebody still needs: the last first, which may have the others inside."""
        for value in reversed(list(values)):
            if isinstance(self.env.get(value), Lazy) and any(
                u not in self.done for u in self.users.get(value, ())
            ):
                self.materialise(value)
            self.pending.pop(value, None)
