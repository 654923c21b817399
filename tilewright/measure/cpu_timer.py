"""Validation and timing on a CPU: object code is loaded, validated, and run alone.

A kernel runs first on guarded memory: every buffer lies between canaries, inputs must be what they were
afterwards, the output is filled with NaN before, and so are the stacks that hold scratch memory. It runs on the number
of threads that it is timed with, and on another, from addresses that are not aligned, and between pages that nobody may
touch: all must give the same bits.
Only then it is timed, on the ordinary inputs of the validation.

A reference kernel, always the same, is timed between stretches of calls: where it has become slower, the machine has,
and the stretch does not count. How a kernel is called, `kernels.py` says.
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

# Rounds of successive halving of a race of many: until which share of the time those run that take at most so many
# times the best's time.
_HALVING_ROUNDS = ((0.25, math.inf), (0.55, 1.6), (0.8, 1.3), (1.0, 1.12))
_MIN_IN_ROUND = 30
_ROUND_CALLS = 8  # in a turn; the first, which does not count, finds nothing in L1
_QUICK_ROUNDS, _QUICK_CALLS = 4, 5  # at most; in a turn
_CLOSE, _FAR = 1.1, 1.6  # times as slow as the kernel alongside it: what is between these is looked at again


@lru_cache(maxsize=1)
def _blocks() -> BlockPool:
    """Memory that all tasks of a process share."""
    return BlockPool()


class CpuTimer:
    """A task, and the kernels for it that were checked."""

    def __init__(self, task: LoadTask, validation: Validation, heartbeat: SendHeartbeat) -> None:
        blocks = _blocks()
        self._task, self._validation, self._blocks, self._heartbeat = task, validation, blocks, heartbeat
        self._drift = drift_monitor(task.machine, task.threads)
        self._kernels: dict[int, TimedKernel] = {}
        self._rounds = Rounds(blocks)
        self._shared: dict[Layout, Rounds] = {}  # of kernels that alternate

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
        for kernel in kernels:  # each has its own: what one has just read is in a cache
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
        """Each kernel takes the turn of a round that the one before it, of the same layout, has left: what goes round
        is in no cache, and there is memory for one round of each layout."""
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
        """In units of the time of the kernel `compared_to`, by the fastest calls of both."""
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
    """Of those running the ones that take at most `near` times the best's time, and not too few."""
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
    """What a call takes while nobody else is on the machine, of which only some calls can be sure."""
    return float(np.quantile(times, 0.1))
