"""Software pipelining: a loop loads what later iterations use while it computes with what was loaded before.

    for k < 8:                                for n < 2: copy tile[n] <- x[n]; commit             (prologue)
      wait                                    for k < 8:
      copy tile <- x[k]                         wait for all but 1
      commit; wait                     ->       copy tile[(k + 2) % 3] <- x[k + 2] if k + 2 < 8
      ... tile ...                              ... tile[k % 3] ...
                                                commit
                                              wait                                                (flush)

Scratch memory is filled by copies that are awaited by group. Registers are filled by loads that a thread waits for
where it uses them; a register has no address, so the loop is written out, or repeated in steps of the stages.

Two levels, where the buffer that the inner loop loads from is pipelined by the outer loop, are fused: the inner loop's
prologue moves out of the outer loop, and its last iterations load the first elements of the next tile. Its stages are
counted over both loops, and the tile's copies are spread over the inner iterations:

    for k:                                    ... prologue of tile;  held[0] = tile[0, 0]
      copy tile <- x[k]                       for k:
      for i < 4:                       ->       i = 0: part of the copies; held[1] = tile[k, 1]; use held[0]
        held = tile[i]                          ...
        use held                                i = 3: commit; wait;       held[0] = tile[k + 1, 0]; use held[3]

Order with other steps: after `cache_read`, tiling and `bind`, which make the loop and its copies; `inline` of what
computes an operand moves the computation to its use, because a store that computes is not asynchronous.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from tilewright import te
from tilewright.errors import PipelineError
from tilewright.loops.ir import (
    Await,
    Block,
    Buffer,
    Commit,
    Copy,
    For,
    If,
    Kind,
    Program,
    Scope,
    Stmt,
    Warp,
    block,
    local_buffers,
)
from tilewright.loops.passes.accesses import children, leaf_statements, placed_at
from tilewright.loops.passes.load_and_use import LoadAndUse, check_synchronisation, load_and_use
from tilewright.te.index import simplify

WRITTEN_OUT = 32  # maximum iterations of a register loop that are all written out


def pipeline(
    program: Program,
    stages: Mapping[str, int],
    *,
    fused: bool = True,
    synchronous: Collection[str] = (),
    capacity: int | None = None,
) -> Program:
    """The program with each buffer of `stages` in that many stages. Raises PipelineError with the reason if it is not
    legal. `fused`: count an inner pipeline over both loops if possible. `synchronous`: buffers that stores may fill.
    `capacity`: bytes of scratch memory for all buffers together."""
    wanted = {name: count for name, count in stages.items() if count != 1}
    found = [load_and_use(program, name, name in synchronous) for name in wanted]
    for each in found:
        _check_count(each, wanted[each.buffer.name])
    check_synchronisation(program, found, wanted)
    _check_capacity(program, wanted, capacity)
    levels: dict[int, _Level] = {}
    for each in found:
        known = levels.get(id(each.loop))
        buffers = (*(known.buffers if known else ()), each)
        levels[id(each.loop)] = _Level(each.loop, buffers, wanted[each.buffer.name])
    for level in levels.values():
        level.check(wanted)
    return replace(program, body=_Pipelining(levels, fused).rebuilt(program.body))


@dataclass(frozen=True)
class _Level:
    """The buffers that one loop fills, and their stages."""

    loop: For
    buffers: tuple[LoadAndUse, ...]
    stages: int

    def check(self, wanted: Mapping[str, int]) -> None:
        scopes = {each.buffer.scope is Scope.REGISTER for each in self.buffers}
        if len(scopes) > 1:
            raise PipelineError(
                f"pipeline: loop {self.loop.var.name} fills buffers in registers and in memory: pipeline one of them"
            )
        counts = {wanted[each.buffer.name] for each in self.buffers}
        if len(counts) > 1:
            raise PipelineError(
                f"pipeline: buffers of loop {self.loop.var.name} have {sorted(counts)} stages: their waits differ"
            )

    @property
    def in_registers(self) -> bool:
        return self.buffers[0].buffer.scope is Scope.REGISTER

    @property
    def ahead(self) -> int:
        return self.stages - 1

    @property
    def extent(self) -> int:
        return self.loop.var.extent

    @property
    def body(self) -> tuple[Stmt, ...]:
        """The statements of the loop without its waits for these buffers. Those of a loop that fills registers are for
        other buffers."""
        stmts = children(self.loop.body)
        return tuple(stmt for stmt in stmts if self.in_registers or not isinstance(stmt, Commit | Await))

    @property
    def producers(self) -> list[Stmt]:
        stmts = children(self.loop.body)
        numbers = sorted({number for each in self.buffers for number in each.producers})
        return _written_out([stmts[number] for number in numbers])

    @property
    def others(self) -> list[Stmt]:
        stmts = children(self.loop.body)
        made = [stmts[number] for each in self.buffers for number in each.producers]
        return [stmt for stmt in self.body if not any(stmt is each for each in made)]

    def moved(self, slot: te.Expr | int) -> dict[Buffer, tuple[Buffer, te.Expr]]:
        """The multiplied buffers, with the index at which a stage begins in each."""
        return {
            each.buffer: (
                replace(each.buffer, size=each.buffer.size * self.stages),
                simplify(te.as_index(slot) * each.buffer.size),
            )
            for each in self.buffers
        }

    def at(self, stmts: Sequence[Stmt], value: te.Expr | int) -> list[Stmt]:
        """The statements of iteration `value`, using the stage that holds its data."""
        position = simplify(te.as_index(value))
        moved = self.moved(simplify(position % self.stages))
        return [placed_at(stmt, {self.loop.var: position}, moved) for stmt in stmts]

    def loads(self, value: te.Expr | int, stmts: Sequence[Stmt] | None = None) -> list[Stmt]:
        """The statements that fill the buffers for iteration `value`, guarded if it may not exist."""
        made = self.at(self.producers if stmts is None else stmts, value)
        inside = simplify(te.call("lt", te.as_index(value), te.as_index(self.extent)))
        if isinstance(inside, te.Const):
            return made if inside.value else []
        return [_only_if(inside, stmt) for stmt in made]


@dataclass(frozen=True)
class _Pipelining:
    levels: Mapping[int, _Level]  # by the identity of their loop
    fused: bool

    def rebuilt(self, stmt: Stmt) -> Stmt:
        if isinstance(stmt, Block):
            return Block(tuple(_flat(map(self.rebuilt, stmt.stmts))))
        if isinstance(stmt, If):
            other = None if stmt.other is None else self.rebuilt(stmt.other)
            return If(stmt.cond, self.rebuilt(stmt.then), other)
        if not isinstance(stmt, For):
            return stmt
        level = self.levels.get(id(stmt))
        if level is None:
            return For(stmt.var, stmt.kind, self.rebuilt(stmt.body))
        if level.in_registers:
            return self.in_registers(level)
        inner = self.inner(level)
        return block(*(self.in_memory(level) if inner is None else self.both(level, inner)))

    # -- one level ----------------------------------------------------------------------------------------------------

    def in_memory(self, level: _Level) -> list[Stmt]:
        var, ahead = level.loop.var, level.ahead
        uses = level.at([self.rebuilt(stmt) for stmt in level.others], var)
        body = [Await(ahead - 1), *level.loads(var + ahead), *uses, Commit()]
        return [*_prologue(level), For(var, level.loop.kind, block(*body)), Await(0)]

    def in_registers(self, level: _Level) -> Stmt:
        others = _written_out([self.rebuilt(stmt) for stmt in level.others])
        stmts: list[Stmt] = []
        for number in range(min(level.ahead, level.extent)):
            stmts += level.at(level.producers, number)

        def step(now: te.Expr | int) -> list[Stmt]:
            return _interleaved(level.loads(now + level.ahead), level.at(others, now))

        whole = level.extent if level.extent > WRITTEN_OUT else 0
        rounds = whole // level.stages
        if rounds:
            turn = te.Var(level.loop.var.name, rounds)
            body = [each for n in range(level.stages) for each in self.in_turn(level, others, turn, n)]
            stmts.append(For(turn, Kind.SERIAL, block(*body)))
        for now in range(rounds * level.stages, level.extent):
            stmts += step(now)
        return block(*stmts)

    def in_turn(self, level: _Level, others: Sequence[Stmt], turn: te.Var, number: int) -> list[Stmt]:
        """Iteration `turn * stages + number` of a long loop; its slots are the same in every turn."""
        now = turn * level.stages + number
        then = now + level.ahead
        slots = [level.moved(n % level.stages) for n in (number + level.ahead, number)]
        inside = simplify(te.call("lt", then, te.as_index(level.extent)))
        loads = [placed_at(stmt, {level.loop.var: then}, slots[0]) for stmt in level.producers]
        if not isinstance(inside, te.Const):
            loads = [_only_if(inside, stmt) for stmt in loads]
        uses = [placed_at(stmt, {level.loop.var: now}, slots[1]) for stmt in others]
        return _interleaved(loads, uses)

    # -- two levels ---------------------------------------------------------------------------------------------------

    def inner(self, level: _Level) -> _Level | None:
        """The register pipeline that is fused with the pipeline of `level`."""
        if not self.fused or len(level.others) != 1:
            return None
        inner = self.levels.get(id(level.others[0]))
        if inner is None or not inner.in_registers:
            return None
        sources = {each.buffer for each in level.buffers}
        if not all(each.sources <= sources for each in inner.buffers):
            return None
        # A slot is a constant if the tile's iterations are whole turns of the ring.
        return inner if inner.extent % inner.stages == 0 and inner.ahead < inner.extent else None

    def both(self, level: _Level, inner: _Level) -> list[Stmt]:
        var, ahead, steps = level.loop.var, level.ahead, inner.extent
        others = _written_out([self.rebuilt(stmt) for stmt in inner.others])
        parts = steps - inner.ahead

        def held(value: te.Expr | int, then: int) -> list[Stmt]:
            """Load the registers of inner iteration `then`, which may belong to the next tile, in tile `value`."""
            carried, within = divmod(then, steps)
            return level.at(inner.at(inner.producers, within), value + carried)

        body: list[Stmt] = []
        for now in range(steps):
            then = now + inner.ahead
            if now < parts:
                shares = [_share(stmt, now, parts) for stmt in level.producers]
                body += level.loads(var + ahead, [share for share in shares if share != Block(())])
            if then == steps:
                body += [Commit(), Await(ahead - 1)]
            body += _interleaved(held(var, then), level.at(inner.at(others, now), var))
        first: list[Stmt] = []
        for then in range(inner.ahead):
            first += held(0, then)
        loop = For(var, level.loop.kind, block(*body))
        return [*_prologue(level), Await(ahead - 1), *first, loop, Await(0)]


# -- parts ------------------------------------------------------------------------------------------------------------


def _prologue(level: _Level) -> list[Stmt]:
    stmts: list[Stmt] = []
    for number in range(level.ahead):
        stmts += [*level.loads(number), Commit()]
    return stmts


def _interleaved(loads: Sequence[Stmt], uses: Sequence[Stmt]) -> list[Stmt]:
    """Distribute loads evenly before the uses, so that memory and arithmetic units are busy at the same time."""
    if not uses:
        return [*loads]
    stmts: list[Stmt] = []
    for number, use in enumerate(uses):
        begin, end = (len(loads) * n // len(uses) for n in (number, number + 1))
        stmts += [*loads[begin:end], use]
    return stmts


def _written_out(stmts: Sequence[Stmt]) -> list[Stmt]:
    """Statements whose loops around warp instructions are unrolled, so that loads can be placed between the
    instructions."""
    found: list[Stmt] = []
    for stmt in stmts:
        unrolled = isinstance(stmt, For) and stmt.kind is Kind.UNROLL
        if unrolled and any(isinstance(leaf, Warp) for _, leaf in leaf_statements(stmt)):
            assert isinstance(stmt, For)
            for number in range(stmt.var.extent):
                found += _written_out(children(placed_at(stmt.body, {stmt.var: te.as_index(number)}, {})))
        else:
            found.append(stmt)
    return found


def _share(stmt: Stmt, part: int, parts: int) -> Stmt:
    """A part of a statement's copies."""
    if isinstance(stmt, For) and stmt.kind is Kind.THREAD:
        share = _share(stmt.body, part, parts)
        return share if share == Block(()) else For(stmt.var, stmt.kind, share)
    stmts = children(stmt)
    begin, end = (len(stmts) * n // parts for n in (part, part + 1))
    return block(*stmts[begin:end]) if end > begin else Block(())


def _only_if(inside: te.Expr, stmt: Stmt) -> Stmt:
    """The statement, executed only if `inside` holds. A copy stores zeros otherwise, so that its groups stay the
    same."""
    if isinstance(stmt, Copy):
        return replace(stmt, cond=inside if stmt.cond is None else te.all_of([stmt.cond, inside]))
    if isinstance(stmt, Block):
        return Block(tuple(_only_if(inside, child) for child in stmt.stmts))
    if isinstance(stmt, For) and stmt.kind is not Kind.VECTOR:
        return For(stmt.var, stmt.kind, _only_if(inside, stmt.body))
    if (
        isinstance(stmt, If)
        and stmt.other is None
        and all(isinstance(leaf, Copy) for _, leaf in leaf_statements(stmt))
    ):
        return If(stmt.cond, _only_if(inside, stmt.then))
    return If(inside, stmt)


def _flat(stmts: object) -> list[Stmt]:
    return list(children(block(*stmts)))  # type: ignore[misc]


# -- limits -----------------------------------------------------------------------------------------------------------


def _check_count(each: LoadAndUse, stages: int) -> None:
    name, extent = each.buffer.name, each.loop.var.extent
    if stages < 1:
        raise PipelineError(f"pipeline: {name}: {stages} stages; a buffer has at least 1")
    if stages > extent + 1:
        raise PipelineError(
            f"pipeline: {name}: {stages} stages, and loop {each.loop.var.name} has {extent} iterations to fill them"
        )


def _check_capacity(program: Program, stages: Mapping[str, int], capacity: int | None) -> None:
    if capacity is None:
        return
    held = {
        buffer.name: buffer.size * buffer.dtype.bytes * stages.get(buffer.name, 1)
        for buffer in local_buffers(program)
        if buffer.scope is not Scope.REGISTER
    }
    if sum(held.values()) > capacity and any(name in held for name in stages):
        largest = max((name for name in held if name in stages), key=lambda name: held[name])
        raise PipelineError(
            f"pipeline: {largest}: {stages[largest]} stages need {sum(held.values())} bytes of scratch memory, of"
            f" {capacity}",
            remedy="fewer stages, or a smaller tile",
        )
