"""Decides which buffers may be pipelined, for `pipeline.py`. The analysis does not depend on the target.

A buffer may be pipelined if each iteration of a sequential loop first fills it and then reads it:

    for k:                                     the load-and-use loop: the innermost loop around the store to the
      for i, j: tile[i, j] = x[i, k * 8 + j]   buffer whose variable is not in the buffer's index
      ... tile ...

The fill must be asynchronous, so that the loop can continue: a `Copy` to scratch memory, or a plain load into
registers, which a thread waits for at the first use. The data must not depend on results of the loop.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tilewright import te
from tilewright.errors import PipelineError
from tilewright.loops.ir import (
    Await,
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
    Path,
    children,
    expressions,
    leaf_statements,
    loaded,
    read,
    written,
)

Access = tuple[Path, Stmt]


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


def load_and_use(program: Program, name: str, synchronous: bool = False) -> LoadAndUse:
    """The load-and-use loop of a local buffer. Raises PipelineError with the reason if no loop allows pipelining.
    `synchronous`: also accept a buffer that stores fill; its tiles are then computed ahead, which saves barriers."""
    leaves = list(leaf_statements(program.body))
    buffer = _local(program, name, leaves)
    filling = [(path, stmt) for path, stmt in leaves if (at := written(stmt)) is not None and at[0] == buffer]
    using = [(path, stmt) for path, stmt in leaves if buffer in read(stmt) or _branches_on(path, buffer)]
    if any(view.of == buffer for _, stmt in leaves for view in read(stmt)):
        raise _refused(buffer, "a view reads its bytes as another type, so it has an alias")
    if not synchronous:
        for _, stmt in filling:
            _check_asynchronous(buffer, stmt)
    loops = [_loop(buffer, path, stmt) for path, stmt in filling]
    loop, around = loops[0]
    if any(other is not loop for other, _ in loops):
        raise _refused(buffer, "two loops fill it")
    if any(not _inside(path, loop) for path, _ in using):
        raise _refused(buffer, f"it is read outside of loop {loop.var.name}, which fills it")
    if loop.var.extent < 2:
        raise _refused(buffer, f"loop {loop.var.name} has one iteration")
    for path, stmt in filling:
        _check_independent(buffer, loop, path, stmt)
    numbers = [
        tuple(
            number
            for number, stmt in enumerate(children(loop.body))
            if _holds(stmt, [each for _, each in which])
        )
        for which in (filling, using)
    ]
    producers, consumers = numbers
    if not consumers:
        raise _refused(buffer, "nothing reads it")
    if max(producers) >= min(consumers):
        raise _refused(
            buffer, f"loop {loop.var.name} reads it before it fills it: it holds data of the iteration before"
        )
    sources = frozenset(source for _, stmt in filling for source in read(stmt) if source != buffer)
    return LoadAndUse(buffer, loop, around, producers, consumers, sources)


def pipelinable(program: Program) -> dict[str, LoadAndUse | PipelineError]:
    """For each local buffer, its load-and-use loop or the reason why it has none."""
    found: dict[str, LoadAndUse | PipelineError] = {}
    for buffer in local_buffers(program):
        try:
            found[buffer.name] = load_and_use(program, buffer.name)
        except PipelineError as error:
            found[buffer.name] = error
    return found


def pipelines(program: Program, stages: Mapping[str, int]) -> str:
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


def check_synchronisation(program: Program, found: Collection[LoadAndUse], stages: Mapping[str, int]) -> None:
    """Check the order of waits. Copies are awaited in the order of their groups, whatever they fill. So all copies
    inside a pipelined loop must belong to its one pipeline, and all others must be complete before it begins."""
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
        for path, stmt in leaf_statements(each.loop.body):
            if isinstance(stmt, Copy) and stmt.buffer not in names:
                raise _refused(
                    each.buffer,
                    f"{stmt.buffer.name} is copied in the same loop and is not pipelined with it: their waits differ",
                )
            if isinstance(stmt, Commit | Await) and path:
                raise _refused(
                    each.buffer, f"a loop or branch inside loop {each.loop.var.name} waits for copies"
                )
        _check_complete_before(program, each)


def _check_complete_before(program: Program, each: LoadAndUse) -> None:
    pending: Buffer | None = None
    for path, stmt in leaf_statements(program.body):
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


def _local(program: Program, name: str, leaves: Sequence[Access]) -> Buffer:
    known = {buffer.name: buffer for buffer in local_buffers(program)}
    if name not in known:
        raise PipelineError(
            f"pipeline: the buffer must be one of {', '.join(known) or '(none)'}, got {name}",
            remedy="cache_read gives an operand a buffer of its own",
        )
    return known[name]


def _check_asynchronous(buffer: Buffer, stmt: Stmt) -> None:
    """Check that a fill is asynchronous: a copy to scratch memory, or for registers a plain load or an instruction that
    only loads."""
    if isinstance(stmt, Copy):
        return
    if buffer.scope is Scope.REGISTER and isinstance(stmt, Warp) and not stmt.instruction.accumulates:
        return
    if buffer.scope is Scope.REGISTER and isinstance(stmt, Store) and isinstance(stmt.value, te.Load):
        return
    raise PipelineError(
        f"pipeline: {buffer.name}: it is filled by a synchronous store, which a thread waits for",
        remedy="cache_read the operand itself, so that a copy fills the buffer, and compute where it is used",
    )


def _loop(buffer: Buffer, path: Path, stmt: Stmt) -> tuple[For, tuple[For, ...]]:
    """The innermost sequential loop whose variable does not index the buffer, and the loops around it."""
    filled = written(stmt)
    assert filled is not None
    indexed = te.variables(filled[1])
    kinds = (Kind.SERIAL, Kind.UNROLL) if buffer.scope is Scope.REGISTER else (Kind.SERIAL,)
    for number in range(len(path) - 1, -1, -1):
        each = path[number]
        if isinstance(each, For) and each.kind in kinds and each.var not in indexed:
            return each, tuple(outer for outer in path[:number] if isinstance(outer, For))
    raise _refused(buffer, "no sequential loop fills it again and again")


def _check_independent(buffer: Buffer, loop: For, path: Path, stmt: Stmt) -> None:
    """Check that filling the buffer gives the same data whenever it runs: it reads nothing that the loop writes."""
    changing = {at[0] for _, each in leaf_statements(loop.body) if (at := written(each)) is not None}
    start = next(number for number, each in enumerate(path) if each is loop)
    branches = [each for each in path[start + 1 :] if isinstance(each, If)]
    if any(loop.var in te.variables(branch.cond) for branch in branches):
        raise _refused(buffer, f"only some iterations of loop {loop.var.name} fill it")
    reads = (loaded(*expressions(stmt), *(branch.cond for branch in branches)) | read(stmt)) - {buffer}
    for source in sorted(reads & changing, key=lambda source: source.name):
        raise _refused(
            buffer,
            f"its data depend on {source.name}, which loop {loop.var.name} wrote in the previous iteration",
        )


def _inside(path: Path, loop: For) -> bool:
    return any(each is loop for each in path)


def _branches_on(path: Path, buffer: Buffer) -> bool:
    return any(isinstance(each, If) and buffer in loaded(each.cond) for each in path)


def _holds(stmt: Stmt, wanted: Sequence[Stmt]) -> bool:
    return any(any(leaf is each for each in wanted) for _, leaf in leaf_statements(stmt))
