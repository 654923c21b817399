"""Transposes with unaligned output rows, still written with non-temporal stores.

Non-temporal stores must write whole cache lines, and the offset of a line differs from row to row of the output. So
the tiles advance along the written axis, the last tile of each output row stays in scratch, and the line that begins in
it and ends in the next one is assembled in registers:

    for every block of rows of the output:           (parallel)
      for lines of what is written, t:
        for tiles of the block:
          tile = x[rows of t, columns of the tile], transposed
          for row in the tile: out[row, line] = the end of stage[row] with the begin of tile[row]
          stage = tile                               (after all of them: stores in between would stall streaming)
      the partial lines at both ends of a row, which share a cache line with another row

In registers the offset of each row of a tile must be a constant: it is the same in every tile of whole lines.
"""

from __future__ import annotations

from collections.abc import Callable

from tilewright import te
from tilewright.hw import CpuMachine
from tilewright.loops.formula import Formula
from tilewright.loops.ir import (
    SCRATCH_LIMIT,
    Buffer,
    If,
    Kind,
    Prefetch,
    Program,
    Scope,
    Slide,
    Stmt,
    Store,
    Transpose,
    block,
    nest,
)
from tilewright.loops.tiling import Tiles, extent_of, parallel_nest, with_values
from tilewright.loops.transpose_pattern import TransposePattern
from tilewright.support.arith import ceil_div
from tilewright.te.index import coefficient, divisor_of

_MIN = 4  # minimum lines of an output row that outweigh its ends
_KEPT = 8  # stages that fill L2: one stays there while rows and prefetched data pass
_AHEAD = 24  # prefetch distance in tiles
_LONG = 32  # minimum lines of an output row that is not split for more threads
_CHUNKS = 4  # per core, if rows are that long


def unaligned_transpose_program(
    formula: Formula, machine: CpuMachine, pattern: TransposePattern
) -> Program | None:
    """The program; None if rows of the output are short, or a vector is not a line."""
    whole = pattern.lanes * formula.output.dtype.bytes == machine.line_bytes
    if not whole or pattern.writes_run or pattern.reads_run or pattern.written.extent < _MIN * pattern.lanes:
        return None
    elsewhere: dict[te.Var, te.Expr] = dict.fromkeys((pattern.written, pattern.read), te.as_index(0))
    step = coefficient(formula.store, pattern.read)
    if step is None or divisor_of(te.substitute(formula.store, elsewhere)) % pattern.lanes:
        return None
    return _UnalignedTranspose(formula, machine, pattern, step).program()


