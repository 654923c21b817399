"""Plan row reductions: all decisions, made before a statement is emitted.

Short rows are processed together, so that one row's reduction latency overlaps the computation of others. A
stride-based hardware prefetcher loses loads that jump from row to row; with one, only very short rows are processed
together, where the latency of several reductions matters more. Expensive values that a pass computes and the result
needs again, such as the exponentials of a softmax, are kept in scratch memory.

Slow passes prefetch the next rows, which arrive while the current ones are computed and written. They go into L1 if
everything used until then fits there too, otherwise into L2, because a line that is evicted early is read twice. A
row that is only read, in a single pass, is prefetched one page ahead, where the hardware prefetcher stops.

A row of 16-bit floats that several passes read is converted to f32 once, in the first one, if it then stays in L1.

Non-temporal stores write whole lines. If rows do not end at a line, as many as together end at one are put into
scratch memory, the stage, and written from there. Such a row of a few vectors is unrolled and stays in registers from
its first pass to the last.

Memory should not wait for arithmetic. So a group of rows is written during a reduction of the next group: from the
stage during one that computes exponentials; without a stage, if rows end at a line, during the last one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tilewright import te
from tilewright.dtypes import DType
from tilewright.hw import CpuMachine
from tilewright.loops.formula import Formula, Reduction
from tilewright.loops.ir import SCRATCH_LIMIT, Buffer, Scope
from tilewright.loops.recompute import computable_anywhere, is_expensive
from tilewright.loops.tiling import (
    Tiles,
    columns_in_order,
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
_IN_REGISTERS = 16  # maximum vectors of a row that stays in registers
_GROUPS = 128  # maximum groups of rows in a chunk: nothing is written while its first one is computed
_CHUNKS = 4  # minimum per core
_SHORTEST_DELAYED = 8  # minimum vectors of a row that is written later than it is computed
_SHORT_ROW = 2048  # elements: in longer rows the latency of reductions does not matter
_SHORTEST_ALONE = 512  # the same if the prefetcher does not follow several rows
# Shares of the part of L2 usable as scratch memory: for results that wait for their line, and for values kept of the
# previous and the current rows.
_STAGED, _KEPT_TWICE = 4, 2
_KEPT_IN_L1 = 3  # the part of L1 that converted rows may fill
_REPEATED = 1.1  # rows computed over rows needed, if the last few overlap
AHEAD = 4 << 10  # prefetch distance in bytes: short, in L1
_FAR_AHEAD = 16 << 10  # the same in L2
_FILLED = 0.7  # maximum share of L1 for prefetched data and everything used until it is needed
_SHORTEST_FETCHED = 256  # minimum bytes of a row: the hardware prefetcher covers shorter ones


@dataclass(frozen=True)
class RowPass:
    """A reduction along the row, in blocks of vectors with an accumulator each."""

    reduction: Reduction
    lanes: int
    vectors: int

    @property
    def size(self) -> int:
        """Elements of a block."""
        return self.vectors * self.lanes

    @property
    def blocks(self) -> int:
        """The number of whole blocks."""
        return self.reduction.axes[-1].extent // self.size


@dataclass(frozen=True)
class KeptValue:
    """An expression over the axes of `reduction` that is stored during it, and read by later passes and the result."""

    reduction: Reduction
    expr: te.Expr
    buffer: Buffer
    pitch: int  # elements between rows


@dataclass(frozen=True)
class RowStaging:
    """Scratch memory for `rows` rows of results that together end at a line. It has two halves if other rows are
    computed before these are written."""

    rows: int
    length: int  # elements of all rows
    line: int  # elements
    buffer: Buffer

    @property
    def half(self) -> int:
        """Elements between the halves; the last row is written in whole vectors."""
        return self.length + self.line


@dataclass(frozen=True)
class RowPrefetch:
    """The first loads of a row, prefetched `rows` rows ahead into the cache of this level."""

    load: te.Load
    rows: int
    level: int


@dataclass(frozen=True)
class RowPlan:
    """Rows are computed in groups (those of a stage, or those processed together), and groups in chunks, each by one
    thread."""

    formula: Formula  # the last axis of each reduction is the contiguous one
    columns: tuple[te.Var, ...]  # the same for these
    lanes: int  # of the result
    passes: tuple[RowPass, ...]  # one for each reduction
    together: int  # rows
    streamed: bool
    stage: RowStaging | None
    written_along: int | None  # the reduction during which the previous group is written
    groups: int  # in a chunk
    in_registers: bool
    kept: KeptValue | None
    widened: KeptValue | None  # the row in f32, if it is converted once
    fetches: tuple[RowPrefetch, ...]
    fetching: tuple[
        int, ...
    ]  # the passes that prefetch, a share each; after the reductions, the one that writes
    a_page_ahead: tuple[te.Load, ...]  # loads that the only pass prefetches

    @property
    def delayed(self) -> bool:
        """Whether rows are written a group later without a stage: two sets of results and kept values exist."""
        return self.written_along is not None and self.stage is None

    @property
    def group_rows(self) -> int:
        return self.together if self.stage is None else self.stage.rows

    def __str__(self) -> str:
        words = ", ".join(f"{r.kind} of {r.length}" for r in self.formula.reductions)
        words += f", kept in {self.kept.buffer.scope.value}" if self.kept else ""
        words += ", converted once" if self.widened else ""
        words += ", streamed" if self.streamed else ""
        words += f" in {self.stage.rows} rows at a time" if self.stage else ""
        return words + (", delayed by a row" if self.delayed else "")


def row_plan_of(formula: Formula, machine: CpuMachine, on_chip: bool = False) -> RowPlan:
    """`on_chip`: the rows are read from a cache and written to one, so nothing is streamed or prefetched."""
    formula = contiguous_last(formula)
    columns = columns_in_order(formula)
    streamed = bool(columns) and not on_chip and is_streamed(formula, machine)
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
    loads = () if on_chip else _fetched(formula, machine)
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
        widened=None if streamed else _widened(formula, machine, rows=together),
        fetches=() if only_read else _fetches(formula, machine, loads, together, kept, delayed=delayed),
        fetching=(last,) if delayed else _slow_passes(formula),
        a_page_ahead=_a_page_ahead(formula, machine, loads) if only_read else (),
    )


def groups_in_chunk(rows: Sequence[te.Var], size: int, machine: CpuMachine) -> int:
    """How many groups of `size` rows one thread processes at a time, leaving enough chunks for all threads."""
    most = extent_of(rows) // (size * _CHUNKS * machine.cores)
    return max(n for n in range(1, min(max(most, 1), _GROUPS) + 1) if rows[-1].extent // size % n == 0)


# -- passes over the row ----------------------------------------------------------------------------------------------


def _is_only_read(formula: Formula) -> bool:
    """Whether there is only one pass."""
    return len(formula.reductions) == 1 and not columns_of(formula)


def _lanes(reduction: Reduction, formula: Formula, machine: CpuMachine) -> int:
    """Lanes for the axis: at most the machine's for the types of this reduction."""
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
    # Rows that are not whole vectors begin at different offsets in a line.
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
    """How many rows of the result together end at a line, if one does not; 0 if they are not staged."""
    columns = columns_of(formula)
    length = extent_of(columns)
    if not formula.rows:
        return 0
    lanes = lanes_for(formula, machine, length * formula.rows[-1].extent)  # one row may have fewer
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
    """The reduction during which a stage can be written: it is slow per vector. None if there is no such reduction,
    or no stage."""
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
    """Whether a staged row stays in registers."""
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
    """The same formula, with the last reduction's only axis split like the columns, so that their passes match."""
    (*others, last), columns = formula.reductions, columns_in_order(formula)
    if len(last.axes) > 1 or len(columns) == 1 or last.length != extent_of(columns):
        return formula
    axes = tuple(te.Var(f"{last.axes[0].name}_{axis.name}", axis.extent) for axis in columns)
    cut = replace(last, axes=axes, body=te.substitute(last.body, {last.axes[0]: row_major(axes)}))
    return replace(formula, reductions=(*others, cut))


