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

A loop that another sequential loop does nothing but run is counted over both: the next tile of its last iteration is
the first one of the outer loop's next iteration. There is one prologue and one flush, and indices carry:

    for o < 3:                                ... prologue
      for k < 8:                              for o < 3:
        copy tile <- x[o, k]           ->       for k < 8:
        ... tile ...                              copy tile[(8 * o + k + 2) % 3] <- x[o + (k + 2) // 8, (k + 2) % 8]
                                                  ... tile[(8 * o + k) % 3] ...

Tiles that the tensor copy engine of a GPU brings, as boxes, go through a ring of slots with barriers instead of groups
of copies, and may be brought by threads of their own: `bulk_pipeline.py`.

Order with other steps: after `cache_read`, tiling and `bind`, which make the loop and its copies; `inline` of what
computes an operand moves the computation to its use, because a store that computes is not asynchronous.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

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
    nest,
)
from tilewright.loops.passes.accesses import Placed, children, leaf_statements
from tilewright.loops.passes.bulk_pipeline import (
    check_roles,
    check_warps,
    divided,
    in_clusters,
    in_ring,
    is_bulk,
)
from tilewright.loops.passes.load_and_use import (
    LoadAndUse,
    ProgramAccesses,
    check_synchronisation,
    load_and_use,
)
from tilewright.te.index import simplify

WRITTEN_OUT = 32  # maximum iterations of a register loop that are all written out


def pipeline(
    program: Program | ProgramAccesses,
    stages: Mapping[str, int],
    *,
    fused: bool = True,
    synchronous: Collection[str] = (),
    capacity: int | None = None,
    specialise: bool = False,
    registers: tuple[int, int] | None = None,
    cluster: int = 1,
) -> Program:
    """The program with each buffer of `stages` in that many stages. Raises PipelineError with the reason if it is not
    legal. `fused`: count an inner pipeline over both loops if possible. `synchronous`: buffers that stores may fill.
    `capacity`: bytes of scratch memory for all buffers together. `specialise`: let threads of their own fill what the
    tensor copy engine brings; `registers`: of each such thread, and of the others; `cluster`: so many neighbouring
    blocks copy what is the same for all of them once."""
    plan = planned(
        program, stages, fused=fused, synchronous=synchronous, capacity=capacity, specialise=specialise
    )
    if cluster > 1 and not specialise:
        raise PipelineError(
            "pipeline: blocks of a cluster copy for each other only by a producer of its own",
            remedy="specialise=True",
        )
    made = replace(plan, registers=registers).program()
    return in_clusters(made, cluster) if cluster > 1 else made


def planned(
    program: Program | ProgramAccesses,
    stages: Mapping[str, int],
    *,
    fused: bool = True,
    synchronous: Collection[str] = (),
    capacity: int | None = None,
    specialise: bool = False,
) -> Pipelining:
    """What `pipeline` does, before it is done."""
    known = ProgramAccesses.of(program)
    wanted = {name: count for name, count in stages.items() if count != 1}
    found = [load_and_use(known, name, name in synchronous) for name in wanted]
    for each in found:
        _check_count(each, wanted[each.buffer.name])
    check_synchronisation(known, found, wanted)
    _check_capacity(known, wanted, capacity)
    of_loops: dict[int, list[LoadAndUse]] = {}
    for each in found:
        of_loops.setdefault(id(each.loop), []).append(each)
    levels = []
    for some in of_loops.values():
        bulk = [is_bulk(known, each) for each in some]
        if len(set(bulk)) > 1:
            raise PipelineError(
                f"pipeline: loop {some[0].loop.var.name} fills some buffers by boxes and others by copies of threads:"
                " their waits differ"
            )
        levels.append(Level(some[0].loop, tuple(some), wanted[some[0].buffer.name], bulk[0]))
    for level in levels:
        level.check(wanted)
    if any(level.is_bulk for level in levels):
        check_warps(known.program)
    if specialise:
        check_roles(known.program, levels)
    found_levels = {id(level.outermost): level for level in levels}
    return Pipelining(known.program, found_levels, fused, specialise)


@dataclass(frozen=True)
class Position:
    """An iteration of a pipelined loop: the values of its variable and of those that it carries into, and how many
    iterations are before it."""

    values: Mapping[te.Var, te.Expr]
    number: te.Expr


