"""Reductions along many long rows: a block takes one after another, the next on its way meanwhile.

    for blocks b:                                     (parallel; as many as run at once)
      for threads: tile = x[the first row]            (in lanes)
      for rows of the block:                          (serial)
        for threads: next[:] = x[the next row]        (in lanes; until it is needed nobody waits for it)
        ... the reductions and the results, of what is in `tile`
        for threads: tile = next                      (in lanes)

Reading goes on while exponentials are computed and results are written, which one row by itself does in turn. A row is
in shared memory, of which a thread reads what it wrote; what comes next is in registers.
"""

from __future__ import annotations

from tilewright import te
from tilewright.hw.gpu import GpuMachine
from tilewright.loops.formula import Formula
from tilewright.loops.gpu.places import VECTOR_BYTES, positions
from tilewright.loops.gpu.rows import Pass, Rows, Visit
from tilewright.loops.ir import Buffer, For, If, Kind, Program, Scope, Stmt, Store, block, nest
from tilewright.loops.rowwise import contiguous_last
from tilewright.loops.tiling import extent_of, with_values
from tilewright.te.index import simplify

_THREADS = 1_024
_FEWEST = 16_384  # elements of a row: one of more has a block of its own
_MOST = 65_536  # elements of a row that fill the registers of a block
_ROWS = 4  # for each multiprocessor, before one ahead pays
_RESERVED = 4 << 10  # bytes of shared memory for what threads exchange


def staged_rows_program(formula: Formula, machine: GpuMachine) -> Program | None:
    """None where rows are few, short or too long, or more than one tensor of them is read."""
    formula = contiguous_last(formula)
    rows, length = extent_of(formula.rows), max(reduction.length for reduction in formula.reductions)
    if not _FEWEST < length <= _MOST or rows < _ROWS * machine.sms:
        return None
    whole = [buffer for buffer in formula.inputs if buffer.size == rows * length]
    if len(whole) != 1 or length * whole[0].dtype.bytes > machine.shared_block - _RESERVED:
        return None
    if length * whole[0].dtype.bytes % (VECTOR_BYTES * _THREADS) or whole[0].dtype.bytes != 2:
        return None
    made = _Staged(formula, machine, whole[0])
    return made.program() if made.is_sound else None


class _Staged(Rows):
    def __init__(self, formula: Formula, machine: GpuMachine, source: Buffer) -> None:
        super().__init__(formula, machine)
        rows = extent_of(formula.rows)
        self.source, self.length = source, source.size // rows
        self.group = self.threads = _THREADS
        self.rows_per_block, self.cluster = 1, 1
        turns = -(-rows // machine.sms)
        self.turn, self.at = te.Var("turn", turns), te.Var("b", -(-rows // turns))
        self.thread = te.Var("t", _THREADS)
        self.place = self.thread
        self.row = self._row(self.turn)
        self.row_position = positions(self.row, formula.rows)
        tile = Buffer(f"tile_{source.name}", source.dtype, self.length, Scope.SCRATCH)
        self.tiles = {source: tile}

    def _row(self, turn: te.Expr) -> te.Expr:
        row = self.at * self.turn.extent + turn
        rows = extent_of(self.formula.rows)
        return te.call("min", row, rows - 1) if self.at.extent * self.turn.extent > rows else row

    @property
    def is_sound(self) -> bool:
        """Whether each pass reads of the long tensor the row's own elements, in their order."""
        formula = self.formula
        passes = [*((r.axes, r.body) for r in formula.reductions), (self.columns, formula.value)]
        place = te.Var("place", self.length)
        for axes, expr in passes:
            loads = [load for load in te.loads(expr) if load.source == self.source]
            if loads and extent_of(axes) != self.length:
                return False
            at = {**self.row_position, **positions(place, axes)}
            if any(self._in_tile(te.substitute(load.indices[0], at), self.source) != place for load in loads):
                return False
        return any(load.source == self.source for load in te.loads(formula.reductions[0].body))

    def _in_tile(self, index: te.Expr, buffer: Buffer) -> te.Expr:
        return simplify(index - self.row * self.length)

    def _walked(self, walk: Pass, value: te.Expr, place: te.Expr | None, visit: Visit) -> Stmt:
        return self._in_pieces(walk, value, place, visit)

    def _moved(self, into: Buffer, source: Buffer, row: te.Expr | None) -> Stmt:
        """All that a thread has of a row: from memory, where `row` says which, to its registers or the tile; or from
        the one to the other."""
        lanes = VECTOR_BYTES // self.source.dtype.bytes
        step, lane = te.Var("u", self.length // (lanes * _THREADS)), te.Var("v", lanes)
        in_row = (step * _THREADS + self.thread) * lanes + lane
        own = step * lanes + lane
        target = own if into.scope is Scope.REGISTER else in_row
        origin = own if row is None else row * self.length + in_row
        copy = Store(into, target, te.Load(source, (origin,)), streamed=into.scope is Scope.REGISTER)
        return nest([(step, Kind.UNROLL), (lane, Kind.VECTOR)], copy)

    def program(self) -> Program:
        formula, tile = self.formula, self.tiles[self.source]
        coming = Buffer("coming", tile.dtype, self.length // _THREADS, Scope.REGISTER)
        turns, following = self.turn.extent, self.turn + 1
        is_more = te.call("lt", following, turns)
        asked = If(is_more, self._moved(coming, self.source, self._row(following)))
        stmts: list[Stmt] = [For(self.thread, Kind.THREAD, asked)]
        for reduction in formula.reductions:
            stmts += self._reduction(reduction)
        stmts += self._write()
        stmts.append(For(self.thread, Kind.THREAD, If(is_more, self._moved(tile, coming, None))))
        first = For(self.thread, Kind.THREAD, self._moved(tile, self.source, self._row(te.as_index(0))))
        body = block(first, nest([(self.turn, Kind.SERIAL)], block(*stmts)))
        words = "staged rows: " + ", ".join(f"{r.kind} of {r.length}" for r in formula.reductions)
        words += f", {turns} for each of {self.at.extent} blocks of {_THREADS} threads"
        nested = with_values(nest([(self.at, Kind.PARALLEL)], body), {})
        return Program(formula.name, (*formula.inputs, formula.output), nested, words)
