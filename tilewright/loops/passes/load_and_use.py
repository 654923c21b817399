"""Decides which buffers may be pipelined, for `pipeline.py`. The analysis does not depend on the target.

A buffer may be pipelined if each iteration of a sequential loop first fills it and then reads it:

    for k:                                     the load-and-use loop: the innermost loop around the store to the
      for i, j: tile[i, j] = x[i, k * 8 + j]   buffer whose variable is not in the buffer's index
      ... tile ...

The fill must be asynchronous, so that the loop can continue: a `Copy` or a `BoxCopy` to scratch memory, or a plain load
into registers, which a thread waits for at the first use. The data must not depend on results of the loop.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from tilewright import te
from tilewright.errors import PipelineError
from tilewright.loops.ir import (
    Await,
    BoxCopy,
    Buffer,
    Commit,
    Copy,
    For,
    If,
    Kind,
    Program,
    Scope,
    Stmt,
    Store,
    Warp,
    local_buffers,
)
from tilewright.loops.passes.accesses import (
    Indexed,
    Path,
    children,
    leaf_statements,
    loaded,
    read,
    written,
)


class Access(NamedTuple):
    """A statement without parts, the loops and branches around it, and what it reads and writes."""

    path: Path
    stmt: Stmt
    target: Indexed | None  # the buffer that it writes, and where
    reads: frozenset[Buffer]


@dataclass(frozen=True, eq=False)
class ProgramAccesses:
    """All accesses of a program, collected once for every question about its buffers."""

    program: Program

    @staticmethod
    def of(program: Program | ProgramAccesses) -> ProgramAccesses:
        return program if isinstance(program, ProgramAccesses) else ProgramAccesses(program)

    @cached_property
    def all(self) -> tuple[Access, ...]:
        return tuple(
            Access(path, stmt, written(stmt), frozenset(read(stmt)))
            for path, stmt in leaf_statements(self.program.body)
        )

    @cached_property
    def local(self) -> dict[str, Buffer]:
        return {buffer.name: buffer for buffer in local_buffers(self.program)}

    @cached_property
    def _fills(self) -> dict[Buffer, list[Access]]:
        found: dict[Buffer, list[Access]] = {}
        for each in self.all:
            if each.target is not None:
                found.setdefault(each.target[0], []).append(each)
        return found

    @cached_property
    def _uses(self) -> dict[Buffer, list[Access]]:
        """By buffer, the statements that read it, or that run only where a branch that reads it says so."""
        asked: dict[int, frozenset[Buffer]] = {}  # by the identity of a branch
        found: dict[Buffer, list[Access]] = {}
        for each in self.all:
            buffers = each.reads
            for branch in each.path:
                if isinstance(branch, If):
                    if id(branch) not in asked:
                        asked[id(branch)] = frozenset(loaded(branch.cond))
                    buffers |= asked[id(branch)]
            for buffer in buffers:
                found.setdefault(buffer, []).append(each)
        return found

    @cached_property
    def aliased(self) -> frozenset[Buffer]:
        """The buffers whose bytes a view reads as another type."""
        views = {view.of for each in self.all for view in each.reads}
        return frozenset(of for of in views if of is not None)

    def filling(self, buffer: Buffer) -> list[Access]:
        return self._fills.get(buffer, [])

    def using(self, buffer: Buffer) -> list[Access]:
        return self._uses.get(buffer, [])

    def inside(self, loop: For) -> list[Access]:
        if id(loop) not in self._by_loop:
            self._by_loop[id(loop)] = [each for each in self.all if _inside(each.path, loop)]
        return self._by_loop[id(loop)]

    @cached_property
    def _by_loop(self) -> dict[int, list[Access]]:
        return {}

    def positions(self, loop: For) -> dict[int, list[int]]:
        """By the identity of each statement without parts, which statements of the loop's body hold it."""
        if id(loop) not in self._positions:
            found: dict[int, list[int]] = {}
            for number, stmt in enumerate(children(loop.body)):
                for _, leaf in leaf_statements(stmt):
                    found.setdefault(id(leaf), []).append(number)
            self._positions[id(loop)] = found
        return self._positions[id(loop)]

    @cached_property
    def _positions(self) -> dict[int, dict[int, list[int]]]:
        return {}


@dataclass(frozen=True, eq=False)
class LoadAndUse:
    """A buffer that each iteration of `loop` fills and then reads. `producers`: the statements of the loop's body
    that fill it; `consumers`: those that read it; `around`: the loops around `loop`, outermost first."""

    buffer: Buffer
    loop: For
    around: tuple[For, ...]
    producers: tuple[int, ...]
    consumers: tuple[int, ...]
    sources: frozenset[Buffer]
    carried: tuple[For, ...] = ()  # those of `around`, outermost first, over which a pipeline may be counted


