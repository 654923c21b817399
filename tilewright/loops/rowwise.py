"""Row reductions, contiguous along the *reduced* axis: vector lanes hold partial results.

    for every few rows w:                            (parallel)
      acc[w, u, :] = identity
      for k in blocks: acc[w, u, :] = combine(acc[w, u, :], x[w, k, u, :])
      the rest of the row, its last vector masked
      result[w] = across lanes(acc[w])
      out[w, columns] = value(result[w])

`row_plan.py` makes and explains the decisions: how many rows are processed together, what is kept and prefetched, and
which results are staged. If a reduction is slow enough, the previous group's results are written meanwhile, one line
per vector:

    rows of group 0 -> stage
    for g = 1, 2, ...: rows of group g -> stage, and meanwhile stage of group g - 1 -> out
    stage of the last group -> out

Rows that end at a line are written in the same way without a stage: during the last reduction of two rows, the two
previous rows are written. Their results stay in registers, and their kept values in the other half of the scratch
buffer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tilewright import te
from tilewright.hw import CpuMachine
from tilewright.loops.formula import Formula, Reduction
from tilewright.loops.ir import Across, Buffer, Kind, Prefetch, Program, Scope, Stmt, Store, block, nest
from tilewright.loops.row_plan import KeptValue, RowPass, RowPlan, RowStaging, row_plan_of
from tilewright.loops.softmax_exp import combined
from tilewright.loops.tiling import (
    Tiles,
    best_unroll,
    columns_of,
    extent_of,
    parallel_nest,
    row_major,
    same_extents,
    streamed_run,
    with_results,
    with_values,
)
from tilewright.support.arith import ceil_div
from tilewright.te.index import coefficient, simplify

_SECOND_CACHE = 2
_COMPUTED, _COPIED = 4, 8  # maximum unrolled vectors of the result


def rowwise_program(formula: Formula, machine: CpuMachine) -> Program:
    return _Rows(row_plan_of(formula, machine), machine).program()


def row_block(formula: Formula, machine: CpuMachine, name: str) -> Stmt:
    """All rows, for one thread, as a part of another program. `name` is appended to the names of its own buffers."""
    own: dict[Buffer, te.Expr] = {
        r.result: te.Load(replace(r.result, name=r.result.name + name), ()) for r in formula.reductions
    }
    named = formula.map(lambda expr: with_results(expr, own))
    results = tuple(replace(r, result=replace(r.result, name=r.result.name + name)) for r in named.reductions)
    plan = row_plan_of(replace(named, reductions=results), machine, on_chip=True)
    if plan.kept is not None:
        buffer = replace(plan.kept.buffer, name=plan.kept.buffer.name + name)
        plan = replace(plan, kept=replace(plan.kept, buffer=buffer))
    return _Rows(plan, machine).block()


class _Rows:
    """The loop nest of a plan. `group` is the index of a group in its chunk, `turn` that of the rows processed
    together in their group, `row` that of one of these."""

    def __init__(self, plan: RowPlan, machine: CpuMachine) -> None:
        self.plan, self.formula, self.machine = plan, plan.formula, machine
        self.row = te.Var("w", plan.together)
        self.turn = te.Var("turn", plan.group_rows // plan.together)
        self.group = te.Var("group", plan.groups)
        self.each_row = [(self.row, Kind.UNROLL)]
        self.loops, self.first = list(self.formula.rows), te.as_index(0)  # over chunks; row of the group
        if self.loops:
            tiles = Tiles(self.loops[-1], plan.group_rows)
            chunk = te.Var(tiles.var.name, tiles.count // plan.groups)
            self.loops[-1], self.first = chunk, tiles.start_of(chunk * plan.groups + self.group)
        self.results: dict[Buffer, te.Expr] = {
            r.result: te.Load(replace(r.result, size=plan.together), (self.row,))
            for r in self.formula.reductions
        }
        self.results_before: dict[Buffer, te.Expr] = {
            result: te.Load(self._before(result), (self.row,)) for result in self.results
        }

    def program(self) -> Program:
        plan, formula = self.plan, self.formula
        if plan.stage is not None or plan.delayed:
            body = self._groups()
        else:
            body = self._in_group(self._rows(meanwhile=False), 0)
        work = sum(2 * r.length for r in formula.reductions) + extent_of(plan.columns)
        work *= plan.group_rows * plan.groups
        nested = with_values(parallel_nest(self.loops, work, body), {})
        return Program(formula.name, (*formula.inputs, formula.output), nested, f"rowwise: {plan}")

    def block(self) -> Stmt:
        """All rows, one after the other."""
        body = self._in_group(self._rows(meanwhile=False), 0)
        return with_values(nest([(loop, Kind.SERIAL) for loop in self.loops], body), {})

    # -- groups of rows ------------------------------------------------------------------------------------------------

    def _groups(self) -> Stmt:
        """The groups of a chunk: each is written while the next one is computed."""
        plan, stage = self.plan, self.plan.stage
        turns = [(self.turn, Kind.SERIAL)]
        after = te.Var("after", plan.groups - 1)
        stmts = [self._in_group(nest(turns, self._rows(meanwhile=False)), 0)]
        if after.extent:
            both = nest(turns, self._rows(meanwhile=True))
            if stage is not None:
                both = block(both, self._of_group_before(self._lines(stage, self._lines_meanwhile(stage))))
            stmts.append(nest([(after, Kind.SERIAL)], self._in_group(both, after + 1)))
        last = self._write(self.results_before) if stage is None else self._lines(stage, 0)
        return block(*stmts, self._in_group(last, after.extent))

    def _rows(self, *, meanwhile: bool) -> Stmt:
        """Compute some rows; with `meanwhile`, write the previous group."""
        stmts = [
            self._reduction(number, row_pass, meanwhile=meanwhile and number == self.plan.written_along)
            for number, row_pass in enumerate(self.plan.passes)
        ]
        if not self.plan.delayed:
            return block(*stmts, self._write(self.results))
        remembered = [
            nest(self.each_row, Store(self._before(result), self.row, value))
            for result, value in self.results.items()
        ]
        return block(*stmts, *remembered)

    def _before(self, result: Buffer) -> Buffer:
        """The buffer that keeps a result of the previous group."""
        return replace(result, name=f"{result.name}_before", size=self.plan.together)

    def _in_group(self, stmt: Stmt, group: te.Expr | int) -> Stmt:
        row = dict.fromkeys(self.formula.rows[-1:], self.first + self.turn + self.row)
        return with_values(with_values(stmt, row), {self.group: te.as_index(group)})

    def _of_group_before(self, stmt: Stmt) -> Stmt:
        return with_values(stmt, {self.group: self.group - 1})

    # -- what is prefetched early -------------------------------------------------------------------------------------

    def _a_page_ahead(self, start: te.Expr, vectors: int, lanes: int) -> list[Stmt]:
        """Prefetches in the block of the only pass that begins at `start`, for contiguous rows."""
        axis, found = self.formula.reductions[0].axes[-1], list[Stmt]()
        for load in self.plan.a_page_ahead:
            size = load.dtype.bytes
            assert isinstance(load.source, Buffer)
            for begin in range(0, vectors * lanes * size, self.machine.line_bytes):
                coord = {axis: start + (begin + self.machine.page_bytes) // size}
                found.append(Prefetch(load.source, te.substitute(load.indices[0], coord), _SECOND_CACHE))
        return found

    def _next_rows(
        self, number: int, axes: Sequence[te.Var], start: te.Expr, vectors: int, lanes: int
    ) -> list[Stmt]:
        """Prefetches in the block of pass `number` that begins at `start` of the last of `axes`: its share of the
        lines of later rows."""
        fetching, first = self.plan.fetching, self.formula.reductions[0].axes
        alike = same_extents(first, axes)
        joined = len(first) == 1 and first[0].extent == extent_of(axes)
        if number not in fetching or not (alike or joined):
            return []
        found: list[Stmt] = []
        for fetch in self.plan.fetches:
            load, row = fetch.load, self.formula.rows[-1]
            assert isinstance(load.source, Buffer)
            for vector in range(fetching.index(number), vectors, len(fetching)):
                if vector * lanes * load.dtype.bytes % self.machine.line_bytes:
                    continue
                position = start + vector * lanes
                coord: dict[te.Var, te.Expr] = {row: row + fetch.rows}
                if alike:
                    coord.update(zip(first, (*axes[:-1], position), strict=True))
                else:
                    coord[first[0]] = row_major(axes[:-1]) * axes[-1].extent + position
                ahead = Prefetch(load.source, te.substitute(load.indices[0], coord), fetch.level)
                found.append(nest(self.each_row, ahead))
        return found

    # -- a pass over the row -------------------------------------------------------------------------------------------

    def _reduction(self, number: int, row_pass: RowPass, *, meanwhile: bool) -> Stmt:
        """One reduction; with `meanwhile`, the previous group is written during it."""
        reduction, lanes, size = row_pass.reduction, row_pass.lanes, row_pass.size
        *outer, axis = reduction.axes
        blocks, rest = te.Var(f"{axis.name}_b", row_pass.blocks), axis.extent % size
        lane, step = te.Var("v", lanes), te.Var("u", row_pass.vectors)
        held = self.plan.together * size
        partial = Buffer(f"acc_{reduction.result.name}", reduction.result.dtype, held, Scope.REGISTER)
        in_block = [(step, Kind.UNROLL), (lane, Kind.VECTOR)]
        element, first = step * lanes + lane, self.row * size
        along: list[Stmt] = []
        if blocks.extent:
            start = blocks * size
            taken = self._accumulated(reduction, partial, first + element, start + element)
            fetches = [
                *self._next_rows(number, reduction.axes, start, row_pass.vectors, lanes),
                *self._a_page_ahead(start, row_pass.vectors, lanes),
            ]
            written: list[Stmt] = []
            if meanwhile and self.plan.stage is not None:
                vector = (self.turn * row_pass.blocks + blocks) * row_pass.vectors + step
                written.append(nest(in_block, self._of_group_before(self._line(self.plan.stage, vector))))
            elif meanwhile:
                written.append(nest([*self.each_row, *in_block], self._row_before(start + element)))
            kind = Kind.UNROLL if self.plan.in_registers else Kind.SERIAL
            # Written last, because a load waits for a store at the same page offset, as rows of a whole page have.
            whole = block(*fetches, nest([*self.each_row, *in_block], taken), *written)
            along.append(nest([(blocks, kind)], whole))
        for begin in range(0, rest, lanes):
            start = te.as_index(blocks.extent * size + begin)
            position = start + lane
            ends_inside = begin + lanes <= rest
            inside = None if ends_inside else te.call("lt", position, te.as_index(axis.extent))
            taken = self._accumulated(reduction, partial, first + lane + begin, position, inside)
            in_vector = [*self.each_row, (lane, Kind.VECTOR)]
            along += [*self._a_page_ahead(start, 1, lanes), nest(in_vector, taken)]
            if meanwhile and self.plan.stage is None:
                along.append(nest(in_vector, self._row_before(position)))
        identity = te.reduce_identity(reduction.kind, partial.dtype)
        return block(
            nest([*self.each_row, *in_block], Store(partial, first + element, identity)),
            nest([(loop, Kind.SERIAL) for loop in outer], block(*along)),
            *self._across(row_pass, partial),
        )

    def _accumulated(
        self,
        reduction: Reduction,
        partial: Buffer,
        element: te.Expr,
        position: te.Expr,
        inside: te.Expr | None = None,
    ) -> Stmt:
        """The stores that accumulate the element at `position`, if `inside` holds."""

        def at(expr: te.Expr) -> te.Expr:
            return with_results(te.substitute(expr, {reduction.axes[-1]: position}), self.results)

        def guarded(expr: te.Expr, otherwise: te.Expr) -> te.Expr:
            return expr if inside is None else te.select(inside, expr, otherwise)

        stmts: list[Stmt] = []
        body, read = simplify(reduction.body), self._kept_by(reduction)
        for number, kept in enumerate(read):
            if kept.reduction == reduction:
                value = at(self._with_kept(read[:number], reduction.axes, kept.expr))
                coord = at(self._coord_of_kept(kept, reduction.axes))
                stmts.append(Store(kept.buffer, coord, guarded(value, te.const(0, value.dtype))))
        body = at(self._with_kept(read, reduction.axes, body))
        body = guarded(body, te.reduce_identity(reduction.kind, partial.dtype))
        more = combined(reduction, self.formula, te.Load(partial, (element,)), body)
        return block(*stmts, Store(partial, element, more))

    def _across(self, row_pass: RowPass, partial: Buffer) -> list[Stmt]:
        """The results of the rows, from all their accumulators."""
        reduction, lanes = row_pass.reduction, row_pass.lanes
        lane = te.Var("v", lanes)
        stmts: list[Stmt] = []

        def coord(vector: int) -> te.Expr:
            return self.row * row_pass.size + lane + vector * lanes

        left = row_pass.vectors
        while left > 1:
            half = ceil_div(left, 2)
            for vector in range(left - half):
                one, other = (te.Load(partial, (coord(at),)) for at in (vector, vector + half))
                both = Store(partial, coord(vector), combined(reduction, self.formula, one, other))
                stmts.append(nest([*self.each_row, (lane, Kind.VECTOR)], both))
            left = half
        result = replace(reduction.result, size=self.plan.together)
        for row in range(self.plan.together):
            across = Across(reduction.kind, partial, row * row_pass.size, lanes)
            stmts.append(Store(result, te.as_index(row), across))
        return stmts

    # -- the result ----------------------------------------------------------------------------------------------------

    def _write(self, results: Mapping[Buffer, te.Expr]) -> Stmt:
        """Write the results of some rows to the output, or to the stage."""
        plan, formula = self.plan, self.formula
        value = self._value(results)
        if not plan.columns:
            return nest(self.each_row, Store(formula.output, formula.store, value))
        if plan.stage is None:
            run = self._streamed_run(value) if plan.streamed else None
            return run or self._in_tiles(formula.output, formula.store, value, streamed=plan.streamed)
        row = self.turn * extent_of(plan.columns) + row_major(columns_of(formula))
        coord = row + self._half(plan.stage)
        if plan.in_registers:
            return self._written_out(plan.stage, coord, value)
        return self._in_tiles(plan.stage.buffer, coord, value, streamed=False)

    def _streamed_run(self, value: te.Expr) -> Stmt | None:
        """None if a row is not contiguous, or if its vectors are whole lines anyway."""
        (*outer, axis), store, lanes = self.plan.columns, self.formula.store, self.plan.lanes
        if outer or coefficient(store, axis) != 1:
            return None
        number = len(self.formula.reductions)
        return streamed_run(
            axis,
            simplify(te.substitute(store, {axis: te.as_index(0)})),
            lanes,
            lambda at, index, past: Store(self.formula.output, index, te.substitute(value, {axis: at}), past),
            rows=self.each_row,
            interleaved=lambda start, vectors: self._next_rows(
                number, self.plan.columns, start, vectors, lanes
            ),
        )

    def _in_tiles(self, target: Buffer, coord: te.Expr, value: te.Expr, *, streamed: bool) -> Stmt:
        (*outer, axis), lanes = self.plan.columns, self.plan.lanes
        vectors = best_unroll(axis.extent, lanes, _COMPUTED)
        tiles = Tiles(axis, lanes * vectors)
        lane, step = te.Var("v", lanes), te.Var("u", vectors)
        position = {axis: tiles.start() + step * lanes + lane}
        store = Store(target, te.substitute(coord, position), te.substitute(value, position), streamed)
        number = len(self.formula.reductions)
        fetches = self._next_rows(number, self.plan.columns, tiles.start(), vectors, lanes)
        loops = [(loop, Kind.SERIAL) for loop in (*outer, tiles.var)]
        in_tile = [*self.each_row, (step, Kind.UNROLL), (lane, Kind.VECTOR)]
        return nest(loops, block(*fetches, nest(in_tile, store)))

    def _written_out(self, stage: RowStaging, coord: te.Expr, value: te.Expr) -> Stmt:
        """Write the row to the stage, vector by vector; the next row overwrites what the last vector writes beyond
        its end."""
        (axis,), lanes = self.plan.columns, self.plan.lanes
        lane, vectors = te.Var("v", lanes), ceil_div(axis.extent, lanes)
        number = len(self.formula.reductions)
        stmts = self._next_rows(number, self.plan.columns, te.as_index(0), vectors, lanes)
        for vector in range(vectors):
            position: dict[te.Var, te.Expr] = {axis: lane + vector * lanes}
            found = te.substitute(value, position)
            if (vector + 1) * lanes > axis.extent:
                inside = te.call("lt", position[axis], te.as_index(axis.extent))
                found = te.select(inside, found, te.const(0, found.dtype))
            store = Store(stage.buffer, te.substitute(coord, position), found)
            stmts.append(nest([(lane, Kind.VECTOR)], store))
        return block(*stmts)

    def _row_before(self, position: te.Expr) -> Stmt:
        """An element of the result of each row of the previous group."""
        formula, (*outer, axis) = self.formula, self.plan.columns
        coord = dict(zip(outer, formula.reductions[-1].axes[:-1], strict=True)) | {axis: position}
        index, value = (te.substitute(e, coord) for e in (formula.store, self._value(self.results_before)))
        store = Store(formula.output, index, value, streamed=True)
        row = {formula.rows[-1]: self.first + self.row}
        return self._of_group_before(with_values(store, row))

    def _half(self, stage: RowStaging) -> te.Expr:
        """The group's offset in the stage; the next group uses the other half."""
        return self.group % 2 * stage.half if self.plan.groups > 1 else te.as_index(0)

    def _line(self, stage: RowStaging, number: te.Expr) -> Store:
        """Copy a line of the group from the stage to the output."""
        coord = number * stage.line + te.Var("v", stage.line)
        columns: dict[te.Var, te.Expr] = dict.fromkeys(self.plan.columns, te.as_index(0))
        begin = te.substitute(self.formula.store, {**columns, self.formula.rows[-1]: self.first})
        loaded = te.Load(stage.buffer, (self._half(stage) + coord,))
        return Store(self.formula.output, begin + coord, loaded, streamed=True)

    def _lines_meanwhile(self, stage: RowStaging) -> int:
        """How many lines of a group are written during a reduction of the next one."""
        assert self.plan.written_along is not None
        row_pass = self.plan.passes[self.plan.written_along]
        return stage.rows * row_pass.blocks * row_pass.vectors

    def _lines(self, stage: RowStaging, begin: int) -> Stmt:
        """The lines of the group from `begin` on."""
        count = stage.length // stage.line - begin
        if not count:
            return block()
        lines = Tiles(te.Var("line", count), best_unroll(count, 1, _COPIED))
        step, lane = te.Var("u", lines.size), te.Var("v", stage.line)
        copy = self._line(stage, lines.start() + step + begin)
        return nest([(lines.var, Kind.SERIAL), (step, Kind.UNROLL), (lane, Kind.VECTOR)], copy)

    def _coord_of_kept(self, kept: KeptValue, axes: Sequence[te.Var]) -> te.Expr:
        coord = self.row * kept.pitch + row_major(axes)
        return coord + self.group % 2 * (self.plan.together * kept.pitch) if self.plan.delayed else coord

    def _kept_by(self, reduction: Reduction) -> list[KeptValue]:
        """What a pass stores, or reads from an earlier one."""
        widened, kept = self.plan.widened, self.plan.kept
        found = [widened] if widened and same_extents(widened.reduction.axes, reduction.axes) else []
        return [*found, kept] if kept is not None and kept.reduction == reduction else found

    def _with_kept(self, kept: Sequence[KeptValue], axes: Sequence[te.Var], expr: te.Expr) -> te.Expr:
        """`expr` over `axes` with what is kept read from memory. A value that contains others comes after them."""
        for each in reversed(kept):
            if not same_extents(each.reduction.axes, axes):
                continue
            renamed = dict(zip(axes, each.reduction.axes, strict=True))
            loaded = te.Load(each.buffer, (self._coord_of_kept(each, axes),))

            def rule(node: te.Expr) -> te.Expr | None:
                return loaded if simplify(te.substitute(node, renamed)) == each.expr else None  # noqa: B023

            expr = te.rewrite(expr, rule)
        return expr

    def _value(self, results: Mapping[Buffer, te.Expr]) -> te.Expr:
        kept = [each for each in (self.plan.widened, self.plan.kept) if each is not None]
        return with_results(self._with_kept(kept, self.plan.columns, self.formula.value), results)
