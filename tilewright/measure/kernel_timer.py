"""Checks and times launches of kernels: the `Timer` of the timing process for a `KernelSpec`.

A launch runs first on a copy of the user's tensors with canaries around them. Afterwards the tensors must hold what is
expected, all others must be as they were, and so must the canaries. Then it is timed, on the same memory again and
again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from tilewright.errors import DeviceError, TilewrightError
from tilewright.hw import CpuMachine
from tilewright.hw.machine import from_text
from tilewright.measure.kernel_build import Launch, launch_of
from tilewright.measure.kernel_job import (
    BuiltKernel,
    Expected,
    KernelSpec,
    LaunchMemory,
    array_of,
    difference,
    mapped,
    mapped_descriptor,
    stored_view,
)
from tilewright.measure.reference_kernel import drift_monitor
from tilewright.measure.validation import OutOfBoundsWrite, WrongResult

Heartbeat = Callable[[bool], None]


class KernelFailed(Exception):
    """A launch raised an exception: its compiler's, in most cases."""


class LoadKernel(msgspec.Struct, frozen=True, tag=True):
    """Take up a launch: what it must compute lies in the file whose descriptor comes with this."""

    spec: KernelSpec
    expected: Expected
    device: int = 0


class Device(Protocol):
    """The tensors of a launch where it runs, and a clock there."""

    def tensors(self) -> dict[str, Any]:
        """The tensors as the user passed them; the same memory each time."""

    def results(self) -> LaunchMemory:
        """The memory after what was launched, in this process."""

    def time(self, launch: Callable[[], None]) -> tuple[float, float, bool]:
        """(seconds of a call, seconds of the reference kernel, whether the machine was steady)."""


class CpuDevice:
    def __init__(self, spec: KernelSpec, data: np.ndarray) -> None:
        self._memory = LaunchMemory(spec, data)
        machine = from_text(spec.described)
        assert isinstance(machine, CpuMachine)
        self._drift = drift_monitor(machine, max(1, spec.threads))
        self._before = 0.0

    def tensors(self) -> dict[str, Any]:
        self._memory.fill()
        return dict(self._memory.arrays())

    def results(self) -> LaunchMemory:
        return self._memory

    def time(self, launch: Callable[[], None]) -> tuple[float, float, bool]:
        before = self._before or self._drift.run()
        begin = time.perf_counter()
        launch()
        seconds = time.perf_counter() - begin
        after = self._before = self._drift.run()
        return seconds, after, self._drift.is_steady(before, after)


