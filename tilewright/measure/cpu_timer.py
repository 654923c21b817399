"""Checking and timing on a processor: object code is loaded, examined, and run alone.

A kernel runs first on memory that is watched: every buffer lies between canaries, inputs must be what they were
afterwards, the output is filled with NaN before, and so are the stacks that hold scratch memory. It runs on the number
of threads that it is timed with, and on another, from addresses that are not aligned, and between pages that nobody may
touch: all must give the same bits.
Only then it is timed, on the ordinary inputs of the exam.

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

from tilewright.measure.exam import Exam
from tilewright.measure.kernels import Kernel, Layout, Rounds
from tilewright.measure.pace import pace
from tilewright.measure.single import Built
from tilewright.measure.timing import BEAT_SECONDS, RACE_TURNS, Beating, Sit, Timed, Times
from tilewright.measure.watched import Blocks

# Heats of a race of many: until which share of the time those run that take at most so many times the best's time.
_HEATS = ((0.25, math.inf), (0.55, 1.6), (0.8, 1.3), (1.0, 1.12))
_LEAST_IN_HEAT = 30
_HEAT_CALLS = 8  # in a turn; the first, which does not count, finds nothing in L1
_GLANCE_TURNS, _GLANCE_CALLS = 4, 5  # at most; in a turn
_CLOSE, _FAR = 1.1, 1.6  # times as slow as the kernel beside it: what is between these is looked at again


@lru_cache(maxsize=1)
def _blocks() -> Blocks:
    """Memory that all tasks of a process share."""
    return Blocks()


class CpuTimer:
    """A task, and the kernels for it that were checked."""

    def __init__(self, task: Sit, exam: Exam, beat: Beating) -> None:
        blocks = _blocks()
        self._task, self._exam, self._blocks, self._beat = task, exam, blocks, beat
        self._pace = pace(task.machine, task.threads)
        self._kernels: dict[int, Kernel] = {}
        self._rounds = Rounds(blocks)
        self._shared: dict[Layout, Rounds] = {}  # of kernels that take turns

    def check(self, number: int, built: Built, keep: Sequence[int]) -> float:
        for other in [other for other in self._kernels if other not in keep]:
            self._kernels.pop(other).release()
        self._beat(False)
        kernel = Kernel(built, self._task, self._exam.ordinary, self._blocks, self._pace)
        error = kernel.check(self._exam.cases, self._beat)
        self._kernels[number] = kernel
        return error

    def time(self, number: int, best: float | None) -> Timed:
        kernel = self._kernels[number]
        self._beat(False)
        kernel.prepare(self._rounds)
        self._beat(True)
        kernel.warm_up()
        times = Times(best)
        begin = beaten = time.perf_counter()
        while not times.suffice(time.perf_counter() - begin):
            for seconds, before, after in kernel.calls():
                times.add(seconds, after, self._pace.is_steady(before, after))
            if time.perf_counter() - beaten > BEAT_SECONDS:
                self._beat(True)
                beaten = time.perf_counter()
        self._pace.note(times.references)
        return times.result()

    def race(self, numbers: Sequence[int], seconds: float) -> tuple[tuple[float, ...], ...]:
        kernels = [self._kernels[number] for number in numbers]
        self._beat(False)
        for kernel in kernels:  # each has its own: what one has just read is in a cache
            kernel.prepare(None)
        every: list[list[float]] = [[] for _ in kernels]
        steady: list[list[float]] = [[] for _ in kernels]
        begin = time.perf_counter()
        beaten = 0.0
        while len(every[0]) < RACE_TURNS or time.perf_counter() - begin < seconds:
            for number, kernel in enumerate(kernels):
                if time.perf_counter() - beaten > BEAT_SECONDS:
                    self._beat(True)
                    beaten = time.perf_counter()
                ((taken, before, after),) = kernel.calls(1)
                every[number].append(taken)
                if self._pace.is_steady(before, after):
                    steady[number].append(taken)
        at_rest = min(map(len, steady)) >= RACE_TURNS
        return tuple(map(tuple, steady if at_rest else every))

    def heats(self, numbers: Sequence[int], seconds: float) -> tuple[tuple[float, ...], ...]:
        """Each kernel takes the turn of a round that the one before it, of the same layout, has left: what goes round
        is in no cache, and there is memory for one round of each layout."""
        self._beat(False)
        for number in numbers:
            self._prepare_shared(self._kernels[number])
        times: dict[int, list[float]] = {number: [] for number in numbers}
        running, begin, beaten = list(numbers), time.perf_counter(), 0.0
        order = Random(0)
        for share, near in _HEATS:
            running = _near(times, running, near)
            turns = 0
            while not turns or time.perf_counter() - begin < share * seconds:
                order.shuffle(running)
                for number in running:
                    if time.perf_counter() - beaten > BEAT_SECONDS:
                        self._beat(True)
                        beaten = time.perf_counter()
                    kernel = self._kernels[number]
                    times[number] += kernel.turn(self._shared[kernel.layout], _HEAT_CALLS)
                turns += 1
        return tuple(tuple(times[number]) for number in numbers)

    def glance(self, built: Built, beside: int) -> float:
        """In units of the time of the kernel `beside`, by the fastest calls of both."""
        self._beat(False)
        checked = self._kernels[beside]
        kernel = Kernel(built, self._task, self._exam.ordinary, self._blocks, self._pace)
        for each in (checked, kernel):
            self._prepare_shared(each)
        times: dict[Kernel, list[float]] = {checked: [], kernel: []}
        for _ in range(_GLANCE_TURNS):
            for each in times:
                self._beat(True)
                times[each] += each.turn(self._shared[each.layout], _GLANCE_CALLS)
            if not _CLOSE < min(times[kernel]) / min(times[checked]) < _FAR:
                break
        self._beat(False)
        return min(times[kernel]) / min(times[checked])

    def _prepare_shared(self, kernel: Kernel) -> None:
        kernel.prepare(self._shared.setdefault(kernel.layout, Rounds(self._blocks)))


def _near(times: Mapping[int, Sequence[float]], running: Sequence[int], near: float) -> list[int]:
    """Of those running the ones that take at most `near` times the best's time, and not too few."""
    if not all(times[number] for number in running):
        return list(running)
    seconds = {number: undisturbed(times[number]) for number in running}
    ranked = sorted(running, key=lambda number: seconds[number])
    limit = near * seconds[ranked[0]]
    return [
        number for place, number in enumerate(ranked) if place < _LEAST_IN_HEAT or seconds[number] <= limit
    ]


def undisturbed(times: Sequence[float]) -> float:
    """What a call takes while nobody else is on the machine, of which only some calls can be sure."""
    return float(np.quantile(times, 0.1))
