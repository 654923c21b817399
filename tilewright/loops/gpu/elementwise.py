"""Formulas without a reduction: each thread computes a few vectors, and neighbouring threads compute neighbouring
vectors.

for blocks b:                                     (parallel)
  for threads t:
    for u: n = (b * U + u) * threads + t          (unrolled)
      if n < vectors: out[n, :] = value           (in lanes)
"""

from __future__ import annotations

from tilewright import te
from tilewright.hw.gpu import GpuMachine
from tilewright.loops.formula import Formula
from tilewright.loops.gpu.thread_index import (
    THREADS,
    blocks_for,
    by_stride,
    guarded,
    positions,
    store_position,
    under,
    vector_lanes,
)
from tilewright.loops.ir import For, Kind, Program, Stmt, Store, nest
from tilewright.loops.tiling import extent_of, with_values
from tilewright.te.index import coefficient

_MAX_BYTES = 64  # maximum output bytes per thread: enough loads in flight
_WAVES = 2  # waves of blocks before a thread computes more than one vector


def elementwise_program(formula: Formula, machine: GpuMachine) -> Program:
    axes = by_stride(formula, formula.axes)
    lanes = _lanes(formula, axes[-1]) if axes else 1
    lane = te.Var("v", lanes)
    units = [*axes[:-1], te.Var(axes[-1].name, axes[-1].extent // lanes)] if axes else []
    count = extent_of(units)
    unroll = _unroll(count, lanes * formula.output.dtype.bytes, machine)

    block, thread, step = (
        blocks_for(count, THREADS * unroll),
        te.Var("t", THREADS),
        te.Var("u", unroll),
    )
    number = (block * unroll + step) * THREADS + thread
    coords = positions(number, units)
    position = {axis: coords[unit] for axis, unit in zip(axes, units, strict=True)}
    if axes:
        position[axes[-1]] = coords[units[-1]] * lanes + lane
    coord = store_position(formula, axes, number * lanes + lane, position)
    store = Store(formula.output, coord, te.substitute(formula.value, position))
    body: Stmt = nest([(lane, Kind.VECTOR)], store)
    body = under(guarded(number, count, block.extent * unroll * THREADS), body)
    threads = For(thread, Kind.THREAD, nest([(step, Kind.UNROLL)], body))
    words = f"elementwise: {THREADS} threads of {unroll} x {lanes}"
    program_body = with_values(nest([(block, Kind.PARALLEL)], threads), {})
    return Program(formula.name, (*formula.inputs, formula.output), program_body, words)


def _lanes(formula: Formula, axis: te.Var) -> int:
    if coefficient(formula.store, axis) != 1:
        return 1
    loads = te.unguarded_loads(formula.value)
    accesses = [(load.indices[0], load.dtype.bytes) for load in loads]
    return vector_lanes([*accesses, (formula.store, formula.output.dtype.bytes)], axis)


def _unroll(count: int, vector_bytes: int, machine: GpuMachine) -> int:
    """Vectors per thread: more than one only if the GPU is still filled."""
    unroll = 1
    while (
        2 * unroll * vector_bytes <= _MAX_BYTES
        and count // (2 * unroll) >= _WAVES * machine.sms * machine.threads_sm
    ):
        unroll *= 2
    return unroll