class CudaDevice:
    """Through PyTorch. Between calls L2 is overwritten, so that tensors come from memory, as in the first call."""

    def __init__(self, spec: KernelSpec, data: np.ndarray, device: int) -> None:
        import torch

        if not torch.cuda.is_available():
            raise DeviceError("the measuring process has no CUDA device")
        from tilewright.measure.gpu_checks import Checks
        from tilewright.measure.gpu_reference import GpuReference

        self._torch, self._spec = torch, spec
        torch.cuda.set_device(device)
        self._reference, self._checks = GpuReference(device), Checks(device)
        self._host = LaunchMemory(spec, data)
        self._regions = [
            torch.empty(max(1, region.size) + region.phase, dtype=torch.uint8, device="cuda")[region.phase :]
            for region in spec.regions
        ]
        self._flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")

    def tensors(self) -> dict[str, Any]:
        torch = self._torch
        found = {}
        for number, region in enumerate(self._regions):
            if self._spec.regions[number].size:
                region.copy_(torch.from_numpy(self._host.original(number).copy()))
        for tensor in self._spec.tensors:
            name = np.dtype(array_of(tensor, self._host.region(tensor.region)).dtype).name
            dtype = getattr(torch, name)
            size = dtype.itemsize
            flat = self._regions[tensor.region]
            flat = flat[: flat.numel() // size * size].view(dtype)
            found[tensor.name] = flat.as_strided(tensor.shape, tensor.strides, tensor.start // size)
        self._checks.fill_shared(0xFF)  # NaN, instead of what the last launch left there
        return found

    def results(self) -> LaunchMemory:
        self._torch.cuda.synchronize()
        for number, region in enumerate(self._regions):
            if self._spec.regions[number].size:
                self._host.region(number)[:] = region.cpu().numpy()
        return self._host

    def time(self, launch: Callable[[], None]) -> tuple[float, float, bool]:
        torch = self._torch
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._flush.zero_()
        begin.record()
        launch()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1e-3, self._reference.seconds(), True


class KernelTimer:
    def __init__(self, request: LoadKernel, descriptor: int, heartbeat: Heartbeat) -> None:
        self._spec, self._expected, self._heartbeat = request.spec, request.expected, heartbeat
        self._data = mapped(self._spec.data, self._spec.size)
        source = self._data
        if request.expected.arrays and not request.expected.in_spec:
            source = mapped_descriptor(descriptor, request.expected.size)
        self._arrays = {each.name: stored_view(source, each) for each in request.expected.arrays}
        self._masks = {each.name: stored_view(source, each) for each in request.expected.masks}
        self._launch: Launch = launch_of(self._spec)
        self._device: Device = (
            CpuDevice(self._spec, self._data)
            if self._spec.kind == "cpu"
            else CudaDevice(self._spec, self._data, request.device)
        )
        self._launches: dict[int, Callable[[], None]] = {}

    def check(self, number: int, built: BuiltKernel, keep: Sequence[int]) -> float:
        self._launches = {other: self._launches[other] for other in keep if other in self._launches}
        self._heartbeat(False)
        if not self._arrays:
            self._arrays = self._results_of_start()
        tensors = self._device.tensors()
        launch = self._launch.prepare(tensors, built.config, built.grid)
        self._heartbeat(True)
        try:
            launch()
        except TilewrightError:
            raise
        except Exception as error:  # of Triton's compiler, or of its interpreter
            raise KernelFailed(f"{type(error).__name__}: {error}") from None
        memory = self._device.results()
        self._heartbeat(False)
        if not memory.is_intact:
            raise OutOfBoundsWrite("it writes outside of its tensors")
        worst = self._compare(memory, tensors, built)
        self._launches[number] = launch
        return worst

    def _results_of_start(self) -> dict[str, np.ndarray]:
        """The results of the start config, as the expected ones if there is neither a reference nor an interpreter."""
        launch = self._launch.prepare(self._device.tensors(), self._spec.start, self._spec.start_grid)
        self._heartbeat(True)
        launch()
        results = self._device.results().arrays()
        self._heartbeat(False)
        return {name: np.array(values) for name, values in results.items()}

    def _compare(self, memory: LaunchMemory, tensors: dict[str, Any], built: BuiltKernel) -> float:
        worst = 0.0
        results = memory.arrays()
        for name, expected in self._arrays.items():
            mask = self._masks.get(name)
            error, wrong = difference(results[name], expected, mask, self._spec.tolerance)
            if wrong:
                raise WrongResult(f"`{name}`: {wrong}")
            worst = max(worst, error)
        written = self._launch.written(tensors, built.config)
        if written is not None:
            changed = {tensor.region for tensor in self._spec.tensors if tensor.name in written}
            for number in range(len(self._spec.regions)):
                if number in changed:
                    continue
                if not np.array_equal(memory.region(number), memory.original(number)):
                    raise OutOfBoundsWrite("it writes into a tensor that it only reads")
        return worst

    def time(self, number: int, best: float | None) -> Any:
        from tilewright.measure.timing import HEARTBEAT_SECONDS, Times

        launch = self._launches[number]
        self._heartbeat(True)
        self._device.time(launch)
        times = Times(best)
        begin = beaten = time.perf_counter()
        while not times.suffice(time.perf_counter() - begin):
            times.add(*self._device.time(launch))
            if time.perf_counter() - beaten > HEARTBEAT_SECONDS:
                self._heartbeat(True)
                beaten = time.perf_counter()
        return times.result()

    def race(self, numbers: Sequence[int], seconds: float) -> tuple[tuple[float, ...], ...]:
        from tilewright.measure.timing import HEARTBEAT_SECONDS, RACE_ROUNDS

        launches = [self._launches[number] for number in numbers]
        every: list[list[float]] = [[] for _ in launches]
        steady: list[list[float]] = [[] for _ in launches]
        begin, beaten = time.perf_counter(), 0.0
        while len(every[0]) < RACE_ROUNDS or time.perf_counter() - begin < seconds:
            for number, launch in enumerate(launches):
                if time.perf_counter() - beaten > HEARTBEAT_SECONDS:
                    self._heartbeat(True)
                    beaten = time.perf_counter()
                taken, _, is_steady = self._device.time(launch)
                every[number].append(taken)
                if is_steady:
                    steady[number].append(taken)
        at_rest = min(map(len, steady)) >= RACE_ROUNDS
        return tuple(map(tuple, steady if at_rest else every))