def _can_be_delayed(formula: Formula, machine: CpuMachine) -> bool:
    """Whether rows can be written during the last reduction of the following rows, which is usually the slowest."""
    if not formula.rows:
        return False
    columns, last = columns_in_order(formula), formula.reductions[-1]
    axis = columns[-1]
    lanes = lanes_for(formula, machine, axis.extent)
    position = te.substitute(formula.store, {axis: te.as_index(0)})
    if coefficient(formula.store, axis) != 1 or divisor_of(position) % lanes or axis.extent % lanes:
        return False
    along = same_extents(columns, last.axes) and _lanes(last, formula, machine) == lanes
    long = axis.extent >= _SHORTEST_DELAYED * lanes
    return along and long and _rows_held_twice(formula, machine) > 0


def _rows_held_twice(formula: Formula, machine: CpuMachine) -> int:
    """How many rows, or their kept values, fit twice."""
    longest = max((r.length + _lanes(r, formula, machine)) * r.result.dtype.bytes for r in formula.reductions)
    return _room(machine) // (_KEPT_TWICE * 2 * longest)


# -- what is kept from one pass to the last ---------------------------------------------------------------------------


def _kept(formula: Formula, machine: CpuMachine, scope: Scope, *, rows: int) -> KeptValue | None:
    columns = columns_in_order(formula)
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


