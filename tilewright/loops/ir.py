"""The loop IR: *how* a task is computed, as a loop nest over flat buffers.

Semantics
---------
- A `Program` is a function of buffers: its parameters (the task's inputs in order, then its output) and local ones in
  registers or scratch memory. Buffers are one-dimensional, of a fixed number of elements, and do not overlap.
- Statements run in order. `For` runs its body for var = 0, 1, ..., extent - 1; its kind allows:
  * SERIAL: nothing more.
  * PARALLEL: iterations may run in any order, on any thread. Only the outermost statement may be parallel. Iterations
    write disjoint elements, **or the same value to the same element**: a tile at the end of an axis may be shifted
    back to overlap its neighbour, which computes the same elements again instead of needing a tail loop.
  * UNROLL: the body is repeated extent times in the code.
  * VECTOR: the iterations run in lockstep in the lanes of a vector. The body holds only `Store`s; each one's value is
    computed for all lanes, then stored for all lanes.
  * THREAD, on GPUs: each iteration runs on a thread of its own, and an iteration of the parallel loop is a block of
    threads. All thread loops of a program have the same extent; one is not inside another, a branch within it may
    differ from thread to thread. A register buffer is each thread's own and keeps its values from one thread loop to
    the next; scratch memory belongs to the block, and a thread loop may read what the previous one wrote.
- A register buffer lives in machine registers: once unrolled loops are written out, each of its accesses is at a
  constant offset (a lane counts from there), and a given element is always accessed with the same number of lanes. It
  is written before it is read, also in the first iteration of enclosing loops, unless a branch skips that iteration.
- A scratch buffer is memory of the thread's own (on its stack), private to one iteration of the parallel loop and
  undefined at its beginning. All of a program's together hold at most `SCRATCH_LIMIT` bytes.
- A view reads a buffer as elements of another type, in the machine's byte order. It is read-only, and only as aligned
  as its buffer.
- `If` runs one of its branches; its condition is the same in every lane and is not under a vector loop.
- `Prefetch` has no effect on results: it names an element that will be read or written soon, which need not exist.
- `Combine`, between thread loops: an element of a register buffer is combined over groups of neighbouring threads, in
  a fixed order, and each thread of the group then holds the result.
- `Copy`, in a thread loop, starts an asynchronous copy of contiguous elements to scratch memory. It is complete after
  an `Await` of its group, the copies since the last `Commit`. Until then the destination must not be accessed, nor
  read between the `Await` before the copy and the copy. `Commit` and `Await` are between thread loops; all threads
  meet at an `Await`.
- A `Ring` is scratch memory in slots that the tensor copy engine of a GPU fills, for iteration n slot n % slots. `Fill`
  starts the copies of an iteration as soon as its slot was released by the iteration before in it; one thread does
  that. `Filled` waits, in all threads, until the data of an iteration have arrived, and `Release` says that each warp
  has read them. Numbers of iterations count up from 0, in each of the three. A slot must not be read before `Filled` or
  after `Release`. A `BoxCopy` is one copy of a `Fill`: a box of a matrix, with zeros for what is outside of it.
- `Roles`, the whole work of a block: `producer` fills rings while `consumer` does everything else. The thread loops are
  the consumer's; the producer's threads are additional ones, a warpgroup.
- `Warp`, between thread loops: an instruction that the threads of each warp, or warpgroup, carry out together.
  `Invoke`, on CPUs: an instruction of one thread, outside of vector loops. Both are a `hw.intrinsics.Intrinsic`.
- A `running` warpgroup instruction goes on beside what follows. `Multiplied` closes a group of such instructions, and
  waits for all groups but the last `pending`. Until then their operands must not change, nor their results be accessed.
- `Push` and `Pop`, for an accelerator with decoupled units (`units.py`): a unit waits at a `Pop` for the token of its
  `Push`. In one stream, as CPUs run them, each push is before its pop.
  Loops of kind VIRTUAL are virtual threads, which `passes/virtual_threads.py` interleaves before anything runs them.
- `Transpose` transposes a tile of a register buffer: its vectors hold a matrix by rows before, and by columns after.
  `Slide` extracts a vector from two adjacent register vectors, at any offset.
- `Store` rounds nothing: the value's type is the buffer's. A `streamed` store writes data that is not read soon: it
  may use non-temporal stores, for which vectors should be aligned. On a GPU, a streamed store to registers issues its
  load at once. `Across` combines the lanes of a register vector pairwise (first half with second half, and so on): a
  fixed order.
- Expressions are those of `te`; a `Load` reads a `Buffer` at one flat index, and `Select` is lazy in its loads.
- Arithmetic follows the expressions and their order; `numerics` decides the fast-math flags.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from tilewright.dtypes import DType
from tilewright.hw import memory
from tilewright.hw.bulk_copies import Box
from tilewright.hw.gpu import WARP
from tilewright.hw.intrinsics import Intrinsic
from tilewright.runtime.packing import Packing
from tilewright.support.frozen import quickly_made
from tilewright.te import Expr, Load, Source, Var

Scope = memory.Scope
SCRATCH_LIMIT = memory.STACK_BYTES
Unit = Literal["load", "execute", "store"]


@dataclass(frozen=True)
class Buffer(Source):
    name: str
    dtype: DType
    size: int
    scope: Scope = Scope.GLOBAL
    of: Buffer | None = None  # the buffer that it is a view of

    @property
    def memory(self) -> Buffer:
        """The buffer that owns the bytes."""
        return self if self.of is None else self.of

    def read_as(self, dtype: DType) -> Buffer:
        """A view as elements of another type; trailing bytes that do not fill an element are not in it."""
        size = self.size * self.dtype.bytes // dtype.bytes
        return Buffer(f"{self.memory.name}.{dtype.short}", dtype, size, self.scope, self.memory)


class Kind(enum.Enum):
    SERIAL = "serial"
    PARALLEL = "parallel"
    UNROLL = "unroll"
    VECTOR = "vector"
    THREAD = "thread"
    VIRTUAL = "virtual"


@dataclass(frozen=True)
class Across(Expr):
    """The combination of `lanes` elements of a register buffer, starting at `offset`; `kind` as in `te.Reduce`."""

    kind: str
    buffer: Buffer
    offset: int
    lanes: int

    @property
    def dtype(self) -> DType:  # type: ignore[override]
        return self.buffer.dtype


@quickly_made
@dataclass(frozen=True)
class For:
    var: Var  # its extent is the loop's
    kind: Kind
    body: Stmt


@quickly_made
@dataclass(frozen=True)
class Block:
    stmts: tuple[Stmt, ...]


@quickly_made
@dataclass(frozen=True)
class Store:
    buffer: Buffer
    index: Expr
    value: Expr
    streamed: bool = False


@quickly_made
@dataclass(frozen=True)
class If:
    cond: Expr
    then: Stmt
    other: Stmt | None = None


@dataclass(frozen=True)
class Prefetch:
    """Prefetch the cache line of an element into the cache of the given level, 1 being the nearest. `written`: for a
    later write."""

    buffer: Buffer
    index: Expr
    level: int = 2
    written: bool = False


@dataclass(frozen=True)
class Transpose:
    """Transpose the first `rows * columns` elements of a register buffer, a matrix of `rows` rows held in vectors of
    `lanes`."""

    buffer: Buffer
    rows: int
    columns: int
    lanes: int


@dataclass(frozen=True)
class Slide:
    """Replace the first `lanes` elements of a register buffer by those at offset `begin` in its concatenation with
    `lanes` elements of `following`, another register buffer, from `position` on."""

    buffer: Buffer
    following: Buffer
    position: int
    lanes: int
    begin: int


@dataclass(frozen=True)
class Combine:
    """Combine element `offset` of a register buffer over `group` neighbouring threads, each of which gets the result.
    `kind` as in `te.Reduce`; `group` is a power of two, or a number of whole warps."""

    kind: str
    buffer: Buffer
    offset: int
    group: int


@dataclass(frozen=True)
class Copy:
    """Copy `lanes` contiguous elements from `source` to scratch memory asynchronously. Stores zeros, and reads
    nothing, if `cond` is false."""

    buffer: Buffer
    index: Expr
    source: Buffer
    source_index: Expr
    lanes: int
    cond: Expr | None = None


@dataclass(frozen=True)
class Commit:
    """Close a group of the copies since the last `Commit`."""


@dataclass(frozen=True)
class Await:
    """Wait, in all threads, until the copies of all groups but the last `pending` are complete."""

    pending: int


@dataclass(frozen=True)
class Ring:
    """Slots that the tensor copy engine fills. Each has two barriers: for the bytes that arrive, and for the warps that
    have read them."""

    name: str
    slots: int


@dataclass(frozen=True)
class SourceMatrix:
    """An input as a matrix of contiguous rows that are `stride` elements apart."""

    buffer: Buffer
    rows: int
    columns: int
    stride: int


@dataclass(frozen=True)
class BoxCopy:
    """Copy the box of `source` whose first element is at (`row`, `column`) to scratch memory, from `index` on. The
    chunks of its rows are swizzled there (`hw/bulk_copies.py`). `shared`: it is the same for the blocks of a cluster
    (`Program.together`), each of which copies a part of it to all of them."""

    buffer: Buffer
    index: Expr
    source: SourceMatrix
    row: Expr
    column: Expr
    box: Box
    shared: bool = False


@dataclass(frozen=True)
class Fill:
    """Start the copies of iteration `number` when its slot is free."""

    ring: Ring
    number: Expr
    copies: tuple[BoxCopy, ...]

    @property
    def bytes(self) -> int:
        return sum(copy.box.bytes for copy in self.copies)


@dataclass(frozen=True)
class Filled:
    """Wait, in all threads, for the data of iteration `number`."""

    ring: Ring
    number: Expr


@dataclass(frozen=True)
class Release:
    """Each warp has read the data of iteration `number`."""

    ring: Ring
    number: Expr


@dataclass(frozen=True)
class Multiplied:
    """Close a group of the running instructions since the last one, and wait for all groups but the last `pending`."""

    pending: int


@quickly_made
@dataclass(frozen=True)
class Roles:
    """Threads that only fill rings, beside those that do everything else. `registers`: of a thread of each, from there
    on; None: as many as the kernel begins with."""

    producer: Stmt
    consumer: Stmt
    registers: tuple[int, int] | None = None


@dataclass(frozen=True)
class Push:
    """Put a token into a queue when unit `source` has done what is before it."""

    queue: int
    source: Unit
    target: Unit


@dataclass(frozen=True)
class Pop:
    """Let unit `target` wait for a token of the queue and take it."""

    queue: int
    source: Unit
    target: Unit


@dataclass(frozen=True)
class Warp:
    """An instruction of a warp or warpgroup. For each operand, the result first: the buffer and the start of a thread's
    fragment in it; `thread` is the thread index. `pitches`: 0, or for an operand that is a matrix in shared memory the
    elements of a row: element (r, c) is at `start + r * pitch + c` before the chunks of rows are swizzled."""

    instruction: Intrinsic
    thread: Var
    operands: tuple[tuple[Buffer, Expr], ...]
    pitches: tuple[int, ...] = ()
    running: bool = False

    @property
    def threads(self) -> int:
        """How many threads carry it out together."""
        return max(WARP, *(fragment.lanes for fragment in self.instruction.fragments))

    @property
    def operand_pitches(self) -> tuple[int, ...]:
        return self.pitches or (0,) * len(self.operands)


@dataclass(frozen=True)
class Location:
    """An operand in memory: lane n of its fragment is the element at `index + offsets[n]`."""

    buffer: Buffer
    index: Expr
    offsets: tuple[int, ...]

    @property
    def is_run(self) -> bool:
        """Whether the lanes are contiguous in memory."""
        return self.offsets == tuple(range(len(self.offsets)))


@dataclass(frozen=True)
class Invoke:
    """An instruction of a CPU with its operands, the result first. An accumulating instruction reads its
    result too."""

    intrinsic: Intrinsic
    operands: tuple[Location, ...]


Stmt = (
    For
    | Block
    | Store
    | If
    | Prefetch
    | Transpose
    | Slide
    | Combine
    | Copy
    | Commit
    | Await
    | BoxCopy
    | Fill
    | Filled
    | Release
    | Multiplied
    | Roles
    | Push
    | Pop
    | Warp
    | Invoke
)


@dataclass(frozen=True)
class Program:
    """A loop nest.

    `decisions` describes the schedule's choices, for `explain`. `packings` says in which order the elements of each
    input are expected; None, or beyond its end: unchanged. `cluster`: on a GPU, the number of blocks that share the
    threads of an iteration; they share no scratch memory. `together`: the number of neighbouring iterations whose
    blocks run at the same time, as a cluster. `unpipelined`: the same program before its loops were pipelined, if they
    were.
    """

    name: str
    params: tuple[Buffer, ...]
    body: Stmt
    decisions: str = ""
    packings: tuple[Packing | None, ...] = ()
    cluster: int = 1
    together: int = 1
    unpipelined: Program | None = field(default=None, compare=False, repr=False)

    @property
    def parallel_extent(self) -> int:
        body = self.body
        return body.var.extent if isinstance(body, For) and body.kind is Kind.PARALLEL else 1


def thread_count(program: Program) -> int:
    """Threads of a block: the extent of the thread loops; 1 if there are none."""
    loops = (stmt for stmt in walk_stmts(program.body) if isinstance(stmt, For))
    return next((loop.var.extent for loop in loops if loop.kind is Kind.THREAD), 1)


def set_to(position: Load, value: Expr) -> Store:
    """The store to the element that `position` reads."""
    assert isinstance(position.source, Buffer)
    return Store(position.source, position.indices[0], value)


def block(*stmts: Stmt) -> Stmt:
    """Statements in order, nested blocks flattened."""
    flat: list[Stmt] = []
    for stmt in stmts:
        flat.extend(stmt.stmts if isinstance(stmt, Block) else (stmt,))
    return flat[0] if len(flat) == 1 else Block(tuple(flat))


def nest(loops: list[tuple[Var, Kind]], body: Stmt) -> Stmt:
    """`body` inside `loops`, the first outermost; loops with one iteration disappear (their variable is always 0)."""
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
    elif isinstance(stmt, Roles):
        yield from walk_stmts(stmt.producer)
        yield from walk_stmts(stmt.consumer)
    elif isinstance(stmt, Fill):
        yield from stmt.copies


def rings_of(program: Program) -> list[Ring]:
    """The rings that are filled, in order."""
    return list(dict.fromkeys(stmt.ring for stmt in walk_stmts(program.body) if isinstance(stmt, Fill)))


def local_buffers(program: Program) -> list[Buffer]:
    """The register and scratch buffers, in the order in which they are first written."""
    found: dict[Buffer, None] = {}
    for stmt in walk_stmts(program.body):
        written: Buffer | None = None
        if isinstance(stmt, Store | Copy | BoxCopy):
            written = stmt.buffer
        elif isinstance(stmt, Warp):
            written = stmt.operands[0][0]
        elif isinstance(stmt, Invoke):
            written = stmt.operands[0].buffer
        if written is not None and written.scope is not Scope.GLOBAL:
            found[written] = None
    return list(found)


def foreign_scope(program: Program, scopes: Collection[Scope]) -> str | None:
    """The error for the first buffer in a scope that is not in `scopes`; None if there is none."""
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
    if isinstance(stmt, BoxCopy):
        return replace(stmt, index=change(stmt.index), row=change(stmt.row), column=change(stmt.column))
    if isinstance(stmt, Fill):
        copies = tuple(map_exprs(copy, change) for copy in stmt.copies)
        return Fill(stmt.ring, change(stmt.number), copies)  # type: ignore[arg-type]
    if isinstance(stmt, Filled | Release):
        return replace(stmt, number=change(stmt.number))
    if isinstance(stmt, Roles):
        producer, consumer = map_exprs(stmt.producer, change), map_exprs(stmt.consumer, change)
        return Roles(producer, consumer, stmt.registers)
    if isinstance(stmt, Transpose | Slide | Combine | Commit | Await | Multiplied | Push | Pop):
        return stmt
    return Store(stmt.buffer, change(stmt.index), change(stmt.value), stmt.streamed)
