"""The loop IR: *how* a task is computed, as a loop nest over flat buffers.

Semantics
---------
- A `Program` is a function of buffers: its parameters (the task's inputs in order, then its output) and local ones in
  registers or scratch memory. Buffers are one-dimensional, of a fixed number of elements, and do not overlap.
- Statements run in order. `For` runs its body for var = 0, 1, ..., extent - 1; what its kind allows:
  * SERIAL: nothing more.
  * PARALLEL: iterations may run in any order, on any thread. Only the outermost statement may be parallel. Iterations
    write disjoint elements, **or the same value to the same element**: a tile at the end of an axis may be shifted back
    to overlap its neighbour, which computes the same elements again instead of needing a tail loop.
  * UNROLL: the body is written out extent times.
  * VECTOR: the iterations run in lockstep in the lanes of a vector. The body holds only `Store`s; each one's value is
    computed for all lanes, then stored for all lanes.
  * THREAD, on GPUs: each iteration runs on a thread of its own, and an iteration of the parallel loop is a block of
    threads. All thread loops of a program have the same extent; one is not inside another, a branch within it may
    differ from thread to thread. A register buffer is each thread's own and keeps its values from one thread loop to
    the next; scratch memory is the block's, and what one thread loop has written the next may read.
- A register buffer lives in machine registers: once unrolled loops are written out, each of its accesses is at a
  constant offset (a lane counts from there), and a given element is always accessed with the same number of lanes.
  It is written before it is read, also in the first iteration of the loops around; a branch may leave that one out.
- A scratch buffer is memory of the thread's own (on its stack), private to one iteration of the parallel loop and
  undefined at its beginning. All of a program's together hold at most `SCRATCH_LIMIT` bytes.
- A buffer can be read as elements of another type, its bytes taken together in the machine's order: a view, which is
  only read, and is aligned no better than what it is a view of.
- `If` runs one of its branches; its condition is the same in every lane and is not under a vector loop.
- `Prefetch` changes nothing: it names an element that will be read or written soon, and may name one that does not
  exist.
- `Combine`, between thread loops: an element of a register buffer is combined over groups of neighbouring threads, in a
  fixed order, and each thread of the group then holds the result.
- `Copy`, in a thread loop, prefetches neighbours in memory, which are in scratch memory after an `Await` of its group:
  those since the last `Commit`. Nobody touches their place from the copy to there, and nobody reads it between the
  `Await` before the copy and the copy. `Commit` and `Await` are between thread loops; all threads meet at an `Await`.
- `Warp`, between thread loops: an instruction that the threads of each warp carry out together. `Invoke`, on CPUs: an
  instruction of one thread, outside of vector loops. Both are a `hw.intrinsics.Intrinsic`.
- `Transpose` turns a tile of a register buffer: its vectors in order are the elements of a matrix by rows before, and
  by columns afterwards. `Slide` takes a vector from two register vectors, wherever it begins in the first.
- `Store` rounds nothing: the value's type is the buffer's. One that is `streamed` writes what nobody reads soon: it may
be written with non-temporal
  stores, for which a vector should begin at a multiple of its length; into registers, on a GPU, it prefetches
  what it reads there and then. `Across` combines the lanes of a register vector pairwise (first half with second half,
  and so on): a fixed order.
- Expressions are those of `te`; a `Load` reads a `Buffer` at one flat index, and `Select` is lazy in its loads.
- Arithmetic is what the expressions say, in the order they say it; `numerics` decides which fast-math flags it gets.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

from tilewright.dtypes import DType
from tilewright.hw import memory
from tilewright.hw.intrinsics import Intrinsic
from tilewright.runtime.packing import Packing
from tilewright.te import Expr, Load, Source, Var

Scope = memory.Scope
SCRATCH_LIMIT = memory.STACK_BYTES


@dataclass(frozen=True)
class Buffer(Source):
    name: str
    dtype: DType
    size: int
    scope: Scope = Scope.GLOBAL
    of: Buffer | None = None  # what it is a view of

    @property
    def memory(self) -> Buffer:
        """The buffer whose bytes it has."""
        return self if self.of is None else self.of

    def read_as(self, dtype: DType) -> Buffer:
        """The view as elements of another type; bytes at the end that make no whole element are not in it."""
        size = self.size * self.dtype.bytes // dtype.bytes
        return Buffer(f"{self.memory.name}.{dtype.short}", dtype, size, self.scope, self.memory)


class Kind(enum.Enum):
    SERIAL = "serial"
    PARALLEL = "parallel"
    UNROLL = "unroll"
    VECTOR = "vector"
    THREAD = "thread"


@dataclass(frozen=True)
class Across(Expr):
    """The combination of `lanes` elements of a register buffer, from `offset` on; `kind` as in `te.Reduce`."""

    kind: str
    buffer: Buffer
    offset: int
    lanes: int

    @property
    def dtype(self) -> DType:  # type: ignore[override]
        return self.buffer.dtype


@dataclass(frozen=True)
class For:
    var: Var  # its extent is the loop's
    kind: Kind
    body: Stmt


@dataclass(frozen=True)
class Block:
    stmts: tuple[Stmt, ...]


@dataclass(frozen=True)
class Store:
    buffer: Buffer
    index: Expr
    value: Expr
    streamed: bool = False


@dataclass(frozen=True)
class If:
    cond: Expr
    then: Stmt
    other: Stmt | None = None


@dataclass(frozen=True)
class Prefetch:
    """Brings the cache line of an element into the cache of the given level, 1 is the nearest; `written`: as one that
    will be written."""

    buffer: Buffer
    index: Expr
    level: int = 2
    written: bool = False


@dataclass(frozen=True)
class Transpose:
    """The first `rows * columns` elements of a register buffer, a matrix of `rows` rows, become its transpose. They are
    held in vectors of `lanes`."""

    buffer: Buffer
    rows: int
    columns: int
    lanes: int


@dataclass(frozen=True)
class Slide:
    """The first `lanes` elements of a register buffer become those from `begin` on of themselves with the `lanes` of
    `following`, another register buffer, from `position` on after them."""

    buffer: Buffer
    following: Buffer
    position: int
    lanes: int
    begin: int


@dataclass(frozen=True)
class Combine:
    """Element `offset` of a register buffer becomes, in each of `group` neighbouring threads, the combination of them
    all; `kind` as in `te.Reduce`, `group` a power of two, or a number of whole warps."""

    kind: str
    buffer: Buffer
    offset: int
    group: int


@dataclass(frozen=True)
class Copy:
    """`lanes` neighbours from `source` to scratch memory, some time until they are awaited. Zeros where `cond` does not
    hold: nothing is read then."""

    buffer: Buffer
    index: Expr
    source: Buffer
    source_index: Expr
    lanes: int
    cond: Expr | None = None


@dataclass(frozen=True)
class Commit:
    """The copies since the last one are a group."""


@dataclass(frozen=True)
class Await:
    """The copies of all groups but the last `pending` are there, for all threads."""

    pending: int


@dataclass(frozen=True)
class Warp:
    """Of each operand of the instruction, the result first, the buffer and where in it a thread's fragment begins;
    `thread` stands for the number of the thread."""

    instruction: Intrinsic
    thread: Var
    operands: tuple[tuple[Buffer, Expr], ...]


@dataclass(frozen=True)
class Location:
    """An operand where it lies: lane n of its fragment is the element at `index + offsets[n]`."""

    buffer: Buffer
    index: Expr
    offsets: tuple[int, ...]

    @property
    def is_run(self) -> bool:
        """Whether the lanes are neighbours in memory."""
        return self.offsets == tuple(range(len(self.offsets)))


@dataclass(frozen=True)
class Invoke:
    """An instruction of a CPU: where its operands are, the result first. One that accumulates reads its result too."""

    intrinsic: Intrinsic
    operands: tuple[Location, ...]


Stmt = (
    For | Block | Store | If | Prefetch | Transpose | Slide | Combine | Copy | Commit | Await | Warp | Invoke
)


@dataclass(frozen=True)
class Program:
    """A loop nest. `decisions` says in words what the schedule chose: it is what `explain` shows. `packings` says, for
    each input, in which order its elements are expected; None, and inputs beyond its end: as they are. `cluster`: on a
    GPU, among how many blocks the threads of an iteration are divided; they share no scratch memory."""

    name: str
    params: tuple[Buffer, ...]
    body: Stmt
    decisions: str = ""
    packings: tuple[Packing | None, ...] = ()
    cluster: int = 1

    @property
    def parallel_extent(self) -> int:
        body = self.body
        return body.var.extent if isinstance(body, For) and body.kind is Kind.PARALLEL else 1


def thread_count(program: Program) -> int:
    """Threads of a block: the extent of the thread loops; 1 where there are none."""
    loops = (stmt for stmt in walk_stmts(program.body) if isinstance(stmt, For))
    return next((loop.var.extent for loop in loops if loop.kind is Kind.THREAD), 1)


def set_to(position: Load, value: Expr) -> Store:
    """The store to where `position` is read from."""
    assert isinstance(position.source, Buffer)
    return Store(position.source, position.indices[0], value)


def block(*stmts: Stmt) -> Stmt:
    """Statements in order, nested blocks flattened."""
    flat: list[Stmt] = []
    for stmt in stmts:
        flat.extend(stmt.stmts if isinstance(stmt, Block) else (stmt,))
    return flat[0] if len(flat) == 1 else Block(tuple(flat))


def nest(loops: list[tuple[Var, Kind]], body: Stmt) -> Stmt:
    """`body` inside `loops`, the first outermost; loops that run once disappear (their variable is always 0)."""
    for var, kind in reversed(loops):
        if var.extent != 1:
            body = For(var, kind, body)
    return body


def walk_stmts(stmt: Stmt) -> Iterator[Stmt]:
    yield stmt
    if isinstance(stmt, For):
        yield from walk_stmts(stmt.body)
    elif isinstance(stmt, Block):
        for child in stmt.stmts:
            yield from walk_stmts(child)
    elif isinstance(stmt, If):
        yield from walk_stmts(stmt.then)
        if stmt.other is not None:
            yield from walk_stmts(stmt.other)


def local_buffers(program: Program) -> list[Buffer]:
    """The register and scratch buffers, in the order in which they are first written."""
    found: dict[Buffer, None] = {}
    for stmt in walk_stmts(program.body):
        written: Buffer | None = None
        if isinstance(stmt, Store | Copy):
            written = stmt.buffer
        elif isinstance(stmt, Warp):
            written = stmt.operands[0][0]
        elif isinstance(stmt, Invoke):
            written = stmt.operands[0].buffer
        if written is not None and written.scope is not Scope.GLOBAL:
            found[written] = None
    return list(found)


def foreign_scope(program: Program, scopes: Collection[Scope]) -> str | None:
    """What is wrong with the first buffer in a scope that is not among `scopes`; None where there is no such buffer."""
    for buffer in (*program.params, *local_buffers(program)):
        if buffer.scope not in scopes:
            known = ", ".join(scope.value for scope in scopes)
            return f"buffer {buffer.name} is in scope {buffer.scope.value!r}, and the target has {known}"
    return None


def map_exprs(stmt: Stmt, change: Callable[[Expr], Expr]) -> Stmt:
    """`stmt` with `change` applied to every expression in it."""
    if isinstance(stmt, For):
        return For(stmt.var, stmt.kind, map_exprs(stmt.body, change))
    if isinstance(stmt, Block):
        return Block(tuple(map_exprs(child, change) for child in stmt.stmts))
    if isinstance(stmt, If):
        other = None if stmt.other is None else map_exprs(stmt.other, change)
        return If(change(stmt.cond), map_exprs(stmt.then, change), other)
    if isinstance(stmt, Prefetch):
        return replace(stmt, index=change(stmt.index))
    if isinstance(stmt, Copy):
        cond = None if stmt.cond is None else change(stmt.cond)
        return replace(stmt, index=change(stmt.index), source_index=change(stmt.source_index), cond=cond)
    if isinstance(stmt, Warp):
        operands = tuple((buffer, change(index)) for buffer, index in stmt.operands)
        return replace(stmt, operands=operands)
    if isinstance(stmt, Invoke):
        positions = tuple(replace(position, index=change(position.index)) for position in stmt.operands)
        return replace(stmt, operands=positions)
    if isinstance(stmt, Transpose | Slide | Combine | Commit | Await):
        return stmt
    return Store(stmt.buffer, change(stmt.index), change(stmt.value), stmt.streamed)
