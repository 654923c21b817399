"""Reductions along many long rows, staged in shared memory. If rows are short enough and cheap to compute, a
multiprocessor runs several blocks at once, each with one row:

    for blocks b:                                     (parallel; one for each row)
      for threads: tile = x[row]                      (asynchronously)
      ... the reductions and the results, of what is in `tile`

Otherwise a block processes rows in sequence, and loads the next row meanwhile:

    for blocks b:                                     (parallel; as many as run at once)
      for threads: tile = x[the first row]            (in lanes)
      for rows of the block:                          (serial)
        for threads: next[:] = x[the next row]        (in lanes; asynchronous)
        ... the reductions and the results, of what is in `tile`
        for threads: tile = next                      (in lanes)

Either way, loads overlap the computation and writing of other rows. In the first form, loads in flight need no
registers.
"""

from __future__ import annotations

from tilewright import te
from tilewright.hw.gpu import WARP, GpuMachine
from tilewright.loops.formula import Formula
from tilewright.loops.gpu.rows import RowProgram, RowWalk, Visit
from tilewright.loops.gpu.thread_index import VECTOR_BYTES, positions, walked
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
    block,
    nest,
)
from tilewright.loops.tiling import contiguous_last, extent_of, with_values
from tilewright.support.arith import ceil_div
from tilewright.te.index import simplify
from tilewright.te.scalars import EXPENSIVE_CALLS

_THREADS = 1_024
_MIN = 16_384  # minimum elements of a row: longer rows have a block of their own
_MAX = 65_536  # maximum elements of a row that fit in the registers of a block
_ROWS = 4  # minimum rows per multiprocessor for loading one row ahead
_RESERVED = 4 << 10  # bytes of shared memory for exchange between threads
_AT_ONCE = 3  # blocks per multiprocessor: one loads, one computes, one writes
_WAVES = 2  # minimum waves of such blocks, so that the last one leaves few multiprocessors idle
_SHARES = (4, 5, 6, 7, 8)  # vectors per thread


def staged_rows_program(formula: Formula, machine: GpuMachine) -> Program | None:
    """The program; None if rows are few, short or too long, or more than one tensor of rows is read."""
    formula = contiguous_last(formula)
    rows, length = extent_of(formula.rows), max(reduction.length for reduction in formula.reductions)
    whole = [buffer for buffer in formula.inputs if buffer.size == rows * length]
    if length <= _MIN or len(whole) != 1 or length * whole[0].dtype.bytes % VECTOR_BYTES:
        return None
    made: _Held | _Staged | None = None
    if _may_be_held(formula, length * whole[0].dtype.bytes, machine):
        made = _Held(formula, machine, whole[0])
    elif _may_be_staged(rows, length, whole[0], machine):
        made = _Staged(formula, machine, whole[0])
    return made.program() if made is not None and made.is_sound else None


def _may_be_held(formula: Formula, row_bytes: int, machine: GpuMachine) -> bool:
    """Whether several rows fit; expensive elements need more than one pass."""
    if extent_of(formula.rows) < _WAVES * _AT_ONCE * machine.sms or _threads(row_bytes, machine) is None:
        return False
    takes_long = any(
        isinstance(node, te.Call) and node.op in EXPENSIVE_CALLS and te.variables(node) & set(reduction.axes)
        for reduction in formula.reductions
        for node in te.walk(reduction.body)
    )
    return not takes_long and (row_bytes + _RESERVED) * _AT_ONCE <= machine.shared_sm


def _threads(row_bytes: int, machine: GpuMachine) -> int | None:
    """The smallest number of threads with equal or nearly equal shares of a row; None if too many are needed."""
    vectors = row_bytes // VECTOR_BYTES
    found = [ceil_div(vectors, share * WARP) * WARP for share in _SHARES]
    possible = [threads for threads in found if threads * _AT_ONCE <= machine.threads_sm]
    return min(possible, key=lambda threads: (-vectors % threads, threads), default=None)


def _may_be_staged(rows: int, length: int, source: Buffer, machine: GpuMachine) -> bool:
    row_bytes = length * source.dtype.bytes
    return (
        length <= _MAX
        and rows >= _ROWS * machine.sms
        and row_bytes <= machine.shared_block - _RESERVED
        and row_bytes % (VECTOR_BYTES * _THREADS) == 0
        and source.dtype.bytes == 2
    )


