"""Upsampling by an integer factor: vectors of neighbours interleaved in registers.

Along the written axis, the elements o * factor + r of one r are read in order with the same weights, which differ
between values of r. Only the first and the last o have neighbours that do not exist.

    for all other axes:                              (the outer ones parallel)
      for tiles of o:
        tile[r, :] = value at (o * factor + r)       (r unrolled, o in lanes)
        transpose tile
        out[o * factor + r] = tile

An element is read for several results. If each reading would convert it from 16 bits, whole images are converted once:

    for all axes that select an image:               (the outer ones parallel)
      image[:] = f32(x)
      for all other axes: as above, with `image` instead of x
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright import te
from tilewright.dtypes import DType
from tilewright.hw import CpuMachine
from tilewright.loops.formula import Formula
from tilewright.loops.ir import Buffer, Kind, Program, Scope, Stmt, Store, Transpose, block, nest
from tilewright.loops.tiling import (
    Tiles,
    extent_of,
    is_streamed,
    lanes_for,
    load_offsets,
    parallel_nest,
    power_of_two_below,
    with_values,
)
from tilewright.te.index import bounds, coefficient, simplify

_FACTORS = (2, 3, 4)
_IMAGE_BYTES = 128 << 10  # the largest converted image: it stays in a core's own caches
_IMAGES = 16  # the fewest images that are enough for all threads


def upsample_program(formula: Formula, machine: CpuMachine) -> Program | None:
    """The program; None if all loads are linear, or no factor makes them so."""
    written = next((axis for axis in reversed(formula.axes) if coefficient(formula.store, axis) == 1), None)
    if formula.reductions or written is None or not _bent(load_offsets(formula.value), written):
        return None
    image = _converted_image(formula, machine)
    value = _before_narrowing(formula.value)
    read = value if image is None else image.read(value)
    for factor in _FACTORS:
        length, rest = divmod(written.extent, factor)
        lanes = lanes_for(formula, machine, power_of_two_below(length))
        if rest or length < max(lanes, 3) or lanes <= factor:
            continue
        phases = [_phase(read, written, factor, number) for number in range(factor)]
        found = [phase for phase in phases if phase is not None]
        if len(found) == factor:
            return _program(formula, machine, written, found, lanes, image)
    return None


def _before_narrowing(value: te.Expr) -> te.Expr:
    """A value that is rounded to 16 bits as it is stored is transposed before: there are fewer instructions for lanes
    of 16 bits."""
    return value.value if isinstance(value, te.Cast) and value.dtype.is_half else value


def _bent(offsets: list[te.Expr], axis: te.Var) -> bool:
    return any(coefficient(offset, axis) is None for offset in offsets)


@dataclass(frozen=True)
class _Phase:
    """The value at o * factor + r for one r: at the first o, in between, and at the last."""

    first: te.Expr
    between: te.Expr  # of `position`
    last: te.Expr
    position: te.Var

    def at(self, position: te.Expr, *, begins: bool, ends: bool) -> te.Expr:
        """The value in a tile at `position`, which may include the first or the last o."""
        value = te.substitute(self.between, {self.position: position})
        if ends:
            value = te.select(
                te.call("lt", position, te.as_index(self.position.extent - 1)), value, self.last
            )
        if begins:
            value = te.select(te.call("lt", position, te.as_index(1)), self.first, value)
        return value


def _phase(value: te.Expr, axis: te.Var, factor: int, number: int) -> _Phase | None:
    length = axis.extent // factor
    inner, position = te.Var("inner", length - 2), te.Var("place", length)

    def at(o: te.Expr) -> te.Expr:
        return simplify(te.substitute(value, {axis: o * factor + number}))

    between = at(inner + 1)
    if any(coefficient(offset, inner) not in (0, 1) for offset in load_offsets(between)):
        return None
    last = te.as_index(length - 1)
    return _Phase(at(te.as_index(0)), te.substitute(between, {inner: position + (-1)}), at(last), position)


@dataclass(frozen=True)
class _Image:
    """A block of the only input, converted to f32 before it is read."""

    source: Buffer
    begin: te.Expr  # its index in the source
    axes: tuple[te.Var, ...]  # that `begin` depends on
    converted: Buffer
    lanes: int

    def read(self, value: te.Expr) -> te.Expr:
        """The value with all loads from the block."""

        def replaced(node: te.Expr) -> te.Expr | None:
            load = _widened(node)
            return (
                None if load is None else te.Load(self.converted, (simplify(load.indices[0] - self.begin),))
            )

        return te.rewrite(value, replaced)

    def convert(self) -> Stmt:
        tiles, lane = Tiles(te.Var("s", self.converted.size), self.lanes), te.Var("sv", self.lanes)
        at = tiles.start() + lane
        element = te.cast(te.Load(self.source, (self.begin + at,)), self.converted.dtype)
        return nest([(tiles.var, Kind.SERIAL), (lane, Kind.VECTOR)], Store(self.converted, at, element))


def _converted_image(formula: Formula, machine: CpuMachine) -> _Image | None:
    """The block that one index of all axes along which the loads are linear selects; None if it is large, if there are
    few, or if nothing is converted."""
    loads = te.loads(formula.value)
    widened = {_widened(node) for node in te.walk(formula.value)}
    sources = {load.source for load in loads}
    if not loads or len(sources) != 1 or not set(loads) <= widened:
        return None
    source = loads[0].source
    assert isinstance(source, Buffer)
    begin: te.Expr = te.as_index(0)
    axes: tuple[te.Var, ...] = ()
    for axis in formula.axes:
        steps = {coefficient(load.indices[0], axis) for load in loads}
        step = steps.pop()
        if step and not steps:
            begin, axes = begin + axis * step, (*axes, axis)
    within = [bounds(simplify(load.indices[0] - begin)) for load in loads]
    if any(low is None or low < 0 or high is None for low, high in within):
        return None
    size = 1 + max(high for _, high in within if high is not None)
    last = bounds(simplify(begin))[1]
    if last is None or last + size > source.size or 4 * size > _IMAGE_BYTES or extent_of(axes) < _IMAGES:
        return None
    converted = Buffer("image", DType.F32, size, Scope.SCRATCH)
    return _Image(source, begin, axes, converted, min(machine.lanes(DType.F32), power_of_two_below(size)))


def _widened(node: te.Expr) -> te.Load | None:
    """The 16-bit element that a node converts to f32."""
    if not isinstance(node, te.Cast) or not isinstance(node.value, te.Load):
        return None
    return node.value if node.dtype is DType.F32 and node.value.dtype.is_half else None


def _program(
    formula: Formula,
    machine: CpuMachine,
    written: te.Var,
    phases: list[_Phase],
    lanes: int,
    image: _Image | None,
) -> Program:
    factor, streamed = len(phases), is_streamed(formula, machine)
    tiles = Tiles(phases[0].position, lanes)
    tile = Buffer("tile", phases[0].between.dtype, factor * lanes, Scope.REGISTER)
    lane, step = te.Var("v", lanes), te.Var("u", factor)

    def transposed(start: te.Expr, *, begins: bool, ends: bool) -> Stmt:
        fill = [
            nest(
                [(lane, Kind.VECTOR)],
                Store(tile, lane + number * lanes, phase.at(start + lane, begins=begins, ends=ends)),
            )
            for number, phase in enumerate(phases)
        ]
        element = step * lanes + lane
        index = te.substitute(formula.store, {written: start * factor + element})
        result = te.cast(te.Load(tile, (element,)), formula.output.dtype)
        write = Store(formula.output, index, result, streamed)
        return block(
            *fill,
            Transpose(tile, factor, lanes, lanes),
            nest([(step, Kind.UNROLL), (lane, Kind.VECTOR)], write),
        )

    between = te.Var(tiles.var.name, max(0, tiles.count - 2))
    stmts = [transposed(te.as_index(0), begins=True, ends=tiles.count == 1)]
    if between.extent:
        middle = transposed(simplify((between + 1) * lanes), begins=False, ends=False)
        stmts.append(nest([(between, Kind.SERIAL)], middle))
    if tiles.count > 1:
        stmts.append(transposed(te.as_index(tiles.axis.extent - lanes), begins=False, ends=True))
    outer = [axis for axis in formula.axes if axis != written]
    words = f"upsampled: {written.name} {factor} at a time, in vectors of {lanes}"
    if image is None:
        body = parallel_nest(outer, 4 * written.extent, block(*stmts))
    else:
        within = [axis for axis in outer if axis not in image.axes]
        rows = nest([(axis, Kind.SERIAL) for axis in within], block(*stmts))
        work = 4 * written.extent * extent_of(within)
        body = parallel_nest(image.axes, work, block(image.convert(), rows))
        words += ", converted image by image"
    words += ", streamed" if streamed else ""
    return Program(formula.name, (*formula.inputs, formula.output), with_values(body, {}), words)
