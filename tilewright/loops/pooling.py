"""Pooling of channels-first images: windows that move along the vector axis.

Neighbouring windows overlap, and with stride two only every second element of a vector begins a window. So a window
is reduced in two steps, a few rows of the result at a time: first over its rows, contiguous in memory, then over its
columns, from L1.

    for every few rows:                              (the outer ones parallel)
      for row in them: columns[row, :] = combined over the window's rows
      for row in them: stage[row, :] = epilogue(combined over the window's columns of columns[row, :])
      out[lines] = stage[lines]                      (for non-temporal stores; otherwise it is written directly)

With non-temporal stores, reading is the bottleneck. With a page-based hardware prefetcher, several concurrent streams
get more bandwidth: rows are then taken from a few streams in turn, and the following ones are prefetched while the
columns of these are combined. A stride-based prefetcher needs loads in order: rows of small windows are read from one
stream. Then so little goes into `columns` that it would be reloaded before its store completes, and these windows are
reduced in one step:

    for every few rows:
      for row in them: stage[row, :] = epilogue(combined over the window)
      out[lines] = stage[lines]

Padding is written into `columns`, and only rows at the border test whether rows above or below exist.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

from tilewright import te
from tilewright.dtypes import DType
from tilewright.hw import CpuMachine
from tilewright.loops.formula import Formula, Reduction
from tilewright.loops.guards import conjuncts, interval_of
from tilewright.loops.ir import Buffer, If, Kind, Prefetch, Program, Scope, Stmt, Store, block, nest
from tilewright.loops.tiling import (
    LONGEST_STRIDE,
    Tiles,
    best_unroll,
    extent_of,
    indices_of,
    is_streamed,
    lanes_for,
    parallel_nest,
    power_of_two_below,
    row_major,
    with_results,
    with_values,
)
from tilewright.loops.transpose_pattern import written_axis
from tilewright.loops.window_pattern import stride_of
from tilewright.support.arith import ceil_div, round_up
from tilewright.te.index import coefficient, linear, simplify

_KINDS = ("max", "min", "sum")
_LARGEST = 16  # maximum window elements along its rows or columns, which are unrolled
_MIN = 2  # minimum vectors in a row
_HELD = 4 << 10  # bytes of rows that are computed together
_MAX = 64 << 10  # maximum bytes of columns
_STREAMS = (8, 4, 2)  # numbers of interleaved streams
_TAKEN_AT_ONCE = 9  # maximum elements of a window that is reduced in one step
_STREAM_DISTANCE = 16 << 10  # minimum bytes between two streams
_SECOND_CACHE = 2
_UNROLLED = 8  # vectors
_MANY = 1 << 10
_TRUE, _FALSE = (te.const(value, DType.BOOL) for value in (True, False))


def pooled_program(formula: Formula, machine: CpuMachine) -> Program | None:
    """The program; None if the formula is not a window along its last axis."""
    windows = _windows_of(formula)
    if windows is None or windows.across.extent < _MIN * lanes_for(formula, machine, _MANY):
        return None
    pool = _Pool(formula, machine, windows)
    return pool.program() if pool.columns.size * pool.columns.dtype.bytes <= _MAX else None


@dataclass(frozen=True)
class _Windows:
    reduction: Reduction
    across: te.Var  # the vector axis
    step: int  # the stride of windows along it
    along: te.Var  # the window's columns
    down: tuple[te.Var, ...]  # the other window axes
    column: te.Var  # all positions that windows read along `across`; those from `begin` to `end` exist
    begin: int
    end: int
    value: te.Expr  # the element there, in terms of `column` instead of `across` and `along`
    guards: tuple[te.Expr, ...]  # conditions for its rows to exist


def _windows_of(formula: Formula) -> _Windows | None:
    if len(formula.reductions) != 1 or set(formula.rows) != set(formula.axes):
        return None
    (reduction,) = formula.reductions
    across = written_axis(formula)
    if reduction.kind not in _KINDS or across is None:
        return None
    if reduction.body.dtype is not reduction.result.dtype:
        return None
    for along in reduction.axes:
        down = tuple(axis for axis in reduction.axes if axis != along)
        loads = te.loads(reduction.body)
        ahead = {coefficient(load.indices[0], along) for load in loads if load.indices}
        if ahead != {1} or max(along.extent, extent_of(down)) > _LARGEST:
            continue
        step = stride_of(reduction.body, across, along)
        if step is not None and step <= min(along.extent, LONGEST_STRIDE) and extent_of(down) > 1:
            return _seen(reduction, across, step, along, down)
    return None


def _seen(
    reduction: Reduction, across: te.Var, step: int, along: te.Var, down: tuple[te.Var, ...]
) -> _Windows | None:
    column = te.Var("column", (across.extent - 1) * step + along.extent)
    value = simplify(te.substitute(reduction.body, {across: te.as_index(0), along: column}))
    if simplify(te.substitute(value, {column: across * step + along})) != simplify(reduction.body):
        return None
    guards: list[te.Expr] = []
    begin, end = 0, column.extent
    outside = te.reduce_identity(reduction.kind, value.dtype)
    if isinstance(value, te.Select) and value.other == outside:
        conditions = conjuncts(value.cond)
        of_column = [each for each in conditions if column in te.variables(each)]
        guards = [each for each in conditions if each not in of_column]
        inside = interval_of(of_column, column)
        if inside is None or not all(_is_linear(guard) for guard in guards):
            return None
        (begin, end), value = inside, value.then
    return _Windows(reduction, across, step, along, down, column, begin, end, value, tuple(guards))


def _is_linear(condition: te.Expr) -> bool:
    """Whether it also holds between two positions where it holds."""
    if not isinstance(condition, te.Call) or condition.op not in ("lt", "le"):
        return False
    return all(isinstance(atom, te.Var) for side in condition.args for atom in linear(side).terms)


class _Pool:
    def __init__(self, formula: Formula, machine: CpuMachine, windows: _Windows) -> None:
        self.formula, self.windows, self.line_bytes = formula, windows, machine.line_bytes
        self.lanes = lanes_for(formula, machine, windows.across.extent)
        self.outer = [axis for axis in formula.axes if axis != windows.across]
        dense = row_major((*self.outer, windows.across))
        is_dense = simplify(formula.store - dense) == te.as_index(0)
        self.count = self._rows_at_once(is_streamed(formula, machine) and is_dense)
        self.turn = te.Var("turn", self.count)
        self.groups, self.positions = self._cut()
        self.group = row_major(self.groups)
        self.stream = te.Var("strand", 1)
        self.at_once = self.staged and not machine.prefetches_by_page and self._can_be_taken_at_once()
        if self.staged and not self.at_once:
            self._take_streams()
        self.slot = self.stream * self.count + self.turn  # index among the rows that are computed together
        self.lead = round_up(windows.begin, self.lanes)
        after = round_up(windows.column.extent - windows.end, self.lanes)
        pitch = self.lead + (windows.end - windows.begin) + after
        self.pitch = round_up(pitch, self.lanes)
        self.rows = self.stream.extent * self.count
        dtype, length = windows.reduction.result.dtype, windows.across.extent
        self.columns = Buffer("columns", dtype, self.rows * self.pitch, Scope.SCRATCH)
        self.stage = Buffer("stage", formula.output.dtype, self.rows * length, Scope.SCRATCH)

    def _rows_at_once(self, streamed: bool) -> int:
        """How many rows are computed together: planes are cut evenly, and streamed output ends at a line."""
        length, size = self.windows.across.extent, self.formula.output.dtype.bytes
        line = self.line_bytes // size
        whole = line // math.gcd(length, line)
        inner, rows = (self.outer[-1].extent if self.outer else 1), extent_of(self.outer)
        held = max(1, _HELD // (length * size))
        self.staged = streamed and rows % whole == 0 and whole <= held
        if self.staged:
            held = max(held // _STREAMS[0], whole)
        unit = whole if self.staged else 1
        choices = [n for n in range(unit, held + 1, unit) if rows % n == 0]
        even = [n for n in choices if inner % n == 0]
        return max(even or choices)

    def _cut(self) -> tuple[list[te.Var], dict[te.Var, te.Expr]]:
        """Loops over groups of rows, and the outer axes' values in them."""
        if self.outer and self.outer[-1].extent % self.count == 0:
            *others, last = self.outer
            part = te.Var(f"{last.name}_g", last.extent // self.count)
            return [*others, part], {last: part * self.count + self.turn}
        group = te.Var("group", extent_of(self.outer) // self.count)
        return [group], indices_of(group * self.count + self.turn, self.outer)

    def _take_streams(self) -> None:
        """Interleave groups of rows that are a few pages apart."""
        read = self.count * self.windows.step * self.windows.column.extent * self.formula.output.dtype.bytes
        total = extent_of(self.groups)
        least = ceil_div(_STREAM_DISTANCE, read)
        streams, distance = next(
            ((n, size) for n in _STREAMS for size in range(least, 4 * least) if total % (n * size) == 0),
            (1, total),
        )
        if streams == 1:
            return
        self.stream = te.Var("strand", streams)
        block_of, inside = te.Var("block", total // (streams * distance)), te.Var("inside", distance)
        self.group = (block_of * streams + self.stream) * distance + inside
        values = indices_of(self.group, self.groups)
        self.positions = {
            axis: te.substitute(position, values) for axis, position in self.positions.items()
        } | values
        self.groups = [block_of, inside]

    def _can_be_taken_at_once(self) -> bool:
        """Whether windows are small, and only those in the first and last vector of a row leave it."""
        first, last = self._inside()
        length = self.windows.across.extent
        ends = first <= self.lanes and length - last <= self.lanes
        return self.windows.reduction.length <= _TAKEN_AT_ONCE and ends

    def _inside(self) -> tuple[int, int]:
        """The first window of a row whose columns all exist, and the one after the last."""
        windows = self.windows
        last = (windows.end - windows.along.extent) // windows.step + 1
        return ceil_div(windows.begin, windows.step), min(last, windows.across.extent)

    def program(self) -> Program:
        words = f"pooled: {self.windows.across.name} in vectors of {self.lanes}, {self.count} rows at a time"
        if self.at_once:
            stmts = [self._by_row([self.turn], self._taken_at_once())]
            words += ", windows at once"
        else:
            stmts = [
                self._by_row([self.turn, self.stream], self._column_pass()),
                self._by_row([self.stream, self.turn], block(*self._prefetched_ahead(), self._row_pass())),
            ]
        if self.stream.extent > 1:
            words += f" of {self.stream.extent} places"
        if self.staged:
            stmts.append(self._by_row([self.stream], self._streamed()))
            words += ", streamed"
        work = self.rows * self.windows.across.extent * 2 * self.windows.reduction.length
        body = parallel_nest(self.groups, work, block(*stmts))
        params = (*self.formula.inputs, self.formula.output)
        return Program(self.formula.name, params, with_values(body, {}), words)

    def _taken_at_once(self) -> Stmt:
        """A row in one step; only the vectors at its ends test which columns exist."""
        windows = self.windows
        first, last = self._inside()
        length = windows.across.extent
        begin = self.lanes if first > 0 else 0
        end = length - self.lanes if last < length else length
        parts = [(0, begin, True), (begin, end, False), (end, length, True)]

        def row(guards: Sequence[te.Expr]) -> Stmt:
            stmts: list[Stmt] = []
            for start, stop, at_end in parts:
                if start < stop:

                    def store(at: te.Expr, start: int = start, at_end: bool = at_end) -> Store:
                        return self._result(at + start, self._window(at + start, guards, at_end=at_end))

                    stmts.append(self._vectors(stop - start, store))
            return block(*stmts)

        return If(self._all_exist(), row(()), row(windows.guards)) if windows.guards else row(())

    def _window(self, at: te.Expr, guards: Sequence[te.Expr], *, at_end: bool) -> te.Expr:
        """Reduce the existing elements of the window at a position of the row."""
        windows = self.windows
        outside = te.reduce_identity(windows.reduction.kind, windows.value.dtype)
        values: list[te.Expr] = []
        for tap in range(windows.along.extent):
            column = at * windows.step + tap
            exists = list(guards)
            if at_end and tap < windows.begin:
                exists.append(te.call("le", te.as_index(windows.begin), column))
            if at_end and (windows.across.extent - 1) * windows.step + tap >= windows.end:
                exists.append(te.call("lt", column, te.as_index(windows.end)))
            guard = te.all_of(exists)
            value = windows.value if guard is None else te.select(guard, windows.value, outside)
            values.append(te.substitute(self._down(value), {windows.column: column}))
        return self._combined(values)

    def _by_row(self, loops: Sequence[te.Var], stmt: Stmt) -> Stmt:
        return nest([(loop, Kind.SERIAL) for loop in loops], with_values(stmt, self.positions))

    def _column_pass(self) -> Stmt:
        windows = self.windows
        outside = te.reduce_identity(windows.reduction.kind, self.columns.dtype)
        first = self.slot * self.pitch
        size = windows.end - windows.begin

        def border(start: int, length: int) -> Stmt:
            return self._vectors(length, lambda at: Store(self.columns, first + start + at, outside))

        def inside(value: te.Expr) -> Stmt:
            def store(at: te.Expr) -> Store:
                there = te.substitute(self._down(value), {windows.column: at + windows.begin})
                return Store(self.columns, first + self.lead + at, there)

            return self._vectors(size, store)

        filled = inside(windows.value)
        if windows.guards:
            guarded = te.all_of(windows.guards)
            assert guarded is not None
            filled = If(self._all_exist(), filled, inside(te.select(guarded, windows.value, outside)))
        after = windows.column.extent - windows.end
        borders = [
            *([border(self.lead - windows.begin, windows.begin)] if windows.begin else []),
            *([border(self.lead + size, after)] if after else []),
        ]
        return block(*borders, filled)

    def _down(self, value: te.Expr) -> te.Expr:
        """Reduce the rows of the window."""
        ranges = [range(axis.extent) for axis in self.windows.down]
        values = [
            te.substitute(value, dict(zip(self.windows.down, map(te.as_index, position), strict=True)))
            for position in itertools.product(*ranges)
        ]
        return self._combined(values)

    def _combined(self, values: Sequence[te.Expr]) -> te.Expr:
        combine = te.REDUCE_COMBINERS[self.windows.reduction.kind]
        return reduce(lambda one, other: te.call(combine, one, other), values)

    def _all_exist(self) -> te.Expr:
        """The condition that all rows of a window exist: the first and the last along each axis."""
        ends = [(0, axis.extent - 1) for axis in self.windows.down]
        corners = [
            dict(zip(self.windows.down, map(te.as_index, position), strict=True))
            for position in itertools.product(*ends)
        ]
        conditions = dict.fromkeys(
            simplify(te.substitute(guard, corner)) for guard in self.windows.guards for corner in corners
        )
        undecided = te.all_of([each for each in conditions if not isinstance(each, te.Const)])
        if _FALSE in conditions:
            return _FALSE
        return undecided if undecided is not None else _TRUE

    def _prefetched_ahead(self) -> list[Stmt]:
        """Prefetch the next group's row, so that memory stays busy while this one is computed."""
        loads = te.loads(self.windows.value)
        if not self.staged or len(loads) != 1 or not self.outer:
            return []
        (load,) = loads
        (index,) = load.indices
        assert isinstance(load.source, Buffer)
        distance, line = coefficient(index, self.outer[-1]) or 0, self.line_bytes // load.dtype.bytes
        pitch = min(coefficient(index, axis) or 0 for axis in self.windows.down)
        # A prefetch of the data between distant rows would be useless.
        if distance <= 0 or pitch > 2 * (self.windows.end - self.windows.begin):
            return []
        values = dict.fromkeys((*self.windows.down, self.windows.column), te.as_index(0))
        first = te.substitute(index, values) + (self.count * distance + self.windows.begin)
        step = te.Var("r", ceil_div(distance, line))
        return [nest([(step, Kind.UNROLL)], Prefetch(load.source, first + step * line, _SECOND_CACHE))]

    def _row_pass(self) -> Stmt:
        windows = self.windows

        def store(at: te.Expr) -> Store:
            position = self.slot * self.pitch + (self.lead - windows.begin) + at * windows.step
            seen = [te.Load(self.columns, (position + tap,)) for tap in range(windows.along.extent)]
            return self._result(at, self._combined(seen))

        return self._vectors(windows.across.extent, store)

    def _result(self, at: te.Expr, combined: te.Expr) -> Store:
        """The element at a position of the row, from its reduced window."""
        windows, formula = self.windows, self.formula
        position = {windows.across: at}
        value = te.substitute(with_results(formula.value, {windows.reduction.result: combined}), position)
        if self.staged:
            return Store(self.stage, self.slot * windows.across.extent + at, value)
        return Store(formula.output, te.substitute(formula.store, position), value)

    def _streamed(self) -> Stmt:
        """The rows of a stream in the stage, which end at a line."""
        size, line = (
            self.count * self.windows.across.extent,
            self.line_bytes // self.formula.output.dtype.bytes,
        )
        lines = Tiles(te.Var("line", size // line), best_unroll(size // line, 1, _UNROLLED))
        step, lane = te.Var("u", lines.size), te.Var("v", line)
        position = (lines.start() + step) * line + lane
        staged = te.Load(self.stage, (self.stream * size + position,))
        moved = Store(self.formula.output, self.group * size + position, staged, streamed=True)
        return nest([(lines.var, Kind.SERIAL), (step, Kind.UNROLL), (lane, Kind.VECTOR)], moved)

    def _vectors(self, length: int, store: Callable[[te.Expr], Store]) -> Stmt:
        """Run `store` at every position below `length`, in vectors."""
        lanes = min(self.lanes, power_of_two_below(length))
        tiles = Tiles(te.Var("w", length), lanes * best_unroll(length, lanes, _UNROLLED))
        step, lane = te.Var("u", tiles.size // lanes), te.Var("v", lanes)
        loops = [(tiles.var, Kind.SERIAL), (step, Kind.UNROLL), (lane, Kind.VECTOR)]
        return nest(loops, store(tiles.start() + step * lanes + lane))
