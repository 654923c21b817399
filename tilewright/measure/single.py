"""One program as a model of its own: built, loaded and run by the same executor as any plan."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from tilewright.codegen.llvm.build import build
from tilewright.hw import CpuMachine
from tilewright.loops.ir import Buffer, Program
from tilewright.runtime.executor import Executor, aligned_empty
from tilewright.runtime.loader import object_digest
from tilewright.runtime.packing import Packing
from tilewright.runtime.plan import ALIGNMENT, MemoryReport, Place, Plan, Step, TaskInfo, TensorSpec


class Built(msgspec.Struct, frozen=True):
    """A program's object code, and what is needed to call it: plain data, which one process makes and another runs."""

    name: str
    symbol: str
    object_code: bytes
    extent: int
    parameters: tuple[TensorSpec, ...]  # flat; the inputs, then the output
    packings: tuple[Packing | None, ...]  # how each input is expected
    decisions: str = ""

    @classmethod
    def of(cls, program: Program, machine: CpuMachine, numerics: str) -> Built:
        kernel = build(program, machine, numerics, cache=None)
        specs = tuple(_spec(buffer) for buffer in program.params)
        return cls(
            program.name,
            kernel.symbol,
            kernel.object_code,
            kernel.extent,
            specs,
            kernel.packings,
            kernel.decisions,
        )


class Call(NamedTuple):
    """One call of a kernel in a plan: the numbers of the plan's inputs that it reads, and of the output it writes."""

    built: Built
    inputs: Sequence[int]
    output: int


def executor_of(
    calls: Sequence[Call], machine: CpuMachine, threads: int | None, *, inputs: int, outputs: int
) -> Executor:
    """A plan of these calls in order, loaded: so many flat inputs and outputs, in places of the caller's."""
    specs: dict[tuple[str, int], TensorSpec] = {}
    steps, objects, kernels, tasks = [], {}, {}, {}
    for built, reads, writes in calls:
        places = [*(Place("input", number) for number in reads), Place("output", writes)]
        for place, spec in zip(places, built.parameters, strict=True):
            specs[place.space, place.index] = spec
        digest = object_digest(built.object_code)
        objects[digest], kernels[built.symbol] = built.object_code, digest
        *taken, given = built.parameters
        tasks[built.symbol] = TaskInfo(built.name, "", 0, 0, tuple(taken), given, built.decisions)
        steps.append(Step(built.symbol, tuple(places), built.extent, built.symbol, built.name))
    leaves = [{"kind": "leaf", "index": index} for index in range(inputs)]
    empty = {"kind": "dict", "keys": [], "items": []}
    plan = Plan(
        inputs=tuple(specs["input", number] for number in range(inputs)),
        outputs=tuple(specs["output", number] for number in range(outputs)),
        constants=(),
        steps=tuple(steps),
        kernels=kernels,
        tasks=tasks,
        memory=MemoryReport(0, 0, 0, 0),
        input_tree={"kind": "tuple", "items": [{"kind": "tuple", "items": leaves}, empty]},
        output_tree={"kind": "leaf", "index": 0},
        target={"triple": machine.triple, "cpu": machine.cpu, "features": list(machine.features)},
    )
    return Executor(plan, [], objects, threads)


class SingleKernel:
    """A program ready to run on flat arrays, which lie in memory as a plan's own do: aligned to a cache line.

    Vectors that straddle two lines cost half the speed of a good kernel, so arrays that are not aligned are copied,
    once: an array must not be changed between two calls that are given it.
    """

    def __init__(
        self, program: Program, machine: CpuMachine, *, numerics: str = "fast", threads: int | None = None
    ) -> None:
        self.output = program.params[-1]
        self.built = Built.of(program, machine, numerics)
        inputs = len(program.params) - 1
        call = Call(self.built, range(inputs), 0)
        self.executor = executor_of([call], machine, threads, inputs=inputs, outputs=1)
        self._copies: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def __call__(self, inputs: Sequence[np.ndarray], output: np.ndarray | None = None) -> np.ndarray:
        if output is None:
            output = _aligned_like(np.empty(self.output.size, self.output.dtype.numpy))
        self.executor.run([self._aligned(array) for array in inputs], [output])
        return output

    def _aligned(self, array: np.ndarray) -> np.ndarray:
        if array.ctypes.data % ALIGNMENT == 0:
            return array
        kept = self._copies.get(id(array))
        if kept is None or kept[0] is not array:
            copy = _aligned_like(array)
            copy[...] = array
            kept = self._copies[id(array)] = (array, copy)
        return kept[1]

    def seconds(self, inputs: Sequence[np.ndarray], *, at_least: float = 0.2) -> float:
        """The median time of a call, over at least five calls and `at_least` seconds."""
        output = self(inputs)
        times: list[float] = []
        start = time.perf_counter()
        while len(times) < 5 or time.perf_counter() - start < at_least:
            before = time.perf_counter()
            self(inputs, output)
            times.append(time.perf_counter() - before)
        return statistics.median(times)


def _aligned_like(array: np.ndarray) -> np.ndarray:
    return aligned_empty(array.nbytes).view(array.dtype).reshape(array.shape)


def _spec(buffer: Buffer) -> TensorSpec:
    return TensorSpec(buffer.name, buffer.dtype.short, (buffer.size,))
