"""One task on this machine, ready to try configs on it: inputs, the oracle's answer, and kernels that race.

Before a kernel is timed its result is compared with the oracle's, in memory that was filled with NaN beforehand and is
watched at both ends. Constants are weights, which in a model come from memory and not from a cache: calls go round
copies that together are larger than the caches. Other inputs were just written when a model runs, and stay as they are.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import msgspec
import numpy as np

from tilewright.dtypes import DType
from tilewright.graph.oracle import evaluate
from tilewright.graph.task import Task
from tilewright.graph.text import parse_graph
from tilewright.hw import CpuMachine
from tilewright.loops.ir import Program
from tilewright.measure.check import relative_error
from tilewright.measure.single import SingleKernel
from tilewright.runtime.executor import aligned_copy, aligned_empty
from tilewright.space.realise import program_for
from tilewright.space.space import Config
from tilewright.space.template import Work

# Relative errors that a kernel may have, by the type of its result; integers are exact.
_BOUNDS = {DType.F64: 1e-5, DType.F32: 1e-5, DType.F16: 2e-3, DType.BF16: 2e-2}
_GUARD = 64  # bytes at both ends of an output
_GUARD_BYTE = 0xA5
_POISON_BYTE = 0xFF  # NaN in every type of float
_MOST_COPIES = 64
_MOST_COPIED_BYTES = 256 << 20


class WrongResult(Exception):
    """A kernel ran and computed something else than the oracle."""


class TaskJob(msgspec.Struct, frozen=True):
    """A task as plain data."""

    text: str
    constants: tuple[int, ...]
    machine: CpuMachine
    numerics: str
    threads: int

    @classmethod
    def of(cls, work: Work, threads: int) -> TaskJob:
        constants = tuple(sorted(work.task.constants))
        return cls(work.task.text, constants, work.machine, work.numerics, threads)

    def work(self) -> Work:
        task = Task(parse_graph(self.text, {}), frozenset(self.constants))
        return Work(task, self.machine, self.numerics)


class Bench:
    """A task's inputs and answer, and the kernels that have been checked so far."""

    def __init__(self, job: TaskJob, seed: int = 0) -> None:
        self.job = job
        self.work = job.work()
        self.inputs, self.reference = _operands(self.work.task, np.random.default_rng(seed))
        self._kernels: dict[Config | None, TimedKernel] = {}

    def check(self, config: Config | None) -> float:
        """Build the kernel of a config and compare its result: the relative error. Raises WrongResult."""
        program = program_for(self.work, config)
        kernel = TimedKernel(program, self.job, self.inputs)
        error = kernel.checked(self.reference)
        self._kernels[config] = kernel
        return error

    def race(self, configs: Sequence[Config | None], seconds: float) -> list[list[float]]:
        """Times of each in turns, for about so long together; at least five turns."""
        kernels = [self._kernels[config] for config in configs]
        times: list[list[float]] = [[] for _ in kernels]
        begin = time.perf_counter()
        while len(times[0]) < 5 or time.perf_counter() - begin < seconds:
            for kernel, taken in zip(kernels, times, strict=True):
                taken.append(kernel.seconds())
        return times

    def forget_except(self, configs: Sequence[Config | None]) -> None:
        """Kernels hold copies of their weights."""
        self._kernels = {config: kernel for config, kernel in self._kernels.items() if config in configs}

    def knows(self, config: Config | None) -> bool:
        return config in self._kernels


class TimedKernel:
    """A program with its inputs in the order that it wants, and an output that is watched."""

    def __init__(self, program: Program, job: TaskJob, inputs: Sequence[np.ndarray]) -> None:
        self._kernel = SingleKernel(program, job.machine, numerics=job.numerics, threads=job.threads)
        packings = (*program.packings, *[None] * (len(inputs) - len(program.packings)))
        packed = [
            aligned_copy(array.reshape(-1) if packing is None else packing.pack(array))
            for array, packing in zip(inputs, packings, strict=True)
        ]
        constants = set(job.constants)
        count = _copies(sum(packed[number].nbytes for number in constants), job.machine)
        self._sets = [packed] + [
            [aligned_copy(array) if number in constants else array for number, array in enumerate(packed)]
            for _ in range(count - 1)
        ]
        self._next = 0
        output = program.params[-1]
        size = output.size * output.dtype.numpy.itemsize
        self._memory = aligned_empty(size + 2 * _GUARD)
        self._bytes = self._memory[_GUARD : _GUARD + size]
        self._output = self._bytes.view(output.dtype.numpy)
        self._bound = _BOUNDS.get(output.dtype, 0.0)
        self._addresses = [[array.ctypes.data for array in arrays] for arrays in self._sets]

    def checked(self, reference: np.ndarray) -> float:
        self._memory[:] = _GUARD_BYTE
        self._bytes[:] = _POISON_BYTE
        self._kernel.executor.run(self._sets[0], [self._output])
        if (self._memory[:_GUARD] != _GUARD_BYTE).any() or (self._memory[-_GUARD:] != _GUARD_BYTE).any():
            raise WrongResult("it writes outside its output")
        error = relative_error(self._output, reference.reshape(-1))
        if not error <= self._bound:
            raise WrongResult(f"its relative error is {error:.1e}")
        return error

    def seconds(self) -> float:
        """Of one call, on the next copy of the weights."""
        addresses = self._addresses[self._next]
        self._next = (self._next + 1) % len(self._addresses)
        outputs = [self._output.ctypes.data]
        begin = time.perf_counter()
        self._kernel.executor.run_addresses(addresses, outputs)
        return time.perf_counter() - begin


def _copies(size: int, machine: CpuMachine) -> int:
    """Of constants of so many bytes together, how many are beyond the caches."""
    if not size:
        return 1
    wanted = math.ceil(2 * machine.caches.last / size)
    return max(1, min(wanted, _MOST_COPIES, _MOST_COPIED_BYTES // size))


def _operands(task: Task, rng: np.random.Generator) -> tuple[list[np.ndarray], np.ndarray]:
    """Random inputs and the exact result: of both signs where most of the result is a number then, else positive."""
    for positive in (False, True):
        inputs = [
            _drawn(node.dtype, node.shape, rng, index in task.constants, positive)
            for index, node in enumerate(task.graph.inputs)
        ]
        (reference,) = evaluate(task.graph, inputs, precise=True)
        if reference.dtype.kind != "f" or np.isfinite(reference).mean() > 0.5:
            break
    return inputs, reference


def _drawn(
    dtype: DType, shape: tuple[int, ...], rng: np.random.Generator, constant: bool, positive: bool
) -> np.ndarray:
    if dtype.is_float:
        values = rng.standard_normal(shape, dtype=np.float32)
        if constant and len(shape) > 1:
            values /= np.float32(math.sqrt(math.prod(shape[1:])))  # sums of products stay near one
        return np.asarray(np.abs(values) if positive else values, dtype.numpy)
    if dtype in (DType.I8, DType.U8):
        limits = np.iinfo(dtype.numpy)
        return rng.integers(limits.min, limits.max, shape, dtype=dtype.numpy, endpoint=True)
    return rng.integers(0, 2, shape).astype(
        dtype.numpy
    )  # bools, and indices that are in range nearly everywhere
