"""Builds a launch of a kernel: compiles a config, and interprets the launch if there is no reference.

The interpreter runs program instances one after the other, which takes long, so it runs some of them: the first, the
last and random ones. The elements that these instances store are compared. Sums over instances (`atomic_add`) need all
of them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import numpy as np

from tilewright.dtypes import DType
from tilewright.errors import MeasurementError
from tilewright.hw import host
from tilewright.hw.machine import to_text
from tilewright.measure.kernel_job import (
    BuiltKernel,
    DataFile,
    Expected,
    Grid3,
    KernelSpec,
    LaunchMemory,
    mapped,
)
from tilewright.space.space import Config
from tilewright.support.bundle import restored, value_of
from tilewright.tile.interpret import run_instances
from tilewright.tile.ir import Op, TileProgram, walk
from tilewright.tile.kernel import Kernel
from tilewright.tile.memory import Memory
from tilewright.tile.passes.written import written_params

_INSTANCES = 24  # that are interpreted at most, where they share nothing
_SOME_SECONDS, _ALL_SECONDS = 2.0, 20.0


class BuildKernel(msgspec.Struct, frozen=True, tag=True):
    """Compile a config of a launch on this grid."""

    spec: KernelSpec
    config: Config
    grid: Grid3


class MakeExpected(msgspec.Struct, frozen=True, tag=True):
    """Write what the launch must compute into the file whose descriptor comes with this."""

    spec: KernelSpec


class Launch(Protocol):
    """A kernel in a process that measures."""

    def prepare(self, tensors: dict[str, Any], config: Config, grid: Grid3) -> Callable[[], None]:
        """A function that launches it once. Raises what the compiler raises."""

    def written(self, tensors: dict[str, Any], config: Config) -> set[str] | None:
        """Names of tensors that it stores to; None: not known."""


def launch_of(spec: KernelSpec) -> Launch:
    if spec.language == "tile":
        return TileLaunch(spec)
    if spec.language == "triton":
        from tilewright.measure.triton_launch import TritonLaunch

        return TritonLaunch(spec)
    raise MeasurementError(f"no kernels are built from the language {spec.language!r}")


class TileLaunch:
    def __init__(self, spec: KernelSpec) -> None:
        self.spec = spec
        self.kernel: Kernel = restored(spec.bundle, Kernel)

    def arguments(self, tensors: dict[str, Any], config: Config) -> dict[str, Any]:
        knobs = {name: value for name, value in config.values if name not in self.spec.options}
        constants = {name: value_of(reference) for name, reference in self.spec.constants}
        return {**tensors, **dict(self.spec.scalars), **constants, **knobs}

    def prepare(self, tensors: dict[str, Any], config: Config, grid: Grid3) -> Callable[[], None]:
        options = {name: value for name, value in config.values if name in self.spec.options}
        if self.spec.kind == "cpu":
            options.setdefault("threads", self.spec.threads)
        found = self.kernel.prepare(grid, options=options, **self.arguments(tensors, config))
        if found is None:
            raise MeasurementError(
                "no code can be generated for this kernel here: it runs in the interpreter"
            )
        return found

    def program(self, tensors: dict[str, Any], config: Config) -> TileProgram:
        return self.kernel.program(**self.arguments(tensors, config))

    def written(self, tensors: dict[str, Any], config: Config) -> set[str]:
        return set(written_params(self.program(tensors, config)))


def built_kernel(request: BuildKernel, launch: Launch) -> BuiltKernel:
    """Compiled here, so that the process that times finds the machine code in the cache; unless this is another
    machine."""
    spec = request.spec
    if spec.kind == "cpu" and spec.described == to_text(host()):
        launch.prepare(_unfilled(spec).arrays(), request.config, request.grid)
    return BuiltKernel(request.config, request.grid)


def _unfilled(spec: KernelSpec) -> LaunchMemory:
    return LaunchMemory(spec, np.zeros(0, np.uint8))


def make_expected(spec: KernelSpec, launch: Launch, descriptor: int) -> Expected:
    """Raise MeasurementError if the interpreter would take too long."""
    if spec.expected:
        return Expected(spec.expected, (), spec.size, in_spec=True)
    if not isinstance(launch, TileLaunch):  # the process that times runs the start config
        return Expected((), (), 1, in_spec=False)
    memory = LaunchMemory(spec, mapped(spec.data, spec.size))
    memory.fill()
    arrays = memory.arrays()
    program = launch.program(arrays, spec.start)
    marks = _interpret_some(spec, launch, program, arrays)
    file = DataFile.on(descriptor)
    names = sorted(written_params(program) & arrays.keys())
    values = tuple(file.store(name, arrays[name]) for name in names)
    masks = tuple(file.store(name, marks[name]) for name in names)
    return Expected(values, masks, file.finish(), in_spec=False)


def _interpret_some(
    spec: KernelSpec, launch: TileLaunch, program: TileProgram, arrays: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Runs instances on these arrays: of each, which elements were stored to."""
    total = spec.start_grid[0] * spec.start_grid[1] * spec.start_grid[2]
    shared = any(isinstance(node, Op) and node.name.startswith("atomic") for node in walk(program.body))
    numbers = list(range(total))
    if not shared and total > _INSTANCES:
        middle = random.Random(0).sample(range(1, total - 1), _INSTANCES - 2)
        numbers = [0, total - 1, *middle]
    tensors = launch.kernel.tensor_arguments(**launch.arguments(arrays, spec.start))
    memory = _Marking(tensors)
    scalars = dict(spec.scalars)
    deadline = time.monotonic() + (_ALL_SECONDS if shared else _SOME_SECONDS)
    for done, number in enumerate(numbers):
        if done and time.monotonic() > deadline:
            if shared:
                raise MeasurementError(
                    f"the interpreter ran {done} of {total} program instances in {_ALL_SECONDS:.0f} s, and instances"
                    " that add to the same elements (atomic_add) need all: give a reference"
                )
            break
        run_instances(program, memory, spec.start_grid, scalars, [number])
    return memory.marks()


