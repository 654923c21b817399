"""A pipelined loop whose tiles the tensor copy engine brings, for `pipeline.py`: a ring of slots with barriers.

    for k < 8:                                for n < 2: fill tile[n] <- x[n]                         (prologue)
      box tile <- x[k]                        for k < 8:
      ... tile ...                    ->        await k
                                                fill tile[(k + 2) % 3] <- x[k + 2] if k + 2 < 8
                                                ... tile[k % 3] ...
                                                release k

A fill waits for the release of its slot; no barrier of the whole block is in the loop, so warps run apart by as much as
the slots allow. With roles, a producer does nothing but fill, as far ahead as there are slots, and needs no prologue:

    producer:                                 consumer:
      for k < 8:                                for k < 8:
        fill tile[k % 3] <- x[k]                  await k
                                                  ... tile[k % 3] ...
                                                  release k

Where all uses are instructions of warpgroups, those of one iteration go on while the next one begins, and a slot is
released one iteration later. Iterations are numbered over all sequential loops around: a barrier knows only the parity
of how often its slot was filled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tilewright import te
from tilewright.errors import PipelineError
from tilewright.hw.gpu import MAX_THREADS, WARP
from tilewright.hw.warpgroups import WARPGROUP
from tilewright.loops.clusters import may_be_shared
from tilewright.loops.ir import (
    Block,
    BoxCopy,
    Buffer,
    Combine,
    Fill,
    Filled,
    For,
    If,
    Kind,
    Multiplied,
    Program,
    Release,
    Ring,
    Roles,
    Stmt,
    Warp,
    block,
    nest,
    thread_count,
    walk_stmts,
)
from tilewright.loops.passes.accesses import leaf_statements
from tilewright.loops.passes.load_and_use import LoadAndUse, ProgramAccesses
from tilewright.te.index import simplify

if TYPE_CHECKING:
    from tilewright.loops.passes.pipeline import Level, Position


def is_bulk(known: ProgramAccesses, each: LoadAndUse) -> bool:
    """Whether the copy engine fills the buffer. Raises PipelineError where its rules do not hold."""
    filling = known.filling(each.buffer)
    found = [isinstance(access.stmt, BoxCopy) for access in filling]
    if not any(found):
        return False
    if len(found) > 1:
        raise _refused(
            each.buffer, "several statements fill it, and a box of the copy engine does it at once"
        )
    path = filling[0].path
    branch = next((stmt for stmt in path if isinstance(stmt, If)), None)
    if branch is not None:
        raise _refused(each.buffer, "a branch decides whether it is filled: barriers count all iterations")
    at = next(number for number, stmt in enumerate(path) if stmt is each.loop)
    if len(path) > at + 1:
        raise _refused(each.buffer, f"loop {path[at + 1].var.name} inside loop {each.loop.var.name} fills it")  # type: ignore[union-attr]
    return True


def check_warps(program: Program) -> None:
    """Whether the threads are whole warps: each warp releases a slot once."""
    threads = thread_count(program)
    if threads % WARP:
        raise PipelineError(
            f"pipeline: {threads} threads in a block are not whole warps of {WARP}, which release the slots that the"
            " copy engine fills",
            remedy=f'bind loops to a multiple of {WARP} threads, or copy="async"',
        )


def check_roles(program: Program, levels: Sequence[Level]) -> None:
    """Whether a producer of its own can fill the rings of the program."""
    if not any(level.is_bulk for level in levels):
        raise PipelineError(
            "pipeline: a producer of its own needs buffers that the copy engine fills",
            remedy='pipeline(..., copy="bulk"), or no specialise',
        )
    threads = thread_count(program) + WARPGROUP
    if threads > MAX_THREADS:
        raise PipelineError(
            f"pipeline: {threads} threads in a block with those of a producer of its own, of at most {MAX_THREADS}",
            remedy="bind loops to fewer threads, or no specialise",
        )
    for stmt in walk_stmts(program.body):
        if isinstance(stmt, Combine) and stmt.group > WARP:
            raise PipelineError(
                f"pipeline: {stmt.buffer.name} is combined over {stmt.group} threads, which meet at a barrier of the"
                " whole block: a producer of its own does not come there",
                remedy="combine within a warp, or no specialise",
            )


def ring_of(level: Level) -> Ring:
    return Ring(f"{level.loop.var.name}.ring", level.stages)


def in_ring(level: Level, uses: Sequence[Stmt], specialise: bool) -> list[Stmt]:
    """The level's loop; `uses`: its body without the copies. With a producer of its own, the fills are in a loop of
    their own before it, which `divided` takes out."""
    ring, ahead = ring_of(level), level.ahead
    now = level.current()
    number = level.counted(now)
    goes_on = _may_go_on(level, uses)
    used = level.at([_running(stmt) for stmt in uses] if goes_on else uses, now, number)
    body: list[Stmt] = [Filled(ring, number)]
    fills = [] if specialise else _fill(level, ring, level.current(ahead))
    if goes_on:
        # The last iteration of the loop before, if a loop around runs it again, is released behind the loop.
        is_later = simplify(te.call("lt", te.as_index(0), now.number))
        release = If(is_later, Release(ring, simplify(number - 1)))
        body += [*used, Multiplied(1), release, *fills]
    else:
        body += [*fills, *used, Release(ring, number)]
    loop = nest([(each.var, each.kind) for each in level.loops], block(*body))
    last = level.counted(level.numbered(level.extent - 1))
    after: list[Stmt] = [Multiplied(0), Release(ring, last)] if goes_on else []
    if specialise:
        filling = nest([(each.var, each.kind) for each in level.loops], block(*_fill(level, ring, now)))
        return [filling, loop, *after]
    prologue = [stmt for n in range(ahead) for stmt in _fill(level, ring, level.numbered(n))]
    return [*prologue, loop, *after]


def _fill(level: Level, ring: Ring, position: Position) -> list[Stmt]:
    number = level.counted(position)
    copies = level.at(level.producers, position, number)
    fill = Fill(ring, number, tuple(copy for copy in copies if isinstance(copy, BoxCopy)))
    inside = simplify(te.call("lt", position.number, te.as_index(level.extent)))
    if isinstance(inside, te.Const):
        return [fill] if inside.value else []
    return [If(inside, fill)]


def _may_go_on(level: Level, uses: Sequence[Stmt]) -> bool:
    """Whether the uses are multiplications of warpgroups alone, on tiles of the ring."""
    tiles = {each.buffer for each in level.buffers}
    leaves = [leaf for stmt in uses for _, leaf in leaf_statements(stmt)]
    return bool(leaves) and all(
        isinstance(leaf, Warp)
        and leaf.threads > WARP
        and all(buffer in tiles for buffer, _ in leaf.operands[1:])
        for leaf in leaves
    )


def _running(stmt: Stmt) -> Stmt:
    if isinstance(stmt, For):
        return For(stmt.var, stmt.kind, _running(stmt.body))
    if isinstance(stmt, Block):
        return Block(tuple(map(_running, stmt.stmts)))
    if isinstance(stmt, If):
        return If(stmt.cond, _running(stmt.then), None if stmt.other is None else _running(stmt.other))
    assert isinstance(stmt, Warp)
    return replace(stmt, running=True)


# -- clusters ---------------------------------------------------------------------------------------------------------


def in_clusters(program: Program, together: int) -> Program:
    """The program with clusters of neighbouring blocks, in which boxes that are the same for all are copied once.
    Raises PipelineError if there are none."""
    loop = program.body
    if not (isinstance(loop, For) and loop.kind is Kind.PARALLEL) or loop.var.extent % together:
        raise PipelineError(
            f"pipeline: {program.parallel_extent} blocks are no clusters of {together}",
            remedy="tiles of which there is an even number along block.x, or cluster=1",
        )
    var, shared = loop.var, 0

    def changed(stmt: Stmt) -> Stmt:
        nonlocal shared
        if isinstance(stmt, For):
            return For(stmt.var, stmt.kind, changed(stmt.body))
        if isinstance(stmt, Block):
            return Block(tuple(map(changed, stmt.stmts)))
        if isinstance(stmt, If):
            return If(stmt.cond, changed(stmt.then), None if stmt.other is None else changed(stmt.other))
        if isinstance(stmt, Roles):
            return Roles(changed(stmt.producer), stmt.consumer, stmt.registers)
        if not isinstance(stmt, Fill):
            return stmt
        copies = [replace(copy, shared=may_be_shared(copy, var, together)) for copy in stmt.copies]
        shared += sum(copy.shared for copy in copies)
        return replace(stmt, copies=tuple(copies))

    body = changed(loop)
    if not shared:
        raise PipelineError(
            f"pipeline: no tile is the same for {together} neighbouring blocks, in rows that they can divide",
            remedy="bind the loop along which a tile stays the same to block.x",
        )
    return replace(program, body=body, together=together)


# -- roles ------------------------------------------------------------------------------------------------------------


def divided(body: Stmt, registers: tuple[int, int] | None) -> Stmt:
    """The work of a block, with its fills as a role of their own."""
    if isinstance(body, For) and body.kind is Kind.PARALLEL:
        return For(body.var, body.kind, divided(body.body, registers))
    producer, consumer = _only_fills(body, True), _only_fills(body, False)
    assert producer is not None and consumer is not None
    return Roles(producer, consumer, registers)


def _only_fills(stmt: Stmt, wanted: bool) -> Stmt | None:
    """The statement with its fills and the loops around them, or without them; None if nothing is left."""
    if isinstance(stmt, Block):
        found = [kept for each in stmt.stmts if (kept := _only_fills(each, wanted)) is not None]
        return block(*found) if found else None
    if isinstance(stmt, For):
        body = _only_fills(stmt.body, wanted)
        return None if body is None else For(stmt.var, stmt.kind, body)
    if isinstance(stmt, If):
        then = _only_fills(stmt.then, wanted)
        other = None if stmt.other is None else _only_fills(stmt.other, wanted)
        if then is None and other is None:
            return None
        return If(stmt.cond, Block(()) if then is None else then, other)
    return stmt if isinstance(stmt, Fill) == wanted else None


def _refused(buffer: Buffer, why: str) -> PipelineError:
    return PipelineError(f"pipeline: {buffer.name}: {why}")
