"""Column reductions on a GPU: a thread computes a few contiguous results, and neighbouring threads compute
neighbouring ones.

for blocks b:                                     (parallel)
  for threads t: n = b * threads + t
    if n < vectors:
      acc[:] = identity                           (in lanes)
      for k: acc[:] = combine(acc, x[n, :, k])    (serial, in lanes)
      for columns: out[n, :, column] = value      (in lanes)
"""

from __future__ import annotations

from tilewright import te
from tilewright.hw.gpu import GpuMachine
from tilewright.loops.formula import Formula
from tilewright.loops.gpu.thread_index import (
    blocks_for,
    by_stride,
    guarded,
    positions,
    store_position,
    under,
    vector_lanes,
)
from tilewright.loops.ir import Buffer, For, Kind, Program, Scope, Stmt, Store, block, nest
from tilewright.loops.tiling import columns_of, extent_of, updated, with_results, with_values
from tilewright.te.index import coefficient

_UNROLLED = 16  # elements of a window that is unrolled
_MIN_THREADS, _MAX_THREADS = 32, 256
_BUSY = 128  # threads per multiprocessor before a thread computes more than one result


def columns_program(formula: Formula, machine: GpuMachine) -> Program:
    rows = by_stride(formula, formula.rows)
    lanes = _lanes(formula, rows, machine)
    lane = te.Var("v", lanes)
    units = [*rows[:-1], te.Var(rows[-1].name, rows[-1].extent // lanes)] if rows else []
    count = extent_of(units)
    threads = _MAX_THREADS
    while threads > _MIN_THREADS and count < threads * machine.sms:
        threads //= 2
    at, thread = blocks_for(count, threads), te.Var("t", threads)
    number = at * threads + thread
    coords = positions(number, units)
    position = {axis: coords[unit] for axis, unit in zip(rows, units, strict=True)}
    if rows:
        position[rows[-1]] = coords[units[-1]] * lanes + lane

    stmts: list[Stmt] = []
    results: dict[Buffer, te.Expr] = {}
    for reduction in formula.reductions:
        kept = Buffer(f"acc_{reduction.result.name}", reduction.result.dtype, lanes, Scope.REGISTER)
        accumulator = te.Load(kept, (lane,))
        element = with_results(te.substitute(reduction.body, position), results)
        identity = Store(kept, lane, te.reduce_identity(reduction.kind, kept.dtype))
        stmts.append(nest([(lane, Kind.VECTOR)], identity))
        kind = Kind.UNROLL if reduction.length <= _UNROLLED else Kind.SERIAL
        loops = [*((axis, kind) for axis in reduction.axes), (lane, Kind.VECTOR)]
        stmts.append(nest(loops, Store(kept, lane, updated(reduction, accumulator, element))))
        results[reduction.result] = accumulator
    value = with_results(te.substitute(formula.value, position), results)
    write = Store(formula.output, store_position(formula, rows, number * lanes + lane, position), value)
    columns = [(column, Kind.SERIAL) for column in columns_of(formula)]
    stmts.append(nest([*columns, (lane, Kind.VECTOR)], write))

    body = under(guarded(number, count, at.extent * threads), block(*stmts))
    nested = nest([(at, Kind.PARALLEL)], For(thread, Kind.THREAD, body))
    words = "columns: " + ", ".join(f"{r.kind} of {r.length}" for r in formula.reductions)
    return Program(
        formula.name,
        (*formula.inputs, formula.output),
        with_values(nested, {}),
        f"{words}, {threads} threads of {lanes}",
    )


def _lanes(formula: Formula, rows: list[te.Var], machine: GpuMachine) -> int:
    """Results per thread: more than one if they are contiguous, loaded together, and enough threads remain."""
    if not rows or coefficient(formula.store, rows[-1]) != 1:
        return 1
    axis = rows[-1]
    loads = [
        load for body in (*(r.body for r in formula.reductions), formula.value) for load in te.loads(body)
    ]
    accesses = [(load.indices[0], load.dtype.bytes) for load in loads if load.indices]
    if any(axis in te.variables(offset) and coefficient(offset, axis) != 1 for offset, _ in accesses):
        return 1
    lanes = vector_lanes([*accesses, (formula.store, formula.output.dtype.bytes)], axis)
    while lanes > 1 and extent_of(rows) // lanes < _BUSY * machine.sms:
        lanes //= 2
    return lanes
