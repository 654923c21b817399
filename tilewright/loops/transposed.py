"""Elements that are read along one axis and written along another: tiles turned in registers.

    for every block of tiles:                        (parallel)
      for every tile in it:
        tile[b, :] = x[b, a : a + lanes]             (vectors along the axis that is contiguous in x)
        transpose tile
        out[a, :] = value(tile[a, :])                (vectors along the axis that is contiguous in the output)

Of an axis of two to four elements a tile holds the whole: where neighbours along the other axis lie behind each other
in memory (the channels of an image), its elements are one run, read or written in whole vectors.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright import te
from tilewright.hw import CpuMachine
from tilewright.loops.formula import Formula
from tilewright.loops.ir import Buffer, Kind, Program, Scope, Store, Transpose, block, nest
from tilewright.loops.tiling import (
    Tiles,
    extent_of,
    is_streamed,
    lanes_for,
    parallel_nest,
    power_of_two_below,
    with_values,
)
from tilewright.te.index import coefficient

_BLOCK = 4  # tiles along each side of a block: what it reads and writes stays in the first cache
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
    turned = [
        load for load in _unguarded(formula.value) if coefficient(load.indices[0], written) not in (0, 1)
    ]
    if len(set(turned)) != 1:
        return None
    load = turned[0]
    read = next((axis for axis in formula.axes if coefficient(load.indices[0], axis) == 1), None)
    if read is None or coefficient(load.indices[0], written) is None:
        return None
    lanes = lanes_for(formula, machine, max(read.extent, written.extent))
    if 1 < written.extent <= _SHORT and _is_run(formula.store, written, read) and read.extent >= lanes:
        if {read, written} & _variables_outside(formula.value, load):
            return None
        return _Turn(load, read, written, lanes, written.extent, lanes)
    if 1 < read.extent <= _SHORT and _is_run(load.indices[0], read, written) and written.extent >= lanes:
        return _Turn(load, read, written, lanes, lanes, read.extent)
    lanes = min(lanes, power_of_two_below(min(read.extent, written.extent)))
    return _Turn(load, read, written, lanes, lanes, lanes) if lanes >= 4 else None


def _unguarded(expr: te.Expr) -> list[te.Load]:
    """The loads that are performed wherever `expr` is needed."""
    if isinstance(expr, te.Select):
        return _unguarded(expr.cond)
    below = [load for child in te.children(expr) for load in _unguarded(child)]
    return [expr, *below] if isinstance(expr, te.Load) and expr.indices else below


def _is_run(offset: te.Expr, inner: te.Var, outer: te.Var) -> bool:
    return coefficient(offset, inner) == 1 and coefficient(offset, outer) == inner.extent


def _variables_outside(expr: te.Expr, load: te.Load) -> set[te.Var]:
    return te.variables(te.rewrite(expr, lambda node: te.const(0, load.dtype) if node == load else None))


@dataclass(frozen=True)
class _Cut:
    """An axis cut into tiles, and these into blocks where there are enough."""

    axis: te.Var
    size: int

    @property
    def blocks(self) -> Tiles:
        whole = self.size * _BLOCK
        return Tiles(self.axis, whole if whole <= self.axis.extent else self.size)

    @property
    def inside(self) -> te.Var:
        """The loop over the tiles of a block."""
        return te.Var(f"{self.axis.name}_i", self.blocks.size // self.size)

    def start(self) -> te.Expr:
        return self.blocks.start() + self.inside * self.size


def _program(formula: Formula, machine: CpuMachine, turn: _Turn) -> Program:
    tile = Buffer("tile", turn.load.dtype, turn.rows * turn.columns, Scope.REGISTER)
    written, read = _Cut(turn.written, turn.rows), _Cut(turn.read, turn.columns)
    step, lane = te.Var("u", tile.size // turn.lanes), te.Var("v", turn.lanes)
    in_tile = [(step, Kind.UNROLL), (lane, Kind.VECTOR)]
    element = step * turn.lanes + lane
    in_registers = te.Load(tile, (element,))

    def placed(expr: te.Expr, at_written: te.Expr | int, at_read: te.Expr | int) -> te.Expr:
        return te.substitute(
            expr, {turn.written: written.start() + at_written, turn.read: read.start() + at_read}
        )

    source, (offset,) = turn.load.source, turn.load.indices
    place = placed(offset, 0, 0) + element if turn.reads_run else placed(offset, step, lane)
    fill = nest(in_tile, Store(tile, element, te.Load(source, (place,))))

    at = (0, 0) if turn.writes_run else (lane, step)
    origin = placed(turn.load, *at)
    value = te.rewrite(placed(formula.value, *at), lambda node: in_registers if node == origin else None)
    place = placed(formula.store, *at) + (element if turn.writes_run else 0)
    streamed = is_streamed(formula, machine)
    write = nest(in_tile, Store(formula.output, place, value, streamed))

    turned = block(fill, Transpose(tile, turn.rows, turn.columns, turn.lanes), write)
    inside = [read.inside, written.inside]
    outside = [axis for axis in formula.axes if axis not in (turn.read, turn.written)]
    body = parallel_nest(
        [*outside, read.blocks.var, written.blocks.var],
        2 * tile.size * extent_of(inside),
        nest([(loop, Kind.SERIAL) for loop in inside], turned),
    )
    shape = f"{turn.rows} x {turn.columns} of ({turn.written.name}, {turn.read.name})"
    decisions = f"transposed: tiles of {shape}" + (", streamed" if streamed else "")
    return Program(formula.name, (*formula.inputs, formula.output), with_values(body, {}), decisions)