def load_and_use(program: Program | ProgramAccesses, name: str, synchronous: bool = False) -> LoadAndUse:
    """The load-and-use loop of a local buffer. Raises PipelineError with the reason if no loop allows pipelining.
    `synchronous`: also accept a buffer that stores fill; its tiles are then computed ahead, which saves barriers."""
    known = ProgramAccesses.of(program)
    buffer = _local(known, name)
    filling, using = known.filling(buffer), known.using(buffer)
    if buffer in known.aliased:
        raise _refused(buffer, "a view reads its bytes as another type, so it has an alias")
    if not synchronous:
        for each in filling:
            _check_asynchronous(buffer, each.stmt)
    loops = [_loop(buffer, each) for each in filling]
    loop, around = loops[0]
    if any(other is not loop for other, _ in loops):
        raise _refused(buffer, "two loops fill it")
    if any(not _inside(each.path, loop) for each in using):
        raise _refused(buffer, f"it is read outside of loop {loop.var.name}, which fills it")
    if loop.var.extent < 2:
        raise _refused(buffer, f"loop {loop.var.name} has one iteration")
    _check_independent(known, buffer, loop, filling)
    positions = known.positions(loop)
    producers, consumers = (
        tuple(sorted({number for each in some for number in positions[id(each.stmt)]}))
        for some in (filling, using)
    )
    if not consumers:
        raise _refused(buffer, "nothing reads it")
    if max(producers) >= min(consumers):
        raise _refused(
            buffer, f"loop {loop.var.name} reads it before it fills it: it holds data of the iteration before"
        )
    sources = frozenset(source for each in filling for source in each.reads if source != buffer)
    # A register pipeline is written out in the loop that it carries over; several loops at once would be too long.
    carried = () if buffer.scope is Scope.REGISTER else _carried(loop, around, filling)
    return LoadAndUse(buffer, loop, around, producers, consumers, sources, carried)


def pipelinable(program: Program | ProgramAccesses) -> dict[str, LoadAndUse | PipelineError]:
    """For each local buffer, its load-and-use loop or the reason why it has none."""
    known = ProgramAccesses.of(program)
    found: dict[str, LoadAndUse | PipelineError] = {}
    for name in known.local:
        try:
            found[name] = load_and_use(known, name)
        except PipelineError as error:
            found[name] = error
    return found


def pipelines(program: Program | ProgramAccesses, stages: Mapping[str, int]) -> str:
    """For `explain`: the local buffers of an unpipelined program that these stages pipeline, those that could be
    pipelined, and why the rest cannot be."""
    done = [f"{name} x {count}" for name, count in stages.items() if count > 1]
    could: list[str] = []
    words: dict[str, list[str]] = {}
    for name, found in pipelinable(program).items():
        if stages.get(name, 1) > 1:
            continue
        if isinstance(found, LoadAndUse):
            could.append(name)
        else:
            words.setdefault(found.message.partition(f"{name}: ")[2], []).append(name)
    parts = [f"pipelined: {', '.join(done)}"] if done else []
    parts += [f"not pipelined: {', '.join(could)} (could be)"] if could else []
    parts += [f"not pipelined: {', '.join(names)} ({why})" for why, names in words.items()]
    return "; ".join(parts)


def check_synchronisation(
    program: Program | ProgramAccesses, found: Collection[LoadAndUse], stages: Mapping[str, int]
) -> None:
    """Check the order of waits. Copies are awaited in the order of their groups, whatever they fill. So all copies
    inside a pipelined loop must belong to its one pipeline, and all others must be complete before it begins."""
    known = ProgramAccesses.of(program)
    for each in found:
        if each.buffer.scope is Scope.REGISTER:
            continue
        together = [
            other for other in found if other.loop is each.loop and other.buffer.scope is not Scope.REGISTER
        ]
        counts = {stages[other.buffer.name] for other in together}
        if len(counts) > 1:
            raise _refused(
                each.buffer,
                f"buffers of loop {each.loop.var.name} have {sorted(counts)} stages: their waits differ",
            )
        names = {other.buffer for other in together}
        for path, stmt, _, _ in known.inside(each.loop):
            if isinstance(stmt, Copy | BoxCopy) and stmt.buffer not in names:
                raise _refused(
                    each.buffer,
                    f"{stmt.buffer.name} is copied in the same loop and is not pipelined with it: their waits differ",
                )
            if isinstance(stmt, Commit | Await) and path[-1] is not each.loop:
                raise _refused(
                    each.buffer, f"a loop or branch inside loop {each.loop.var.name} waits for copies"
                )
        _check_complete_before(known, each)


