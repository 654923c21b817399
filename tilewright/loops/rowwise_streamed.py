"""Row reductions over short rows that are not a multiple of a cache line, with non-temporal stores.

Non-temporal stores must write whole lines. So vectors are aligned to lines, not to rows: at both ends of a row, lanes
of its neighbours are masked, and a line that two rows share waits in a register for the second one.

    for every few rows:                          (parallel)
      for row in them:
        its reductions, all but the last
        for lines of the row:
          out[line of the row before] = value        (its first line includes the end of the row before that)
          kept[line] = what the last reduction computes at some expense

Nothing goes through scratch memory: an ordinary store waits for all earlier streaming stores. Kept values reuse the
register that the previous row has just freed. So memory is read and written continuously, and the latency of a
reduction is hidden by writing lines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from tilewright import te
from tilewright.hw import CpuMachine
from tilewright.loops.formula import Formula, Reduction
from tilewright.loops.ir import Across, Buffer, If, Kind, Prefetch, Program, Scope, Stmt, Store, block, nest
from tilewright.loops.recompute import computable_anywhere, is_expensive
from tilewright.loops.row_plan import AHEAD, groups_in_chunk
from tilewright.loops.softmax_exp import combined
from tilewright.loops.tiling import (
    columns_of,
    contiguous_last,
    is_streamed,
    lanes_for,
    parallel_nest,
    row_major,
    with_results,
    with_values,
)
from tilewright.support.arith import ceil_div
from tilewright.te.index import coefficient, divisor_of, in_range, simplify

_MIN, _MAX = (
    5,
    14,
)  # minimum and maximum lines of a row: the ends of shorter rows cost too much, longer rows do not stay in registers
_ACCUMULATORS = 4


def streamed_rows_program(formula: Formula, machine: CpuMachine) -> Program | None:
    """The program; None if rows are longer or much shorter, or end at a line anyway, or if the last one does not."""
    formula = contiguous_last(formula)
    columns = columns_of(formula)
    if len(columns) != 1 or not formula.rows or not is_streamed(formula, machine):
        return None
    (axis,), row = columns, formula.rows[-1]
    lanes = lanes_for(formula, machine, axis.extent)
    held = {formula.output.dtype.bytes, *(r.result.dtype.bytes for r in formula.reductions)}
    alike = all([a.extent for a in r.axes] == [axis.extent] for r in formula.reductions)
    if held != {machine.line_bytes // lanes} or not alike:
        return None
    common = math.gcd(axis.extent, lanes)
    lines = ceil_div(lanes - common + axis.extent, lanes)
    if common == lanes or row.extent % (lanes // common) or not _MIN <= lines <= _MAX:
        return None
    elsewhere = simplify(formula.store - row_major((row, axis)))
    if te.variables(elsewhere) & {row, axis} or divisor_of(elsewhere) % lanes:
        return None
    return _StreamedRows(formula, machine, axis, lanes, lines).program()


class _StreamedRows:
    """The loop nest: `turn` is the index of a row in its chunk, `line` that of a line of the row."""

    def __init__(self, formula: Formula, machine: CpuMachine, axis: te.Var, lanes: int, lines: int) -> None:
        self.formula, self.axis, self.lanes, self.lines = formula, axis, lanes, lines
        self.whole = axis.extent // lanes  # lines that end in the row, wherever it begins
        self.row = formula.rows[-1]
        together = lanes // math.gcd(axis.extent, lanes)
        size = together * groups_in_chunk(formula.rows, together, machine)
        self.chunk = te.Var(f"{self.row.name}_t", self.row.extent // size)
        self.after = te.Var("after", size - 1)
        self.lane = te.Var("v", lanes)
        self.carry = Buffer("carry", formula.output.dtype, lanes, Scope.REGISTER)
        self.kept_expr = self._expensive_twice()
        self.kept = Buffer("kept", formula.reductions[-1].result.dtype, lines * lanes, Scope.REGISTER)

    def program(self) -> Program:
        formula, last = self.formula, te.as_index(self.after.extent)
        steps = block(*self._reductions(self.after + 1, before=self.after), self._remember())
        written = [self._written(last, line) for line in range(self.whole + 1)]
        nothing = Store(self.carry, self.lane, te.const(0, self.carry.dtype))
        body = block(
            self._vector(nothing),
            *self._reductions(te.as_index(0), before=None),
            self._remember(),
            nest([(self.after, Kind.SERIAL)], steps),
            *written,
        )
        work = (2 * len(formula.reductions) + 1) * self.axis.extent * (self.after.extent + 1)
        nested = parallel_nest([*formula.rows[:-1], self.chunk], work, body)
        words = "rowwise: " + ", ".join(f"{r.kind} of {r.length}" for r in formula.reductions)
        words += ", kept in register" if self.kept_expr is not None else ""
        words += ", streamed in lines of two rows, delayed by a row"
        return Program(formula.name, (*formula.inputs, formula.output), with_values(nested, {}), words)

    def _vector(self, store: Store) -> Stmt:
        return nest([(self.lane, Kind.VECTOR)], store)

    # -- offsets
    # -------------------------------------------------------------------------------------------------------

    def _row_at(self, turn: te.Expr) -> dict[te.Var, te.Expr]:
        return {self.row: self.chunk * (self.after.extent + 1) + turn}

    def _phase(self, turn: te.Expr) -> te.Expr:
        """The row's offset within a line; a chunk begins at a line."""
        return turn * (self.axis.extent % self.lanes) % self.lanes

    def _column(self, turn: te.Expr, line: int) -> te.Expr:
        return self.lane + line * self.lanes - self._phase(turn)

    def _element(self, line: int) -> te.Expr:
        return self.lane + line * self.lanes

    # -- what is kept --------------------------------------------------------------------------------------------------

    def _expensive_twice(self) -> te.Expr | None:
        """Expensive values of the last reduction that the result needs again, over the axis of the result."""
        last = self.formula.reductions[-1]
        needed = set(te.walk(simplify(self.formula.value)))
        for expr in computable_anywhere(simplify(te.substitute(last.body, {last.axes[0]: self.axis}))):
            if expr in needed and is_expensive(expr, [self.axis]) and expr.dtype is last.result.dtype:
                return expr
        return None

    def _with_kept(self, expr: te.Expr, line: int) -> te.Expr:
        loaded = te.Load(self.kept, (self._element(line),))
        return te.rewrite(simplify(expr), lambda node: loaded if node == self.kept_expr else None)

    def _before(self, result: Buffer) -> Buffer:
        return replace(result, name=f"{result.name}_before", size=1)

    def _remember(self) -> Stmt:
        """Keep the results of a row until it is written."""
        stores = []
        for r in self.formula.reductions:
            found = te.Load(replace(r.result, size=1), (te.as_index(0),))
            stores.append(Store(self._before(r.result), te.as_index(0), found))
        return block(*stores)

    # -- a row ---------------------------------------------------------------------------------------------------------

    def _reductions(self, turn: te.Expr, before: te.Expr | None) -> list[Stmt]:
        """The reductions of row `turn`; row `before` is written during the last one."""
        results: dict[Buffer, te.Expr] = {}
        stmts: list[Stmt] = []
        *others, last = self.formula.reductions
        for reduction in (*others, last):
            interleaved: list[Sequence[Stmt]] = [()] * self.lines
            if reduction is last and before is not None:
                # The branch goes first: LLVM would move code before it to its uses after it.
                stmts += [self._written(before, 0), self._written(before, self.whole)]
                inner = {line: [self._written(before, line)] for line in range(1, self.whole)}
                interleaved = [
                    [*inner.get(line, ()), *self._prefetched(turn, line)] for line in range(self.lines)
                ]
            stmts.append(self._reduction(reduction, turn, results, interleaved))
            result = replace(reduction.result, size=1)
            results[reduction.result] = te.Load(result, (te.as_index(0),))
        return stmts

    def _reduction(
        self,
        reduction: Reduction,
        turn: te.Expr,
        results: dict[Buffer, te.Expr],
        interleaved: Sequence[Sequence[Stmt]],
    ) -> Stmt:
        """One reduction of the row, its lines in order; `interleaved` runs before each line."""
        dtype, lanes = reduction.result.dtype, self.lanes
        partial = Buffer(f"acc_{reduction.result.name}", dtype, _ACCUMULATORS * lanes, Scope.REGISTER)
        identity = te.reduce_identity(reduction.kind, dtype)
        at = [te.Load(partial, (self._element(number),)) for number in range(_ACCUMULATORS)]

        def store(number: int, value: te.Expr) -> Stmt:
            return self._vector(Store(partial, self._element(number), value))

        stmts = [store(number, identity) for number in range(_ACCUMULATORS)]
        keeps = reduction is self.formula.reductions[-1] and self.kept_expr is not None
        for line in range(self.lines):
            body = te.substitute(reduction.body, {reduction.axes[0]: self.axis})
            stmts += interleaved[line]
            if keeps:
                assert self.kept_expr is not None
                value = self._here(self.kept_expr, turn, line, results, te.const(0, dtype))
                stmts.append(self._vector(Store(self.kept, self._element(line), value)))
                body = self._with_kept(body, line)
            number = line % _ACCUMULATORS
            element = self._here(body, turn, line, results, identity)
            value = combined(reduction, self.formula, at[number], element)
            stmts.append(store(number, value))
        left = _ACCUMULATORS
        while left > 1:
            left //= 2
            for number in range(left):
                value = combined(reduction, self.formula, at[number], at[number + left])
                stmts.append(store(number, value))
        across = Across(reduction.kind, partial, 0, lanes)
        return block(*stmts, Store(replace(reduction.result, size=1), te.as_index(0), across))

    def _here(
        self, expr: te.Expr, turn: te.Expr, line: int, results: dict[Buffer, te.Expr], otherwise: te.Expr
    ) -> te.Expr:
        """An expression in the lanes of a row; `otherwise` in those of its neighbours."""
        position = {**self._row_at(turn), self.axis: self._column(turn, line)}
        found = with_results(te.substitute(expr, position), results)
        inside = in_range(self._column(turn, line), self.axis.extent)
        return found if inside is None else te.select(inside, found, otherwise)

    def _prefetched(self, turn: te.Expr, line: int) -> list[Stmt]:
        """Prefetch a line of the first loads of a later row."""
        first = self.formula.reductions[0]
        stmts: list[Stmt] = []
        for load in dict.fromkeys(te.loads(first.body)):
            (index,) = load.indices or (te.as_index(0),)
            moves = coefficient(index, first.axes[0]) == 1 and coefficient(index, self.row)
            if not moves or line * self.lanes >= self.axis.extent:
                continue
            rows = ceil_div(AHEAD, self.axis.extent * load.dtype.bytes)
            position = {**self._row_at(turn + rows), first.axes[0]: te.as_index(line * self.lanes)}
            assert isinstance(load.source, Buffer)
            stmts.append(Prefetch(load.source, te.substitute(index, position), level=1))
        return stmts

    # -- the result ----------------------------------------------------------------------------------------------------

    def _written(self, turn: te.Expr, line: int) -> Stmt:
        """Write a line of the row; the last call writes all lines that not every row has, and keeps what waits for
        the next row."""
        if line < self.whole:
            return self._streamed(turn, line)
        waits = self._vector(Store(self.carry, self.lane, self._value(turn, line)))
        done = [self._streamed(turn, line)]
        if line + 1 < self.lines:
            done.append(self._vector(Store(self.carry, self.lane, self._value(turn, line + 1))))
        ends = (line + 1) * self.lanes - self.axis.extent
        return If(te.call("lt", self._phase(turn), te.as_index(ends)), waits, block(*done))

    def _streamed(self, turn: te.Expr, line: int) -> Stmt:
        begin = te.substitute(self.formula.store, {**self._row_at(turn), self.axis: te.as_index(0)})
        index = begin // self.lanes * self.lanes + self._element(line)
        return self._vector(Store(self.formula.output, index, self._value(turn, line), streamed=True))

    def _value(self, turn: te.Expr, line: int) -> te.Expr:
        """The result in the lanes of the row, combined with those of the previous row."""
        results: dict[Buffer, te.Expr] = {
            r.result: te.Load(self._before(r.result), (te.as_index(0),)) for r in self.formula.reductions
        }
        value = self._with_kept(self.formula.value, line)
        other = te.Load(self.carry, (self.lane,)) if line == 0 else te.const(0, value.dtype)
        return self._here(value, turn, line, results, other)
