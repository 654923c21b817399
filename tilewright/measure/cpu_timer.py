"""Validation and timing on a CPU: object code is loaded, validated, and run alone.

A kernel first runs on guarded memory: every buffer lies between canaries, inputs must be unchanged afterwards, and
the output and the stacks with scratch memory are filled with NaN before. It runs with the number of threads that it
is timed with, with another number, from unaligned addresses, and between guard pages: all runs must give the same
bits. Only then is it timed, on the validation's ordinary inputs.

A fixed reference kernel is timed between series of calls: if it has become slower, so has the machine, and the series
does not count. `kernels.py` defines how a kernel is called.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import lru_cache

from tilewright.measure.guarded_memory import BlockPool
from tilewright.measure.kernels import Rounds, TimedKernel
from tilewright.measure.reference_kernel import drift_monitor
from tilewright.measure.single import Built
from tilewright.measure.timing import HEARTBEAT_SECONDS, RACE_ROUNDS, LoadTask, SendHeartbeat, Timed, Times
from tilewright.measure.validation import Validation


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

    def check(self, number: int, built: Built, keep: Sequence[int]) -> float:
        for other in [other for other in self._kernels if other not in keep]:
            self._kernels.pop(other).release()
        self._heartbeat(False)
        kernel = self._loaded(built)
        error = kernel.check(self._validation.cases, self._heartbeat)
        self._kernels[number] = kernel
        return error

    def _loaded(self, built: Built) -> TimedKernel:
        return TimedKernel(built, self._task, self._validation.ordinary, self._blocks, self._drift)

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
