"""Run a plan on a GPU: bind memory and kernels once, capture the steps as one CUDA graph, and launch it for each
call.

Inputs are copied into the plan's own buffers and results out of them, both on the caller's stream; the host does not
wait. Calls share one arena: those on one stream run in order, and a call on another stream waits for the last one.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np

from tilewright import knobs
from tilewright.dtypes import DType
from tilewright.errors import ArtifactMachineError
from tilewright.runtime.contract import code_of
from tilewright.runtime.cuda import cublaslt
from tilewright.runtime.cuda.device import CudaFunction, Device, count
from tilewright.runtime.cuda.tensor_maps import of_arguments
from tilewright.runtime.cuda.vendor import VendorStep, loaded_torch, needs_torch
from tilewright.runtime.plan import Place, Plan, Step, aligned

TRIPLE = "nvptx64-nvidia-cuda"
AWAITS_TURN = "awaits-turn"  # in a target: its machine code supports `Launch.awaits`
_ALIGNMENT = 256


def check_target(target: dict[str, Any], ordinal: int = 0) -> None:
    """Raise ArtifactMachineError unless a GPU here runs machine code for `target`."""
    if count() <= ordinal:
        raise ArtifactMachineError(
            "the model is for an NVIDIA GPU, and there is none here",
            remedy='run it on a machine with one (`nvidia-smi` shows it), or compile with target="cpu"',
        )
    card = Device(ordinal)
    problem = misfit(str(target["cpu"]), card.capability)
    if problem:
        raise ArtifactMachineError(f"{problem}, and {card.name} is {card.capability}")


def misfit(wanted: str, here: str) -> str:
    """Why code for `wanted` does not run on a GPU with the capability `here`; "" if it does."""
    if wanted.startswith("compute_"):
        least = wanted.removeprefix("compute_")
        return "" if int(here.removeprefix("sm_")) >= int(least) else f"the PTX is for sm_{least} and later"
    plain = wanted.rstrip("a")
    # Machine code runs on later GPUs of one generation, unless it uses features of one architecture only.
    same_generation = plain[:-1] == here[:-1] and plain <= here and plain == wanted
    return "" if here == plain or same_generation else f"the machine code is for {wanted}"


class GpuExecutor:
    """A plan for a GPU. `objects`: digest -> machine code. Nothing touches the GPU before the first call."""

    def __init__(
        self,
        plan: Plan,
        constants: Sequence[np.ndarray],
        objects: Mapping[str, bytes],
        ordinal: int = 0,
        *,
        dependent_launch: str | None = None,
        guard: int = 0,
    ) -> None:
        """`dependent_launch`: which kernels may start while the previous one ends; None: as the option says. `guard`:
        bytes around every buffer that must not be written."""
        plan.validate()
        self.guard = guard
        self.plan = plan
        self.ordinal = ordinal
        self.dependent_launch = dependent_launch or knobs.get("dependent_launch")
        self.constants = [np.ascontiguousarray(array) for array in constants]
        self.objects = {digest: bytes(objects[digest]) for digest in sorted(set(plan.kernels.values()))}
        self.threads = 0
        self._lock = threading.Lock()
        self._loaded: _Loaded | None = None

    def loaded(self) -> _Loaded:
        with self._lock:
            if self._loaded is None:
                check_target(self.plan.target, self.ordinal)
                self._loaded = _Loaded(self)
            return self._loaded

    def new_outputs(self) -> list[np.ndarray]:
        return [np.empty(spec.shape, DType.parse(spec.dtype).numpy) for spec in self.plan.outputs]

    def run(self, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray]) -> None:
        """Run on host arrays."""
        self.run_addresses(
            [(array.ctypes.data, True) for array in inputs],
            [(array.ctypes.data, True) for array in outputs],
            0,
        )

    def run_addresses(
        self, inputs: Sequence[tuple[int, bool]], outputs: Sequence[tuple[int, bool]], stream: int
    ) -> None:
        """Run on addresses, each with whether it is host memory. Waits only if a result goes to the host."""
        loaded = self.loaded()
        with self._lock:
            loaded.run(inputs, outputs, stream)

    def time_steps(self, inputs: Sequence[np.ndarray], repeats: int = 10) -> list[float]:
        """Median seconds of each step alone, launched one by one, not as a graph."""
        loaded = self.loaded()
        outputs = self.new_outputs()
        self.run(inputs, outputs)
        with self._lock:
            return loaded.time_steps(max(repeats, 1))

    def poison(self, byte: int = 0xFF) -> None:
        """Fill what steps write with such bytes, NaN by default, so that unwritten results show."""
        loaded = self.loaded()
        with self._lock:
            loaded.poison(byte)

    def seconds_of_graph(self) -> float:
        """Seconds of one launch of all steps together, on the last inputs."""
        loaded = self.loaded()
        with self._lock:
            return loaded.seconds_of_graph()

    def trace(self, inputs: Sequence[np.ndarray]) -> Iterator[tuple[Step, list[np.ndarray], np.ndarray]]:
        """Run step by step; yield each step with its inputs and its output, as host arrays."""
        loaded = self.loaded()
        loaded.take_inputs([(array.ctypes.data, True) for array in inputs], loaded.stream.handle)
        with loaded.in_steps() as runner:
            for number, step in enumerate(self.plan.steps):
                runner.start(number)
                loaded.device.synchronise()
                info = self.plan.tasks[step.task]
                specs = (*info.inputs, info.output)
                arrays = []
                for place, spec in zip(step.arguments, specs, strict=True):
                    array = np.empty(spec.shape, DType.parse(spec.dtype).numpy)
                    loaded.device.download(array.ctypes.data, runner.address(place), array.nbytes)
                    arrays.append(array)
                yield step, arrays[:-1], arrays[-1]


class _Loaded:
    """A plan on the GPU."""

    def __init__(self, executor: GpuExecutor) -> None:
        self.plan = plan = executor.plan
        self.device = Device(executor.ordinal)
        self.ordinal = executor.ordinal
        overlaps = AWAITS_TURN in plan.target["features"] and self.device.has_dependent_launch
        self.dependent_launch = executor.dependent_launch if overlaps else "off"
        vendors = [step.vendor for step in plan.steps if step.vendor is not None]
        self.workspace_bytes = cublaslt.WORKSPACE_BYTES if any(not needs_torch(v) for v in vendors) else 0
        self.through_torch = any(needs_torch(v) for v in vendors)
        self._allocate(executor)
        self.functions = self._functions(executor.objects)
        self.vendor = [
            None if step.vendor is None else VendorStep(step, plan.tasks[step.task], self.ordinal)
            for step in plan.steps
        ]
        self.stream = self.device.new_stream()
        self.done = self.device.new_event()
        self.last_stream: int | None = None
        with self.in_steps() as warm:  # libraries choose their algorithms, modules are loaded
            for number in range(len(plan.steps)):
                warm.start(number)
        del warm
        self._graph, self.results, self._kept = self._captured()

    def _allocate(self, executor: GpuExecutor) -> None:
        """Allocate one block of GPU memory for everything."""
        plan, constants = self.plan, executor.constants
        sizes = [
            *(spec.bytes for spec in plan.inputs),
            *(spec.bytes for spec in plan.outputs),
            *(array.nbytes for array in constants),
            plan.memory.arena_bytes,
            self.workspace_bytes,
        ]
        guard = aligned(executor.guard, _ALIGNMENT)
        offsets, total = [], guard
        self.guards = [(0, guard)]  # (offset, bytes)
        for size in sizes:
            offsets.append(total)
            # Directly after the buffer: nothing may write there.
            self.guards.append((total + size, aligned(max(size, 1), _ALIGNMENT) - size + guard))
            total += aligned(max(size, 1), _ALIGNMENT) + guard
        self.block = self.device.block(total)
        addresses = iter(self.block.address + offset for offset in offsets)
        self.inputs = [next(addresses) for _ in plan.inputs]
        self.outputs = [next(addresses) for _ in plan.outputs]
        self.constants = [next(addresses) for _ in constants]
        self.arena, self.workspace = next(addresses), next(addresses)
        for address, array in zip(self.constants, constants, strict=True):
            self.device.upload(address, array.ctypes.data, array.nbytes)
        self.device.synchronise()  # an upload is complete when the driver has read its source

    def _functions(self, objects: Mapping[str, bytes]) -> dict[str, CudaFunction]:
        shared = {
            step.kernel: step.launch.shared_bytes for step in self.plan.steps if step.launch is not None
        }
        return {
            symbol: self.device.load(code_of(objects[digest]), symbol, shared.get(symbol, 0))
            for symbol, digest in self.plan.kernels.items()
        }

    # -- steps --------------------------------------------------------------------------------------------------------

    @contextmanager
    def in_steps(self) -> Iterator[_Runner]:
        """A runner for single steps, on its own stream."""
        with self._current_stream():
            yield _Runner(self)
            self.stream.synchronise()

    @contextmanager
    def _current_stream(self) -> Iterator[None]:
        """Make Tilewright's stream the framework's current one, if the framework is involved."""
        self.device.enter()
        if not self.through_torch:
            yield
            return
        torch = loaded_torch()
        device = torch.device("cuda", self.ordinal)
        with torch.no_grad(), torch.cuda.stream(torch.cuda.ExternalStream(self.stream.handle, device)):
            yield

    def _captured(self) -> tuple[Any, list[int], Any]:
        """(the graph launcher, the location of each result, objects that must stay alive)."""

        def start_all(runner: _Runner) -> None:
            for number in range(len(self.plan.steps)):
                runner.start(number)

        if not self.through_torch:
            runner = _Runner(self, self.dependent_launch)
            with self.stream.capture() as captured:
                start_all(runner)
            return captured.launch, self._results(runner), runner
        torch = loaded_torch()
        graph = torch.cuda.CUDAGraph()
        device = torch.device("cuda", self.ordinal)
        side = torch.cuda.ExternalStream(self.stream.handle, device)
        torch.cuda.synchronize(device)
        with torch.no_grad(), torch.cuda.graph(graph, stream=side):
            runner = _Runner(self, self.dependent_launch)
            start_all(runner)
            results = self._results(runner)

        def launch(stream: int) -> None:
            if torch.cuda.current_stream(device).cuda_stream == stream:
                graph.replay()
                return
            with torch.cuda.stream(torch.cuda.ExternalStream(stream, device)):
                graph.replay()

        return launch, results, (graph, runner)

    def _results(self, runner: _Runner) -> list[int]:
        return [runner.address(Place("output", index)) for index in range(len(self.plan.outputs))]

    # -- calls --------------------------------------------------------------------------------------------------------

    def run(
        self, inputs: Sequence[tuple[int, bool]], outputs: Sequence[tuple[int, bool]], stream: int
    ) -> None:
        self.device.enter()
        if self.last_stream not in (None, stream):
            self.done.wait(stream)
        self.take_inputs(inputs, stream)
        self._graph(stream)
        to_host = False
        for (address, on_host), place, spec in zip(outputs, self.results, self.plan.outputs, strict=True):
            if on_host:
                to_host = True
                self.device.download_on(stream, address, place, spec.bytes)
            else:
                self.device.copy_on(stream, address, place, spec.bytes)
        if to_host:
            self.device.synchronise_stream(stream)
        self.done.record(stream)
        self.last_stream = stream

    def take_inputs(self, inputs: Sequence[tuple[int, bool]], stream: int) -> None:
        for (address, on_host), place, spec in zip(inputs, self.inputs, self.plan.inputs, strict=True):
            if on_host:
                self.device.upload_on(stream, place, address, spec.bytes)
            else:
                self.device.copy_on(stream, place, address, spec.bytes)

    def poison(self, byte: int) -> None:
        """Poison what steps write, and the guards, so that reads from there show."""
        if self.guards[0][1]:
            for offset, size in self.guards:
                self.device.fill(self.block.address + offset, byte, size)
        self.device.fill(self.arena, byte, self.plan.memory.arena_bytes)
        for address, spec in zip(self.results, self.plan.outputs, strict=True):
            self.device.fill(address, byte, spec.bytes)
        self.device.synchronise()

    def seconds_of_graph(self) -> float:
        begin, end = (self.device.new_event(timing=True) for _ in range(2))
        with self._current_stream():
            begin.record(self.stream.handle)
            self._graph(self.stream.handle)
            end.record(self.stream.handle)
            self.stream.synchronise()
        return begin.seconds_to(end)

    def time_steps(self, repeats: int) -> list[float]:
        events = [self.device.new_event(timing=True) for _ in range(len(self.plan.steps) + 1)]
        times: list[list[float]] = []
        for _ in range(repeats):
            with self.in_steps() as runner:
                events[0].record(self.stream.handle)
                for number in range(len(self.plan.steps)):
                    runner.start(number)
                    events[number + 1].record(self.stream.handle)
            times.append([a.seconds_to(b) for a, b in pairwise(events)])
        return [statistics.median(each) for each in zip(*times, strict=True)]


class _Runner:
    """The steps of a plan in order, and the results that a library returned in its own memory. `dependent_launch`: as
    in the option."""

    def __init__(self, loaded: _Loaded, dependent_launch: str = "off") -> None:
        self._loaded, self._dependent_launch = loaded, dependent_launch
        self._elsewhere: dict[Place, Any] = {}

    def start(self, number: int) -> None:
        loaded = self._loaded
        step = loaded.plan.steps[number]
        tensors = [self._elsewhere.get(place) for place in step.arguments[:-1]]
        addresses = [self.address(place) for place in step.arguments[:-1]]
        # The previous contents of this place are dead: the plan gives it to this step's result.
        self._elsewhere.pop(step.arguments[-1], None)
        addresses.append(self.address(step.arguments[-1]))
        vendor = loaded.vendor[number]
        if vendor is not None:
            tensor = vendor.run(addresses, tensors, loaded.workspace, loaded.stream.handle)
            if tensor is not None:
                self._elsewhere[step.arguments[-1]] = tensor
            return
        assert step.launch is not None
        function = loaded.functions[step.kernel]
        kinds = [spec.dtype for spec in loaded.plan.tasks[step.task].inputs]
        function.launch(
            step.extent,
            step.launch.threads,
            addresses,
            loaded.stream.handle,
            dependent=number > 0 and step.launch.awaits and self._may_overlap(number),
            maps=of_arguments(step.launch.matrix_maps, addresses, kinds),
        )

    def _may_overlap(self, number: int) -> bool:
        """Whether a Tilewright kernel may start before the previous step has ended."""
        after_ours = self._loaded.vendor[number - 1] is None
        return self._dependent_launch == "all" or (self._dependent_launch == "own" and after_ours)

    def address(self, place: Place) -> int:
        tensor = self._elsewhere.get(place)
        if tensor is not None:
            return int(tensor.data_ptr())
        loaded = self._loaded
        if place.space == "arena":
            return loaded.arena + place.offset
        bases = {"input": loaded.inputs, "output": loaded.outputs, "constant": loaded.constants}
        return bases[place.space][place.index] + place.offset
