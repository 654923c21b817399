"""Elements that are read along one axis and written along another: tiles turned in registers.

    for every block of tiles:                        (parallel)
      for every tile in it:
        tile[b, :] = x[b, a : a + lanes]             (vectors along the axis that is contiguous in x)
        transpose tile
        out[a, :] = value(tile[a, :])                (vectors along the axis that is contiguous in the output)

Of an axis of two to four elements a tile holds the whole: where neighbours along the other axis lie behind each other
in memory (the channels of an image), its elements are one run, read or written in whole vectors. What is written that
often (an image enlarged) is such a tile of equal rows.

Beyond the caches, what is written comes first: the tiles of a block follow each other down the axis that is written,
two at a time where that fits, so that each row of the output gets a run of lines. What is read are then single lines of
many rows. So they are asked for a block ahead, row after row, and wait in the second cache: memory sees runs on both
sides, all the time.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright import te
from tilewright.hw import CpuMachine
from tilewright.loops.formula import Formula
from tilewright.loops.ir import Buffer, Kind, Prefetch, Program, Scope, Stmt, Store, Transpose, block, nest
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
from tilewright.support.arith import ceil_div
from tilewright.te.index import coefficient, divisor_of

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
    if streamed and not turn.writes_run and not _writes_lines(formula, turn, machine):
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
        tiles = ceil_div(self.axis.extent, self.size)
        equal = ceil_div(tiles, ceil_div(tiles, self.most))
        return Tiles(self.axis, self.size * min(equal, self.axis.extent // self.size))

    @property
    def inside(self) -> te.Var:
        """The loop over the tiles of a block."""
        return te.Var(f"{self.axis.name}_i", self.blocks.size // self.size)

    def start(self) -> te.Expr:
        return self.blocks.start() + self.inside * self.size


def _program(formula: Formula, machine: CpuMachine, turn: Turn, *, streamed: bool) -> Program:
    asks = streamed and _reads_lines(turn, machine)  # for the next block
    written, read = _cut(formula, turn, machine) if asks else _cut_for_registers(turn, streamed=streamed)
    size, held = turn.rows * turn.columns, written.size // turn.rows
    tiles = [Buffer(f"tile{n or ''}", turn.load.dtype, size, Scope.REGISTER) for n in range(held)]
    inside = [read.inside, written.inside] if asks else [written.inside, read.inside]
    outside = [axis for axis in formula.axes if axis not in (turn.read, turn.written)]
    blocks = [*outside, read.blocks.var, written.blocks.var]
    step, lane = te.Var("u", size // turn.lanes), te.Var("v", turn.lanes)
    steps, in_lanes = [(step, Kind.UNROLL)], [(lane, Kind.VECTOR)]
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

    def asked_beside_load() -> list[Stmt]:
        """What is read a few tiles later in the same rows."""
        if asks or not streamed or not coefficient(offset, turn.written) or turn.reads_run:
            return []
        later = read.inside + _AHEAD
        at = {
            turn.written: written.start() + later // read.inside.extent * turn.rows + step,
            turn.read: read.blocks.start() + later % read.inside.extent * turn.columns,
        }
        return [Prefetch(source, te.substitute(offset, at), level=1)]

    def asked_beside_store(number: int) -> list[Stmt]:
        """A line of the next block, with each that is written of this one: the faster place, as measured."""
        if not asks:
            return []
        together = read.inside * written.inside.extent + written.inside
        line = _line_of_block(turn, together, held * turn.rows, step * held + number, read.inside.extent)
        at = {turn.written: written.blocks.start(), turn.read: read.blocks.start()}
        following = places_of(row_major(blocks) + 1, blocks)
        return [Prefetch(source, te.substitute(te.substitute(offset, at) + line, following), level=2)]

    def turned(number: int, tile: Buffer) -> Stmt:
        row = step + number * turn.rows
        place = placed(offset, 0, 0) + element if turn.reads_run else placed(offset, row, lane)
        moved = nest(in_lanes, Store(tile, element, te.Load(source, (place,))))
        fill = nest(steps, block(moved, *asked_beside_load()))
        return block(fill, Transpose(tile, turn.rows, turn.columns, turn.lanes))

    def stored(number: int, tile: Buffer) -> Stmt:
        """A vector of tile `number`."""
        at = (0, 0) if turn.writes_run else (lane + number * turn.rows, step)
        place = placed(formula.store, *at)
        value = value_from(tile, element, at)
        index = place + element if turn.writes_run else place
        moved = nest(in_lanes, Store(formula.output, index, value, streamed))
        return block(moved, *asked_beside_store(number))

    together = list(enumerate(tiles))
    write = nest(steps, block(*(stored(number, tile) for number, tile in together)))
    body = block(*(turned(number, tile) for number, tile in together), write)
    body = nest([(loop, Kind.SERIAL) for loop in inside], body)
    body = parallel_nest(blocks, 2 * size * held * extent_of(inside), body)
    decisions = f"transposed: tiles of {turn}" + (", streamed" if streamed else "")
    return Program(formula.name, (*formula.inputs, formula.output), with_values(body, {}), decisions)


def _cut_for_registers(turn: Turn, *, streamed: bool) -> tuple[_Cut, _Cut]:
    """The axes (written, read) in small blocks; in long ones along what is read, where all of it comes from memory."""
    return (
        _Cut(turn.written, turn.rows, _BLOCK),
        _Cut(turn.read, turn.columns, _RUN if streamed else _BLOCK),
    )


def _cut(formula: Formula, turn: Turn, machine: CpuMachine) -> tuple[_Cut, _Cut]:
    """The axes (written, read) in blocks that the second cache keeps: runs of what is read, of as many rows.

    Two tiles together write two lines to each row of the output. That takes all registers, so only where elements are
    moved as they are, and it pays where rows go on behind the block: from rows as short as that, one tile at a time is
    read faster.
    """
    width = turn.load.dtype.bytes * turn.columns
    read = _Cut(turn.read, turn.columns, max(1, _READ // width))
    rows = machine.caches.l2_per_core // _KEPT // (width * read.inside.extent)
    single = _Cut(turn.written, turn.rows, max(1, rows // turn.rows))
    fits = formula.value == turn.load and 2 * turn.rows <= min(machine.vector_registers, turn.written.extent)
    if not fits or read.blocks.count == 1:
        return single, read
    pair = _Cut(turn.written, 2 * turn.rows, max(1, rows // (2 * turn.rows)))
    return (pair if pair.blocks.waste <= single.blocks.waste else single), read


def _line_of_block(turn: Turn, together: te.Expr, count: int, number: te.Expr, lines: int) -> te.Expr:
    """Where in a block, from its first element on, line `together * count + number` is: row after row, `lines` to each.
    A number is divided once for all `count` where that will do: to find the row and the place in it of each line takes
    as long as to turn the tiles."""
    pitch = coefficient(turn.load.indices[0], turn.written)
    assert pitch is not None
    first, to_next_row = together * count, pitch - lines * turn.columns
    if to_next_row == 0:
        return (first + number) * turn.columns
    if count % lines == 0:
        return (together * (count // lines) + number // lines) * pitch + number % lines * turn.columns
    if lines < count:
        return (first + number) // lines * pitch + (first + number) % lines * turn.columns
    line = first % lines + number
    place = first // lines * pitch + line * turn.columns
    return place if lines % count == 0 else place + line // lines * to_next_row


def _reads_lines(turn: Turn, machine: CpuMachine) -> bool:
    """Whether a tile's rows are read from places that begin a cache line: otherwise two of each are waited for. Where
    data says which places, behind the last block there is none to ask."""
    (offset,) = turn.load.indices
    begin = te.substitute(offset, {turn.read: te.as_index(0)})
    square = not turn.reads_run and not turn.writes_run and not te.loads(begin)
    return square and divisor_of(begin) * turn.load.dtype.bytes % machine.line_bytes == 0


def _writes_lines(formula: Formula, turn: Turn, machine: CpuMachine) -> bool:
    """Whether each vector of the result is a whole cache line."""
    vector = turn.lanes * formula.output.dtype.bytes
    whole = vector == machine.line_bytes and turn.written.extent % turn.lanes == 0
    return (
        whole and divisor_of(te.substitute(formula.store, {turn.written: te.as_index(0)})) % turn.lanes == 0
    )
