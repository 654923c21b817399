"""Plans row reductions: everything decided before a statement is emitted.

Rows are taken together where they are short, so that one waits for the end of a reduction while others compute. A
look-ahead that follows loads loses those that go from row to row: where there is one, only rows are taken together that
are so short that the wait for each of several reductions counts more. What one pass over the row computes at some
expense and the result needs again, as the exponentials of a softmax, is kept in scratch.

In the passes that take long, the next rows are prefetched: they come while these are computed and written. They come
into L1 if all that is used until then has room there too, otherwise into the second: what is pushed out
before it is needed is read twice. A row that is only read, in one pass and by itself, is prefetched a page ahead: there
the processor's look-ahead ends.

Results that are written with non-temporal stores are written in whole lines. Where rows do not end with a line, as many
as end with one together are put into scratch, the stage, and written from there. Such a row of a few vectors is written
out and stays in registers from its first pass to the last.

Memory should not wait for arithmetic. So a group of rows is written while the next one is computed, along one of its
reductions: from the stage along one that computes exponentials; where rows end with a line, without a stage, along the
last one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tilewright import te
from tilewright.hw import CpuMachine
from tilewright.loops.formula import Formula, Reduction
from tilewright.loops.ir import SCRATCH_LIMIT, Buffer, Scope
from tilewright.loops.recompute import computable_anywhere, is_expensive
from tilewright.loops.tiling import (
    Tiles,
    columns_of,
    contiguous_last,
    extent_of,
    is_streamed,
    lanes_for,
    row_major,
    same_extents,
)
from tilewright.support.arith import ceil_div
from tilewright.te.index import coefficient, divisor_of, simplify

_ACCUMULATORS = 8
_IN_REGISTERS = 16  # vectors of a row that stays in them
_GROUPS = 128  # of rows in a chunk, at most: nothing is written while its first one is computed
_CHUNKS = 4  # for each core, at least
_SHORTEST_DELAYED = 8  # vectors of a row that is written later than it is computed
_SHORT_ROW = 2048  # elements: the end of a longer row's reductions does not count
_SHORTEST_ALONE = 512  # the same where several rows are not followed
# Parts of L2, as far as it may be scratch: that of results which wait for their line, and that of what is
# kept of the rows before and of those that are computed.
_STAGED, _KEPT_TWICE = 4, 2
_REPEATED = 1.1  # rows computed over rows needed, where the last few overlap those before
AHEAD = 4 << 10  # bytes between what is computed and what is prefetched: little, in L1
_FAR_AHEAD = 16 << 10  # the same in the second
_FILLED = 0.7  # of L1, by what is prefetched and all that is used until it is needed
_SHORTEST_FETCHED = 256  # bytes of a row: of shorter ones the processor's own look-ahead sees the next


@dataclass(frozen=True)
class RowPass:
    """A reduction along the row, in blocks of so many vectors, each of which has an accumulator."""

    reduction: Reduction
    lanes: int
    vectors: int

    @property
    def size(self) -> int:
        """Elements of a block."""
        return self.vectors * self.lanes

    @property
    def blocks(self) -> int:
        """Those that are whole."""
        return self.reduction.axes[-1].extent // self.size


@dataclass(frozen=True)
class KeptValue:
    """An expression over the axes of `reduction` that is stored when that is computed, and read for the result."""

    reduction: Reduction
    expr: te.Expr
    buffer: Buffer
    pitch: int  # elements from one row to the next


@dataclass(frozen=True)
class RowStaging:
    """Scratch for `rows` of results that end with a line together. Where others are computed before these are written
    it has two halves."""

    rows: int
    length: int  # elements of all of them
    line: int  # elements
    buffer: Buffer

    @property
    def half(self) -> int:
        """Elements from one half to the other: the last row is written in whole vectors."""
        return self.length + self.line


@dataclass(frozen=True)
class RowPrefetch:
    """What meets a row first, prefetched so many `rows` before, into the cache of this level."""

    load: te.Load
    rows: int
    level: int


@dataclass(frozen=True)
class RowPlan:
    """Rows are computed in groups, those of a stage or those that are taken together, and groups in chunks, each by one
    thread."""

    formula: Formula  # of the axes of each reduction the contiguous one is the last
    columns: tuple[te.Var, ...]  # and of these
    lanes: int  # of the result
    passes: tuple[RowPass, ...]  # one for each reduction
    together: int  # rows
    streamed: bool
    stage: RowStaging | None
    written_along: int | None  # the number of the reduction that goes along with writing the group before
    groups: int  # in a chunk
    in_registers: bool
    kept: KeptValue | None
    fetches: tuple[RowPrefetch, ...]
    fetching: tuple[int, ...]  # the passes that do so, a share each; after the reductions, that which writes
    a_page_ahead: tuple[te.Load, ...]  # what the only pass prefetches

    @property
    def delayed(self) -> bool:
        """Whether rows are written a group later, without a stage: their results, and what is kept of them, are there
        twice."""
        return self.written_along is not None and self.stage is None

    @property
    def group_rows(self) -> int:
        return self.together if self.stage is None else self.stage.rows

    def __str__(self) -> str:
        words = ", ".join(f"{r.kind} of {r.length}" for r in self.formula.reductions)
        words += f", kept in {self.kept.buffer.scope.value}" if self.kept else ""
        words += ", streamed" if self.streamed else ""
        words += f" in {self.stage.rows} rows at a time" if self.stage else ""
        return words + (", delayed by a row" if self.delayed else "")


def row_plan_of(formula: Formula, machine: CpuMachine) -> RowPlan:
    formula = contiguous_last(formula)
    columns = _columns(formula)
    streamed = bool(columns) and is_streamed(formula, machine)
    staged = _rows_staged(formula, machine) if streamed else 0
    in_registers = bool(staged) and _stays_in_registers(formula, machine)
    cut = _cut_like_columns(formula) if streamed else formula
    delayed = streamed and not staged and _can_be_delayed(cut, machine)
    if delayed:
        formula = cut
    last = len(formula.reductions) - 1
    written_along = last if delayed else _slow_pass(formula, machine, staged)
    together = 1 if staged else _rows_together(formula, machine, delayed=delayed)
    groups = 1 if written_along is None else groups_in_chunk(formula.rows, staged or together, machine)
    scope = Scope.REGISTER if in_registers else Scope.SCRATCH
    kept = _kept(formula, machine, scope, rows=2 * together if delayed else together)
    loads = _fetched(formula, machine)
    only_read = _is_only_read(formula)
    return RowPlan(
        formula=formula,
        columns=columns,
        lanes=lanes_for(formula, machine, extent_of(columns[-1:])),
        passes=tuple(_row_pass(r, formula, machine, together) for r in formula.reductions),
        together=together,
        streamed=streamed,
        stage=_stage(formula, machine, staged, groups) if staged else None,
        written_along=written_along,
        groups=groups,
        in_registers=in_registers,
        kept=kept,
        fetches=() if only_read else _fetches(formula, machine, loads, together, kept, delayed=delayed),
        fetching=(last,) if delayed else _slow_passes(formula),
        a_page_ahead=_a_page_ahead(formula, machine, loads) if only_read else (),
    )


def groups_in_chunk(rows: Sequence[te.Var], size: int, machine: CpuMachine) -> int:
    """How many groups of `size` rows one thread takes at a time: enough chunks are left for all."""
    most = extent_of(rows) // (size * _CHUNKS * machine.cores)
    return max(n for n in range(1, min(max(most, 1), _GROUPS) + 1) if rows[-1].extent // size % n == 0)


# -- passes over the row ----------------------------------------------------------------------------------------------


def _columns(formula: Formula) -> tuple[te.Var, ...]:
    """That which is contiguous in the output last."""
    return tuple(sorted(columns_of(formula), key=lambda axis: coefficient(formula.store, axis) == 1))


def _is_only_read(formula: Formula) -> bool:
    """Whether one pass is all."""
    return len(formula.reductions) == 1 and not columns_of(formula)


def _lanes(reduction: Reduction, formula: Formula, machine: CpuMachine) -> int:
    """Enough for the axis, at most the machine's for what this reduction computes with."""
    alone = replace(formula, reductions=(reduction,), value=te.Load(reduction.result, ()))
    enough = 1 << (reduction.axes[-1].extent - 1).bit_length()
    return lanes_for(alone, machine, enough)