@dataclass(frozen=True)
class Level:
    """The buffers that one loop fills, and their stages."""

    loop: For
    buffers: tuple[LoadAndUse, ...]
    stages: int
    is_bulk: bool = False  # the tensor copy engine fills them

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

    @cached_property
    def loops(self) -> tuple[For, ...]:
        """The loops that the pipeline is counted over, outermost first."""
        carried = min((each.carried for each in self.buffers), key=len)
        return (*carried, self.loop)

    @property
    def outermost(self) -> For:
        return self.loops[0]

    @property
    def extent(self) -> int:
        return math.prod(each.var.extent for each in self.loops)

    @cached_property
    def body(self) -> tuple[Stmt, ...]:
        """The statements of the loop without its waits for these buffers. Those of a loop that fills registers are for
        other buffers."""
        stmts = children(self.loop.body)
        return tuple(stmt for stmt in stmts if self.in_registers or not isinstance(stmt, Commit | Await))

    @cached_property
    def producers(self) -> list[Stmt]:
        stmts = children(self.loop.body)
        numbers = sorted({number for each in self.buffers for number in each.producers})
        return _written_out([stmts[number] for number in numbers])

    @cached_property
    def others(self) -> list[Stmt]:
        stmts = children(self.loop.body)
        made = [stmts[number] for each in self.buffers for number in each.producers]
        return [stmt for stmt in self.body if not any(stmt is each for each in made)]

    # -- positions ----------------------------------------------------------------------------------------------------

    def current(self, later: int = 0) -> Position:
        """The iteration that runs, or one so many iterations later."""
        number: te.Expr = te.as_index(0)
        for each in self.loops:
            number = number * each.var.extent + each.var
        if not later:
            return Position({}, simplify(number))
        values: dict[te.Var, te.Expr] = {}
        carry: te.Expr = te.as_index(later)
        for each in reversed(self.loops):
            value = each.var + carry
            is_last = each is self.outermost  # it ends there: what would be behind it is guarded
            values[each.var] = simplify(value if is_last else value % each.var.extent)
            carry = value // each.var.extent
        return Position(values, simplify(number + later))

    def counted(self, position: Position) -> te.Expr:
        """How many iterations are before this one, also in iterations of the sequential loops around."""
        found: te.Expr = te.as_index(0)
        for each in self.buffers[0].around:
            sequential = each.kind in (Kind.SERIAL, Kind.UNROLL)
            if sequential and not any(each is other for other in self.loops):
                found = found * each.var.extent + each.var
        return simplify(found * self.extent + position.number)

    def numbered(self, number: int) -> Position:
        values: dict[te.Var, te.Expr] = {}
        rest = number
        for each in reversed(self.loops):
            rest, value = divmod(rest, each.var.extent)
            values[each.var] = te.as_index(value)
        return Position(values, te.as_index(number))

    def at(self, stmts: Sequence[Stmt], position: Position, slot: te.Expr | int | None = None) -> list[Stmt]:
        """The statements of an iteration, using the stage that holds its data."""
        placed = Placed(position.values, self._moved(position.number if slot is None else slot))
        return [placed.of(stmt) for stmt in stmts]

    def _moved(self, slot: te.Expr | int) -> dict[Buffer, tuple[Buffer, te.Expr]]:
        """The multiplied buffers, with the index at which a stage begins in each."""
        stage = te.as_index(slot) % self.stages
        return {
            each.buffer: (
                replace(each.buffer, size=each.buffer.size * self.stages),
                simplify(stage * each.buffer.size),
            )
            for each in self.buffers
        }

    def loads(
        self, position: Position, stmts: Sequence[Stmt] | None = None, slot: int | None = None
    ) -> list[Stmt]:
        """The statements that fill the buffers for an iteration, guarded if it may not exist."""
        inside = simplify(te.call("lt", position.number, te.as_index(self.extent)))
        if isinstance(inside, te.Const) and not inside.value:
            return []
        made = self.at(self.producers if stmts is None else stmts, position, slot)
        return made if isinstance(inside, te.Const) else [_only_if(inside, stmt) for stmt in made]


