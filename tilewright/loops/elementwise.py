"""Formulas without a reduction: one vector axis, the rest outside.

    for all other axes:                              (the outer ones parallel)
      for tiles of the axis: out[u, :] = value       (u unrolled, in lanes)

If an axis index selects one of several inputs (a concatenation), this is not decided per element: the axis is cut
into segments, each from one input. Along the vector axis each segment has its own loop; along other axes there is a
branch around a tile.

If short runs of memory are permuted, consecutive output runs are read from different pages. Several of these are then
interleaved with the runs that follow them in memory, while their pages are open; or just one, if the hardware
prefetcher is not page-based:

    for blocks of axis a:
      for b:                                         (smaller stride than a in the input)
        for a in the block: out[b, a, :] = x[a, b, :]

Short rows that do not end at a cache line (a padded image) cannot be written with non-temporal stores one by one. As
many rows as together end at a line are staged in scratch memory and written from there:

    for every few rows:
      for row in them: stage[row, :] = value
      out[lines] = stage[lines]

Long functions of 16-bit floats are computed two vectors at a time: each is one chain of dependent instructions, and
the conversions make it longer.

The inside of a padded row is copied and its border filled, without a test for each vector.

Rows whose index is loaded (an embedding) are prefetched, as many ahead as are written during one memory latency.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tilewright import te
from tilewright.dtypes import DType
from tilewright.hw import CpuMachine
from tilewright.loops.formula import Formula
from tilewright.loops.guards import conjuncts, interval_of
from tilewright.loops.ir import Buffer, If, Kind, Prefetch, Program, Scope, Stmt, Store, block, nest
from tilewright.loops.tiling import (
    Tiles,
    best_unroll,
    extent_of,
    indices_of,
    is_streamed,
    lanes_for,
    load_offsets,
    parallel_nest,
    power_of_two_below,
    row_major,
    streamed_run,
    vector_cost,
    with_values,
)
from tilewright.support.arith import ceil_div
from tilewright.te.index import coefficient, simplify
from tilewright.te.scalars import EXPENSIVE_CALLS

_UNROLLED = 8  # vectors of one tile
_LARGE = 24  # expression size above which fewer copies are unrolled
_ROOM_FOR_TWO = 32  # registers for two vectors of a long function and its constants
_FEW, _MANY = 8, 16  # interleaved runs
_SHORT_ROW = 16  # lines: in longer rows the ends do not matter
_HELD = 64  # lines of staged rows: stores that the CPU can buffer while it continues
_SECOND_CACHE = 2
_ANSWERED = 8 << 10  # bytes of rows that are moved during one memory latency
_SHARED = 16  # iterations outside the vector axis that are enough for all threads


def elementwise_program(formula: Formula, machine: CpuMachine) -> Program:
    if not formula.axes:
        store = Store(formula.output, formula.store, formula.value)
        return _program(formula, store, "scalar")
    loads = load_offsets(formula.value)
    accesses = len(loads) + 1
    costs = {
        axis: vector_cost(loads, axis, lanes_for(formula, machine, axis.extent), [formula.store])
        for axis in reversed(formula.axes)
    }
    axis = min(costs, key=lambda a: costs[a])
    outer = [a for a in formula.axes if a != axis]
    lanes = lanes_for(formula, machine, axis.extent)
    in_pairs = _in_pairs(formula, machine, axis.extent)
    writer = _Writer(formula, 2 * lanes if in_pairs else lanes, is_streamed(formula, machine), in_pairs)
    segments = _segments(formula)
    streamed = ", streamed" if writer.streamed else ""
    words = f"elementwise: {axis.name} in vectors of {writer.lanes}"
    if segments and segments[0].axis == axis and extent_of(outer) >= _SHARED:
        stmts = [writer.row(segment.inside, segment.of(formula)) for segment in segments]
        body = parallel_nest(outer, axis.extent * accesses, block(*stmts))
        return _program(formula, body, f"{words}, in {len(segments)} pieces{streamed}")
    after = f", {segments[0].axis.name} in {len(segments)} pieces{streamed}" if segments else streamed
    far = _far_axis(formula, machine, axis, outer) if writer.streamed and not segments else None
    after += f", {far.axis.name} in blocks of {far.blocks.size}" if far else ""
    if writer.streamed and extent_of(outer) >= _SHARED and writer.run(axis, formula) is not None:
        # A segment that is one row may be known to begin at a cache line.
        run = _by_segment(
            formula, axis, segments, lambda part: writer.run(axis, part) or writer.row(axis, part)
        )
        loops, run = far.cut(outer, run) if far else (outer, run)
        return _program(formula, parallel_nest(loops, axis.extent * accesses, run), words + after)
    if (
        writer.streamed
        and not far
        and (staged := _staged(formula, machine, axis, outer, segments)) is not None
    ):
        return _program(formula, staged, f"{words}, staged{after}")
    bordered = writer.bordered(axis)
    if not writer.streamed and bordered is not None and extent_of(outer) >= _SHARED:
        return _program(formula, parallel_nest(outer, axis.extent * accesses, bordered), f"{words}, bordered")
    tiles = writer.tiles(axis)
    tile = _by_segment(formula, axis, segments, lambda part: writer.tile(tiles, part))
    loops, tile = far.cut(outer, tile) if far else (outer, tile)
    if writer.streamed:
        tile = block(*_prefetched_ahead(formula, machine, axis, outer, tiles), tile)
    body = parallel_nest([*loops, tiles.var], tiles.size * accesses, tile)
    return _program(formula, body, f"{words} x {tiles.size // writer.lanes}{after}")


def _in_pairs(formula: Formula, machine: CpuMachine, extent: int) -> bool:
    """Whether two vectors are computed at a time."""
    lanes = lanes_for(formula, machine, extent)
    converts = formula.output.dtype.is_half and any(load.dtype.is_half for load in te.loads(formula.value))
    is_long = any(isinstance(node, te.Call) and node.op in EXPENSIVE_CALLS for node in te.walk(formula.value))
    fits = machine.vector_registers >= _ROOM_FOR_TWO and lanes == machine.lanes(DType.F32)
    return converts and is_long and fits and 2 * lanes <= extent


def _prefetched_ahead(
    formula: Formula, machine: CpuMachine, axis: te.Var, outer: Sequence[te.Var], tiles: Tiles
) -> list[Stmt]:
    """Prefetch the same tile of a later row. Only rows whose index is read from an input need it: hardware prefetchers
    cannot predict where they are. The input must hold an index for every row."""
    stmts: list[Stmt] = []
    for load in dict.fromkeys(te.unguarded_loads(formula.value)):
        (index,) = load.indices or (te.as_index(0),)
        if not outer or coefficient(index, axis) != 1 or not te.loads(index):
            continue
        row, line = outer[-1], machine.line_bytes // load.dtype.bytes
        if coefficient(index, row) is not None:
            continue  # the next row's index is known without the input
        ahead = ceil_div(_ANSWERED, axis.extent * load.dtype.bytes)
        following = te.call("min", row + ahead, te.as_index(row.extent - 1))
        step = te.Var("r", ceil_div(tiles.size, line))
        coord = te.substitute(index, {row: following, axis: tiles.start() + step * line})
        assert isinstance(load.source, Buffer)
        stmts.append(nest([(step, Kind.UNROLL)], Prefetch(load.source, coord)))
    return stmts


def _staged(
    formula: Formula, machine: CpuMachine, axis: te.Var, outer: Sequence[te.Var], segments: Sequence[_Segment]
) -> Stmt | None:
    """Stage rows in scratch memory until they end at a line; None if rows end at a line anyway and have no border, if
    they never do, and if they are long."""
    dtype, length = formula.output.dtype, axis.extent
    line = machine.line_bytes // dtype.bytes
    rows, count = extent_of(outer), line // math.gcd(length, line)
    dense = simplify(formula.store - row_major((*outer, axis))) == te.as_index(0)
    if not outer or rows % count or not dense or segments or length > _SHORT_ROW * line:
        return None
    ends_unaligned = count > 1
    more = next(
        n for n in (4, 2, 1) if rows // count % n == 0 and (n == 1 or n * count * length <= _HELD * line)
    )
    count *= more
    stage = Buffer("stage", dtype, count * length, Scope.SCRATCH)
    group, turn = te.Var("group", rows // count), te.Var("turn", count)
    values = indices_of(group * count + turn, outer)
    to_stage = replace(formula, output=stage, store=turn * length + axis)
    writer = _Writer(to_stage, lanes_for(formula, machine, length), streamed=False)
    bordered = writer.bordered(axis)
    if bordered is None and not ends_unaligned:
        return None
    fill = nest([(turn, Kind.SERIAL)], with_values(bordered or writer.row(axis, to_stage), values))
    lines = Tiles(te.Var("line", count * length // line), best_unroll(count * length // line, 1, _UNROLLED))
    step, lane = te.Var("u", lines.size), te.Var("v", line)
    coord = (lines.start() + step) * line + lane
    moved = Store(formula.output, group * (count * length) + coord, te.Load(stage, (coord,)), streamed=True)
    written = nest([(step, Kind.UNROLL), (lane, Kind.VECTOR)], moved)
    following = indices_of((group + 1) * count, outer)
    copied = block(*_next_rows(formula, machine, axis, outer[-1], count, lines, following), written)
    copy = nest([(lines.var, Kind.SERIAL)], copied)
    return parallel_nest([group], 2 * count * length, block(fill, copy))


def _next_rows(
    formula: Formula,
    machine: CpuMachine,
    axis: te.Var,
    row: te.Var,
    count: int,
    lines: Tiles,
    following: dict[te.Var, te.Expr],
) -> list[Stmt]:
    """Prefetches of the lines read for the `count` rows from `following` on, spread over `lines`, so that memory
    stays busy while rows are staged."""
    stmts: list[Stmt] = []
    for load in dict.fromkeys(te.loads(formula.value)):
        (index,) = load.indices
        pitch, line = coefficient(index, row), machine.line_bytes // load.dtype.bytes
        # A prefetch of the data between distant rows would be useless.
        if coefficient(index, axis) != 1 or pitch is None or not 0 < pitch <= 2 * axis.extent:
            continue
        if te.loads(index):  # no data gives the index after the last row
            continue
        each = ceil_div(count * pitch, line * lines.count)
        step = te.Var("r", each)
        first = te.substitute(index, {**following, axis: te.as_index(0)})
        coord = first + (lines.var * each + step) * line
        assert isinstance(load.source, Buffer)
        stmts.append(nest([(step, Kind.UNROLL)], Prefetch(load.source, coord, _SECOND_CACHE)))
    return stmts


@dataclass(frozen=True)
class _Far:
    """An axis along which consecutive outputs are read from distant addresses, and one with a smaller stride."""

    axis: te.Var
    near: te.Var
    blocks: Tiles

    def cut(self, outer: Sequence[te.Var], body: Stmt) -> tuple[list[te.Var], Stmt]:
        inside = te.Var(f"{self.axis.name}_i", self.blocks.size)
        others = [a for a in outer if a not in (self.axis, self.near)]
        body = with_values(body, {self.axis: self.blocks.start() + inside})
        return [*others, self.blocks.var, self.near, inside], body


def _far_axis(formula: Formula, machine: CpuMachine, axis: te.Var, outer: Sequence[te.Var]) -> _Far | None:
    loads = {load for load in te.loads(formula.value) if coefficient(load.indices[0], axis) == 1}
    if len(loads) != 1 or len(outer) < 2:
        return None
    (load,), far = loads, outer[-1]
    steps = {a: (coefficient(load.indices[0], a) or 0) * load.dtype.bytes for a in outer}
    near = min(outer, key=lambda a: steps[a] or math.inf)
    if not 0 < steps[near] < machine.page_bytes <= steps[far] or far.extent < _FEW:
        return None
    size = (
        next((n for n in range(_FEW, _MANY + 1) if far.extent % n == 0), _FEW)
        if machine.prefetches_by_page
        else 1
    )
    return _Far(far, near, Tiles(far, size))


def _by_segment(
    formula: Formula, axis: te.Var, segments: Sequence[_Segment], make: Callable[[Formula], Stmt]
) -> Stmt:
    """Apply `make` to the formula, or to each segment after a branch if the segments are not along `axis`."""
    parts = segments if segments and segments[0].axis != axis else ()
    stmt = make(parts[-1].placed(formula) if parts else formula)
    for segment in reversed(parts[:-1]):
        inside = make(segment.placed(formula))
        stmt = If(te.call("lt", segment.axis, te.as_index(segment.end)), inside, stmt)
    return stmt


def _program(formula: Formula, body: Stmt, decisions: str) -> Program:
    return Program(formula.name, (*formula.inputs, formula.output), with_values(body, {}), decisions)


@dataclass(frozen=True)
class _Writer:
    formula: Formula
    lanes: int
    streamed: bool
    in_pairs: bool = False  # of vectors

    def tiles(self, axis: te.Var) -> Tiles:
        large = sum(1 for _ in te.walk(self.formula.value)) > _LARGE
        most = _UNROLLED // 2 if large or self.in_pairs else _UNROLLED
        lanes = min(self.lanes, power_of_two_below(axis.extent))
        return Tiles(axis, lanes * best_unroll(axis.extent, lanes, most))

    def run(self, axis: te.Var, formula: Formula) -> Stmt | None:
        if coefficient(formula.store, axis) != 1:
            return None

        def write(coord: te.Expr, index: te.Expr, streamed: bool) -> Store:
            return Store(formula.output, index, te.substitute(formula.value, {axis: coord}), streamed)

        begin = simplify(te.substitute(formula.store, {axis: te.as_index(0)}))
        return streamed_run(axis, begin, self.lanes, write)

    def bordered(self, axis: te.Var) -> Stmt | None:
        """The whole row, if it is a constant before one index of the axis and after another, and vectors in between
        need no test; else None."""
        value = self.formula.value
        if not (isinstance(value, te.Select) and isinstance(value.other, te.Const) and te.loads(value.then)):
            return None
        conditions = conjuncts(value.cond)
        along = [each for each in conditions if axis in te.variables(each)]
        guard = te.all_of([each for each in conditions if each not in along])
        inside = None if te.loads(value.cond) else interval_of(along, axis)
        if inside is None:
            return None
        ends = [0, *inside, axis.extent]
        segments = [_Segment(axis, begin, end) for begin, end in itertools.pairwise(ends) if begin < end]
        outside = replace(self.formula, value=value.other)
        kept = replace(self.formula, value=value.then)
        rows = [
            self.row(segment.inside, segment.of(kept if segment.begin == inside[0] else outside))
            for segment in segments
        ]
        filled = block(*rows)
        return filled if guard is None else If(guard, filled, self.row(axis, outside))

    def row(self, axis: te.Var, formula: Formula) -> Stmt:
        """The whole row, tile by tile."""
        tiles = self.tiles(axis)
        return nest([(tiles.var, Kind.SERIAL)], self.tile(tiles, formula))

    def tile(self, tiles: Tiles, formula: Formula) -> Stmt:
        lanes = min(self.lanes, power_of_two_below(tiles.size))
        lane, step = te.Var("v", lanes), te.Var("u", tiles.size // lanes)
        position = {tiles.axis: tiles.start() + step * lanes + lane}
        index, value = (te.substitute(expr, position) for expr in (formula.store, formula.value))
        return nest(
            [(step, Kind.UNROLL), (lane, Kind.VECTOR)], Store(formula.output, index, value, self.streamed)
        )


@dataclass(frozen=True)
class _Segment:
    """The indices of an axis from `begin` to before `end`."""

    axis: te.Var
    begin: int
    end: int

    @property
    def inside(self) -> te.Var:
        return te.Var(f"{self.axis.name}_{self.begin}", self.end - self.begin)

    def of(self, formula: Formula) -> Formula:
        """The formula along `inside`, with all conditions on the segment resolved."""
        return formula.map(lambda expr: simplify(te.substitute(expr, {self.axis: self.inside + self.begin})))

    def placed(self, formula: Formula) -> Formula:
        """The same along the whole axis; valid within the segment."""
        return self.of(formula).map(
            lambda expr: te.substitute(expr, {self.inside: self.axis + (-self.begin)})
        )


def _segments(formula: Formula) -> list[_Segment]:
    """The segments of the first axis along which a selection between loads changes; none if there is no such axis."""
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
    return [_Segment(axis, begin, end) for begin, end in itertools.pairwise(ends)]