class _InShared(RowProgram):
    """A block has one row at a time, in shared memory. `turn` counts its rows."""

    def __init__(
        self, formula: Formula, machine: GpuMachine, source: Buffer, threads: int, turns: int
    ) -> None:
        super().__init__(formula, machine)
        rows = extent_of(formula.rows)
        self.source, self.length = source, source.size // rows
        self.group = self.threads = threads
        self.rows_per_block, self.cluster = 1, 1
        self.turn, self.at = te.Var("turn", turns), te.Var("b", ceil_div(rows, turns))
        self.thread = te.Var("t", threads)
        self.coord = self.thread
        self.row = self._row(self.turn if turns > 1 else te.as_index(0))
        self.row_position = positions(self.row, formula.rows)
        flat: te.Expr = te.as_index(0)
        for axis in formula.rows:
            flat = flat * axis.extent + axis
        # The row's offset in its tensor.
        self.start = simplify(te.substitute(flat * self.length, self.row_position))
        self.tile = Buffer(f"tile_{source.name}", source.dtype, self.length, Scope.SCRATCH)
        self.tiles = {source: self.tile}

    def _row(self, turn: te.Expr) -> te.Expr:
        row = simplify(self.at * self.turn.extent + turn)
        rows = extent_of(self.formula.rows)
        return te.call("min", row, rows - 1) if self.at.extent * self.turn.extent > rows else row

    @property
    def is_sound(self) -> bool:
        """Whether each pass reads only the row's own elements of the long tensor, in order."""
        formula = self.formula
        passes = [*((r.axes, r.body) for r in formula.reductions), (self.columns, formula.value)]
        coord = te.Var("place", self.length)
        for axes, expr in passes:
            here = te.substitute(walked(expr, axes, coord), {**self.row_position, **positions(coord, axes)})
            loads = [load for load in te.loads(here) if load.source == self.source]
            if loads and extent_of(axes) != self.length:
                return False
            if any(self._in_tile(load.indices[0], self.source) != coord for load in loads):
                return False
        return any(load.source == self.source for load in te.loads(formula.reductions[0].body))

    def _in_tile(self, index: te.Expr, buffer: Buffer) -> te.Expr:
        return simplify(index - self.start)

    def _computed(self) -> list[Stmt]:
        stmts: list[Stmt] = []
        for reduction in self.formula.reductions:
            stmts += self._reduction(reduction)
        return stmts + self._write()

    def _finished(self, kind: str, whose: str, *stmts: Stmt) -> Program:
        formula = self.formula
        words = f"{kind} rows: " + ", ".join(f"{r.kind} of {r.length}" for r in formula.reductions)
        nested = with_values(nest([(self.at, Kind.PARALLEL)], block(*stmts)), {})
        return Program(formula.name, (*formula.inputs, formula.output), nested, f"{words}, {whose}")


class _Held(_InShared):
    def __init__(self, formula: Formula, machine: GpuMachine, source: Buffer) -> None:
        threads = _threads(source.size // extent_of(formula.rows) * source.dtype.bytes, machine)
        assert threads is not None
        super().__init__(formula, machine, source, threads, 1)

    def _walked(self, walk: RowWalk, value: te.Expr, coord: te.Expr | None, visit: Visit) -> Stmt:
        return self._chunk(walk, te.as_index(0), walk.steps, value, coord, visit, keep=False)

    def program(self) -> Program:
        lanes = VECTOR_BYTES // self.source.dtype.bytes
        vectors = self.length // lanes
        step = te.Var("u", ceil_div(vectors, self.threads))
        number = step * self.threads + self.thread
        copy = Copy(self.tile, number * lanes, self.source, self.start + number * lanes, lanes)
        inside = te.call("lt", number, vectors) if vectors % self.threads else None
        copied = nest([(step, Kind.UNROLL)], copy if inside is None else If(inside, copy))
        fetch = (For(self.thread, Kind.THREAD, copied), Commit(), Await(0))
        return self._finished("held", f"{self.threads} threads each", *fetch, *self._computed())


class _Staged(_InShared):
    def __init__(self, formula: Formula, machine: GpuMachine, source: Buffer) -> None:
        super().__init__(formula, machine, source, _THREADS, ceil_div(extent_of(formula.rows), machine.sms))

    def _walked(self, walk: RowWalk, value: te.Expr, coord: te.Expr | None, visit: Visit) -> Stmt:
        return self._in_chunks(walk, value, coord, visit)

    def _moved(self, into: Buffer, source: Buffer, row: te.Expr | None) -> Stmt:
        """Move a thread's share of a row: from memory (`row` says which) to registers or the tile, or between
        these."""
        lanes = VECTOR_BYTES // self.source.dtype.bytes
        step, lane = te.Var("u", self.length // (lanes * _THREADS)), te.Var("v", lanes)
        in_row = (step * _THREADS + self.thread) * lanes + lane
        own = step * lanes + lane
        target = own if into.scope is Scope.REGISTER else in_row
        origin = own if row is None else row * self.length + in_row
        copy = Store(into, target, te.Load(source, (origin,)), streamed=into.scope is Scope.REGISTER)
        return nest([(step, Kind.UNROLL), (lane, Kind.VECTOR)], copy)

    def program(self) -> Program:
        coming = Buffer("coming", self.tile.dtype, self.length // _THREADS, Scope.REGISTER)
        turns, following = self.turn.extent, self.turn + 1
        is_more = te.call("lt", following, turns)
        asked = If(is_more, self._moved(coming, self.source, self._row(following)))
        kept = If(is_more, self._moved(self.tile, coming, None))
        first = For(self.thread, Kind.THREAD, self._moved(self.tile, self.source, self._row(te.as_index(0))))
        each = block(
            For(self.thread, Kind.THREAD, asked), *self._computed(), For(self.thread, Kind.THREAD, kept)
        )
        whose = f"{turns} for each of {self.at.extent} blocks of {_THREADS} threads"
        return self._finished("staged", whose, first, nest([(self.turn, Kind.SERIAL)], each))