@dataclass(frozen=True)
class Pipelining:
    unpipelined: Program
    levels: Mapping[int, Level]  # by the identity of the outermost loop that they are counted over
    fused: bool
    specialise: bool = False
    registers: tuple[int, int] | None = None

    def program(self) -> Program:
        body = self._rebuilt(self.unpipelined.body)
        return replace(self.unpipelined, body=divided(body, self.registers) if self.specialise else body)

    @property
    def is_fused(self) -> bool:
        """Whether an inner pipeline is counted over two loops."""
        return any(self._inner(level) is not None for level in self.levels.values() if not level.in_registers)

    def _rebuilt(self, stmt: Stmt) -> Stmt:
        if isinstance(stmt, Block):
            return Block(tuple(_flat(map(self._rebuilt, stmt.stmts))))
        if isinstance(stmt, If):
            other = None if stmt.other is None else self._rebuilt(stmt.other)
            return If(stmt.cond, self._rebuilt(stmt.then), other)
        if not isinstance(stmt, For):
            return stmt
        level = self.levels.get(id(stmt))
        if level is None:
            return For(stmt.var, stmt.kind, self._rebuilt(stmt.body))
        if level.in_registers:
            return self._in_registers(level)
        if level.is_bulk:
            return block(*in_ring(level, [self._rebuilt(stmt) for stmt in level.others], self.specialise))
        inner = self._inner(level)
        return block(*(self._in_memory(level) if inner is None else self._both(level, inner)))

    # -- one level ----------------------------------------------------------------------------------------------------

    def _in_memory(self, level: Level) -> list[Stmt]:
        ahead = level.ahead
        uses = level.at([self._rebuilt(stmt) for stmt in level.others], level.current())
        body = [Await(ahead - 1), *level.loads(level.current(ahead)), *uses, Commit()]
        return [*_prologue(level), _looped(level, body), Await(0)]

    def _in_registers(self, level: Level) -> Stmt:
        others = _written_out([self._rebuilt(stmt) for stmt in level.others])
        stmts: list[Stmt] = []
        for number in range(min(level.ahead, level.extent)):
            stmts += level.at(level.producers, level.numbered(number))
        whole = level.extent if level.extent > WRITTEN_OUT else 0
        rounds = whole // level.stages
        if rounds:
            turn = te.Var(level.loop.var.name, rounds)
            body = [each for n in range(level.stages) for each in self._in_turn(level, others, turn, n)]
            stmts.append(For(turn, Kind.SERIAL, block(*body)))
        for number in range(rounds * level.stages, level.extent):
            now, then = level.numbered(number), level.numbered(number + level.ahead)
            stmts += _interleaved(level.loads(then), level.at(others, now))
        return block(*stmts)

    def _in_turn(self, level: Level, others: Sequence[Stmt], turn: te.Var, number: int) -> list[Stmt]:
        """Iteration `turn * stages + number` of a long loop; its slots are the same in every turn."""

        def position(value: te.Expr) -> Position:
            return Position({level.loop.var: value}, simplify(value))

        now = turn * level.stages + number
        loads = level.loads(position(now + level.ahead), slot=number + level.ahead)
        return _interleaved(loads, level.at(others, position(now), number))

    # -- two levels ---------------------------------------------------------------------------------------------------

    def _inner(self, level: Level) -> Level | None:
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

    def _both(self, level: Level, inner: Level) -> list[Stmt]:
        ahead, steps = level.ahead, inner.extent
        others = _written_out([self._rebuilt(stmt) for stmt in inner.others])
        parts = steps - inner.ahead
        loaded = [inner.at(inner.producers, inner.numbered(number)) for number in range(steps)]
        copied = level.loads(level.current(ahead))

        def held(then: int) -> list[Stmt]:
            """Load the registers of inner iteration `then`, which may belong to the next tile."""
            carried, within = divmod(then, steps)
            return level.at(loaded[within], level.current(carried))

        body: list[Stmt] = []
        for now in range(steps):
            then = now + inner.ahead
            if now < parts:
                shares = [_share(stmt, now, parts) for stmt in copied]
                body += [share for share in shares if share != Block(())]
            if then == steps:
                body += [Commit(), Await(ahead - 1)]
            uses = level.at(inner.at(others, inner.numbered(now)), level.current())
            body += _interleaved(held(then), uses)
        first = [each for then in range(inner.ahead) for each in level.at(loaded[then], level.numbered(0))]
        return [*_prologue(level), Await(ahead - 1), *first, _looped(level, body), Await(0)]


# -- parts ------------------------------------------------------------------------------------------------------------


def _prologue(level: Level) -> list[Stmt]:
    stmts: list[Stmt] = []
    for number in range(level.ahead):
        stmts += [*level.loads(level.numbered(number)), Commit()]
    return stmts


def _looped(level: Level, stmts: Sequence[Stmt]) -> Stmt:
    return nest([(each.var, each.kind) for each in level.loops], block(*stmts))


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
                placed = Placed({stmt.var: te.as_index(number)}, {})
                found += _written_out([placed.of(each) for each in children(stmt.body)])
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
    name = each.buffer.name
    extent = math.prod(loop.var.extent for loop in (*each.carried, each.loop))
    if stages < 1:
        raise PipelineError(f"pipeline: {name}: {stages} stages; a buffer has at least 1")
    if stages > extent + 1:
        raise PipelineError(
            f"pipeline: {name}: {stages} stages, and loop {each.loop.var.name} has {extent} iterations to fill them"
        )


def _check_capacity(known: ProgramAccesses, stages: Mapping[str, int], capacity: int | None) -> None:
    if capacity is None:
        return
    held = {
        buffer.name: buffer.size * buffer.dtype.bytes * stages.get(buffer.name, 1)
        for buffer in known.local.values()
        if buffer.scope is not Scope.REGISTER
    }
    if sum(held.values()) > capacity and any(name in held for name in stages):
        largest = max((name for name in held if name in stages), key=lambda name: held[name])
        raise PipelineError(
            f"pipeline: {largest}: {stages[largest]} stages need {sum(held.values())} bytes of scratch memory, of"
            f" {capacity}",
            remedy="fewer stages, or a smaller tile",
        )
