"""Reductions that do not run along memory: a thread for each result, neighbours in memory on neighbouring threads.

for blocks b:                                     (parallel)
  for threads t: row = b * threads + t
    if row < rows:
      acc = identity
      for k: acc = combine(acc, x[row, k])        (serial)
      for columns: out[row, column] = value
"""

from __future__ import annotations

from tilewright import te
from tilewright.hw.gpu import GpuMachine
from tilewright.loops.formula import Formula
from tilewright.loops.gpu.places import blocks_for, by_stride, guarded, positions, store_place, under
from tilewright.loops.ir import Buffer, For, Kind, Program, Scope, Stmt, Store, block, nest
from tilewright.loops.tiling import columns_of, extent_of, updated, with_results, with_values

_UNROLLED = 16  # elements of a window that is written out
_FEWEST_THREADS, _MOST_THREADS = 32, 256


def columns_program(formula: Formula, machine: GpuMachine) -> Program:
    rows = by_stride(formula, formula.rows)
    count = extent_of(rows)
    threads = _MOST_THREADS
    while threads > _FEWEST_THREADS and count < threads * machine.sms:
        threads //= 2
    at, thread = blocks_for(count, threads), te.Var("t", threads)
    row = at * threads + thread
    position = positions(row, rows)

    stmts: list[Stmt] = []
    results: dict[Buffer, te.Expr] = {}
    zero = te.as_index(0)
    for reduction in formula.reductions:
        kept = Buffer(f"acc_{reduction.result.name}", reduction.result.dtype, 1, Scope.REGISTER)
        accumulator = te.Load(kept, (zero,))
        element = with_results(te.substitute(reduction.body, position), results)
        stmts.append(Store(kept, zero, te.reduce_identity(reduction.kind, kept.dtype)))
        kind = Kind.UNROLL if reduction.length <= _UNROLLED else Kind.SERIAL
        loops = [(axis, kind) for axis in reduction.axes]
        stmts.append(nest(loops, Store(kept, zero, updated(reduction, accumulator, element))))
        results[reduction.result] = accumulator
    value = with_results(te.substitute(formula.value, position), results)
    write = Store(formula.output, store_place(formula, rows, row, position), value)
    stmts.append(nest([(column, Kind.SERIAL) for column in columns_of(formula)], write))

    body = under(guarded(row, count, at.extent * threads), block(*stmts))
    nested = nest([(at, Kind.PARALLEL)], For(thread, Kind.THREAD, body))
    words = "columns: " + ", ".join(f"{r.kind} of {r.length}" for r in formula.reductions)
    return Program(
        formula.name,
        (*formula.inputs, formula.output),
        with_values(nested, {}),
        f"{words}, {threads} threads",
    )
