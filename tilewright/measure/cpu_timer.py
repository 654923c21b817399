"""Validation and timing on a CPU: object code is loaded, validated, and run alone.

A kernel first runs on guarded memory: every buffer lies between canaries, inputs must be unchanged afterwards, and
the output and the stacks with scratch memory are filled with NaN before. It runs with the number of threads that it
is timed with, with another number, from unaligned addresses, and between guard pages: all runs must give the same
bits. Only then is it timed, on the validation's ordinary inputs.

A fixed reference kernel is timed between series of calls: if it has become slower, so has the machine, and the series
does not count. `kernels.py` defines how a kernel is called.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from random import Random

import numpy as np

from tilewright.measure.guarded_memory import BlockPool
from tilewright.measure.kernels import Layout, Rounds, TimedKernel
from tilewright.measure.reference_kernel import drift_monitor
from tilewright.measure.single import Built
from tilewright.measure.timing import HEARTBEAT_SECONDS, RACE_ROUNDS, LoadTask, SendHeartbeat, Timed, Times
from tilewright.measure.validation import Validation

# Rounds of successive halving: the share of the time at which each round ends, and the factor of the best time within
# which kernels continue.
_HALVING_ROUNDS = ((0.25, math.inf), (0.55, 1.6), (0.8, 1.3), (1.0, 1.12))
_MIN_IN_ROUND = 30
_ROUND_CALLS = 8  # per turn; the first one, which does not count, warms L1
_QUICK_ROUNDS, _QUICK_CALLS = 4, 5  # maximum rounds; calls per turn
_CLOSE, _FAR = 1.1, 1.6  # slowdown against the reference candidate between which a kernel is timed again


@lru_cache(maxsize=1)
def _blocks() -> BlockPool:
    """Memory that all tasks of a process share."""
    return BlockPool()


class CpuTimer:
    """A task and its validated kernels."""

    def __init__(self, task: LoadTask, validation: Validation, heartbeat: SendHeartbeat) -> None:
        blocks = _blocks()
        self._task, self._validation, self._blocks, self._heartbeat = task, validation, blocks, heartbeat
        self._drift = drift_monitor(task.machine, task.threads)
        self._kernels: dict[int, TimedKernel] = {}
        self._rounds = Rounds(blocks)
        self._shared: dict[Layout, Rounds] = {}  # for kernels that are interleaved

    def check(self, number: int, built: Built, keep: Sequence[int]) -> float:
        for other in [other for other in self._kernels if other not in keep]:
            self._kernels.pop(other).release()
        self._heartbeat(False)
        kernel = TimedKernel(built, self._task, self._validation.ordinary, self._blocks, self._drift)
        error = kernel.check(self._validation.cases, self._heartbeat)
        self._kernels[number] = kernel
        return error

    def time(self, number: int, best: float | None) -> Timed:
        kernel = self._kernels[number]
        self._heartbeat(False)
        kernel.prepare(self._rounds)
        self._heartbeat(True)
        kernel.warm_up()
        times = Times(best)
        begin = beaten = time.perf_counter()
        while not times.suffice(time.perf_counter() - begin):
            for seconds, before, after in kernel.calls():
                times.add(seconds, after, self._drift.is_steady(before, after))
            if time.perf_counter() - beaten > HEARTBEAT_SECONDS:
                self._heartbeat(True)
                beaten = time.perf_counter()
        self._drift.note(times.references)
        return times.result()

    def race(self, numbers: Sequence[int], seconds: float) -> tuple[tuple[float, ...], ...]:
        kernels = [self._kernels[number] for number in numbers]
        self._heartbeat(False)
        for (
            kernel
        ) in kernels:  # each has its own memory, because data that another kernel has just read is in a cache
            kernel.prepare(None)
        every: list[list[float]] = [[] for _ in kernels]
        steady: list[list[float]] = [[] for _ in kernels]
        begin = time.perf_counter()
        beaten = 0.0
        while len(every[0]) < RACE_ROUNDS or time.perf_counter() - begin < seconds:
            for number, kernel in enumerate(kernels):
                if time.perf_counter() - beaten > HEARTBEAT_SECONDS:
                    self._heartbeat(True)
                    beaten = time.perf_counter()
                ((taken, before, after),) = kernel.calls(1)
                every[number].append(taken)
                if self._drift.is_steady(before, after):
                    steady[number].append(taken)
        at_rest = min(map(len, steady)) >= RACE_ROUNDS
        return tuple(map(tuple, steady if at_rest else every))

    def successive_halving(self, numbers: Sequence[int], seconds: float) -> tuple[tuple[float, ...], ...]:
        """Interleave many kernels. Kernels of one layout take turns on one set of buffers, which together exceed the
        caches; there is memory for one set per layout."""
        self._heartbeat(False)
        for number in numbers:
            self._prepare_shared(self._kernels[number])
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
                    times[number] += kernel.turn(self._shared[kernel.layout], _ROUND_CALLS)
                turns += 1
        return tuple(tuple(times[number]) for number in numbers)

    def quick_timing(self, built: Built, compared_to: int) -> float:
        """The time relative to the kernel `compared_to`, by the fastest calls of both."""
        self._heartbeat(False)
        checked = self._kernels[compared_to]
        kernel = TimedKernel(built, self._task, self._validation.ordinary, self._blocks, self._drift)
        for each in (checked, kernel):
            self._prepare_shared(each)
        times: dict[TimedKernel, list[float]] = {checked: [], kernel: []}
        for _ in range(_QUICK_ROUNDS):
            for each in times:
                self._heartbeat(True)
                times[each] += each.turn(self._shared[each.layout], _QUICK_CALLS)
            if not _CLOSE < min(times[kernel]) / min(times[checked]) < _FAR:
                break
        self._heartbeat(False)
        return min(times[kernel]) / min(times[checked])

    def _prepare_shared(self, kernel: TimedKernel) -> None:
        kernel.prepare(self._shared.setdefault(kernel.layout, Rounds(self._blocks)))


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
