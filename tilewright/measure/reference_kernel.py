"""Helper kernels of the timing process: a reference kernel that measures drift, and one that poisons the stacks."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from tilewright import te
from tilewright.dtypes import DType
from tilewright.hw import CpuMachine
from tilewright.loops.ir import SCRATCH_LIMIT, Buffer, For, Kind, Program, Scope, Store, block, nest
from tilewright.measure.calibrate import fma_program
from tilewright.measure.single import Built, KernelRun, executor_of

_REFERENCE_STEPS = 20_000  # tens of microseconds
_STEADY = 1.12  # maximum slowdown of the reference kernel against its typical time
_REMEMBERED = 512  # calls of the reference kernel that define its typical time
# Poison values for stacks. NaN shows in most results, but kernels that recompute non-finite values hide it; they do
# not hide a large number. Each half of the latter is also a 16-bit number.
NAN, LARGE = math.nan, float(np.array(0x4F4F4F4F, np.uint32).view(np.float32))
_FIRST = 20  # calls of the reference kernel before comparisons start


class HelperKernel:
    """One of Tilewright's helper programs, with its inputs."""

    def __init__(
        self, program: Program, machine: CpuMachine, threads: int, inputs: Sequence[np.ndarray]
    ) -> None:
        self.built = Built.of(program, machine, "fast")
        run = KernelRun(self.built, range(len(inputs)), 0)
        self._executor = executor_of([run], machine, threads, inputs=len(inputs), outputs=1)
        self._arrays = [*inputs, np.zeros(program.params[-1].size, program.params[-1].dtype.numpy)]
        self.addresses = [array.ctypes.data for array in self._arrays]

    def run(self) -> float:
        (seconds,) = self._executor.time_range(self.addresses[:-1], self.addresses[-1:])
        return seconds


class DriftMonitor(HelperKernel):
    """Monitors the machine's speed with a fixed kernel that touches no memory."""

    def __init__(self, machine: CpuMachine, threads: int) -> None:
        lanes = machine.lanes(DType.F32)
        program = fma_program(lanes, threads, _REFERENCE_STEPS)
        super().__init__(
            program, machine, threads, [np.full(lanes, value, np.float32) for value in (1.0, 1e-9)]
        )
        self._recent = deque((self.run() for _ in range(_FIRST)), maxlen=_REMEMBERED)
        self._level = statistics.median(self._recent)

    def is_steady(self, before: float, after: float) -> bool:
        """Whether the machine had its typical speed at both ends of a call."""
        return max(before, after) <= _STEADY * self._level

    def note(self, references: Sequence[float]) -> None:
        self._recent.extend(references)
        self._level = statistics.median(self._recent)


@lru_cache(maxsize=4)
def drift_monitor(machine: CpuMachine, threads: int) -> DriftMonitor:
    return DriftMonitor(machine, threads)


@lru_cache(maxsize=8)
def poison(machine: CpuMachine, threads: int, value: float) -> HelperKernel:
    """Poison the stacks of threads, so that scratch memory that a kernel forgets to initialise is not zero by
    accident."""
    program = poison_program(machine.lanes(DType.F32), threads, value)
    return HelperKernel(program, machine, threads, [np.zeros(1, np.int64)])


def poison_program(lanes: int, threads: int, value: float) -> Program:
    """for p (parallel): scratch[...] = value; out[p] = scratch[index[0]], so that all of it must be written."""
    position, out = Buffer("place", DType.I64, 1), Buffer("out", DType.F32, threads)
    scratch = Buffer("scratch", DType.F32, SCRATCH_LIMIT // DType.F32.bytes, Scope.SCRATCH)
    part, step, lane = te.Var("p", threads), te.Var("k", scratch.size // lanes), te.Var("v", lanes)
    body = block(
        nest(
            [(step, Kind.SERIAL), (lane, Kind.VECTOR)],
            Store(scratch, step * lanes + lane, te.const(value, DType.F32)),
        ),
        Store(out, part, te.Load(scratch, (te.Load(position, (te.const(0, DType.I64),)),))),
    )
    return Program("poison", (position, out), For(part, Kind.PARALLEL, body))
