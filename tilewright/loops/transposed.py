"""Elements that are read along one axis and written along another: tiles turned in registers.

    for every block of tiles:                        (parallel)
      for every tile in it:
        tile[b, :] = x[b, a : a + lanes]             (vectors along the axis that is contiguous in x)
        transpose tile
        out[a, :] = value(tile[a, :])                (vectors along the axis that is contiguous in the output)

Of an axis of two to four elements a tile holds the whole: where neighbours along the other axis lie behind each other
in memory (the channels of an image), its elements are one run, read or written in whole vectors. What is written that
often (an image enlarged) is such a tile of equal rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright import te
from tilewright.hw import CpuMachine
from tilewright.loops.formula import Formula
from tilewright.loops.ir import Buffer, Kind, Prefetch, Program, Scope, Stmt, Store, Transpose, block, nest
from tilewright.loops.tiling import (
    Tiles,
    extent_of,
    is_streamed,
    lanes_for,
    parallel_nest,
    power_of_two_below,
    streamed_run,
    with_values,
)
from tilewright.te.index import coefficient, divisor_of, simplify

_LINE = 64
_BLOCK = 4  # tiles of a block, along both axes or along the shorter side
_RUN = 64  # tiles along what is read, where all of it comes from memory
_STAGED = 64  # tiles along what is written, where these are put together in scratch first
_PAGE = 4 << 10
_SHORT = 4  # elements of an axis that a tile holds as a whole


def transposed_program(formula: Formula, machine: CpuMachine) -> Program | None:
    """None where nothing is read along another axis than it is written along, or not in tiles."""
    turn = _turn_of(formula, machine)
    return None if turn is None else _program(formula, machine, turn)


@dataclass(frozen=True)
class _Turn:
    """What is read through a tile, and the tile: `rows` by `columns` elements of the axes (written, read)."""

    load: te.Load
    read: te.Var  # the axis that is contiguous in what is read
    written: te.Var  # and in the output
    lanes: int
    rows: int
    columns: int

    @property
    def reads_run(self) -> bool:
        return self.columns < self.lanes

    @property
    def writes_run(self) -> bool:
        return self.rows < self.lanes


def _turn_of(formula: Formula, machine: CpuMachine) -> _Turn | None:
    written = next((axis for axis in reversed(formula.axes) if coefficient(formula.store, axis) == 1), None)
    if formula.reductions or written is None:
        return None
    loads = te.unguarded_loads(formula.value)
    turned = {load for load in loads if coefficient(load.indices[0], written) not in (0, 1)}
    if not turned and written.extent <= _SHORT:
        turned = {load for load in loads if coefficient(load.indices[0], written) == 0}
    if len(turned) != 1:
        return None
    (load,) = turned
    read = next((axis for axis in formula.axes if coefficient(load.indices[0], axis) == 1), None)
    if read is None or coefficient(load.indices[0], written) is None:
        return None
    # A tile of so many vectors fits the registers.
    lanes = min(lanes_for(formula, machine, max(read.extent, written.extent)), machine.vector_registers)
    short = min(_SHORT, lanes - 1)  # a run is narrower than a vector
    if 1 < written.extent <= short and _is_run(formula.store, written, read) and read.extent >= lanes:
        if {read, written} & _variables_outside(formula.value, load):
            return None
        return _Turn(load, read, written, lanes, written.extent, lanes)
    if 1 < read.extent <= short and _is_run(load.indices[0], read, written) and written.extent >= lanes:
        return _Turn(load, read, written, lanes, lanes, read.extent)
    if coefficient(load.indices[0], written) == 0:
        return None
    lanes = min(lanes, power_of_two_below(min(read.extent, written.extent)))
    return _Turn(load, read, written, lanes, lanes, lanes) if lanes >= 4 else None


def _is_run(offset: te.Expr, inner: te.Var, outer: te.Var) -> bool:
    return coefficient(offset, inner) == 1 and coefficient(offset, outer) == inner.extent


def _variables_outside(expr: te.Expr, load: te.Load) -> set[te.Var]:
    return te.variables(te.rewrite(expr, lambda node: te.const(0, load.dtype) if node == load else None))


@dataclass(frozen=True)
class _Cut:
    """An axis cut into blocks, and these into tiles."""

    axis: te.Var
    size: int
    most: int  # tiles in a block

    @property
    def blocks(self) -> Tiles:
        return Tiles(self.axis, self.size * min(self.most, self.axis.extent // self.size))

    @property
    def inside(self) -> te.Var:
        """The loop over the tiles of a block."""
        return te.Var(f"{self.axis.name}_i", self.blocks.size // self.size)

    def start(self) -> te.Expr:
        return self.blocks.start() + self.inside * self.size


def _program(formula: Formula, machine: CpuMachine, turn: _Turn) -> Program:
    streamed = is_streamed(formula, machine)
    staged = streamed and not turn.writes_run and not _writes_lines(formula, turn)
    tile = Buffer("tile", turn.load.dtype, turn.rows * turn.columns, Scope.REGISTER)
    written = _Cut(turn.written, turn.rows, _STAGED if staged else _BLOCK)
    read = _Cut(turn.read, turn.columns, _RUN if streamed and not staged else _BLOCK)
    step, lane = te.Var("u", tile.size // turn.lanes), te.Var("v", turn.lanes)
    in_tile = [(step, Kind.UNROLL), (lane, Kind.VECTOR)]
    element = step * turn.lanes + lane

    def placed(expr: te.Expr, at_written: te.Expr | int, at_read: te.Expr | int) -> te.Expr:
        return te.substitute(
            expr, {turn.written: written.start() + at_written, turn.read: read.start() + at_read}
        )

    def value_from(source: Buffer, place: te.Expr, at: tuple[te.Expr | int, te.Expr | int]) -> te.Expr:
        origin, loaded = placed(turn.load, *at), te.Load(source, (place,))
        return te.rewrite(placed(formula.value, *at), lambda node: loaded if node == origin else None)

    source, (offset,) = turn.load.source, turn.load.indices
    assert isinstance(source, Buffer)
    place = placed(offset, 0, 0) + element if turn.reads_run else placed(offset, step, lane)
    fill = nest(in_tile, Store(tile, element, te.Load(source, (place,))))
    ahead = te.Var("r", turn.rows)
    level = 2 if staged else 1
    asked = nest([(ahead, Kind.UNROLL)], Prefetch(source, placed(offset, ahead + turn.rows, 0), level))
    # The processor's own look-ahead follows longer runs, and leaves its buffers of misses to what is written.
    short = read.blocks.size * turn.load.dtype.bytes < _PAGE
    moves = coefficient(offset, turn.written) != 0
    fill = block(asked, fill) if streamed and short and moves and not turn.reads_run else fill

    inside = [written.inside, read.inside]
    width = written.blocks.size
    stage = Buffer("stage", tile.dtype, width * read.blocks.size, Scope.SCRATCH)
    if staged:
        at = (read.inside * turn.columns + step) * width + written.inside * turn.rows + lane
        write = nest(in_tile, Store(stage, at, te.Load(tile, (element,))))
    elif turn.writes_run:
        value = value_from(tile, element, (0, 0))
        write = nest(in_tile, Store(formula.output, placed(formula.store, 0, 0) + element, value, streamed))
    else:
        value = value_from(tile, element, (lane, step))
        write = nest(in_tile, Store(formula.output, placed(formula.store, lane, step), value, streamed))
    turned = block(fill, Transpose(tile, turn.rows, turn.columns, turn.lanes), write)
    body = nest([(loop, Kind.SERIAL) for loop in inside], turned)
    if staged:
        body = block(body, _write_staged(formula, turn, read, written, stage))
    outside = [axis for axis in formula.axes if axis not in (turn.read, turn.written)]
    body = parallel_nest(
        [*outside, read.blocks.var, written.blocks.var], 2 * tile.size * extent_of(inside), body
    )
    shape = f"{turn.rows} x {turn.columns} of ({turn.written.name}, {turn.read.name})"
    decisions = (
        f"transposed: tiles of {shape}" + (", staged" if staged else "") + (", streamed" if streamed else "")
    )
    return Program(formula.name, (*formula.inputs, formula.output), with_values(body, {}), decisions)


def _write_staged(formula: Formula, turn: _Turn, read: _Cut, written: _Cut, stage: Buffer) -> Stmt:
    """The rows of a block from scratch to the output, whole lines of them past the caches."""
    row, along = te.Var("row", read.blocks.size), te.Var("along", written.blocks.size)
    origin: dict[te.Var, te.Expr] = {turn.read: read.blocks.start() + row}

    def write(place: te.Expr, index: te.Expr, streamed: bool) -> Store:
        at = {**origin, turn.written: written.blocks.start() + place}
        loaded, moved = te.Load(stage, (row * along.extent + place,)), te.substitute(turn.load, at)
        value = te.rewrite(te.substitute(formula.value, at), lambda node: loaded if node == moved else None)
        return Store(formula.output, index, value, streamed)

    begin = te.substitute(formula.store, {**origin, turn.written: written.blocks.start()})
    run = streamed_run(along, simplify(begin), turn.lanes, write)
    if run is None:
        tiles, lane = Tiles(along, turn.lanes), te.Var("v", turn.lanes)
        place = tiles.start() + lane
        run = nest([(tiles.var, Kind.SERIAL), (lane, Kind.VECTOR)], write(place, begin + place, True))
    return nest([(row, Kind.SERIAL)], run)


def _writes_lines(formula: Formula, turn: _Turn) -> bool:
    """Whether each vector of the result is a whole cache line."""
    whole = turn.lanes * formula.output.dtype.bytes == _LINE and turn.written.extent % turn.lanes == 0
    return (
        whole and divisor_of(te.substitute(formula.store, {turn.written: te.as_index(0)})) % turn.lanes == 0
    )
