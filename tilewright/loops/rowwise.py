"""Reductions that are contiguous along the *reduced* axis: one row after another, lanes hold partial results.

    for every few rows w:                            (parallel)
      acc[w, u, :] = identity
      for k in blocks: acc[w, u, :] = combine(acc[w, u, :], x[w, k, u, :])
      the rest of the row, its last vector masked
      result[w] = across lanes(acc[w])
      out[w, columns] = value(result[w])

Rows are taken together where they are short, so that one waits for the end of a reduction while others compute. A
look-ahead that follows loads loses those that go from row to row: where there is one, only rows are taken together that
are so short that the wait for each of several reductions counts more. What one pass over the row computes at some
expense and the result needs again, as the exponentials of a softmax, is kept in scratch. In the passes that take long,
the next rows are asked for: they come while these are computed and written. They come into the first cache if all that
is used until then has room there too, otherwise into the second: what is pushed out before it is needed is read twice.
A row that is only read, in one pass and by itself, is asked for a page ahead: there the processor's look-ahead ends.

Results that go past the caches are written in whole lines. Where rows do not end with a line, as many as end with one
together are put into scratch, and written from there. Such a row of a few vectors is written out and stays in registers
from its first pass to the last, which writes whole vectors: what is too much the next row overwrites.

Memory should not wait for arithmetic. Where a pass computes exponentials, the rows in scratch before are written
meanwhile, a line for each vector:

    rows of group 0 -> stage
    for g = 1, 2, ...: rows of group g -> stage, and meanwhile stage of group g - 1 -> out
    stage of the last group -> out

Rows that end with a line are written in the same way, without a stage: the last reduction of two rows goes along with
writing the two before, whose results stay in registers, and what was kept of them in the other half of its scratch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tilewright import te
from tilewright.hw import CpuMachine
from tilewright.loops.expensive import computable_anywhere, is_expensive
from tilewright.loops.formula import Formula, Reduction
from tilewright.loops.ir import (
    SCRATCH_LIMIT,
    Across,
    Buffer,
    Kind,
    Prefetch,
    Program,
    Scope,
    Stmt,
    Store,
    block,
    nest,
)
from tilewright.loops.tiling import (
    Tiles,
    best_unroll,
    columns_of,
    extent_of,
    is_streamed,
    lanes_for,
    load_offsets,
    parallel_nest,
    row_major,
    streamed_run,
    updated,
    with_results,
    with_values,
)
from tilewright.loops.weights import nan_arrives_anyway
from tilewright.te.index import coefficient, divisor_of, simplify

LINE = 64
_ACCUMULATORS = 8
_IN_REGISTERS = 16  # vectors of a row that stays in them
_GROUPS = 128  # of rows in a chunk, at most: nothing is written while its first one is computed
_CHUNKS = 4  # for each core, at least
_SHORTEST_BEHIND = 8  # vectors of a row that is written later than it is computed
_SHORT_ROW = 2048  # elements: the end of a longer row's reductions does not count
_SHORTEST_ALONE = 512  # the same where several rows are not followed
# Parts of the second cache, as far as it may be scratch: that of results which wait for their line, and that of what is
# kept of the rows before and of those that are computed.
_STAGED, _KEPT_TWICE = 4, 2
_REPEATED = 1.1  # rows computed over rows needed, where the last few overlap those before
AHEAD = 4 << 10  # bytes between what is computed and what is asked for: little, in the first cache
_FAR_AHEAD = 16 << 10  # the same in the second
_PAGE = 4 << 10
_SECOND_CACHE = 2
_FILLED = 0.7  # of the first cache, by what is asked for and all that is used until it is needed
_SHORTEST_FETCHED = 256  # bytes of a row: of shorter ones the processor's own look-ahead sees the next


def rowwise_program(formula: Formula, machine: CpuMachine) -> Program:
    return _Rows(contiguous_last(formula), machine).program()


def contiguous_last(formula: Formula) -> Formula:
    """The same reductions, of the axes of each the last one contiguous if any is."""

    def steps_by_one(reduction: Reduction, axis: te.Var) -> int:
        return sum(coefficient(offset, axis) == 1 for offset in load_offsets(reduction.body))

    reductions = tuple(
        replace(r, axes=tuple(sorted(r.axes, key=lambda axis, r=r: steps_by_one(r, axis))))  # type: ignore[misc]
        for r in formula.reductions
    )
    return replace(formula, reductions=reductions)


def groups_in_chunk(rows: Sequence[te.Var], size: int, machine: CpuMachine) -> int:
    """How many groups of `size` rows one thread takes at a time: enough chunks are left for all."""
    most = extent_of(rows) // (size * _CHUNKS * machine.cores)
    return max(n for n in range(1, min(max(most, 1), _GROUPS) + 1) if rows[-1].extent // size % n == 0)


@dataclass(frozen=True)
class _Kept:
    """An expression over the axes of `reduction` that is stored when that is computed, and read for the result."""

    reduction: Reduction
    expr: te.Expr
    buffer: Buffer


class _Rows:
    def __init__(self, formula: Formula, machine: CpuMachine) -> None:
        self.formula, self.machine = formula, machine
        self.room = min(machine.caches.l2_per_core, SCRATCH_LIMIT)
        self.columns = tuple(
            sorted(columns_of(formula), key=lambda axis: coefficient(formula.store, axis) == 1)
        )
        self.passes = len(formula.reductions) + bool(self.columns)
        self.slow = [
            number
            for number in range(1, self.passes)
            if number == self.passes - 1
            or is_expensive(formula.reductions[number].body, formula.reductions[number].axes)
        ]
        self.streamed = bool(self.columns) and is_streamed(formula, machine)
        self.staged = self._rows_staged()
        self.in_registers = self._stays_in_registers()
        self.together = 1 if self.staged else self._rows_together()
        self.behind = self._pass_that_writes()
        if self.behind is not None:
            self.formula = formula = self._cut_like_columns(formula)
            self.together = 2 if formula.rows[-1].extent % 2 == 0 and self._rows_held_twice() > 1 else 1
            self.slow = [self.behind]
        self.row = te.Var("w", self.together)
        self.turn = te.Var("turn", max(self.staged, 1))
        self.held = self.staged * extent_of(self.columns)
        self.half = self.held + lanes_for(formula, machine, self.held)
        self.group = te.Var("group", self._groups_of(self.staged or self.together))
        size = self.half * min(self.group.extent, 2)
        self.stage = Buffer("stage", formula.output.dtype, size, Scope.SCRATCH)
        self.kept = self._find_kept()
        self.fetched, self.level = self._find_fetched()
        self.results: dict[Buffer, te.Expr] = {}
        self.first: te.Expr = te.as_index(0)  # row of the group
        self.written = 0  # lines of a group, while the next one is computed

    def program(self) -> Program:
        formula = self.formula
        work = sum(2 * r.length for r in formula.reductions) + extent_of(self.columns)
        loops = list(formula.rows)
        if not loops:
            body = self._rows()
        else:
            tiles = Tiles(loops[-1], self.staged or self.together)
            work *= tiles.size * self.group.extent
            chunk = te.Var(tiles.var.name, tiles.count // self.group.extent)
            self.first = tiles.start_of(chunk * self.group.extent + self.group)
            body = (
                self._groups() if self.staged or self.behind is not None else self._in_group(self._rows(), 0)
            )
            loops[-1] = chunk
        body = with_values(parallel_nest(loops, work, body), {})
        words = "rowwise: " + ", ".join(f"{r.kind} of {r.length}" for r in formula.reductions)
        words += f", kept in {self.kept.buffer.scope.value}" if self.kept else ""
        words += ", streamed" if self.streamed else ""
        words += f" in {self.staged} rows at a time" if self.staged else ""
        words += " a row behind" if self.behind is not None else ""
        return Program(formula.name, (*formula.inputs, formula.output), body, words)

    def _rows(self, *, meanwhile: bool = False) -> Stmt:
        """Some rows; `meanwhile`, the group before theirs is written."""
        self.results = {}
        stmts: list[Stmt] = []
        for number, reduction in enumerate(self.formula.reductions):
            stmts.append(self._reduction(number, reduction, meanwhile=meanwhile))
            kept = replace(reduction.result, size=self.together)
            self.results[reduction.result] = te.Load(kept, (self.row,))
        if self.behind is None:
            return block(*stmts, self._write())
        for result in self.results:
            value = self.results[result]
            stmts.append(nest([(self.row, Kind.UNROLL)], Store(self._before(result), self.row, value)))
        return block(*stmts)

    def _before(self, result: Buffer) -> Buffer:
        """Where a result of the group before is kept."""
        return replace(result, name=f"{result.name}_before", size=self.together)

    def _groups(self) -> Stmt:
        """The groups of a chunk: each is written while the next one is computed."""
        alone = nest([(self.turn, Kind.SERIAL)], self._rows())
        after = te.Var("after", self.group.extent - 1)
        stmts = [self._in_group(alone, 0)]
        if after.extent:
            both = nest([(self.turn, Kind.SERIAL)], self._rows(meanwhile=True))
            if self.staged:
                both = block(both, with_values(self._lines(self.written), {self.group: self.group - 1}))
            stmts.append(nest([(after, Kind.SERIAL)], self._in_group(both, after + 1)))
        if self.staged:
            return block(*stmts, self._in_group(self._lines(0), after.extent))
        self.results = {r: te.Load(self._before(r), (self.row,)) for r in self.results}
        return block(*stmts, self._in_group(self._write(), after.extent))

    def _in_group(self, stmt: Stmt, group: te.Expr | int) -> Stmt:
        row = {self.formula.rows[-1]: self.first + self.turn + self.row}
        return with_values(with_values(stmt, row), {self.group: te.as_index(group)})

    def _rows_together(self) -> int:
        longest = max(r.length for r in self.formula.reductions)
        # Rows that are not whole vectors begin elsewhere in a line each.
        ragged = longest % lanes_for(self.formula, self.machine, longest)
        if not self.formula.rows or longest > _SHORT_ROW or ragged:
            return 1
        alone = self.passes == 1 or longest >= _SHORTEST_ALONE
        if alone and not self.machine.follows_pages:
            return 1
        axis = self.formula.rows[-1]
        return next((n for n in (4, 2) if n <= axis.extent and Tiles(axis, n).waste <= _REPEATED), 1)

    def _rows_staged(self) -> int:
        """How many rows of the result end with a line together, where one does not; 0 where they are not staged."""
        formula, length = self.formula, extent_of(self.columns)
        if not self.streamed or not formula.rows:
            return 0
        lanes = lanes_for(
            formula, self.machine, length * formula.rows[-1].extent
        )  # of a row there may be fewer
        count = lanes // math.gcd(length, lanes)
        if count == 1 or formula.rows[-1].extent % count:
            return 0
        if count * length * formula.output.dtype.bytes > self.room // _STAGED:
            return 0
        dense = simplify(formula.store - self._place(formula.rows[-1], length))
        other_rows = set(formula.rows[:-1])
        return count if te.variables(dense) <= other_rows and divisor_of(dense) % lanes == 0 else 0

    def _slow_pass(self) -> int | None:
        """The number of the reduction in which there is time to write rows: it takes long, vector by vector."""
        lanes = lanes_for(self.formula, self.machine, self.held)
        for number, r in enumerate(self.formula.reductions):
            alike = [a.extent for a in r.axes] == [a.extent for a in self.columns] and len(r.axes) == 1
            if alike and self._lanes(r) == lanes <= r.length and is_expensive(r.body, r.axes):
                return number
        return None

    def _pass_that_writes(self) -> int | None:
        """The number of the reduction along which the rows before are written: the last, which as a rule takes longest.
        None where each row is written when it is computed."""
        if not self.streamed or self.staged or not self.formula.rows:
            return None
        formula, axis = self._cut_like_columns(self.formula), self.columns[-1]
        lanes = lanes_for(formula, self.machine, axis.extent)
        place = te.substitute(formula.store, {axis: te.as_index(0)})
        if coefficient(formula.store, axis) != 1 or divisor_of(place) % lanes or axis.extent % lanes:
            return None
        number = len(formula.reductions) - 1
        last = formula.reductions[number]
        alike = self._renamed(last) is not None and self._lanes(last) == lanes
        long = axis.extent >= _SHORTEST_BEHIND * lanes
        return number if alike and long and self._rows_held_twice() else None

    def _cut_like_columns(self, formula: Formula) -> Formula:
        """The same formula, the last reduction's only axis cut as the columns are: its passes go along with theirs."""
        *others, last = formula.reductions
        if len(last.axes) > 1 or len(self.columns) == 1 or last.length != extent_of(self.columns):
            return formula
        axes = tuple(te.Var(f"{last.axes[0].name}_{axis.name}", axis.extent) for axis in self.columns)
        cut = replace(last, axes=axes, body=te.substitute(last.body, {last.axes[0]: row_major(axes)}))
        return replace(formula, reductions=(*others, cut))

    def _rows_held_twice(self) -> int:
        """How many rows, or what is kept of them, there is room for, and for as many before."""
        longest = max((r.length + self._lanes(r)) * r.result.dtype.bytes for r in self.formula.reductions)
        return self.room // (_KEPT_TWICE * 2 * longest)

    def _groups_of(self, rows: int) -> int:
        """How many groups of so many rows make a chunk: 1 where nothing is written meanwhile."""
        if self.behind is None and (not self.staged or self._slow_pass() is None):
            return 1
        return groups_in_chunk(self.formula.rows, rows, self.machine)

    def _stays_in_registers(self) -> bool:
        if not self.staged or len(self.columns) > 1:
            return False
        (axis,) = self.columns
        lanes = lanes_for(self.formula, self.machine, axis.extent)
        alike = all(
            [a.extent for a in r.axes] == [axis.extent] and self._lanes(r) == lanes
            for r in self.formula.reductions
        )
        return alike and lanes < axis.extent <= _IN_REGISTERS * lanes

    def _place(self, row: te.Expr, length: int) -> te.Expr:
        """Where the current column of a row is, among rows of `length` behind each other."""
        place: te.Expr = te.as_index(0)
        for axis in columns_of(self.formula):
            place = place * axis.extent + axis
        return row * length + place

    # -- what is kept from one pass to the last ----------------------------------------------------------------------

    def _find_kept(self) -> _Kept | None:
        for reduction in reversed(self.formula.reductions):
            renamed = self._renamed(reduction)
            kept_bytes = reduction.length * reduction.result.dtype.bytes
            if renamed is None or kept_bytes > min(self.machine.caches.l2_per_core // 3, SCRATCH_LIMIT // 2):
                continue
            needed = set(te.walk(simplify(te.substitute(self.formula.value, renamed))))
            for expr in computable_anywhere(simplify(reduction.body)):
                if expr in needed and is_expensive(expr, reduction.axes):
                    room = reduction.length + self._lanes(reduction)
                    scope = Scope.REGISTER if self.in_registers else Scope.SCRATCH
                    halves = 1 if self.behind is None else 2
                    kept = Buffer("kept", expr.dtype, halves * self.together * room, scope)
                    return _Kept(reduction, expr, kept)
        return None

    def _renamed(self, reduction: Reduction) -> dict[te.Var, te.Expr] | None:
        """The columns as axes of a reduction over them; None where it is over something else."""
        if [axis.extent for axis in self.columns] != [axis.extent for axis in reduction.axes]:
            return None
        return dict(zip(self.columns, reduction.axes, strict=True))

    # -- what is asked for early -------------------------------------------------------------------------------------

    def _find_fetched(self) -> tuple[list[te.Load], int]:
        """The loads that meet a row first, and into which cache those of the next row are to come; no loads where it
        does not pay."""
        first, rows, caches = self.formula.reductions[0], self.formula.rows, self.machine.caches
        found: dict[te.Load, int] = {}
        for load in te.loads(first.body):
            if load.indices and coefficient(load.indices[0], first.axes[-1]) == 1 and rows:
                if coefficient(load.indices[0], rows[-1]):
                    found[load] = first.length * load.dtype.bytes
        held = sum(found.values())
        total = held * extent_of(rows)
        pays = _SHORTEST_FETCHED <= held <= caches.l2_per_core // 2 and total > caches.l2_per_core // 2
        return list(found) if pays else [], 1 if self._touched(held) <= caches.l1 * _FILLED else 2

    def _touched(self, held: int) -> int:
        """Bytes that the pass in which rows are asked for goes through, of rows of `held`: those rows and its own, what
        it writes from, and what is the same for all rows."""
        written = self.kept.buffer.size * self.kept.buffer.dtype.bytes if self.kept else 0
        if self.behind is not None and not self.kept:
            written = self.together * held
        rows = set(self.formula.rows)
        shared = sum(
            extent_of(self.columns) * load.dtype.bytes
            for load in dict.fromkeys(te.loads(self.formula.value))
            if load.indices and not te.variables(load.indices[0]) & rows
        )
        return 2 * self.together * held + written + shared

    def _a_page_ahead(self, start: te.Expr, vectors: int, lanes: int) -> list[Stmt]:
        """Prefetches in the block of the only pass that begins at `start`, of rows that lie behind each other."""
        first = self.formula.reductions[0]
        axis, found = first.axes[-1], list[Stmt]()
        if self.passes > 1 or self.machine.follows_pages:
            return found
        for load in self.fetched:
            size = load.dtype.bytes
            assert isinstance(load.source, Buffer)
            if coefficient(load.indices[0], self.formula.rows[-1]) != first.length:
                continue
            for begin in range(0, vectors * lanes * size, LINE):
                place = {axis: start + (begin + _PAGE) // size}
                found.append(Prefetch(load.source, te.substitute(load.indices[0], place), _SECOND_CACHE))
        return found

    def _rows_ahead(self, load: te.Load) -> int:
        """How many rows later the one that is asked for now is needed: enough for it to have come."""
        row_bytes = self.formula.reductions[0].length * load.dtype.bytes
        ahead = AHEAD if self.level == 1 else _FAR_AHEAD
        return max(1, -(-ahead // (row_bytes * self.together))) * self.together

    def _fetches(
        self, number: int, axes: Sequence[te.Var], start: te.Expr, vectors: int, lanes: int
    ) -> list[Stmt]:
        """Prefetches in the block of pass `number` that begins at `start` of the last of `axes`: each slow pass
        asks for its share of the next row's lines."""
        first = self.formula.reductions[0].axes
        alike = [axis.extent for axis in first] == [axis.extent for axis in axes]
        joined = len(first) == 1 and first[0].extent == extent_of(axes)
        if number not in self.slow or not (alike or joined):
            return []
        found: list[Stmt] = []
        row = self.formula.rows[-1:]
        for load in self.fetched:
            for vector in range(self.slow.index(number), vectors, len(self.slow)):
                if vector * lanes * load.dtype.bytes % LINE:
                    continue
                place: dict[te.Var, te.Expr] = {axis: axis + self._rows_ahead(load) for axis in row}
                if alike:
                    place.update(zip(first[:-1], axes[:-1], strict=True))
                    place[first[-1]] = start + vector * lanes
                else:
                    place[first[0]] = row_major(axes[:-1]) * axes[-1].extent + start + vector * lanes
                assert isinstance(load.source, Buffer)
                ahead = Prefetch(load.source, te.substitute(load.indices[0], place), self.level)
                found.append(nest([(self.row, Kind.UNROLL)], ahead))
        return found

    # -- a pass over the row -----------------------------------------------------------------------------------------

    def _lanes(self, reduction: Reduction) -> int:
        """Enough for the axis, at most the machine's for what this reduction computes with."""
        alone = replace(self.formula, reductions=(reduction,), value=te.Load(reduction.result, ()))
        enough = 1 << (reduction.axes[-1].extent - 1).bit_length()
        return lanes_for(alone, self.machine, enough)

    def _reduction(self, number: int, reduction: Reduction, *, meanwhile: bool = False) -> Stmt:
        *outer, axis = reduction.axes
        lanes = self._lanes(reduction)
        vectors = -(-axis.extent // lanes)
        most = _ACCUMULATORS // 2 if is_expensive(reduction.body, reduction.axes) else _ACCUMULATORS
        unroll = max(1, min(most // self.together, vectors))
        size = unroll * lanes
        blocks, rest = te.Var(f"{axis.name}_b", axis.extent // size), axis.extent % size
        lane, step = te.Var("v", lanes), te.Var("u", unroll)
        held = self.together * size
        partial = Buffer(f"acc_{reduction.result.name}", reduction.result.dtype, held, Scope.REGISTER)
        identity = te.reduce_identity(reduction.kind, partial.dtype)

        def accumulate(element: te.Expr, position: te.Expr, inside: te.Expr | None = None) -> Stmt:
            return block(*self._accumulated(reduction, partial, element, position, inside))

        rows, first = [(self.row, Kind.UNROLL)], self.row * size
        along: list[Stmt] = []
        if blocks.extent:
            start = blocks * size
            element = step * lanes + lane
            whole = nest(
                [*rows, (step, Kind.UNROLL), (lane, Kind.VECTOR)],
                accumulate(first + element, start + element),
            )
            fetches = self._fetches(number, reduction.axes, start, unroll, lanes)
            fetches += self._a_page_ahead(start, unroll, lanes)
            written: list[Stmt] = []
            if meanwhile and self.staged and number == self._slow_pass():
                each = blocks.extent * unroll
                line = self._line(self.turn * each + blocks * unroll + step)
                before = with_values(line, {self.group: self.group - 1})
                written.append(nest([(step, Kind.UNROLL), (lane, Kind.VECTOR)], before))
                self.written = self.staged * each
            if meanwhile and number == self.behind:
                written.append(self._row_before(start + element, [*rows, (step, Kind.UNROLL)], lane))
            kind = Kind.UNROLL if self.in_registers else Kind.SERIAL
            # Last: a load waits for a store whose place in its page is the same, as that of a whole page's row is.
            along.append(nest([(blocks, kind)], block(*fetches, whole, *written)))
        for vector in range(-(-rest // lanes)):
            start = te.as_index(blocks.extent * size + vector * lanes)
            position = start + lane
            ends_inside = (vector + 1) * lanes <= rest
            inside = None if ends_inside else te.call("lt", position, te.as_index(axis.extent))
            taken = accumulate(first + lane + vector * lanes, position, inside)
            along += [*self._a_page_ahead(start, 1, lanes), nest([*rows, (lane, Kind.VECTOR)], taken)]
            if meanwhile and number == self.behind:
                along.append(self._row_before(position, rows, lane))

        stmts: list[Stmt] = [
            nest(
                [*rows, (step, Kind.UNROLL), (lane, Kind.VECTOR)],
                Store(partial, first + step * lanes + lane, identity),
            ),
            nest([(loop, Kind.SERIAL) for loop in outer], block(*along)),
        ]
        left = unroll
        while left > 1:
            half = -(-left // 2)
            for number in range(left - half):
                one, other = (
                    te.Load(partial, (first + lane + at * lanes,)) for at in (number, number + half)
                )
                value = combined(reduction, self.formula, one, other)
                both = Store(partial, first + lane + number * lanes, value)
                stmts.append(nest([*rows, (lane, Kind.VECTOR)], both))
            left = half
        result = replace(reduction.result, size=self.together)
        for number in range(self.together):
            across = Across(reduction.kind, partial, number * size, lanes)
            stmts.append(Store(result, te.as_index(number), across))
        return block(*stmts)

    def _accumulated(
        self,
        reduction: Reduction,
        partial: Buffer,
        element: te.Expr,
        position: te.Expr,
        inside: te.Expr | None,
    ) -> list[Stmt]:
        """The stores that take the element at `position` in; where `inside` does not hold there is none."""

        def at(expr: te.Expr) -> te.Expr:
            return with_results(te.substitute(expr, {reduction.axes[-1]: position}), self.results)

        def guarded(expr: te.Expr, otherwise: te.Expr) -> te.Expr:
            return expr if inside is None else te.select(inside, expr, otherwise)

        stmts: list[Stmt] = []
        body = at(simplify(reduction.body))
        if self.kept is not None and self.kept.reduction == reduction:
            value, place = at(self.kept.expr), at(self._place_of_kept(reduction.axes))
            loaded = te.Load(self.kept.buffer, (place,))
            stmts.append(Store(self.kept.buffer, place, guarded(value, te.const(0, value.dtype))))
            body = te.rewrite(body, lambda node: loaded if node == value else None)
        body = guarded(body, te.reduce_identity(reduction.kind, partial.dtype))
        return [
            *stmts,
            Store(partial, element, combined(reduction, self.formula, te.Load(partial, (element,)), body)),
        ]

    # -- the result ----------------------------------------------------------------------------------------------------

    def _write(self) -> Stmt:
        formula = self.formula
        value = self._value(self.results)
        if not self.columns:
            return nest([(self.row, Kind.UNROLL)], Store(formula.output, formula.store, value))
        *outer, axis = self.columns
        lanes = lanes_for(formula, self.machine, axis.extent)
        streamed, number = self.streamed and not self.staged, len(formula.reductions)
        target, place = formula.output, formula.store
        if self.staged:
            target, place = self.stage, self._place(self.turn, extent_of(self.columns)) + self._half()
        if self.in_registers:
            return self._write_out(axis, lanes, place, value)
        rows = [(self.row, Kind.UNROLL)]
        run = None
        if streamed and not outer and coefficient(formula.store, axis) == 1:
            run = streamed_run(
                axis,
                simplify(te.substitute(formula.store, {axis: te.as_index(0)})),
                lanes,
                lambda at, index, past: Store(formula.output, index, te.substitute(value, {axis: at}), past),
                rows=rows,
                beside=lambda start, vectors: self._fetches(number, self.columns, start, vectors, lanes),
            )
        if run is not None:
            return run
        unroll = best_unroll(axis.extent, lanes, _ACCUMULATORS // 2)
        tiles = Tiles(axis, lanes * unroll)
        lane, step = te.Var("v", lanes), te.Var("u", unroll)
        position = {axis: tiles.start() + step * lanes + lane}
        store = Store(target, te.substitute(place, position), te.substitute(value, position), streamed)
        fetches = self._fetches(number, self.columns, tiles.start(), unroll, lanes)
        loops = [(loop, Kind.SERIAL) for loop in (*outer, tiles.var)]
        in_tile = [*rows, (step, Kind.UNROLL), (lane, Kind.VECTOR)]
        return nest(loops, block(*fetches, nest(in_tile, store)))

    def _row_before(self, position: te.Expr, loops: list[tuple[te.Var, Kind]], lane: te.Var) -> Stmt:
        """A vector of the result of each row of the group before."""
        formula, (*outer, axis) = self.formula, self.columns
        place = dict(zip(outer, formula.reductions[-1].axes[:-1], strict=True)) | {axis: position}
        before: dict[Buffer, te.Expr] = {
            r.result: te.Load(self._before(r.result), (self.row,)) for r in formula.reductions
        }
        index, value = (te.substitute(e, place) for e in (formula.store, self._value(before)))
        store = nest([*loops, (lane, Kind.VECTOR)], Store(formula.output, index, value, streamed=True))
        row = {formula.rows[-1]: self.first + self.row}
        return with_values(with_values(store, row), {self.group: self.group - 1})

    def _write_out(self, axis: te.Var, lanes: int, place: te.Expr, value: te.Expr) -> Stmt:
        """The row to scratch, vector by vector; the last one may go beyond its end."""
        lane, vectors = te.Var("v", lanes), -(-axis.extent // lanes)
        stmts = self._fetches(len(self.formula.reductions), self.columns, te.as_index(0), vectors, lanes)
        for vector in range(vectors):
            position: dict[te.Var, te.Expr] = {axis: lane + vector * lanes}
            found = te.substitute(value, position)
            if (vector + 1) * lanes > axis.extent:
                inside = te.call("lt", position[axis], te.as_index(axis.extent))
                found = te.select(inside, found, te.const(0, found.dtype))
            store = Store(self.stage, te.substitute(place, position), found)
            stmts.append(nest([(lane, Kind.VECTOR)], store))
        return block(*stmts)

    def _half(self) -> te.Expr:
        """Where the group is in scratch: that of the next one is the other half."""
        return self.group % 2 * self.half if self.group.extent > 1 else te.as_index(0)

    def _line(self, number: te.Expr) -> Store:
        """A line of the group from scratch to the output."""
        lanes = lanes_for(self.formula, self.machine, self.held)
        place = number * lanes + te.Var("v", lanes)
        first: dict[te.Var, te.Expr] = dict.fromkeys(self.columns, te.as_index(0))
        first[self.formula.rows[-1]] = self.first
        begin = te.substitute(self.formula.store, first)
        loaded = te.Load(self.stage, (self._half() + place,))
        return Store(self.formula.output, begin + place, loaded, streamed=True)

    def _lines(self, begin: int) -> Stmt:
        """The lines of the group from `begin` on."""
        lanes = lanes_for(self.formula, self.machine, self.held)
        count = self.held // lanes - begin
        if not count:
            return block()
        lines = Tiles(te.Var("line", count), best_unroll(count, 1, _ACCUMULATORS))
        step, lane = te.Var("u", lines.size), te.Var("v", lanes)
        copy = self._line(lines.start() + step + begin)
        return nest([(lines.var, Kind.SERIAL), (step, Kind.UNROLL), (lane, Kind.VECTOR)], copy)

    def _place_of_kept(self, axes: Sequence[te.Var]) -> te.Expr:
        assert self.kept is not None
        half = self.kept.buffer.size if self.behind is None else self.kept.buffer.size // 2
        place = self.row * (half // self.together) + row_major(axes)
        return place if self.behind is None else place + self.group % 2 * half

    def _value(self, results: Mapping[Buffer, te.Expr]) -> te.Expr:
        value, kept = self.formula.value, self.kept
        if kept is not None:
            renamed = self._renamed(kept.reduction)
            assert renamed is not None
            loaded = te.Load(kept.buffer, (self._place_of_kept(self.columns),))

            def rule(node: te.Expr) -> te.Expr | None:
                return loaded if simplify(te.substitute(node, renamed)) == kept.expr else None

            value = te.rewrite(value, rule)
        return with_results(value, results)


def combined(reduction: Reduction, formula: Formula, so_far: te.Expr, body: te.Expr) -> te.Expr:
    """One step of a reduction of the formula."""
    if nan_arrives_anyway(reduction, formula):
        return te.select(te.call("lt", so_far, body), body, so_far)
    return updated(reduction, so_far, body)
