"""Virtual threads: their statements interleaved into one stream for decoupled units, with explicit tokens.

    virtual v < 2:                           push execute -> load, for each thread       (its buffer is free)
      for k < 8:                             for k < 8:
        tile[..] = x[v, k, ..]                 pop execute -> load;  tile.0[..] = x[0, k, ..];  push load -> execute
        acc[..] += tile[..]           ->       pop execute -> load;  tile.1[..] = x[1, k, ..];  push load -> execute
      out[v, ..] = acc[..]                     pop load -> execute;  acc.0[..] += tile.0[..];   push execute -> load
                                               pop load -> execute;  acc.1[..] += tile.1[..];   push execute -> load
                                             pop execute -> load, for each thread
                                             push execute -> store;  ...  out[0, ..] = acc.0[..];  out[1, ..] = ...

The load unit fetches for one thread while the execute unit computes for another. Loops inside a virtual thread are run
for all of them together; statements of one unit that belong together are repeated for each. What a thread fills and
reads is its own: the buffers are copied.

Tokens are placed for each two units of a sequence of statements that access a buffer of which one writes it: after the
last statement of the one and before the next of the other, also across iterations, where the other has not waited for
as much before. Each dependence has a queue of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from tilewright import te
from tilewright.errors import ScheduleError
from tilewright.loops.ir import (
    Block,
    Buffer,
    For,
    If,
    Kind,
    Pop,
    Program,
    Push,
    Scope,
    Stmt,
    Unit,
    block,
    local_buffers,
    walk_stmts,
)
from tilewright.loops.passes.accesses import Placed, children, leaf_statements, read, written
from tilewright.loops.units import UNITS, unit_of


def virtual_threads(program: Program) -> Program:
    """The program without virtual loops. Raises ScheduleError if a statement fits no unit."""
    for _, stmt in leaf_statements(program.body):
        if unit_of(stmt) is None:
            raise _refused(stmt)
    return replace(program, body=_Tokens(count()).visit(_Threads(program).visit(program.body)))


def is_virtual(stmt: Stmt) -> bool:
    return any(isinstance(each, For) and each.kind is Kind.VIRTUAL for each in walk_stmts(stmt))


def _refused(stmt: Stmt) -> ScheduleError:
    target = written(stmt)
    if target is None:
        return ScheduleError(f"vthread: {type(stmt).__name__} is not supported in decoupled units")
    outside = sorted(buffer.name for buffer in read(stmt) if buffer.scope is Scope.GLOBAL)
    return ScheduleError(
        f"vthread: {target[0].name} is computed from {', '.join(outside)} in global memory, which the execute unit"
        " cannot access",
        remedy="cache_read makes the load a stage of its own, and cache_write the store",
    )


# -- interleaving -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Threads:
    program: Program

    def visit(self, stmt: Stmt) -> Stmt:
        if isinstance(stmt, Block):
            return block(*map(self.visit, stmt.stmts))
        if isinstance(stmt, If):
            return If(
                stmt.cond, self.visit(stmt.then), None if stmt.other is None else self.visit(stmt.other)
            )
        if not isinstance(stmt, For):
            return stmt
        if stmt.kind is not Kind.VIRTUAL:
            return For(stmt.var, stmt.kind, self.visit(stmt.body))
        return self.together(stmt.body, stmt.var, self.copies(stmt))

    def copies(self, loop: For) -> list[dict[Buffer, tuple[Buffer, te.Expr]]]:
        """The buffers that each thread gets a copy of: those that are not accessed outside the loop."""
        inside = [stmt for _, stmt in leaf_statements(loop.body)]
        outside = [
            stmt
            for path, stmt in leaf_statements(self.program.body)
            if not any(each is loop for each in path)
        ]
        used = {buffer for stmt in outside for buffer in _buffers(stmt)}
        own = [
            buffer
            for buffer in local_buffers(self.program)
            if buffer not in used and any(buffer in _buffers(stmt) for stmt in inside)
        ]
        zero = te.as_index(0)
        return [
            {buffer: (replace(buffer, name=f"{buffer.name}.{number}"), zero) for buffer in own}
            for number in range(loop.var.extent)
        ]

    def together(
        self, stmt: Stmt, var: te.Var, copies: Sequence[Mapping[Buffer, tuple[Buffer, te.Expr]]]
    ) -> Stmt:
        """The statement for all threads: loops around several units are shared, other statements are repeated."""
        units = {unit_of(leaf) for _, leaf in leaf_statements(stmt)}
        if len(units) > 1:
            if isinstance(stmt, Block):
                return block(*(self.together(child, var, copies) for child in stmt.stmts))
            if isinstance(stmt, For):
                return For(stmt.var, stmt.kind, self.together(stmt.body, var, copies))
            if isinstance(stmt, If) and stmt.other is None and var not in te.variables(stmt.cond):
                return If(stmt.cond, self.together(stmt.then, var, copies))
        return block(
            *(Placed({var: te.as_index(number)}, moved).of(stmt) for number, moved in enumerate(copies))
        )


def _buffers(stmt: Stmt) -> set[Buffer]:
    target = written(stmt)
    return read(stmt) | (set() if target is None else {target[0]})


# -- tokens -----------------------------------------------------------------------------------------------------------


@dataclass
class _Access:
    reads: set[Buffer] = field(default_factory=set)
    writes: set[Buffer] = field(default_factory=set)

    def conflicts(self, other: _Access) -> bool:
        return bool(self.writes & (other.reads | other.writes) or self.reads & other.writes)


@dataclass(frozen=True)
class _Tokens:
    queues: Iterator[int]

    def visit(self, stmt: Stmt) -> Stmt:
        if isinstance(stmt, If):
            return If(
                stmt.cond, self.visit(stmt.then), None if stmt.other is None else self.visit(stmt.other)
            )
        if isinstance(stmt, Block):
            return self.sequence(stmt.stmts, None)
        if not isinstance(stmt, For) or len({unit_of(leaf) for _, leaf in leaf_statements(stmt)}) < 2:
            return stmt
        if stmt.kind is Kind.PARALLEL:  # each iteration has its own scratch memory
            return For(stmt.var, stmt.kind, self.visit(stmt.body))
        return self.sequence(children(stmt.body), stmt)

    def sequence(self, stmts: Sequence[Stmt], loop: For | None) -> Stmt:
        """The statements, inside `loop` if it is given, with their tokens."""
        accesses = [_by_unit(stmt) for stmt in stmts]
        before: list[list[Stmt]] = [[] for _ in stmts]
        after: list[list[Stmt]] = [[] for _ in stmts]
        first: list[Stmt] = []
        last: list[Stmt] = []
        # For two units, the iteration (-1: the one before) and statement of the first that the second has waited for.
        waited: dict[tuple[Unit, Unit], tuple[int, int]] = {}
        for number, found in enumerate(accesses):
            for unit, access in found.items():
                for other in UNITS:
                    if other == unit:
                        continue
                    where = [
                        n
                        for n, each in enumerate(accesses)
                        if other in each and each[other].conflicts(access)
                    ]
                    earlier = [n for n in where if n < number]
                    if not where or (not earlier and loop is None):
                        continue
                    needed = (0, earlier[-1]) if earlier else (-1, where[-1])
                    if waited.get((other, unit), (-2, 0)) >= needed:
                        continue
                    waited[other, unit] = needed
                    queue = next(self.queues)
                    push, pop = Push(queue, other, unit), Pop(queue, other, unit)
                    after[needed[1]].append(push)
                    before[number].append(pop)
                    # a dependence on the previous iteration: push a token before the loop, pop one after it
                    if not earlier:
                        first.append(push)
                        last.append(pop)
        made: list[Stmt] = []
        for number, stmt in enumerate(stmts):
            made += [*before[number], self.visit(stmt), *after[number]]
        body = block(*made)
        return body if loop is None else block(*first, For(loop.var, loop.kind, body), *last)


def _by_unit(stmt: Stmt) -> dict[Unit, _Access]:
    found: dict[Unit, _Access] = {}
    for _, leaf in leaf_statements(stmt):
        unit, target = unit_of(leaf), written(leaf)
        assert unit is not None and target is not None
        access = found.setdefault(unit, _Access())
        access.reads |= read(leaf)
        access.writes.add(target[0])
    return found
