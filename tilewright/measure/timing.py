"""The process that checks and times: object code is loaded, examined, and run alone.

A kernel runs first on memory that is watched: every buffer lies between canaries, inputs must be what they were
afterwards, the output is filled with NaN before, and so are the stacks that hold scratch memory. It runs on the number
of threads that it is timed with, and on another, from addresses that are not aligned, and between pages that nobody may
touch: all must give the same bits.
Only then it is timed, on the ordinary inputs of the exam.

A reference kernel, always the same, is timed between stretches of calls: where it has become slower, the machine has,
and the stretch does not count. How a kernel is called, `kernels.py` says.
"""

from __future__ import annotations

import errno
import math
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from random import Random

import msgspec
import numpy as np

from tilewright.errors import ModelSizeError, TilewrightError
from tilewright.hw import CpuMachine
from tilewright.measure.exam import Exam, WrongResult
from tilewright.measure.kernels import Beating, Kernel, Layout, Rounds
from tilewright.measure.pace import pace
from tilewright.measure.process import Channel, Failed
from tilewright.measure.single import Built
from tilewright.measure.stored import StoredExam, load_exam
from tilewright.measure.watched import Blocks, StrayWrite

_TIGHT = 0.02  # of the median: the width of its confidence interval at which it is known well enough
_INTERVAL = 0.98  # ranks to each side of the median, over the root of their number: 95% confidence
_LEAST_CALLS, _LEAST_SECONDS = 5, 0.003
_MOST_CALLS, _MOST_SECONDS = 400, 0.015
_UNSTEADY_SECONDS = 0.04  # as long as this it is tried to find the machine at rest
_SLACK = 0.2  # of the share by which a kernel is slower than the best: by so much wider its interval may be
_HOPELESS, _HOPELESS_CALLS = 3.0, 3  # times the best so far: how slow exactly is of no interest
_RACE_TURNS = 5  # at least
# Heats of a race of many: until which share of the time those run that take at most so many times the best's time.
_HEATS = ((0.25, math.inf), (0.55, 1.6), (0.8, 1.3), (1.0, 1.12))
_LEAST_IN_HEAT = 30
_HEAT_CALLS = 8  # in a turn; the first, which does not count, finds nothing in the first cache
_GLANCE_TURNS, _GLANCE_CALLS = 4, 5  # at most; in a turn
_CLOSE, _FAR = 1.1, 1.6  # times as slow as the kernel beside it: what is between these is looked at again
_BEAT_SECONDS = 0.05


class Sit(msgspec.Struct, frozen=True, tag=True):
    """Take up a task: its exam lies in the file whose descriptor comes with this."""

    exam: StoredExam
    machine: CpuMachine
    numerics: str
    threads: int
    constants: tuple[int, ...]
    cold: bool


class Check(msgspec.Struct, frozen=True, tag=True):
    """Load a kernel under a number and examine it. Others but those of `keep` are forgotten."""

    number: int
    built: Built
    keep: tuple[int, ...] = ()


class Time(msgspec.Struct, frozen=True, tag=True):
    """Time a kernel that was checked. `best`: the time to beat, where there is one."""

    number: int
    best: float | None = None


class Race(msgspec.Struct, frozen=True, tag=True):
    """Time kernels that were checked in turns, for about so long together."""

    numbers: tuple[int, ...]
    seconds: float


class Heats(msgspec.Struct, frozen=True, tag=True):
    """Time many kernels that were checked in turns, for about so long together: all, then those near the best."""

    numbers: tuple[int, ...]
    seconds: float


