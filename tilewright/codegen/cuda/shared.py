"""Shared memory of a program: who touches it when, and where each buffer is."""

from __future__ import annotations

from collections.abc import Iterator

from tilewright import te
from tilewright.hw.bulk_copies import BARRIER_BYTES
from tilewright.hw.warpgroups import WARPGROUP
from tilewright.loops.ir import (
    Await,
    Block,
    BoxCopy,
    Buffer,
    Combine,
    Commit,
    Copy,
    Fill,
    For,
    Kind,
    Program,
    Ring,
    Roles,
    Scope,
    Stmt,
    Store,
    Warp,
    local_buffers,
    rings_of,
    thread_count,
    walk_stmts,
)

SHARED_ALIGNMENT = 128
BOX_ALIGNMENT = 1024  # of what the tensor copy engine fills: its swizzle depends on addresses
_MIN_BYTES = 4  # that are copied asynchronously


def shared_bytes(program: Program) -> int:
    """Dynamic shared memory that a launch must give."""
    return _buffer_bytes(program) + sum(2 * ring.slots * BARRIER_BYTES for ring in rings_of(program))


def _buffer_bytes(program: Program) -> int:
    unit = alignment(program)
    return max((offset + _padded(buffer, unit) for buffer, offset in placed(program).items()), default=0)


def alignment(program: Program) -> int:
    return BOX_ALIGNMENT if rings_of(program) else SHARED_ALIGNMENT


def barriers(program: Program) -> dict[Ring, int]:
    """The offset of each ring's barriers: those for bytes that arrive, one for each slot, then those for readers."""
    found: dict[Ring, int] = {}
    offset = _buffer_bytes(program)
    for ring in rings_of(program):
        found[ring] = offset
        offset += 2 * ring.slots * BARRIER_BYTES
    return found


def block_threads(program: Program) -> int:
    """The threads of a block: also those of a producer."""
    producers = WARPGROUP if any(isinstance(stmt, Roles) for stmt in walk_stmts(program.body)) else 0
    return thread_count(program) // program.cluster + producers


def placed(program: Program) -> dict[Buffer, int]:
    """The offset of each scratch buffer: two that are in use at the same time do not overlap."""
    lives, unit = _lives(program), alignment(program)
    found: dict[Buffer, int] = {}
    for buffer in local_buffers(program):
        if buffer.scope is not Scope.SCRATCH:
            continue
        first, last = lives[buffer]
        concurrent = [other for other in found if lives[other][0] <= last and first <= lives[other][1]]
        starts = [0, *(found[other] + _padded(other, unit) for other in concurrent)]
        found[buffer] = min(
            start
            for start in starts
            if all(
                start + _padded(buffer, unit) <= found[other] or found[other] + _padded(other, unit) <= start
                for other in concurrent
            )
        )
    return found


def _lives(program: Program) -> dict[Buffer, tuple[int, int]]:
    """The first and the last statement of a thread block that touches each scratch buffer."""
    body = program.body
    while isinstance(body, For) and body.kind is Kind.PARALLEL:
        body = body.body
    lives: dict[Buffer, tuple[int, int]] = {}
    for number, stmt in enumerate(body.stmts if isinstance(body, Block) else (body,)):
        for buffer in _touched(stmt):
            if buffer.scope is Scope.SCRATCH:
                lives[buffer] = (lives.get(buffer, (number, number))[0], number)
    for stmt in walk_stmts(body):
        if isinstance(stmt, BoxCopy):  # ordinary stores and the copy engine would need a fence between them
            lives[stmt.buffer] = (-1, len(lives) + max(last for _, last in lives.values()))
    return lives


def _padded(buffer: Buffer, unit: int) -> int:
    size = buffer.size * buffer.dtype.bytes
    return -(-size // unit) * unit


def is_small(copy: Copy) -> bool:
    """Whether no asynchronous copy moves so little."""
    return copy.lanes * copy.buffer.dtype.bytes < _MIN_BYTES


def most_small(program: Program) -> int:
    """Such copies of one group, at most."""
    most = count = 0
    for stmt in walk_stmts(program.body):
        if isinstance(stmt, Commit):
            count = 0
        elif isinstance(stmt, Copy) and is_small(stmt):
            count += 1
            most = max(most, count)
    return most


def is_asynchronous(stmt: Stmt) -> bool:
    """Whether something in it copies, or is carried out by warps."""
    return any(isinstance(each, Copy | Commit | Await | Warp | Fill) for each in walk_stmts(stmt))


def _touched(stmt: Stmt) -> Iterator[Buffer]:
    """The buffers that a statement, or one within it, writes or reads by name."""
    for each in walk_stmts(stmt):
        if isinstance(each, Store):
            loads = [*te.loads(each.value), *te.loads(each.index)]
            yield from (
                each.buffer,
                *(load.source.memory for load in loads if isinstance(load.source, Buffer)),
            )
        elif isinstance(each, Copy | BoxCopy):
            yield each.buffer
        elif isinstance(each, Warp):
            yield from (buffer for buffer, _ in each.operands)


def touches_shared(stmt: Stmt) -> bool:
    return reads_shared(stmt) or writes_shared(stmt)


def writes_shared(stmt: Stmt) -> bool:
    """Whether something in it writes shared memory, other than by an asynchronous copy."""
    return any(
        isinstance(each, Combine) or (isinstance(each, Store) and each.buffer.scope is Scope.SCRATCH)
        for each in walk_stmts(stmt)
    )


def reads_shared(stmt: Stmt) -> bool:
    """Whether something in it reads shared memory, other than an instruction of a warp."""
    for each in walk_stmts(stmt):
        if isinstance(each, Combine):
            return True
        if isinstance(each, Store):
            loads = [*te.loads(each.value), *te.loads(each.index)]
            if any(isinstance(load.source, Buffer) and load.source.scope is Scope.SCRATCH for load in loads):
                return True
    return False