def _row_pass(reduction: Reduction, formula: Formula, machine: CpuMachine, together: int) -> RowPass:
    lanes = _lanes(reduction, formula, machine)
    vectors = ceil_div(reduction.axes[-1].extent, lanes)
    most = _ACCUMULATORS // 2 if is_expensive(reduction.body, reduction.axes) else _ACCUMULATORS
    return RowPass(reduction, lanes, max(1, min(most // together, vectors)))


def _rows_together(formula: Formula, machine: CpuMachine, *, delayed: bool) -> int:
    if delayed:
        return 2 if formula.rows[-1].extent % 2 == 0 and _rows_held_twice(formula, machine) > 1 else 1
    longest = max(r.length for r in formula.reductions)
    # Rows that are not whole vectors begin elsewhere in a line each.
    ragged = longest % lanes_for(formula, machine, longest)
    if not formula.rows or longest > _SHORT_ROW or ragged:
        return 1
    if (_is_only_read(formula) or longest >= _SHORTEST_ALONE) and not machine.prefetches_by_page:
        return 1
    axis = formula.rows[-1]
    return next((n for n in (4, 2) if n <= axis.extent and Tiles(axis, n).waste <= _REPEATED), 1)


# -- results that are written with non-temporal stores ----------------------------------------------------------------


def _room(machine: CpuMachine) -> int:
    return min(machine.caches.l2_per_core, SCRATCH_LIMIT)


def _rows_staged(formula: Formula, machine: CpuMachine) -> int:
    """How many rows of the result end with a line together, where one does not; 0 where they are not staged."""
    columns = columns_of(formula)
    length = extent_of(columns)
    if not formula.rows:
        return 0
    lanes = lanes_for(formula, machine, length * formula.rows[-1].extent)  # of a row there may be fewer
    count = lanes // math.gcd(length, lanes)
    if count == 1 or formula.rows[-1].extent % count:
        return 0
    if count * length * formula.output.dtype.bytes > _room(machine) // _STAGED:
        return 0
    elsewhere = simplify(formula.store - row_major((formula.rows[-1], *columns)))
    other_rows = set(formula.rows[:-1])
    return count if te.variables(elsewhere) <= other_rows and divisor_of(elsewhere) % lanes == 0 else 0


def _stage(formula: Formula, machine: CpuMachine, rows: int, groups: int) -> RowStaging:
    length = rows * extent_of(columns_of(formula))
    line = lanes_for(formula, machine, length)
    size = (length + line) * min(groups, 2)
    return RowStaging(rows, length, line, Buffer("stage", formula.output.dtype, size, Scope.SCRATCH))


def _slow_pass(formula: Formula, machine: CpuMachine, staged: int) -> int | None:
    """The number of the reduction in which there is time to write the rows of a stage: it takes long, vector by vector.
    None where there is no such reduction, or no stage."""
    columns = columns_of(formula)
    if not staged:
        return None
    lanes = lanes_for(formula, machine, staged * extent_of(columns))
    for number, r in enumerate(formula.reductions):
        along = len(r.axes) == 1 and same_extents(r.axes, columns)
        if along and _lanes(r, formula, machine) == lanes <= r.length and is_expensive(r.body, r.axes):
            return number
    return None


def _stays_in_registers(formula: Formula, machine: CpuMachine) -> bool:
    """Whether a row that is staged does."""
    columns = columns_of(formula)
    if len(columns) > 1:
        return False
    length = columns[0].extent
    lanes = lanes_for(formula, machine, length)
    along = all(
        same_extents(r.axes, columns) and _lanes(r, formula, machine) == lanes for r in formula.reductions
    )
    return along and lanes < length <= _IN_REGISTERS * lanes


def _cut_like_columns(formula: Formula) -> Formula:
    """The same formula, the last reduction's only axis cut as the columns are: its passes go along with theirs."""
    (*others, last), columns = formula.reductions, _columns(formula)
    if len(last.axes) > 1 or len(columns) == 1 or last.length != extent_of(columns):
        return formula
    axes = tuple(te.Var(f"{last.axes[0].name}_{axis.name}", axis.extent) for axis in columns)
    cut = replace(last, axes=axes, body=te.substitute(last.body, {last.axes[0]: row_major(axes)}))
    return replace(formula, reductions=(*others, cut))


def _can_be_delayed(formula: Formula, machine: CpuMachine) -> bool:
    """Whether rows can be written along the last reduction, which as a rule takes longest, of the rows after them."""
    if not formula.rows:
        return False
    columns, last = _columns(formula), formula.reductions[-1]
    axis = columns[-1]
    lanes = lanes_for(formula, machine, axis.extent)
    position = te.substitute(formula.store, {axis: te.as_index(0)})
    if coefficient(formula.store, axis) != 1 or divisor_of(position) % lanes or axis.extent % lanes:
        return False
    along = same_extents(columns, last.axes) and _lanes(last, formula, machine) == lanes
    long = axis.extent >= _SHORTEST_DELAYED * lanes
    return along and long and _rows_held_twice(formula, machine) > 0


def _rows_held_twice(formula: Formula, machine: CpuMachine) -> int:
    """How many rows, or what is kept of them, there is room for, and for as many before."""
    longest = max((r.length + _lanes(r, formula, machine)) * r.result.dtype.bytes for r in formula.reductions)
    return _room(machine) // (_KEPT_TWICE * 2 * longest)


# -- what is kept from one pass to the last ---------------------------------------------------------------------------


def _kept(formula: Formula, machine: CpuMachine, scope: Scope, *, rows: int) -> KeptValue | None:
    columns = _columns(formula)
    for reduction in reversed(formula.reductions):
        kept_bytes = reduction.length * reduction.result.dtype.bytes
        fits = kept_bytes <= min(machine.caches.l2_per_core // 3, SCRATCH_LIMIT // 2)
        if not fits or not same_extents(columns, reduction.axes):
            continue
        renamed = dict(zip(columns, reduction.axes, strict=True))
        needed = set(te.walk(simplify(te.substitute(formula.value, renamed))))
        for expr in computable_anywhere(simplify(reduction.body)):
            if expr in needed and is_expensive(expr, reduction.axes):
                pitch = reduction.length + _lanes(reduction, formula, machine)
                return KeptValue(reduction, expr, Buffer("kept", expr.dtype, rows * pitch, scope), pitch)
    return None


# -- what is prefetched early ------------------------------------------------------------------------------------------


def _fetched(formula: Formula, machine: CpuMachine) -> tuple[te.Load, ...]:
    """The loads that meet a row first; none where it does not pay to ask for the next row's."""
    first, rows, caches = formula.reductions[0], formula.rows, machine.caches
    found = tuple(
        load
        for load in dict.fromkeys(te.loads(first.body))
        if load.indices and coefficient(load.indices[0], first.axes[-1]) == 1
        if rows and coefficient(load.indices[0], rows[-1])
    )
    held = _bytes_of_row(formula, found)
    total = held * extent_of(rows)
    pays = _SHORTEST_FETCHED <= held <= caches.l2_per_core // 2 and total > caches.l2_per_core // 2
    return found if pays else ()


def _bytes_of_row(formula: Formula, loads: Sequence[te.Load]) -> int:
    return sum(formula.reductions[0].length * load.dtype.bytes for load in loads)


def _fetches(
    formula: Formula,
    machine: CpuMachine,
    loads: Sequence[te.Load],
    together: int,
    kept: KeptValue | None,
    *,
    delayed: bool,
) -> tuple[RowPrefetch, ...]:
    held = _bytes_of_row(formula, loads)
    written = kept.buffer.size * kept.buffer.dtype.bytes if kept else 0
    if delayed and not kept:
        written = together * held
    shared = sum(
        extent_of(columns_of(formula)) * load.dtype.bytes
        for load in dict.fromkeys(te.loads(formula.value))
        if load.indices and not te.variables(load.indices[0]) & set(formula.rows)
    )
    # Of the pass that asks: the rows that it prefetches and its own, what it writes from, what is the same for all
    # rows.
    touched = 2 * together * held + written + shared
    level, ahead = (1, AHEAD) if touched <= machine.caches.l1 * _FILLED else (2, _FAR_AHEAD)

    def rows(load: te.Load) -> int:
        """Enough for what is prefetched now to have come when it is needed."""
        row_bytes = _bytes_of_row(formula, [load])
        return max(1, ceil_div(ahead, row_bytes * together)) * together

    return tuple(RowPrefetch(load, rows(load), level) for load in loads)


def _slow_passes(formula: Formula) -> tuple[int, ...]:
    """Those after the first in which there is time to ask for the next rows: the last, and those that take long."""
    reductions, last = formula.reductions, len(formula.reductions) - 1 + bool(columns_of(formula))
    return tuple(
        n for n in range(1, last + 1) if n == last or is_expensive(reductions[n].body, reductions[n].axes)
    )


def _a_page_ahead(formula: Formula, machine: CpuMachine, loads: Sequence[te.Load]) -> tuple[te.Load, ...]:
    """Of rows that lie after each other, where the look-ahead does not follow pages."""
    if machine.prefetches_by_page:
        return ()
    length = formula.reductions[0].length
    return tuple(load for load in loads if coefficient(load.indices[0], formula.rows[-1]) == length)