class Glance(msgspec.Struct, frozen=True, tag=True):
    """Load a kernel and time a few calls of it, in turns with one that was checked. It may compute anything."""

    built: Built
    beside: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The task was taken up."""


class Beat(msgspec.Struct, frozen=True, tag=True):
    """Not an answer: a call of a kernel begins now (`native`), or something else does."""

    native: bool


class Checked(msgspec.Struct, frozen=True, tag=True):
    error: float


class Timed(msgspec.Struct, frozen=True, tag=True):
    """Times of calls, from stretches in which the machine was as fast as it used to be if it is `steady`; and the
    typical time of the reference kernel between them."""

    times: tuple[float, ...]
    reference: float
    steady: bool


class Raced(msgspec.Struct, frozen=True, tag=True):
    times: tuple[tuple[float, ...], ...]


class Glanced(msgspec.Struct, frozen=True, tag=True):
    """The seconds of a kernel, in units of the one beside it."""

    ratio: float


TimingReply = Ready | Beat | Checked | Timed | Raced | Glanced | Failed


def serve(channel: Channel) -> None:
    timer: Timer | None = None
    blocks = Blocks()
    decoder = msgspec.msgpack.Decoder(Sit | Check | Time | Race | Heats | Glance)

    def beat(native: bool) -> None:
        channel.send(msgspec.msgpack.encode(Beat(native)))

    while True:
        message, descriptors = channel.receive()
        request = decoder.decode(message)
        reply: TimingReply
        if isinstance(request, Sit):
            timer = Timer(request, load_exam(request.exam, descriptors[0]), blocks, beat)
            os.close(descriptors[0])
            reply = Ready()
        else:
            assert timer is not None
            reply = _answer(timer, request)
        channel.send(msgspec.msgpack.encode(reply))


def _answer(timer: Timer, request: Check | Time | Race | Heats | Glance) -> TimingReply:
    try:
        if isinstance(request, Check):
            return Checked(timer.check(request.number, request.built, request.keep))
        if isinstance(request, Time):
            return timer.time(request.number, request.best)
        if isinstance(request, Heats):
            return Raced(timer.heats(request.numbers, request.seconds))
        if isinstance(request, Glance):
            return Glanced(timer.glance(request.built, request.beside))
        return Raced(timer.race(request.numbers, request.seconds))
    except WrongResult as error:
        return Failed("wrong", str(error), astray=isinstance(error, StrayWrite))
    except (MemoryError, ModelSizeError):
        return Failed("memory", "its buffers do not fit into memory")
    except TilewrightError as error:  # the object code cannot be loaded
        return Failed("build", str(error))
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        return Failed("memory", "its buffers do not fit into memory")


class Timer:
    """A task, and the kernels for it that were checked."""

    def __init__(self, task: Sit, exam: Exam, blocks: Blocks, beat: Beating) -> None:
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
        times = _Times(best)
        begin = beaten = time.perf_counter()
        while not times.suffice(time.perf_counter() - begin):
            for seconds, before, after in kernel.calls():
                times.add(seconds, after, self._pace.is_steady(before, after))
            if time.perf_counter() - beaten > _BEAT_SECONDS:
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
        while len(every[0]) < _RACE_TURNS or time.perf_counter() - begin < seconds:
            for number, kernel in enumerate(kernels):
                if time.perf_counter() - beaten > _BEAT_SECONDS:
                    self._beat(True)
                    beaten = time.perf_counter()
                ((taken, before, after),) = kernel.calls(1)
                every[number].append(taken)
                if self._pace.is_steady(before, after):
                    steady[number].append(taken)
        at_rest = min(map(len, steady)) >= _RACE_TURNS
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
                    if time.perf_counter() - beaten > _BEAT_SECONDS:
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


class _Times:
    """The times of a kernel so far, those of steady stretches apart."""

    def __init__(self, best: float | None) -> None:
        self._best = best
        self._all: list[float] = []
        self._steady: list[float] = []
        self.references: list[float] = []

    def add(self, seconds: float, reference: float, is_steady: bool) -> None:
        self._all.append(seconds)
        self.references.append(reference)
        if is_steady:
            self._steady.append(seconds)

    @property
    def are_steady(self) -> bool:
        return len(self._steady) >= _LEAST_CALLS or self._hopeless

    @property
    def _hopeless(self) -> bool:
        if self._best is None or len(self._steady) < _HOPELESS_CALLS:
            return False
        return min(self._steady) > _HOPELESS * self._best

    def suffice(self, spent: float) -> bool:
        """Whether the median is known well enough, or as well as its worth in time allows."""
        if len(self._steady) < _LEAST_CALLS:
            return self._hopeless or (spent >= _UNSTEADY_SECONDS and len(self._all) >= _LEAST_CALLS)
        if spent >= _MOST_SECONDS or len(self._steady) >= _MOST_CALLS:
            return True
        return self._hopeless or (spent >= _LEAST_SECONDS and interval_width(self._steady) <= self._tight)

    @property
    def _tight(self) -> float:
        """Of one that is not among the best, less has to be known."""
        if self._best is None:
            return _TIGHT
        return _TIGHT + _SLACK * max(0.0, min(self._steady) / self._best - 1)

    def result(self) -> Timed:
        times = self._steady if self.are_steady else self._all
        return Timed(tuple(times), statistics.median(self.references), self.are_steady)


def interval_width(times: Sequence[float]) -> float:
    """Of the 95% confidence interval of the median, by ranks, as a share of the median."""
    ordered = sorted(times)
    count = len(ordered)
    below = math.floor(count / 2 - _INTERVAL * math.sqrt(count))
    if below < 0:
        return math.inf
    return (ordered[count - 1 - below] - ordered[below]) / statistics.median(ordered)
