"""The reference kernel of a GPU: what it computes, and that a trial's answer has its time now. Without a GPU a clock
stands for it; how much a real one's time varies is not known from these tests."""

from __future__ import annotations

from typing import Any

import pytest

from tests.nvrtc import needs_nvrtc
from tilewright.measure import gpu_checks, gpu_reference
from tilewright.measure.gpu_reference import GpuReference
from tilewright.measure.gpu_timer import GpuTimer
from tilewright.measure.kernel_timer import CudaDevice
from tilewright.runtime.cuda import device


class Clock:
    """A GPU whose launches take as long as its clock says, in the order of its stream."""

    def __init__(self) -> None:
        self.now, self.slowdown, self.launched = 0.0, 1.0, []
        self.handle, self.address = 0, 0

    def attribute(self, name: str) -> int:
        return 132

    def block(self, size: int) -> Clock:
        return self

    def new_stream(self) -> Clock:
        return self

    def synchronise(self) -> None:
        pass

    def new_event(self, timing: bool) -> Event:
        return Event(self)

    def launch(self, blocks: int, threads: int, values: list[int], stream: int) -> None:
        self.launched.append((blocks, threads))
        self.now += values[1] * 2e-9 * self.slowdown


class Event:
    def __init__(self, clock: Clock) -> None:
        self._clock, self._when = clock, 0.0

    def record(self, stream: int) -> None:
        self._when = self._clock.now

    def seconds_to(self, other: Event) -> float:
        return other._when - self._when


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(gpu_reference, "Device", lambda ordinal: found)
    monkeypatch.setattr(gpu_reference, "gpu_functions", lambda ordinal: {"tw_reference": found})
    return found


class OneCandidate(GpuTimer):
    """A timer with one candidate, which takes 0.1 ms."""

    def __init__(self, reference: GpuReference) -> None:
        self._reference, self._heartbeat = reference, lambda native: None

    def _timed(self, number: int) -> Any:
        return lambda: 1e-4


def test_a_trial_reports_the_reference_kernel_of_a_gpu(clock: Clock) -> None:
    timer = OneCandidate(GpuReference(0))
    usual = timer.time(0, None)
    clock.slowdown = 1.5
    slower = timer.time(0, None)
    assert usual.times[0] == slower.times[0] == 1e-4
    assert 1e-6 < usual.reference < 1e-3
    assert slower.reference == pytest.approx(1.5 * usual.reference)
    assert set(clock.launched) == {(132, 256)}  # every multiprocessor has a block


def test_a_gpu_that_becomes_slower_within_a_trial(clock: Clock) -> None:
    class Heating(OneCandidate):
        def _timed(self, number: int) -> Any:
            def run() -> float:
                clock.slowdown = 2.0
                return 1e-4

            return run

    reference = GpuReference(0)
    usual = reference.seconds()
    assert Heating(reference).time(0, None).reference == pytest.approx(1.5 * usual)


def test_the_reference_kernel_is_a_chain_of_fmas() -> None:
    needs_nvrtc()
    from tilewright.codegen.cuda.toolchain import compile_source

    text = compile_source(gpu_checks._SOURCE, "compute_80").cubin.decode()
    kernel = text[text.index(".entry tw_reference") :]
    kernel = kernel[: kernel.index("\n}")]
    assert "fma.rn.f32" in kernel and "bra" in kernel and "ld.global" not in kernel


@pytest.mark.gpu
@pytest.mark.skipif(not device.count(), reason="no NVIDIA GPU")
def test_it_runs_on_a_gpu() -> None:
    assert 1e-6 < GpuReference(0).seconds() < 0.1


@pytest.mark.gpu
@pytest.mark.skipif(not device.count(), reason="no NVIDIA GPU")
def test_a_tile_kernels_trial_reports_it_too() -> None:
    found = object.__new__(CudaDevice)
    torch = pytest.importorskip("torch")
    found._torch, found._reference = torch, GpuReference(0)
    found._flush = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    assert 1e-6 < found.time(lambda: None)[1] < 0.1
