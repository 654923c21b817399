"""The process that checks and times: object code is loaded, examined, and run alone.

A kernel runs first on memory that is watched: every buffer lies between canaries, inputs must be what they were
afterwards, the output is filled with NaN before, and so are the stacks that hold scratch memory. It runs on the number
of threads that it is timed with, and on another, from addresses that are not aligned, and between pages that nobody may
touch: all must give the same bits.
Only then it is timed, on the ordinary inputs of the exam.

Constants are weights, which in a model come from memory and not from a cache: calls go round copies that together are
larger than the caches. Other inputs were just written when a model runs, and stay where they are; in the cold mode
they and the output go round too. A reference kernel, always the same, is timed between stretches of calls: where it
has become slower, the machine has, and the stretch does not count.
"""

from __future__ import annotations

import errno
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import lru_cache

import msgspec
import numpy as np

from tilewright.errors import TilewrightError
from tilewright.hw import CpuMachine
from tilewright.measure.exam import Case, Exam, WrongResult
from tilewright.measure.pace import Pace, pace, poison
from tilewright.measure.process import Channel, Failed
from tilewright.measure.single import Built, Call, executor_of
from tilewright.measure.stored import StoredExam, load_exam
from tilewright.measure.watched import Blocks, Fences, StrayWrite, Watched
from tilewright.runtime.plan import aligned

_SLOW_CHECK = 0.25  # seconds of one run, from which on no second opinion is asked for

_BEYOND_CACHES = 1.25  # times the size of the last one: what goes round has left it when it comes again
_MOST_COPIES = 64
_MOST_COPIED_BYTES = 256 << 20

_TIGHT = 0.02  # of the median: the width of its confidence interval at which it is known well enough
_INTERVAL = 0.98  # ranks to each side of the median, over the root of their number: 95% confidence
_LEAST_CALLS, _LEAST_SECONDS = 5, 0.003
_MOST_CALLS, _MOST_SECONDS = 400, 0.015
_UNSTEADY_SECONDS = 0.04  # as long as this it is tried to find the machine at rest
_WARM_SECONDS = 0.001  # of calls before the first that counts
_SLACK = 0.2  # of the share by which a kernel is slower than the best: by so much wider its interval may be
_HOPELESS, _HOPELESS_CALLS = 3.0, 3  # times the best so far: how slow exactly is of no interest
_RACE_TURNS = 5  # at least
_BEAT_SECONDS = 0.05

# In a kernel's plan: two steps of the reference kernel, one of its own, and so on.
_CALL_STEP, _STEPS_OF_A_CALL = 2, 3
_ENTRY_SECONDS = 0.003  # of calls that follow each other in native code
_ENTRY_CALLS = 16  # of a kernel that has nothing that goes round


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


TimingReply = Ready | Beat | Checked | Timed | Raced | Failed
_Beat = Callable[[bool], None]


def serve(channel: Channel) -> None:
    timer: Timer | None = None
    blocks = Blocks()
    decoder = msgspec.msgpack.Decoder(Sit | Check | Time | Race)

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


def _answer(timer: Timer, request: Check | Time | Race) -> TimingReply:
    try:
        if isinstance(request, Check):
            return Checked(timer.check(request.number, request.built, request.keep))
        if isinstance(request, Time):
            return timer.time(request.number, request.best)
        return Raced(timer.race(request.numbers, request.seconds))
    except WrongResult as error:
        return Failed("wrong", str(error), astray=isinstance(error, StrayWrite))
    except TilewrightError as error:  # the object code cannot be loaded
        return Failed("build", str(error))
    except MemoryError:
        return Failed("memory", "its buffers do not fit into memory")
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        return Failed("memory", "its buffers do not fit into memory")


class Timer:
    """A task, and the kernels for it that were checked."""

    def __init__(self, task: Sit, exam: Exam, blocks: Blocks, beat: _Beat) -> None:
        self._task, self._exam, self._blocks, self._beat = task, exam, blocks, beat
        self._pace = pace(task.machine, task.threads)
        self._kernels: dict[int, _Kernel] = {}
        self._rounds = _Rounds(blocks)

    def check(self, number: int, built: Built, keep: Sequence[int]) -> float:
        for other in [other for other in self._kernels if other not in keep]:
            self._kernels.pop(other).release()
        self._beat(False)
        kernel = _Kernel(built, self._task, self._exam.ordinary, self._blocks, self._pace)
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


