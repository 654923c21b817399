"""Run one task as a model of its own: built, linked and run by the same executor as any plan."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from tilewright import link
from tilewright.codegen.cache import ObjectCache
from tilewright.codegen.generator import build_part, generator
from tilewright.hw import CpuMachine, Machine
from tilewright.link import Linkable
from tilewright.loops.ir import Buffer, Program
from tilewright.runtime.contract import Argument
from tilewright.runtime.executor import Executor, aligned_empty
from tilewright.runtime.packing import Packing
from tilewright.runtime.plan import ALIGNMENT, Launch, Plan, TaskInfo, TensorSpec, VendorCall
from tilewright.space.implementation import Implementation


class BuiltPart(msgspec.Struct, frozen=True):
    """The machine code of one kernel, or a library call, and what is needed to run it."""

    name: str
    symbol: str  # "": a library computes it
    code: bytes
    extent: int
    operands: tuple[
        int, ...
    ]  # indices of values: the parameters of the whole, then the results of earlier parts
    parameters: tuple[TensorSpec, ...]  # flat; the inputs, then the output
    decisions: str = ""
    launch: Launch | None = None
    vendor: VendorCall | None = None

    def linkable(self) -> Linkable:
        arguments = tuple(Argument(spec.dtype, math.prod(spec.shape)) for spec in self.parameters)
        packings = (None,) * len(self.operands)  # the data is already packed
        return Linkable(
            self.symbol, self.code, self.extent, self.decisions, packings, self.launch, self.vendor, arguments
        )


class Built(msgspec.Struct, frozen=True, tag=True):
    """A built implementation of a task, as plain data: one process makes it and another runs it.

    `parameters`: flat; the inputs in the kernels' layouts, then the output. `sources`: for each of these inputs, the
    index of the task's input; `packings`: its layout.
    """

    parts: tuple[BuiltPart, ...]
    parameters: tuple[TensorSpec, ...]
    sources: tuple[int, ...]
    packings: tuple[Packing | None, ...]

    @classmethod
    def of(
        cls,
        made: Program | Implementation,
        machine: Machine,
        numerics: str,
        cache: ObjectCache | None = None,
    ) -> Built:
        if isinstance(made, Program):
            kernel, _ = generator(machine.kind).build(made, machine, numerics, cache)
            specs = tuple(map(_spec, made.params))
            count = len(specs) - 1
            part = _part(made.name, kernel, tuple(range(count)), specs)
            packings = (*kernel.packings, *[None] * (count - len(kernel.packings)))
            return cls((part,), specs, tuple(range(count)), packings)
        return cls._of_parts(made, machine, numerics, cache)

    @classmethod
    def _of_parts(
        cls, made: Implementation, machine: Machine, numerics: str, cache: ObjectCache | None
    ) -> Built:
        kernels = [build_part(part, machine, numerics, cache)[0] for part in made.parts]
        given = {node: number for number, node in enumerate(made.inputs)}
        # An input that two parts read in different layouts is passed twice.
        wanted: dict[tuple[int, Packing | None], TensorSpec] = {}
        for part, kernel in zip(made.parts, kernels, strict=True):
            for node, packing in zip(part.operands, kernel.packings, strict=True):
                if node in given:
                    size = node.type.size if packing is None else packing.size
                    wanted[given[node], packing] = TensorSpec(f"x{given[node]}", node.dtype.short, (size,))
        numbers = {key: number for number, key in enumerate(wanted)}
        results = {part.result: len(wanted) + number for number, part in enumerate(made.parts)}
        parts = []
        for part, kernel in zip(made.parts, kernels, strict=True):
            operands = tuple(
                numbers[given[node], packing] if node in given else results[node]
                for node, packing in zip(part.operands, kernel.packings, strict=True)
            )
            specs = [
                TensorSpec(f"x{n}", node.dtype.short, (node.type.size if packing is None else packing.size,))
                for n, (node, packing) in enumerate(zip(part.operands, kernel.packings, strict=True))
            ]
            output = part.task.output
            specs.append(TensorSpec("out", output.dtype.short, (output.type.size,)))
            parts.append(_part(part.task.label, kernel, operands, tuple(specs)))
        return cls(
            tuple(parts),
            (*wanted.values(), parts[-1].parameters[-1]),
            tuple(number for number, _ in wanted),
            tuple(packing for _, packing in wanted),
        )

    @property
    def uses_library(self) -> bool:
        return any(part.vendor is not None for part in self.parts)


def _part(name: str, kernel: Linkable, operands: tuple[int, ...], specs: tuple[TensorSpec, ...]) -> BuiltPart:
    return BuiltPart(
        name,
        kernel.symbol,
        kernel.code,
        kernel.extent,
        operands,
        specs,
        kernel.decisions,
        kernel.launch,
        kernel.vendor,
    )


class KernelRun(NamedTuple):
    """One run of a built implementation in a plan: the indices of the plan's inputs that it reads, and of its
    output."""

    built: Built
    inputs: Sequence[int]
    output: int


def plan_of(
    runs: Sequence[KernelRun], machine: Machine, *, inputs: int, outputs: int, numerics: str = "fast"
) -> tuple[Plan, dict[str, bytes]]:
    """The plan of these runs in order, and its object code, with this many flat inputs and outputs of the caller."""
    specs: dict[tuple[str, int], TensorSpec] = {}
    calls = []
    for number, (built, reads, writes) in enumerate(runs):
        values: list[Hashable] = [("input", read) for read in reads]
        output = ("output", writes)
        specs |= zip((*values, output), built.parameters, strict=True)  # type: ignore[arg-type]
        last = len(built.parts) - 1
        for position, part in enumerate(built.parts):
            result: Hashable = output if position == last else ("between", number, position)
            values.append(result)
            *taken, given = part.parameters
            info = TaskInfo(part.name, "", 0, 0, tuple(taken), given, part.decisions)
            key = part.symbol or f"{part.name} {position}"
            operands = tuple(values[operand] for operand in part.operands)
            calls.append(link.KernelCall(part.linkable(), key, info, operands, result, part.name))
    places = link.Values(
        {("input", n): specs["input", n] for n in range(inputs)},
        {("output", n): specs["output", n] for n in range(outputs)},
    )
    boundary = link.Boundary.anonymous(inputs, outputs)
    target = generator(machine.kind).plan_target(machine)
    return link.link_calls(calls, places, boundary, target, numerics=numerics)


def executor_of(
    runs: Sequence[KernelRun], machine: CpuMachine, threads: int | None, *, inputs: int, outputs: int
) -> Executor:
    """Load these runs on a CPU."""
    plan, objects = plan_of(runs, machine, inputs=inputs, outputs=outputs)
    return Executor(plan, [], objects, threads)


class SingleKernel:
    """A program ready to run on flat arrays, aligned to cache lines as in a plan.

    Vectors that straddle two lines halve the speed of a good kernel, so unaligned arrays are copied once: an array
    must not change between two calls that receive it.
    """

    def __init__(
        self, program: Program, machine: CpuMachine, *, numerics: str = "fast", threads: int | None = None
    ) -> None:
        self.output = program.params[-1]
        self.built = Built.of(program, machine, numerics)
        inputs = len(program.params) - 1
        run = KernelRun(self.built, range(inputs), 0)
        self.executor = executor_of([run], machine, threads, inputs=inputs, outputs=1)
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
