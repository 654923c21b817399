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
from tilewright.loops.ir import Buffer, Kind, Prefetch, Program, Scope, Store, Transpose, block, nest
from tilewright.loops.rolled import rolled_program
from tilewright.loops.tiling import (
    Tiles,
    extent_of,
    is_streamed,
    parallel_nest,
    with_values,
)
from tilewright.loops.turn import Turn, turn_of
from tilewright.te.index import coefficient, divisor_of

_LINE = 64
_BLOCK = 4  # tiles of a block, along both axes or along the shorter side
_RUN = 64  # tiles along what is read, where all of it comes from memory
_AHEAD = 8  # tiles between what is read and what is asked for


def transposed_program(formula: Formula, machine: CpuMachine) -> Program | None:
    """None where nothing is read along another axis than it is written along, or not in tiles."""
    turn = turn_of(formula, machine)
    if turn is None:
        return None
    streamed = is_streamed(formula, machine)
    if streamed and not turn.writes_run and not _writes_lines(formula, turn):
        return rolled_program(formula, machine, turn) or _program(formula, turn, streamed=False)
    return _program(formula, turn, streamed=streamed)


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


def _program(formula: Formula, turn: Turn, *, streamed: bool) -> Program:
    tile = Buffer("tile", turn.load.dtype, turn.rows * turn.columns, Scope.REGISTER)
    written = _Cut(turn.written, turn.rows, _BLOCK)
    read = _Cut(turn.read, turn.columns, _RUN if streamed else _BLOCK)
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
    if streamed and coefficient(offset, turn.written) and not turn.reads_run:
        later = read.inside + _AHEAD
        at = {
            turn.written: written.start() + later // read.inside.extent * turn.rows + step,
            turn.read: read.blocks.start() + later % read.inside.extent * turn.columns,
        }
        asked = Prefetch(source, te.substitute(offset, at), level=1)
        fill = nest([(step, Kind.UNROLL)], block(nest([(lane, Kind.VECTOR)], moved), asked))

    inside = [written.inside, read.inside]
    if turn.writes_run:
        value = value_from(tile, element, (0, 0))
        write = nest(in_tile, Store(formula.output, placed(formula.store, 0, 0) + element, value, streamed))
    else:
        value = value_from(tile, element, (lane, step))
        write = nest(in_tile, Store(formula.output, placed(formula.store, lane, step), value, streamed))
    turned = block(fill, Transpose(tile, turn.rows, turn.columns, turn.lanes), write)
    body = nest([(loop, Kind.SERIAL) for loop in inside], turned)
    outside = [axis for axis in formula.axes if axis not in (turn.read, turn.written)]
    body = parallel_nest(
        [*outside, read.blocks.var, written.blocks.var], 2 * tile.size * extent_of(inside), body
    )
    decisions = f"transposed: tiles of {turn}" + (", streamed" if streamed else "")
    return Program(formula.name, (*formula.inputs, formula.output), with_values(body, {}), decisions)


def _writes_lines(formula: Formula, turn: Turn) -> bool:
    """Whether each vector of the result is a whole cache line."""
    whole = turn.lanes * formula.output.dtype.bytes == _LINE and turn.written.extent % turn.lanes == 0
    return (
        whole and divisor_of(te.substitute(formula.store, {turn.written: te.as_index(0)})) % turn.lanes == 0
    )