class _Marking(Memory):
    """Marks which elements of the tensors are stored to."""

    def __init__(self, tensors: Any) -> None:
        super().__init__(tensors, False)
        self._bytes = {id(each): np.zeros(each.data.size, np.bool_) for each in self.allocations}

    def store(self, addresses: np.ndarray, values: np.ndarray, mask: np.ndarray | None) -> None:
        super().store(addresses, values, mask)
        self._mark(addresses, DType.of(values), mask)

    def atomic(
        self,
        kind: str,
        addresses: np.ndarray,
        values: np.ndarray,
        mask: np.ndarray | None,
        expected: Any = None,
    ) -> np.ndarray:
        result = super().atomic(kind, addresses, values, mask, expected)
        self._mark(addresses, DType.of(values), mask)
        return result

    def _mark(self, addresses: np.ndarray, dtype: DType, mask: np.ndarray | None) -> None:
        active = np.ones(addresses.shape, np.bool_) if mask is None else mask
        for allocation, _, index in self._find(addresses, active, dtype, "store"):
            written = self._bytes[id(allocation)]
            whole = written.size // dtype.bytes * dtype.bytes
            written[:whole].reshape(-1, dtype.bytes)[index] = True

    def marks(self) -> dict[str, np.ndarray]:
        """For each tensor: which elements were stored to."""
        found = {}
        for allocation in self.allocations:
            for tensor in allocation.tensors:
                start = tensor.address - allocation.start
                size = tensor.dtype.bytes
                flags = self._bytes[id(allocation)]
                if 0 in tensor.shape:
                    found[tensor.name] = np.zeros(tensor.shape, np.bool_)
                    continue
                view = np.lib.stride_tricks.as_strided(
                    flags[start : start + 1], tensor.shape, tuple(stride * size for stride in tensor.strides)
                )
                found[tensor.name] = view.copy()
        return found
