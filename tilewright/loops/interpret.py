"""The reference interpreter of loop programs: slow and literal; generated code is tested against it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import reduce
from typing import Any

import numpy as np

from tilewright import te
from tilewright.dtypes import DType
from tilewright.errors import VerificationError
from tilewright.hw.gpu import WARP
from tilewright.hw.memory import LOOP_SCOPES
from tilewright.loops.ir import (
    Across,
    Await,
    Block,
    BoxCopy,
    Buffer,
    Combine,
    Commit,
    Copy,
    Fill,
    Filled,
    For,
    If,
    Invoke,
    Kind,
    Multiplied,
    Pop,
    Prefetch,
    Program,
    Push,
    Release,
    Roles,
    Scope,
    Slide,
    Stmt,
    Transpose,
    Warp,
    foreign_scope,
    local_buffers,
    thread_count,
    walk_stmts,
)
from tilewright.loops.rings import Rings, UnorderedAccess, swizzled
from tilewright.loops.units import Order
from tilewright.te.interpret import interpret
from tilewright.te.scalars import SCALARS


def interpret_program(
    program: Program,
    inputs: Sequence[np.ndarray],
    scopes: Collection[Scope] = LOOP_SCOPES,
    order: Order | None = None,
) -> np.ndarray:
    """Run the program on flat copies of `inputs`, and return the flat output. Elements never written are NaN or -1.
    `scopes`: those of the target; everything except global memory and registers behaves like scratch memory. `order`
    checks the tokens of decoupled units, and has their times afterwards."""
    foreign = foreign_scope(program, scopes)
    if foreign is not None:
        raise VerificationError(f"program {program.name}: {foreign}")
    memory = {
        buffer: np.ascontiguousarray(array).reshape(-1)
        for buffer, array in zip(program.params[:-1], inputs, strict=True)
    }
    output = program.params[-1]
    registers: dict[Buffer, np.ndarray] = {}
    threads = thread_count(program)
    for buffer in (output, *local_buffers(program)):
        empty = np.nan if buffer.dtype.is_float else -1
        if buffer.scope is Scope.REGISTER:
            registers[buffer] = np.full((threads, buffer.size), empty).astype(buffer.dtype.numpy)
        else:
            memory[buffer] = np.full(buffer.size, empty).astype(buffer.dtype.numpy)
    with np.errstate(all="ignore"):
        if order is None and any(isinstance(stmt, Push | Pop) for stmt in walk_stmts(program.body)):
            order = Order()
        machine = _Machine(memory, registers, order)
        machine.run(program.body, {})
        machine.rings.check_ended()
        if order is not None:
            order.end()
    return memory[output]


class _Machine:
    def __init__(
        self,
        shared: dict[Buffer, np.ndarray],
        registers: dict[Buffer, np.ndarray],
        order: Order | None = None,
    ) -> None:
        self.shared, self.registers, self.order = shared, registers, order
        self.thread = 0
        self.asked: list[_Pending] = []
        self.groups: list[list[_Pending]] = []
        self.last_read: dict[
            tuple[Buffer, int], int
        ] = {}  # when each element of scratch memory was last read
        self.awaits = 0
        # Elements of scratch memory that copies in flight will fill.
        self.in_flight: dict[Buffer, np.ndarray] = {}
        self.rings = Rings(shared, self.in_flight)

    def memory(self, buffer: Buffer) -> np.ndarray:
        if buffer.scope is not Scope.REGISTER:
            return self.shared[buffer]
        own: np.ndarray = self.registers[buffer][self.thread]
        return own

    def run(self, stmt: Stmt, env: dict[te.Var, int]) -> None:
        if isinstance(stmt, Block):
            for child in stmt.stmts:
                self.run(child, env)
        elif isinstance(stmt, For):
            for value in range(stmt.var.extent):
                if stmt.kind is Kind.THREAD:
                    self.thread = value
                elif stmt.kind is Kind.PARALLEL:
                    self.last_read.clear()  # each iteration has its own scratch memory
                    self.rings.begin()
                self.run(stmt.body, {**env, stmt.var: value})
        elif isinstance(stmt, If):
            if self.value(stmt.cond, env):
                self.run(stmt.then, env)
            elif stmt.other is not None:
                self.run(stmt.other, env)
        elif isinstance(stmt, Transpose):
            tile = self.memory(stmt.buffer)[: stmt.rows * stmt.columns]
            tile[:] = tile.reshape(stmt.rows, stmt.columns).T.flatten()
        elif isinstance(stmt, Slide):
            first = self.memory(stmt.buffer)[: stmt.lanes]
            following = self.memory(stmt.following)[stmt.position : stmt.position + stmt.lanes]
            first[:] = np.concatenate([first, following])[stmt.begin : stmt.begin + stmt.lanes]
        elif isinstance(stmt, Combine):
            values = self.registers[stmt.buffer][:, stmt.offset]
            groups = values.reshape(-1, stmt.group)
            groups[:] = np.array([_of_threads(stmt.kind, group) for group in groups])[:, None]
        elif isinstance(stmt, Copy):
            self.copy(stmt, env)
        elif isinstance(stmt, Commit):
            self.groups.append(self.asked)
            self.asked = []
        elif isinstance(stmt, Await):
            self.awaits += 1
            while len(self.groups) > stmt.pending:
                for buffer, index, values in self.groups.pop(0):
                    self.shared[buffer][index : index + len(values)] = values
                    self.in_flight[buffer][index : index + len(values)] = False
        elif isinstance(stmt, Fill | Filled | Release):
            self.at_ring(stmt, env)
        elif isinstance(stmt, Multiplied):
            self.rings.multiplied(stmt.pending)
        elif isinstance(stmt, Roles):
            self.roles(stmt, env)
        elif isinstance(stmt, BoxCopy):
            raise VerificationError("a box is copied outside of a fill")
        elif isinstance(stmt, Push | Pop):
            assert self.order is not None
            self.order.push(stmt) if isinstance(stmt, Push) else self.order.pop(stmt)
        elif isinstance(stmt, Warp):
            self.warp(stmt, env)
        elif isinstance(stmt, Invoke):
            self.invoke(stmt, env)
        elif not isinstance(stmt, Prefetch):
            if self.order is not None:
                self.order.begin(stmt)
            index = int(self.value(stmt.index, env))
            if not 0 <= index < stmt.buffer.size:
                raise IndexError(f"{stmt.buffer.name}[{index}] of {stmt.buffer.size}")
            self.rings.check_multiplied(stmt.buffer)
            self.memory(stmt.buffer)[index] = self.value(stmt.value, env)
            if self.order is not None and stmt.buffer.scope is not Scope.GLOBAL:
                self.order.writes_element(stmt.buffer, index)

    def value(self, expr: te.Expr, env: dict[te.Var, int]) -> Any:
        if isinstance(expr, te.Const):
            if expr.dtype is DType.I64:
                return int(expr.value)
            return np.asarray(expr.value).astype(expr.dtype.numpy)[()]
        if isinstance(expr, te.Var):
            return env.get(expr, 0)
        if isinstance(expr, te.Load):
            assert isinstance(expr.source, Buffer)
            index = int(self.value(expr.indices[0], env))
            if not 0 <= index < expr.source.size:
                raise IndexError(f"{expr.source.name}[{index}] of {expr.source.size}")
            if self.order is not None and expr.source.scope is not Scope.GLOBAL:
                self.order.reads_element(expr.source, index)
            self.rings.check_multiplied(expr.source)
            if expr.source.scope is Scope.SCRATCH:
                self.last_read[expr.source, index] = self.awaits
                self.check_awaited(expr.source, index)
            return self.elements(expr.source)[index]
        if isinstance(expr, te.Select):
            return self.value(expr.then if self.value(expr.cond, env) else expr.other, env)
        if isinstance(expr, te.Cast):
            return _convert(self.value(expr.value, env), expr.dtype)
        if isinstance(expr, Across):
            return self.across(expr)
        assert isinstance(expr, te.Call)
        arguments = [self.value(arg, env) for arg in expr.args]
        if (
            expr.op in _OF_INDICES
            and type(arguments[0]) is int
            and type(arguments[1]) is int
            and arguments[1]
        ):
            return _OF_INDICES[expr.op](*arguments)
        return np.asarray(SCALARS[expr.op].numpy(*arguments)).astype(expr.dtype.numpy)[()]

    def copy(self, stmt: Copy, env: dict[te.Var, int]) -> None:
        """A copy has no effect until it is awaited."""
        index = int(self.value(stmt.index, env))
        values = np.zeros(stmt.lanes, stmt.buffer.dtype.numpy)
        if stmt.cond is None or self.value(stmt.cond, env):
            source = int(self.value(stmt.source_index, env))
            if not 0 <= source <= stmt.source.size - stmt.lanes:
                raise IndexError(f"{stmt.source.name}[{source}] of {stmt.source.size}")
            values = self.elements(stmt.source)[source : source + stmt.lanes].copy()
        if not 0 <= index <= stmt.buffer.size - stmt.lanes:
            raise IndexError(f"{stmt.buffer.name}[{index}] of {stmt.buffer.size}")
        for position in range(index, index + stmt.lanes):
            if self.last_read.get((stmt.buffer, position)) == self.awaits:
                raise UnorderedAccess(f"{stmt.buffer.name}[{position}] is copied to where it is still read")
        self.shared[stmt.buffer][index : index + stmt.lanes] = np.nan if stmt.buffer.dtype.is_float else -1
        flags = self.in_flight.setdefault(stmt.buffer, np.zeros(stmt.buffer.size, bool))
        flags[index : index + stmt.lanes] = True
        self.asked.append((stmt.buffer, index, values))

    def at_ring(self, stmt: Fill | Filled | Release, env: dict[te.Var, int]) -> None:
        number = int(self.value(stmt.number, env))
        if isinstance(stmt, Filled):
            self.rings.await_filled(stmt.ring, number)
        elif isinstance(stmt, Release):
            self.rings.release(stmt.ring, number)
        else:

            def at(expr: te.Expr) -> int:
                return int(self.value(expr, env))

            boxes = [(copy, at(copy.index), at(copy.row), at(copy.column)) for copy in stmt.copies]
            self.rings.fill(stmt.ring, number, boxes)

    def roles(self, stmt: Roles, env: dict[te.Var, int]) -> None:
        """The producer runs as far ahead as it may before each statement of the consumer."""
        producer, consumer = self.steps(stmt.producer, env), self.steps(stmt.consumer, env)
        consumes = True
        while True:
            produced, fills = False, next(producer, False)
            while fills:
                produced, fills = True, next(producer, False)
            if not consumes and not produced:
                raise UnorderedAccess("deadlock: the roles of a block wait for each other")
            found = next(consumer, None)
            if found is None:
                break
            consumes = found
        if next(producer, None) is not None:
            raise UnorderedAccess("deadlock: a producer waits for a slot that is not released any more")

    def steps(self, stmt: Stmt, env: dict[te.Var, int]) -> Iterator[bool]:
        """Run one role of a block; yields between its statements: True after one, False if it has to wait."""
        if isinstance(stmt, Block):
            for child in stmt.stmts:
                yield from self.steps(child, env)
        elif isinstance(stmt, For) and stmt.kind in (Kind.SERIAL, Kind.UNROLL):
            for value in range(stmt.var.extent):
                yield from self.steps(stmt.body, {**env, stmt.var: value})
        elif isinstance(stmt, If):
            if self.value(stmt.cond, env):
                yield from self.steps(stmt.then, env)
            elif stmt.other is not None:
                yield from self.steps(stmt.other, env)
        else:
            while not self.may_run(stmt, env):
                yield False
            self.run(stmt, env)
            yield True

    def may_run(self, stmt: Stmt, env: dict[te.Var, int]) -> bool:
        if isinstance(stmt, Fill):
            return self.rings.may_fill(stmt.ring, int(self.value(stmt.number, env)))
        if isinstance(stmt, Filled):
            return self.rings.has_come(stmt.ring, int(self.value(stmt.number, env)))
        return True

    def check_awaited(self, buffer: Buffer, index: int | np.ndarray) -> None:
        flags = self.in_flight.get(buffer)
        if flags is not None and np.any(flags[index]):
            first = np.atleast_1d(index)[np.atleast_1d(flags[index])][0]
            raise UnorderedAccess(f"{buffer.name}[{first}] is read before its copy was awaited")

    def warp(self, stmt: Warp, env: dict[te.Var, int]) -> None:
        if stmt.running:
            for buffer, _ in stmt.operands[1:]:
                self.rings.check_multiplied(buffer)
            reads = self.carry_out(stmt, env, read_only=True)
            self.rings.start(stmt.operands[0][0], reads, lambda: self.carry_out(stmt, env))
            return
        for buffer, _ in stmt.operands:
            self.rings.check_multiplied(buffer)
        self.carry_out(stmt, env)

    def carry_out(
        self, stmt: Warp, env: dict[te.Var, int], read_only: bool = False
    ) -> list[tuple[Buffer, np.ndarray]]:
        """Carry out the instruction, or only read its operands; returns what it reads from shared memory."""
        instruction = stmt.instruction
        reads: list[tuple[Buffer, np.ndarray]] = []
        threads = next(iter(self.registers.values())).shape[0]
        together = stmt.threads
        for first in range(0, threads, together):
            tiles: dict[te.Tensor, np.ndarray] = {}
            for fragment, (buffer, start), pitch in zip(
                instruction.fragments, stmt.operands, stmt.operand_pitches, strict=True
            ):
                positions = self._positions(stmt, fragment.lanes, fragment.size, start, first, env)
                if pitch:
                    rows, columns = fragment.element(0, np.arange(fragment.size))
                    positions = swizzled(positions[:, :1] + rows * pitch + columns, pitch, buffer.dtype.bytes)
                tile = np.zeros(fragment.tensor.shape, fragment.tensor.dtype.numpy)
                elements = fragment.element(
                    np.arange(fragment.lanes)[:, None], np.arange(fragment.size)[None]
                )
                if buffer.scope is Scope.REGISTER:
                    tile[elements] = self.registers[buffer][
                        np.arange(first, first + together)[:, None], positions
                    ]
                else:
                    tile[elements] = self.shared[buffer][positions]
                    self.check_awaited(buffer, positions)
                    reads.append((buffer, positions))
                    self.last_read.update({(buffer, int(at)): self.awaits for at in positions.flat})
                tiles[fragment.tensor] = tile
            if read_only:
                continue
            result, (buffer, start) = instruction.fragments[0], stmt.operands[0]
            before = tiles.pop(instruction.output)
            value = interpret(instruction.output, tiles)
            value = before + value if instruction.accumulates else value
            positions = self._positions(stmt, together, result.size, start, first, env)
            elements = result.element(np.arange(together)[:, None], np.arange(result.size)[None])
            self.registers[buffer][np.arange(first, first + together)[:, None], positions] = value[elements]
        return reads

    def invoke(self, stmt: Invoke, env: dict[te.Var, int]) -> None:
        """Compute what the instruction is declared to compute, whatever code is emitted for it."""
        intrinsic, held = stmt.intrinsic, []
        if self.order is not None:
            self.order.begin(stmt)
        for position in stmt.operands:
            at = int(self.value(position.index, env)) + np.array(position.offsets)
            if at.min() < 0 or at.max() >= position.buffer.size:
                raise IndexError(f"{position.buffer.name}[{at.min()}..{at.max()}] of {position.buffer.size}")
            held.append(at)
        tiles: dict[te.Tensor, np.ndarray] = {}
        if self.order is not None:
            for position, at in zip(stmt.operands[1:], held[1:], strict=True):
                for element in at:
                    self.order.reads_element(position.buffer, int(element))
            for element in held[0]:
                self.order.writes_element(stmt.operands[0].buffer, int(element))
        for fragment, position, at in zip(intrinsic.fragments, stmt.operands, held, strict=True):
            tile = np.zeros(fragment.tensor.shape, fragment.tensor.dtype.numpy)
            for element, value in zip(fragment.positions(), self.elements(position.buffer)[at], strict=True):
                tile[element] = value
            tiles[fragment.tensor] = tile
        before = tiles.pop(intrinsic.output)
        value = interpret(intrinsic.output, tiles)
        reduction = intrinsic.stage.reduction
        if reduction is not None:
            value = SCALARS[te.REDUCE_COMBINERS[reduction.kind]].numpy(before, value)
        result = [value[element] for element in intrinsic.fragments[0].positions()]
        self.memory(stmt.operands[0].buffer)[held[0]] = result

    def _positions(
        self, stmt: Warp, lanes: int, size: int, start: te.Expr, first: int, env: dict[te.Var, int]
    ) -> np.ndarray:
        """The index of each element of each thread's fragment in a warp."""
        varies = stmt.thread in te.variables(start)
        starts = [
            int(self.value(start, {**env, stmt.thread: first + lane}))
            for lane in range(lanes if varies else 1)
        ]
        return np.broadcast_to(np.array(starts), (lanes,))[:, None] + np.arange(size)[None]

    def elements(self, buffer: Buffer) -> np.ndarray:
        if buffer.of is None:
            return self.memory(buffer)
        whole = buffer.size * buffer.dtype.bytes // buffer.of.dtype.bytes
        return self.memory(buffer.of)[:whole].view(buffer.dtype.numpy)

    def across(self, expr: Across) -> Any:
        return _pairwise(expr.kind, self.memory(expr.buffer)[expr.offset : expr.offset + expr.lanes])


# Index arithmetic in plain integers, because it is most of what a program computes.
_OF_INDICES: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "xor": operator.xor,
    "lt": operator.lt,
    "le": operator.le,
}
_Pending = tuple[Buffer, int, np.ndarray]


def _of_threads(kind: str, group: np.ndarray) -> Any:
    """Combine halves with halves within a warp, then the warps in order."""
    combine = SCALARS[te.REDUCE_COMBINERS[kind]].numpy
    warps = group.reshape(-1, min(WARP, len(group)))
    return reduce(combine, [_pairwise(kind, warp) for warp in warps])


def _pairwise(kind: str, vector: np.ndarray) -> Any:
    combine = SCALARS[te.REDUCE_COMBINERS[kind]].numpy
    while len(vector) > 1:
        half = len(vector) // 2
        vector = combine(vector[:half], vector[half:])
    return vector[0]


def _convert(value: Any, dtype: DType) -> Any:
    if dtype is DType.BOOL:
        return np.bool_(value != 0)
    return np.asarray(value).astype(dtype.numpy)[()]
