"""Elements that are read along one axis and written along another: tiles turned in registers.

    for every block of tiles:                        (parallel)
      for every tile in it:
        tile[b, :] = x[b, a : a + lanes]             (vectors along the axis that is contiguous in x)
        transpose tile
        out[a, :] = value(tile[a, :])                (vectors along the axis that is contiguous in the output)

Of an axis of two to four elements a tile holds the whole: where neighbours along the other axis lie behind each other
in memory (the channels of an image), its elements are one run, read or written in whole vectors. What is written that
often (an image enlarged) is such a tile of equal rows.

Beyond the caches, what is written comes first: the tiles of a block follow each other down the axis that is written, so
that each row of the output gets a run of lines. What is read are then single lines of many rows. So they are asked for
a block ahead, row after row, and wait in the second cache: memory sees runs on both sides, all the time.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright import te
from tilewright.hw import CpuMachine
from tilewright.loops.formula import Formula
from tilewright.loops.ir import Buffer, Kind, Prefetch, Program, Scope, Store, Transpose, block, nest
from tilewright.loops.rolled import rolled_program
from tilewright.loops.tiling import (
    Tiles,
    extent_of,
    is_streamed,
    parallel_nest,
    places_of,
    row_major,
    with_values,
)
from tilewright.loops.turn import Turn, turn_of
from tilewright.te.index import coefficient, divisor_of

_LINE = 64
_BLOCK = 4  # tiles of a block, along both axes or along the shorter side
_RUN = 64  # short tiles along what is read, where all of it comes from memory
_AHEAD = 8  # of them, between what is read and what is asked for
_READ = 2 << 10  # bytes of each row that a block reads, where the next one is asked for
_KEPT = 8  # such blocks fill the second cache: two of them stay there among other things


def transposed_program(formula: Formula, machine: CpuMachine) -> Program | None:
    """None where nothing is read along another axis than it is written along, or not in tiles."""
    turn = turn_of(formula, machine)
    if turn is None:
        return None
    streamed = is_streamed(formula, machine)
    if streamed and not turn.writes_run and not _writes_lines(formula, turn):
        return rolled_program(formula, machine, turn) or _program(formula, machine, turn, streamed=False)
    return _program(formula, machine, turn, streamed=streamed)


@dataclass(frozen=True)
class _Cut:
    """An axis cut into blocks, as equal as can be, and these into tiles."""

    axis: te.Var
    size: int
    most: int  # tiles in a block

    @property
    def blocks(self) -> Tiles:
        tiles = -(-self.axis.extent // self.size)
        equal = -(-tiles // -(-tiles // self.most))
        return Tiles(self.axis, self.size * min(equal, self.axis.extent // self.size))

    @property
    def inside(self) -> te.Var:
        """The loop over the tiles of a block."""
        return te.Var(f"{self.axis.name}_i", self.blocks.size // self.size)

    def start(self) -> te.Expr:
        return self.blocks.start() + self.inside * self.size


def _program(formula: Formula, machine: CpuMachine, turn: Turn, *, streamed: bool) -> Program:
    tile = Buffer("tile", turn.load.dtype, turn.rows * turn.columns, Scope.REGISTER)
    asks = streamed and _reads_lines(turn)  # for the next block
    written, read = _cut(turn, machine) if asks else _cut_for_registers(turn, streamed=streamed)
    inside = [read.inside, written.inside] if asks else [written.inside, read.inside]
    outside = [axis for axis in formula.axes if axis not in (turn.read, turn.written)]
    blocks = [*outside, read.blocks.var, written.blocks.var]
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
    moved = Store(tile, element, te.Load(source, (place,)))
    fill = nest(in_tile, moved)
    asked = None
    if asks:
        line = (read.inside * written.inside.extent + written.inside) * turn.rows + step
        row, column = line // read.inside.extent, line % read.inside.extent * turn.columns
        at = {turn.written: written.blocks.start() + row, turn.read: read.blocks.start() + column}
        following = places_of(row_major(blocks) + 1, blocks)
        asked = Prefetch(source, te.substitute(te.substitute(offset, at), following), level=2)
    elif streamed and coefficient(offset, turn.written) and not turn.reads_run:
        later = read.inside + _AHEAD
        at = {
            turn.written: written.start() + later // read.inside.extent * turn.rows + step,
            turn.read: read.blocks.start() + later % read.inside.extent * turn.columns,
        }
        asked = Prefetch(source, te.substitute(offset, at), level=1)
    if asked is not None:
        fill = nest([(step, Kind.UNROLL)], block(nest([(lane, Kind.VECTOR)], moved), asked))

    if turn.writes_run:
        value = value_from(tile, element, (0, 0))
        write = nest(in_tile, Store(formula.output, placed(formula.store, 0, 0) + element, value, streamed))
    else:
        value = value_from(tile, element, (lane, step))
        write = nest(in_tile, Store(formula.output, placed(formula.store, lane, step), value, streamed))
    turned = block(fill, Transpose(tile, turn.rows, turn.columns, turn.lanes), write)
    body = nest([(loop, Kind.SERIAL) for loop in inside], turned)
    body = parallel_nest(blocks, 2 * tile.size * extent_of(inside), body)
    decisions = f"transposed: tiles of {turn}" + (", streamed" if streamed else "")
    return Program(formula.name, (*formula.inputs, formula.output), with_values(body, {}), decisions)


def _cut_for_registers(turn: Turn, *, streamed: bool) -> tuple[_Cut, _Cut]:
    """The axes (written, read) in small blocks; in long ones along what is read, where all of it comes from memory."""
    return (
        _Cut(turn.written, turn.rows, _BLOCK),
        _Cut(turn.read, turn.columns, _RUN if streamed else _BLOCK),
    )


def _cut(turn: Turn, machine: CpuMachine) -> tuple[_Cut, _Cut]:
    """The axes (written, read) in blocks that the second cache keeps: runs of what is read, of as many rows."""
    width = turn.load.dtype.bytes * turn.columns
    read = _Cut(turn.read, turn.columns, max(1, _READ // width))
    rows = machine.caches.l2_per_core // _KEPT // (width * read.inside.extent)
    return _Cut(turn.written, turn.rows, max(1, rows // turn.rows)), read


def _reads_lines(turn: Turn) -> bool:
    """Whether a tile's rows are read from places that begin a cache line: otherwise two of each are waited for. Where
    data says which places, behind the last block there is none to ask."""
    (offset,) = turn.load.indices
    begin = te.substitute(offset, {turn.read: te.as_index(0)})
    square = not turn.reads_run and not turn.writes_run and not te.loads(begin)
    return square and divisor_of(begin) * turn.load.dtype.bytes % _LINE == 0


def _writes_lines(formula: Formula, turn: Turn) -> bool:
    """Whether each vector of the result is a whole cache line."""
    whole = turn.lanes * formula.output.dtype.bytes == _LINE and turn.written.extent % turn.lanes == 0
    return (
        whole and divisor_of(te.substitute(formula.store, {turn.written: te.as_index(0)})) % turn.lanes == 0
    )
