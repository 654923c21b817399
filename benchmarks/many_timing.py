"""A timing process that times thousands of kernels of a task: by successive halving, or quickly and unchecked.

`builds.py` has the runner that asks for it. Both are for benchmarks that measure whole spaces.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import msgspec
import numpy as np

from tilewright.measure.cpu_timer import CpuTimer
from tilewright.measure.kernels import Layout, Rounds, TimedKernel
from tilewright.measure.shared_checks import load_validation
from tilewright.measure.single import Built
from tilewright.measure.timing import (
    HEARTBEAT_SECONDS,
    LoadTask,
    Raced,
    SendHeartbeat,
    TimingReply,
    TimingRequest,
    answer_requests,
    ask_timer,
)
from tilewright.support.process import Channel

# Rounds of successive halving: the share of the time at which each round ends, and the factor of the best time within
# which kernels continue.
_HALVING_ROUNDS = ((0.25, math.inf), (0.55, 1.6), (0.8, 1.3), (1.0, 1.12))
_MIN_IN_ROUND = 30
_ROUND_CALLS = 8  # per turn; the first one, which does not count, warms L1
_QUICK_ROUNDS, _QUICK_CALLS = 4, 5  # maximum rounds; calls per turn
_CLOSE, _FAR = 1.1, 1.6  # slowdown against the reference candidate between which a kernel is timed again


class SuccessiveHalving(msgspec.Struct, frozen=True, tag=True):
    """Time many validated kernels interleaved, for about this long in total: all, then those near the best."""

    numbers: tuple[int, ...]
    seconds: float


class QuickTiming(msgspec.Struct, frozen=True, tag=True):
    """Load a kernel and time a few calls, interleaved with a validated one. Its results are not checked. The answer is
    a `Raced` with one time: that of the kernel relative to the other."""

    built: Built
    compared_to: int


class ManyTimer(CpuTimer):
    """Kernels that take turns on shared memory, continuing one round through it. There is one set of buffers for all
    kernels of a layout."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._shared: dict[Layout, Rounds] = {}
        self._positions: dict[Layout, int] = {}

    def successive_halving(self, numbers: Sequence[int], seconds: float) -> tuple[tuple[float, ...], ...]:
        """Interleave many kernels. Kernels of one layout take turns on one set of buffers, which together exceed the
        caches; there is memory for one set per layout."""
        self._heartbeat(False)
        for number in numbers:
            self._kernels[number].prepare(self._memory(self._kernels[number]))
        times: dict[int, list[float]] = {number: [] for number in numbers}
        running, begin, beaten = list(numbers), time.perf_counter(), 0.0
        order = Random(0)
        for share, near in _HALVING_ROUNDS:
            running = _near(times, running, near)
            turns = 0
            while not turns or time.perf_counter() - begin < share * seconds:
                order.shuffle(running)
                for number in running:
                    if time.perf_counter() - beaten > HEARTBEAT_SECONDS:
                        self._heartbeat(True)
                        beaten = time.perf_counter()
                    kernel = self._kernels[number]
                    times[number] += self._turn(kernel, _ROUND_CALLS)
                turns += 1
        return tuple(tuple(times[number]) for number in numbers)

    def quick_timing(self, built: Built, compared_to: int) -> float:
        """The time relative to the kernel `compared_to`, by the fastest calls of both."""
        self._heartbeat(False)
        checked, kernel = self._kernels[compared_to], self._loaded(built)
        for each in (checked, kernel):
            each.prepare(self._memory(each))
        times: dict[TimedKernel, list[float]] = {checked: [], kernel: []}
        for _ in range(_QUICK_ROUNDS):
            for each in times:
                self._heartbeat(True)
                times[each] += self._turn(each, _QUICK_CALLS)
            if not _CLOSE < min(times[kernel]) / min(times[checked]) < _FAR:
                break
        self._heartbeat(False)
        return min(times[kernel]) / min(times[checked])

    def _memory(self, kernel: TimedKernel) -> Rounds:
        return self._shared.setdefault(kernel.layout, Rounds(self._blocks))

    def _turn(self, kernel: TimedKernel, count: int) -> list[float]:
        """The seconds of some calls after one that does not count, continuing the shared round."""
        position = self._positions.get(kernel.layout, 0)
        kernel.position = position if position + count <= kernel.round_length else 0
        taken = [seconds for seconds, _, _ in kernel.calls(count)]
        self._positions[kernel.layout] = kernel.position
        return taken[1:] or taken


def _near(times: Mapping[int, Sequence[float]], running: Sequence[int], near: float) -> list[int]:
    """The running kernels within `near` times the best time, and at least a minimum number."""
    if not all(times[number] for number in running):
        return list(running)
    seconds = {number: undisturbed(times[number]) for number in running}
    ranked = sorted(running, key=lambda number: seconds[number])
    limit = near * seconds[ranked[0]]
    return [
        number
        for position, number in enumerate(ranked)
        if position < _MIN_IN_ROUND or seconds[number] <= limit
    ]


def undisturbed(times: Sequence[float]) -> float:
    """The time of an undisturbed call, estimated from calls of which only some are undisturbed."""
    return float(np.quantile(times, 0.1))


def serve(channel: Channel) -> None:
    answer_requests(channel, TimingRequest | SuccessiveHalving | QuickTiming, _timer_of, _asked)


def _timer_of(request: LoadTask, descriptor: int, heartbeat: SendHeartbeat) -> ManyTimer:
    return ManyTimer(request, load_validation(request.validation, descriptor), heartbeat)


def _asked(timer: ManyTimer, request: Any) -> TimingReply:
    if isinstance(request, SuccessiveHalving):
        return Raced(timer.successive_halving(request.numbers, request.seconds))
    if isinstance(request, QuickTiming):
        return Raced(((timer.quick_timing(request.built, request.compared_to),),))
    return ask_timer(timer, request)