class _UnalignedTranspose:
    def __init__(self, formula: Formula, machine: CpuMachine, pattern: TransposePattern, step: int) -> None:
        self.formula, self.pattern, self.lanes = formula, pattern, pattern.lanes
        self.begins = [-step * row % self.lanes for row in range(self.lanes)]
        stage = min(machine.caches.l2_per_core // _KEPT, SCRATCH_LIMIT)
        run = stage // (self.lanes * pattern.load.dtype.bytes)  # contiguous elements that are read
        whole = te.Var(pattern.read.name, pattern.read.extent // self.lanes * self.lanes)
        count = ceil_div(whole.extent, run)
        self.tile = te.Var("tile", ceil_div(ceil_div(whole.extent, self.lanes), count))
        self.blocks = Tiles(whole, self.tile.extent * self.lanes)
        self.outside = [axis for axis in formula.axes if axis not in (pattern.read, pattern.written)]
        lines = te.Var("line", pattern.written.extent // self.lanes)
        there = extent_of(self.outside) * self.blocks.count
        chunks = max(1, min(ceil_div(_CHUNKS * machine.cores, there), lines.extent // _LONG))
        self.chunk = Tiles(lines, ceil_div(lines.extent, chunks))
        self.step, self.lane = te.Var("step", self.chunk.size), te.Var("v", self.lanes)
        self.stage = Buffer("stage", pattern.load.dtype, self.blocks.size * self.lanes, Scope.SCRATCH)
        self.held = Buffer("held", pattern.load.dtype, self.lanes * self.lanes, Scope.REGISTER)
        self.before = Buffer("before", pattern.load.dtype, self.lanes, Scope.REGISTER)

    def program(self) -> Program:
        formula, pattern = self.formula, self.pattern
        here, at, last = (
            self.blocks.start() + self.tile * self.lanes,
            self._row_of(self.step),
            self._row_of(-1),
        )
        lines = block(*(self._line(here, row) for row in range(self.lanes)), self._in_tile(self._keep))
        first = block(self._in_tile(self._keep), self._plain(here, at, self._transposed))
        tiles = block(
            self._fill(here, at, self._prefetched), If(te.call("lt", te.as_index(0), self.step), lines, first)
        )
        along = [(self.tile, Kind.SERIAL)]
        stmts = [
            nest([(self.step, Kind.SERIAL), *along], tiles),
            nest(along, self._plain(here, last, self._kept)),
        ]
        left = pattern.written.extent % self.lanes
        if left:
            stmts.append(nest(along, self._moved(here, last + left)))
        if pattern.read.extent % self.lanes:
            stmts.append(self._rows_after(left))
        work = 2 * self.blocks.size * self.chunk.size * self.lanes
        nested = parallel_nest([*self.outside, self.blocks.var, self.chunk.var], work, block(*stmts))
        words = f"transposed: tiles of {pattern}, lines put together from two, streamed"
        return Program(formula.name, (*formula.inputs, formula.output), with_values(nested, {}), words)

    def _rows_after(self, left: int) -> Stmt:
        """The rows of the output after those in tiles of whole lines, processed with the last block."""
        here = te.as_index(self.pattern.read.extent - self.lanes)
        stmts = [nest([(self.step, Kind.SERIAL)], self._moved(here, self._row_of(self.step)))]
        if left:
            stmts.append(self._moved(here, self._row_of(-1) + left))
        if self.blocks.count == 1:
            return block(*stmts)
        return If(te.call("le", te.as_index(self.blocks.count - 1), self.blocks.var), block(*stmts))

    # Tile offsets: `here` along the read axis and `at` along the written axis.

    def _row_of(self, step: te.Expr | int) -> te.Expr:
        """The start of a step's tiles; -1 is the last step."""
        step = step if isinstance(step, te.Expr) else te.as_index(step % self.chunk.size)
        return (self.chunk.start() + step) * self.lanes

    def _in_tile(self, make: Callable[[te.Expr], Store]) -> Stmt:
        row = te.Var("u", self.lanes)
        return nest([(row, Kind.UNROLL), (self.lane, Kind.VECTOR)], make(row))

    def _element(self, row: te.Expr | int) -> te.Expr:
        return te.as_index(0) + row * self.lanes + self.lane

    def _transposed(self, row: te.Expr | int) -> te.Expr:
        return te.Load(self.held, (self._element(row),))

    def _coord_kept(self, row: te.Expr | int) -> te.Expr:
        return self.tile * (self.lanes * self.lanes) + self._element(row)

    def _kept(self, row: te.Expr | int) -> te.Expr:
        return te.Load(self.stage, (self._coord_kept(row),))

    def _keep(self, row: te.Expr | int) -> Store:
        return Store(self.stage, self._coord_kept(row), self._transposed(row))

    # Statements.

    def _fill(
        self, here: te.Expr, at: te.Expr, interleaved: Callable[[te.Expr], Stmt] = lambda row: block()
    ) -> Stmt:
        """Load and transpose a tile; `interleaved` runs with the load of each row."""
        source, (offset,) = self.pattern.load.source, self.pattern.load.indices
        assert isinstance(source, Buffer)

        row = te.Var("u", self.lanes)
        coord = te.substitute(offset, {self.pattern.written: at + row, self.pattern.read: here + self.lane})
        load = Store(self.held, self._element(row), te.Load(source, (coord,)))
        loads = nest([(row, Kind.UNROLL)], block(nest([(self.lane, Kind.VECTOR)], load), interleaved(row)))
        return block(loads, Transpose(self.held, self.lanes, self.lanes, self.lanes))

    def _prefetched(self, row: te.Expr) -> Stmt:
        """Prefetch data that is read a few tiles later; at the end of the block, in the next step. It goes to L2,
        because the stage passes through L1 meanwhile."""
        source, (offset,) = self.pattern.load.source, self.pattern.load.indices
        assert isinstance(source, Buffer)
        later = self.tile + _AHEAD
        coord = {
            self.pattern.written: self._row_of(self.step + later // self.tile.extent) + row,
            self.pattern.read: self.blocks.start() + later % self.tile.extent * self.lanes,
        }
        return Prefetch(source, te.substitute(offset, coord), level=2)

    def _line(self, here: te.Expr, row: int) -> Stmt:
        """The line of an output row that begins in the previous step."""
        vector, begin = [(self.lane, Kind.VECTOR)], self.begins[row]
        at = self._row_of(self.step + (-1)) + begin
        return block(
            nest(vector, Store(self.before, self.lane, self._kept(row))),
            Slide(self.before, self.held, row * self.lanes, self.lanes, begin),
            nest(vector, self._written(here + row, at, te.Load(self.before, (self.lane,)), streamed=True)),
        )

    def _plain(self, here: te.Expr, at: te.Expr, loaded: Callable[[te.Expr], te.Expr]) -> Stmt:
        """Store a transposed tile to the output with unaligned vectors."""
        return self._in_tile(lambda row: self._written(here + row, at, loaded(row)))

    def _moved(self, here: te.Expr, at: te.Expr) -> Stmt:
        return block(self._fill(here, at), self._plain(here, at, self._transposed))

    def _written(self, column: te.Expr, at: te.Expr, loaded: te.Expr, *, streamed: bool = False) -> Store:
        position = {self.pattern.written: at + self.lane, self.pattern.read: column}
        index, value, origin = (
            te.substitute(expr, position)
            for expr in (self.formula.store, self.formula.value, self.pattern.load)
        )
        found = te.rewrite(value, lambda node: loaded if node == origin else None)
        return Store(self.formula.output, index, found, streamed)