def _widened(formula: Formula, machine: CpuMachine, *, rows: int) -> KeptValue | None:
    """The elements of the row that the first pass and a later one, or the result, convert from 16 bits."""
    first, *later = formula.reductions
    pitch = first.length + _lanes(first, formula, machine)
    buffer = Buffer("widened", DType.F32, rows * pitch, Scope.SCRATCH)
    if buffer.size * buffer.dtype.bytes > machine.caches.l1 // _KEPT_IN_L1:
        return None
    read_again: set[te.Expr] = set()
    for axes, body in [(r.axes, r.body) for r in later] + [(columns_in_order(formula), formula.value)]:
        if same_extents(axes, first.axes):
            read_again |= set(
                te.walk(simplify(te.substitute(body, dict(zip(axes, first.axes, strict=True)))))
            )
    for expr in computable_anywhere(simplify(first.body)):
        if isinstance(expr, te.Cast) and te.element(expr) is not None and expr in read_again:
            return KeptValue(first, expr, buffer, pitch)
    return None


# -- what is prefetched early ------------------------------------------------------------------------------------------


def _fetched(formula: Formula, machine: CpuMachine) -> tuple[te.Load, ...]:
    """The first loads of a row; none if prefetching the next row does not pay."""
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
    # During the prefetching pass: the rows that it prefetches, its own rows, its sources for writing, and data shared
    # by all rows.
    touched = 2 * together * held + written + shared
    level, ahead = (1, AHEAD) if touched <= machine.caches.l1 * _FILLED else (2, _FAR_AHEAD)

    def rows(load: te.Load) -> int:
        """Enough rows that prefetched data arrives before it is needed."""
        row_bytes = _bytes_of_row(formula, [load])
        return max(1, ceil_div(ahead, row_bytes * together)) * together

    return tuple(RowPrefetch(load, rows(load), level) for load in loads)


def _slow_passes(formula: Formula) -> tuple[int, ...]:
    """The passes after the first with time to prefetch the next rows: the last, and slow ones."""
    reductions, last = formula.reductions, len(formula.reductions) - 1 + bool(columns_of(formula))
    return tuple(
        n for n in range(1, last + 1) if n == last or is_expensive(reductions[n].body, reductions[n].axes)
    )


def _a_page_ahead(formula: Formula, machine: CpuMachine, loads: Sequence[te.Load]) -> tuple[te.Load, ...]:
    """Whether to prefetch a page ahead: for contiguous rows, if the hardware prefetcher is not page-based."""
    if machine.prefetches_by_page:
        return ()
    length = formula.reductions[0].length
    return tuple(load for load in loads if coefficient(load.indices[0], formula.rows[-1]) == length)