# -- kernels ----------------------------------------------------------------------------------------------------------


class _Kernel:
    """Object code with the task's inputs in the order that it wants.

    Its plan is a round of calls, one for each copy of what goes round, with two of the reference kernel before each and
    after the last: all in one entry into native code, so that no thread falls asleep meanwhile. The first of the two
    wakes those that have waited for a slower one; the second is what counts."""

    def __init__(self, built: Built, task: Sit, ordinary: Case, blocks: Blocks, pace: Pace) -> None:
        self._task, self._blocks, self._built = task, blocks, built
        self._ordinary = ordinary
        self._constants = frozenset(task.constants)
        self._packed = {number: self._as_wanted(number, ordinary) for number in self._constants}
        sizes = [aligned(spec.bytes) for spec in built.parameters]
        self._goes_round = [
            task.cold or (number in self._constants and number < len(sizes) - 1)
            for number in range(len(sizes))
        ]
        self._sizes = list(map(_roomy, sizes))
        self._copies = _copies(self._round_bytes, task.machine)
        self._calls = self._copies if self._copies > 1 else _ENTRY_CALLS

        width = len(sizes) - 1
        reference = Call(pace.built, range(self._calls * width, self._calls * width + 2), self._calls)
        steps = [reference, reference]
        for number in range(self._calls):
            steps.append(Call(built, range(number * width, (number + 1) * width), number))
            steps += [reference, reference]
        self._pace = pace
        self._executor = executor_of(
            steps, task.machine, task.threads, inputs=self._calls * width + 2, outputs=self._calls + 1
        )
        self._addresses: tuple[list[int], list[int]] | None = None
        self._own: np.ndarray | None = None
        self._next = 0
        self._entry = 1  # calls in one entry into native code

    @property
    def _round_bytes(self) -> int:
        return sum(size for size, goes in zip(self._sizes, self._goes_round, strict=True) if goes)

    def _as_wanted(self, number: int, case: Case) -> np.ndarray:
        packing = self._built.packings[number]
        values = case.inputs[number]
        return values.reshape(-1) if packing is None else packing.pack(values)

    def _inputs(self, case: Case) -> list[np.ndarray]:
        return [
            self._packed[number] if number in self._packed else self._as_wanted(number, case)
            for number in range(len(case.inputs))
        ]

    def check(self, cases: Sequence[Case], beat: _Beat) -> float:
        """Run on every case: the relative error on the first. Raises WrongResult."""
        threads, specs = self._task.threads, self._built.parameters
        watched = Watched(self._blocks, specs)
        errors, first, quick = [], b"", True
        for case in cases:
            begin = time.perf_counter()
            self._run_watched(watched, case, threads, beat)
            errors.append(case.error(watched.output))
            if case is cases[0]:
                first, quick = watched.output.tobytes(), time.perf_counter() - begin < _SLOW_CHECK
        if quick:
            other = Watched(self._blocks, specs, shifted=True, aligned_ones=self._constants)
            self._run_watched(other, cases[0], 2 if threads == 1 else 1, beat)
            if other.output.tobytes() != first:
                raise WrongResult("it computes something else on another number of threads")
            other.release()
            inputs = self._inputs(cases[0])
            for at_end in (True, False):
                with _fences().around(specs, inputs, at_end=at_end, aligned_ones=self._constants) as fenced:
                    addresses, output = fenced
                    self._run(addresses, threads, beat)
                    if output.tobytes() != first:
                        raise WrongResult(
                            "it computes something else where other memory is beside its buffers"
                        )
        watched.release()
        self._executor.threads = threads
        beat(False)
        return errors[0]

    def _run_watched(self, watched: Watched, case: Case, threads: int, beat: _Beat) -> None:
        inputs = self._inputs(case)
        watched.fill(inputs)
        self._run(watched.addresses, threads, beat)
        watched.verify(inputs)

    def _run(self, addresses: Sequence[int], threads: int, beat: _Beat) -> None:
        """One call, with nonsense on the stacks."""
        poison(self._task.machine, threads).run()
        beat(True)
        self._executor.threads = threads
        self._executor.time_range(*self._filled_up([addresses] * self._calls), _CALL_STEP, _CALL_STEP + 1)
        beat(False)

    def _filled_up(self, sets: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
        """The addresses of the plan's inputs and outputs: of each call's, then of the reference kernel's."""
        *inputs, output = self._pace.addresses
        return (
            [address for addresses in sets for address in addresses[:-1]] + inputs,
            [*(addresses[-1] for addresses in sets), output],
        )

    def prepare(self, rounds: _Rounds | None) -> None:
        """Copies of what a call finds in memory and not in a cache, as many as together are beyond the caches; those
        that another kernel of the task has left, where there are `rounds` to look for them."""
        each = self._round_bytes
        size = sum(self._sizes) - each + self._copies * each
        layout = (tuple(self._sizes), tuple(self._goes_round))
        if rounds is not None:
            memory, filled = rounds.take(layout, size)
        elif self._own is not None:
            return
        else:
            memory, filled = self._blocks.take(size), False
            self._own = memory
        inputs = [] if filled else self._inputs(self._ordinary)
        firsts: dict[int, np.ndarray] = {}
        end = 0

        def placed(number: int) -> int:
            nonlocal end
            begin, end = end, end + self._sizes[number]
            if number in firsts:
                memory[begin:end] = firsts[number]
            elif number < len(inputs) and inputs[number].size:
                memory[begin:end] = np.resize(inputs[number].reshape(-1).view(np.uint8), end - begin)
                firsts[number] = memory[begin:end]
            return int(memory.ctypes.data) + begin

        fixed = {number: placed(number) for number, goes in enumerate(self._goes_round) if not goes}
        numbers = range(len(self._sizes))
        sets = [[fixed[n] if n in fixed else placed(n) for n in numbers] for _ in range(self._copies)]
        self._addresses = self._filled_up(sets if self._copies > 1 else sets * self._calls)

    def warm_up(self) -> None:
        """Some calls that do not count, and how many fit into one entry."""
        begin = time.perf_counter()
        spent = 0.0
        while spent < _WARM_SECONDS:
            (((taken, _, _),), spent) = self.calls(1), time.perf_counter() - begin
        self._entry = max(1, int(_ENTRY_SECONDS / max(taken, 1e-9)))

    def calls(self, most: int | None = None) -> list[tuple[float, float, float]]:
        """The next calls of the round: the seconds of each, and of the reference kernel just before and after it."""
        assert self._addresses is not None
        first = self._next
        last = min(first + (most or self._entry), self._calls)
        self._next = last % self._calls
        begin, end = first * _STEPS_OF_A_CALL, last * _STEPS_OF_A_CALL + _CALL_STEP
        times = self._executor.time_range(*self._addresses, begin, end)
        return [
            (times[at], times[at - 1], times[at + 2])
            for at in range(_CALL_STEP, len(times), _STEPS_OF_A_CALL)
        ]

    def release(self) -> None:
        if self._own is not None:
            self._blocks.give_back(self._own)


class _Rounds:
    """The memory that kernels of a task are timed on. Where two want places of the same sizes, the second finds there
    what the first has left: the same numbers in another order, which take as long to multiply."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._layout: object = None
        self._block: np.ndarray | None = None

    def take(self, layout: object, size: int) -> tuple[np.ndarray, bool]:
        """Memory, and whether it was filled for this layout before."""
        if self._block is not None and self._layout == layout:
            return self._block, True
        if self._block is not None:
            self._blocks.give_back(self._block)
        self._block, self._layout = self._blocks.take(size), layout
        return self._block, False


def _roomy(size: int) -> int:
    """Rounded up by an eighth at most: packed for another register tile, a weight is a little larger or smaller."""
    return -(-size // (step := aligned(max(1, 1 << max(0, size.bit_length() - 4))))) * step


def _copies(size: int, machine: CpuMachine) -> int:
    """Of so many bytes, how many are beyond the caches."""
    if not size:
        return 1
    wanted = math.ceil(_BEYOND_CACHES * machine.caches.last / size)
    return max(1, min(wanted, _MOST_COPIES, _MOST_COPIED_BYTES // size))


@lru_cache(maxsize=1)
def _fences() -> Fences:
    return Fences()
