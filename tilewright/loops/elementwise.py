"""Formulas without a reduction: one vector axis, the rest outside.

    for all other axes:                              (the outer ones parallel)
      for tiles of the axis: out[u, :] = value       (u unrolled, in lanes)

Where an element comes from one of several inputs by its place along an axis (a concatenation), that is not decided
element by element: the axis is cut into pieces that come from one of them. Along the vector axis each piece has a loop
of its own; along any other there is a branch around a tile.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from tilewright import te
from tilewright.hw import CpuMachine
from tilewright.loops.formula import Formula
from tilewright.loops.ir import If, Kind, Program, Stmt, Store, block, nest
from tilewright.loops.tiling import (
    Tiles,
    extent_of,
    is_streamed,
    lanes_for,
    load_offsets,
    parallel_nest,
    power_of_two_below,
    vector_cost,
    with_values,
)
from tilewright.te.index import simplify

_UNROLLED = 8  # vectors of one tile
_LARGE = 24  # nodes of an expression of which fewer copies are written out
_LOOP = 0.75  # what an iteration costs, in vectors
_SHARED = 16  # iterations outside of the vector axis that are enough to share among threads


def elementwise_program(formula: Formula, machine: CpuMachine) -> Program:
    if not formula.axes:
        store = Store(formula.output, formula.store, formula.value)
        return _program(formula, store, "scalar")
    offsets = [*load_offsets(formula.value), formula.store]
    costs = {
        axis: vector_cost(offsets, axis, lanes_for(formula, machine, axis.extent))
        for axis in reversed(formula.axes)
    }
    axis = min(costs, key=lambda a: costs[a])
    outer = [a for a in formula.axes if a != axis]
    writer = _Writer(formula, lanes_for(formula, machine, axis.extent), is_streamed(formula, machine))
    pieces = _pieces(formula)
    words = f"elementwise: {axis.name} in vectors of {writer.lanes}" + (
        ", streamed" if writer.streamed else ""
    )
    if pieces and pieces[0].axis == axis and extent_of(outer) >= _SHARED:
        stmts = []
        for piece in pieces:
            tiles = writer.tiles(piece.inside)
            stmts.append(nest([(tiles.var, Kind.SERIAL)], writer.tile(tiles, piece.of(formula))))
        body = parallel_nest(outer, axis.extent * len(offsets), block(*stmts))
        return _program(formula, body, f"{words}, {len(pieces)} pieces")
    tiles = writer.tiles(axis)
    tile = writer.tile(tiles, formula)
    if pieces and pieces[0].axis != axis:
        tile = writer.tile(tiles, pieces[-1].placed(formula))
        for piece in reversed(pieces[:-1]):
            before = te.call("lt", piece.axis, te.as_index(piece.end))
            tile = If(before, writer.tile(tiles, piece.placed(formula)), tile)
        words = f"{words}, {len(pieces)} pieces of {pieces[0].axis.name}"
    return _program(formula, parallel_nest([*outer, tiles.var], tiles.size * len(offsets), tile), words)


def _program(formula: Formula, body: Stmt, decisions: str) -> Program:
    return Program(formula.name, (*formula.inputs, formula.output), with_values(body, {}), decisions)


def best_unroll(extent: int, lanes: int, most: int) -> int:
    """Vectors in a tile, at most `most`: what the last one does again and what the loop costs weigh least."""
    choices = [n for n in range(1, most + 1) if n * lanes <= extent] or [1]
    return min(choices, key=lambda n: -(-extent // (n * lanes)) * (n + _LOOP))


@dataclass(frozen=True)
class _Writer:
    formula: Formula
    lanes: int
    streamed: bool

    def tiles(self, axis: te.Var) -> Tiles:
        large = sum(1 for _ in te.walk(self.formula.value)) > _LARGE
        lanes = min(self.lanes, power_of_two_below(axis.extent))
        return Tiles(axis, lanes * best_unroll(axis.extent, lanes, _UNROLLED // 2 if large else _UNROLLED))

    def tile(self, tiles: Tiles, formula: Formula) -> Stmt:
        lanes = min(self.lanes, power_of_two_below(tiles.size))
        lane, step = te.Var("v", lanes), te.Var("u", tiles.size // lanes)
        position = {tiles.axis: tiles.start() + step * lanes + lane}
        index, value = (te.substitute(expr, position) for expr in (formula.store, formula.value))
        return nest(
            [(step, Kind.UNROLL), (lane, Kind.VECTOR)], Store(formula.output, index, value, self.streamed)
        )


@dataclass(frozen=True)
class _Piece:
    """The places of an axis from `begin` to before `end`."""

    axis: te.Var
    begin: int
    end: int

    @property
    def inside(self) -> te.Var:
        return te.Var(f"{self.axis.name}_{self.begin}", self.end - self.begin)

    def of(self, formula: Formula) -> Formula:
        """The formula along `inside`, all that is decided there decided."""
        return formula.map(lambda expr: simplify(te.substitute(expr, {self.axis: self.inside + self.begin})))

    def placed(self, formula: Formula) -> Formula:
        """The same along the whole axis; it holds in the piece."""
        return self.of(formula).map(
            lambda expr: te.substitute(expr, {self.inside: self.axis + (-self.begin)})
        )


def _pieces(formula: Formula) -> list[_Piece]:
    """The pieces of the first axis along which a choice between loads changes; none where there is no such axis."""
    cuts: dict[te.Var, set[int]] = {}
    for node in te.walk(formula.value):
        if not (isinstance(node, te.Select) and te.loads(node.then) and te.loads(node.other)):
            continue
        if isinstance(node.cond, te.Call) and node.cond.op == "lt":
            axis, end = node.cond.args
            if isinstance(axis, te.Var) and isinstance(end, te.Const) and axis in formula.axes:
                cuts.setdefault(axis, set()).add(int(end.value))
    if not cuts:
        return []
    axis, found = next(iter(cuts.items()))
    ends = [0, *sorted(end for end in found if 0 < end < axis.extent), axis.extent]
    return [_Piece(axis, begin, end) for begin, end in itertools.pairwise(ends)]
