"""What this machine can do at most, measured: arithmetic and memory, through our own code generator and threads.

The peak is a loop of independent multiply-adds on registers. Bandwidth is a sum over (reads) and a copy of (reads and
writes) arrays much larger than the caches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilewright import te
from tilewright.dtypes import DType
from tilewright.hw import CpuMachine
from tilewright.loops.default import default_program
from tilewright.loops.formula import formula_of
from tilewright.loops.ir import Buffer, For, Kind, Program, Scope, Store, block, nest
from tilewright.measure.single import SingleKernel

_ACCUMULATORS = 12  # two ports, four or five cycles each, and some to spare; fits sixteen registers
_STEPS = 20_000
_ARRAY_BYTES = 256 << 20


@dataclass(frozen=True)
class Calibration:
    threads: int
    flops: float  # fp32 operations per second, a multiply-add counting two
    read_bandwidth: float  # bytes per second
    copy_bandwidth: float  # bytes per second, read and written bytes together


def calibrate(machine: CpuMachine, threads: int) -> Calibration:
    return Calibration(threads, peak_flops(machine, threads), *bandwidths(machine, threads))


def peak_flops(machine: CpuMachine, threads: int) -> float:
    """fp32 operations per second of plain multiply-adds, on all `threads`."""
    lanes = machine.lanes(DType.F32)
    program = _multiply_add_program(lanes, threads)
    kernel = SingleKernel(program, machine, threads=threads)
    operands = [np.full(lanes, 1.0, np.float32), np.full(lanes, 1e-9, np.float32)]
    return 2 * lanes * _ACCUMULATORS * _STEPS * threads / kernel.seconds(operands)


def _multiply_add_program(lanes: int, iterations: int) -> Program:
    x, y = Buffer("x", DType.F32, lanes), Buffer("y", DType.F32, lanes)
    out = Buffer("out", DType.F32, iterations * lanes * _ACCUMULATORS)
    kept = Buffer("acc", DType.F32, lanes * _ACCUMULATORS, Scope.REGISTER)
    part, step = te.Var("p", iterations), te.Var("k", _STEPS)
    which, lane = te.Var("u", _ACCUMULATORS), te.Var("v", lanes)
    element = which * lanes + lane
    tile = [(which, Kind.UNROLL), (lane, Kind.VECTOR)]
    update = te.call("fma", te.Load(x, (lane,)), te.Load(y, (lane,)), te.Load(kept, (element,)))
    body = block(
        nest(tile, Store(kept, element, te.const(0, DType.F32))),
        nest([(step, Kind.SERIAL), *tile], Store(kept, element, update)),
        nest(tile, Store(out, part * (lanes * _ACCUMULATORS) + element, te.Load(kept, (element,)))),
    )
    return Program("multiply_add", (x, y, out), For(part, Kind.PARALLEL, body))


def bandwidths(machine: CpuMachine, threads: int) -> tuple[float, float]:
    """(read, copy) bytes per second beyond the caches."""
    rows, columns = 512, _ARRAY_BYTES // 4 // 512
    x = te.Tensor("x", (rows, columns), DType.F32)
    (axis,) = te.reduce_axes([columns])
    total = te.compute("total", (rows,), DType.F32, lambda i: te.reduce_over("sum", x[i, axis], [axis]))
    copy = te.compute("copy", x.shape, DType.F32, lambda i, j: x[i, j])
    array = np.ones((rows * columns,), np.float32)
    seconds = [
        SingleKernel(default_program(formula_of(output, [x]), machine), machine, threads=threads).seconds(
            [array]
        )
        for output in (total, copy)
    ]
    return array.nbytes / seconds[0], 2 * array.nbytes / seconds[1]
