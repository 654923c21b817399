"""Reductions over windows that move along contiguous memory: pooling with contiguous image rows.

    for blocks, threads: the place of a few neighbours x0 ... along the row
      for rows of the window:                                    (unrolled)
        data[:] = what the neighbours read of the row            (most of it as one vector)
        for neighbours, places of the window: acc[u] = combine(acc[u], data[u * stride + place])
      out[x0 ...] = value                                        (in lanes)

With one result per thread, each element would be loaded and tested once for every window that contains it.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright import te
from tilewright.hw.gpu import GpuMachine
from tilewright.loops.formula import Formula, Reduction
from tilewright.loops.gpu.thread_index import (
    THREADS,
    VECTOR_BYTES,
    blocks_for,
    by_stride,
    guarded,
    positions,
    under,
    vector_lanes,
)
from tilewright.loops.ir import Buffer, For, Kind, Program, Scope, Stmt, Store, block, nest
from tilewright.loops.tiling import columns_of, extent_of, updated, with_results, with_values
from tilewright.loops.window_pattern import stride_of
from tilewright.te.index import coefficient, linear, simplify

_NEIGHBOURS = (8, 4, 2)
_MAX_TAPS, _MAX_WINDOW = 7, 25  # maximum along the row, and in total: a window is unrolled for each neighbour
_BUSY = 256  # minimum threads per multiprocessor


@dataclass(frozen=True)
class _Pool:
    reduction: Reduction
    axis: te.Var  # of the output, contiguous in memory
    tap: te.Var  # of the window, along that axis
    stride: int
    neighbours: int
    before: int  # window positions before the first element of the vector

    @property
    def vector(self) -> int:
        """Elements loaded at once."""
        return self.stride * self.neighbours

    @property
    def read(self) -> int:
        """Elements of a row that the neighbours read."""
        return (self.neighbours - 1) * self.stride + self.tap.extent


def pooled_program(formula: Formula, machine: GpuMachine) -> Program | None:
    """The program; None if the formula is not such a reduction or too small."""
    rows = by_stride(formula, formula.rows)
    pool = _pool(formula, rows, machine)
    return None if pool is None else _program(formula, rows, pool)


def _pool(formula: Formula, rows: list[te.Var], machine: GpuMachine) -> _Pool | None:
    if len(formula.reductions) != 1 or not rows or columns_of(formula):
        return None
    (reduction,) = formula.reductions
    axis, tap = rows[-1], reduction.axes[-1]
    loads = te.loads(reduction.body)
    if tap.extent > _MAX_TAPS or reduction.length > _MAX_WINDOW or len(set(loads)) != 1:
        return None
    stride = stride_of(reduction.body, axis, tap)
    if stride is None or coefficient(formula.store, axis) != 1 or coefficient(loads[0].indices[0], tap) != 1:
        return None
    before = -linear(loads[0].indices[0]).constant % max(1, stride * _NEIGHBOURS[0])
    for neighbours in _NEIGHBOURS:
        found = _Pool(reduction, axis, tap, stride, neighbours, before % (stride * neighbours))
        if (
            axis.extent % neighbours == 0
            and found.vector * loads[0].dtype.bytes <= VECTOR_BYTES
            and found.before + found.vector <= found.read
            and extent_of(rows) // neighbours >= _BUSY * machine.sms
            and _is_vector(formula, found, loads[0])
        ):
            return found
    return None


def _is_vector(formula: Formula, pool: _Pool, load: te.Load) -> bool:
    """Whether the vector is aligned, and results and epilogue operands can be accessed as vectors too."""
    first = te.Var("first", pool.axis.extent // pool.neighbours)
    at = simplify(
        te.substitute(
            load.indices[0], {pool.axis: first * pool.neighbours, pool.tap: te.as_index(pool.before)}
        )
    )
    form = linear(at)
    aligned = not any(number % pool.vector for number in (form.constant, *form.terms.values()))
    after = [(each.indices[0], each.dtype.bytes) for each in te.loads(formula.value) if each.indices]
    lanes = vector_lanes([*after, (formula.store, formula.output.dtype.bytes)], pool.axis)
    return aligned and lanes >= pool.neighbours


def _program(formula: Formula, rows: list[te.Var], pool: _Pool) -> Program:
    many, reduction = pool.neighbours, pool.reduction
    along = te.Var(pool.axis.name, pool.axis.extent // many)
    units = [*rows[:-1], along]
    count = extent_of(units)
    at, thread = blocks_for(count, THREADS), te.Var("t", THREADS)
    number = at * THREADS + thread
    coords = positions(number, units)
    position: dict[te.Var, te.Expr] = {unit: coords[unit] for unit in rows[:-1]}
    first = coords[along] * many

    result = reduction.result
    sums = Buffer("sums", result.dtype, many, Scope.REGISTER)
    data = Buffer("data", reduction.body.dtype, pool.read, Scope.REGISTER)

    def element(coord: te.Expr) -> te.Expr:
        return te.substitute(reduction.body, {**position, pool.axis: first, pool.tap: coord})

    lane = te.Var("v", pool.vector)
    beyond = [*range(pool.before), *range(pool.before + pool.vector, pool.read)]
    row: list[Stmt] = [
        nest([(lane, Kind.VECTOR)], Store(data, lane + pool.before, element(lane + pool.before))),
        *(Store(data, te.as_index(coord), element(te.as_index(coord))) for coord in beyond),
    ]
    for u in range(many):
        for coord in range(pool.tap.extent):
            datum = te.Load(data, (te.as_index(u * pool.stride + coord),))
            total = te.Load(sums, (te.as_index(u),))
            row.append(Store(sums, te.as_index(u), updated(reduction, total, datum)))

    identity = te.reduce_identity(reduction.kind, sums.dtype)
    stmts: list[Stmt] = [Store(sums, te.as_index(u), identity) for u in range(many)]
    stmts.append(nest([(other, Kind.UNROLL) for other in reduction.axes[:-1]], block(*row)))
    neighbour = te.Var("v", many)
    here = {**position, pool.axis: first + neighbour}
    value = with_results(te.substitute(formula.value, here), {result: te.Load(sums, (neighbour,))})
    stmts.append(
        nest([(neighbour, Kind.VECTOR)], Store(formula.output, te.substitute(formula.store, here), value))
    )

    body = under(guarded(number, count, at.extent * THREADS), block(*stmts))
    nested = nest([(at, Kind.PARALLEL)], For(thread, Kind.THREAD, body))
    words = f"pooled: {reduction.kind} of {reduction.length}, {THREADS} threads of {many}"
    return Program(formula.name, (*formula.inputs, formula.output), with_values(nested, {}), words)