def _check_complete_before(known: ProgramAccesses, each: LoadAndUse) -> None:
    pending: Buffer | None = None
    for path, stmt, _, _ in known.all:
        if _inside(path, each.loop):
            if pending is not None:
                raise _refused(each.buffer, f"copies to {pending.name} are in flight when its loop begins")
            return
        if isinstance(stmt, Copy):
            pending = stmt.buffer
        elif isinstance(stmt, Await) and stmt.pending == 0:
            pending = None


# -- the rules --------------------------------------------------------------------------------------------------------


def _refused(buffer: Buffer, why: str) -> PipelineError:
    return PipelineError(f"pipeline: {buffer.name}: {why}")


def _local(known: ProgramAccesses, name: str) -> Buffer:
    if name not in known.local:
        raise PipelineError(
            f"pipeline: the buffer must be one of {', '.join(known.local) or '(none)'}, got {name}",
            remedy="cache_read gives an operand a buffer of its own",
        )
    return known.local[name]


def _check_asynchronous(buffer: Buffer, stmt: Stmt) -> None:
    """Check that a fill is asynchronous: a copy to scratch memory, or for registers a plain load or an instruction that
    only loads."""
    if isinstance(stmt, Copy | BoxCopy):
        return
    if buffer.scope is Scope.REGISTER and isinstance(stmt, Warp) and not stmt.instruction.accumulates:
        return
    if buffer.scope is Scope.REGISTER and isinstance(stmt, Store) and isinstance(stmt.value, te.Load):
        return
    raise PipelineError(
        f"pipeline: {buffer.name}: it is filled by a synchronous store, which a thread waits for",
        remedy="cache_read the operand itself, so that a copy fills the buffer, and compute where it is used",
    )


def _loop(buffer: Buffer, access: Access) -> tuple[For, tuple[For, ...]]:
    """The innermost sequential loop whose variable does not index the buffer, and the loops around it."""
    path, filled = access.path, access.target
    assert filled is not None
    indexed = te.variables(filled[1])
    kinds = (Kind.SERIAL, Kind.UNROLL) if buffer.scope is Scope.REGISTER else (Kind.SERIAL,)
    for number in range(len(path) - 1, -1, -1):
        each = path[number]
        if isinstance(each, For) and each.kind in kinds and each.var not in indexed:
            return each, tuple(outer for outer in path[:number] if isinstance(outer, For))
    raise _refused(buffer, "no sequential loop fills it again and again")


def _carried(loop: For, around: tuple[For, ...], filling: Collection[Access]) -> tuple[For, ...]:
    """The sequential loops around `loop` that do nothing but run it: what its next iterations load may belong to the
    next iteration of such a loop. They write what `loop` writes, so the data are as independent of them."""
    guards = {
        var for each in filling for branch in _branches(each, loop) for var in te.variables(branch.cond)
    }
    indexed = {var for each in filling if each.target is not None for var in te.variables(each.target[1])}
    found: list[For] = []
    inner = loop
    for outer in reversed(around):
        stmts = children(outer.body)
        alone = outer.kind is Kind.SERIAL and len(stmts) == 1 and stmts[0] is inner
        if not alone or outer.var in guards | indexed:
            break
        found.insert(0, outer)
        inner = outer
    return tuple(found)


def _branches(access: Access, loop: For) -> list[If]:
    """The branches inside the loop that decide on a statement."""
    start = next(number for number, each in enumerate(access.path) if each is loop)
    return [each for each in access.path[start + 1 :] if isinstance(each, If)]


def _check_independent(
    known: ProgramAccesses, buffer: Buffer, loop: For, filling: Collection[Access]
) -> None:
    """Check that filling the buffer gives the same data whenever it runs: it reads nothing that the loop writes."""
    changing = {each.target[0] for each in known.inside(loop) if each.target is not None}
    for each in filling:
        conditions = [branch.cond for branch in _branches(each, loop)]
        if any(loop.var in te.variables(condition) for condition in conditions):
            raise _refused(buffer, f"only some iterations of loop {loop.var.name} fill it")
        reads = (loaded(*conditions) | each.reads) - {buffer}
        for source in sorted(reads & changing, key=lambda source: source.name):
            raise _refused(
                buffer,
                f"its data depend on {source.name}, which loop {loop.var.name} wrote in the previous iteration",
            )


def _inside(path: Path, loop: For) -> bool:
    return any(each is loop for each in path)
