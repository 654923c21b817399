"""Upsampling by an integer factor: vectors of neighbours interleaved in registers.

Along the written axis, the elements o * factor + r of one r are read in order with the same weights, which differ
between values of r. Only the first and the last o have neighbours that do not exist.

    for all other axes:                              (the outer ones parallel)
      for tiles of o:
        tile[r, :] = value at (o * factor + r)       (r unrolled, o in lanes)
        transpose tile
        out[o * factor + r] = tile
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright import te
from tilewright.hw import CpuMachine
from tilewright.loops.formula import Formula
from tilewright.loops.ir import Buffer, Kind, Program, Scope, Stmt, Store, Transpose, block, nest
from tilewright.loops.tiling import (
    Tiles,
    is_streamed,
    lanes_for,
    load_offsets,
    parallel_nest,
    power_of_two_below,
    with_values,
)
from tilewright.te.index import coefficient, simplify

_FACTORS = (2, 3, 4)


def upsample_program(formula: Formula, machine: CpuMachine) -> Program | None:
    """The program; None if all loads are linear, or no factor makes them so."""
    written = next((axis for axis in reversed(formula.axes) if coefficient(formula.store, axis) == 1), None)
    if formula.reductions or written is None or not _bent(load_offsets(formula.value), written):
        return None
    for factor in _FACTORS:
        length, rest = divmod(written.extent, factor)
        lanes = lanes_for(formula, machine, power_of_two_below(length))
        if rest or length < max(lanes, 3) or lanes <= factor:
            continue
        phases = [_phase(formula.value, written, factor, number) for number in range(factor)]
        found = [phase for phase in phases if phase is not None]
        if len(found) == factor:
            return _program(formula, machine, written, found, lanes)
    return None


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


def _program(
    formula: Formula, machine: CpuMachine, written: te.Var, phases: list[_Phase], lanes: int
) -> Program:
    factor, streamed = len(phases), is_streamed(formula, machine)
    tiles = Tiles(phases[0].position, lanes)
    tile = Buffer("tile", formula.output.dtype, factor * lanes, Scope.REGISTER)
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
        write = Store(formula.output, index, te.Load(tile, (element,)), streamed)
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
    body = parallel_nest(outer, 4 * written.extent, block(*stmts))
    words = f"upsampled: {written.name} {factor} at a time, in vectors of {lanes}"
    words += ", streamed" if streamed else ""
    return Program(formula.name, (*formula.inputs, formula.output), with_values(body, {}), words)
