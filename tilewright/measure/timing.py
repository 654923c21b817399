"""The process that checks and times: object code is loaded, examined, and run alone.

A kernel runs first on memory that is watched: every buffer lies between canaries, inputs must be what they were
afterwards, the output is filled with NaN before, and so are the stacks that hold scratch memory. It runs on the number
of threads that it is timed with, and on another, from addresses that are not aligned: both must give the same bits.
Only then it is timed, on the ordinary inputs of the exam.

Constants are weights, which in a model come from memory and not from a cache: calls go round copies that together are
larger than the caches. Other inputs were just written when a model runs, and stay where they are; in the cold mode
they and the output go round too. A reference kernel, always the same, is timed before and after each candidate: where
it has become slower, the machine has.
"""

from __future__ import annotations

import errno
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import lru_cache

import msgspec
import numpy as np

from tilewright import te
from tilewright.dtypes import DType
from tilewright.errors import TilewrightError
from tilewright.hw import CpuMachine
from tilewright.loops.ir import SCRATCH_LIMIT, Buffer, For, Kind, Program, Scope, Store, block, nest
from tilewright.measure.calibrate import multiply_add_program
from tilewright.measure.exam import Case, Exam, StoredExam, WrongResult, load_exam
from tilewright.measure.process import Channel, Failed
from tilewright.measure.single import Built
from tilewright.measure.watched import Blocks, StrayWrite, Watched
from tilewright.runtime.plan import aligned

_SLOW_CHECK = 0.25  # seconds of one run, from which on no second opinion is asked for

_MOST_COPIES = 64
_MOST_COPIED_BYTES = 256 << 20

_TIGHT = 0.02  # of the median: the width of its confidence interval at which it is known well enough
_INTERVAL = (
    0.98  # half the width of a 95% interval of a median, in ranks, over the square root of their number
)
_LEAST_CALLS, _LEAST_SECONDS = 5, 0.004
_MOST_CALLS, _MOST_SECONDS = 400, 0.04
_WARM_SECONDS = 0.001  # of calls before the first that counts
_HOPELESS = 2.0  # times the best so far: how slow exactly is of no interest
_RACE_TURNS = 5  # at least
_BEAT_SECONDS = 0.05

_REFERENCE_STEPS = 20_000  # some tens of microseconds
_REFERENCE_CALLS = 7


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
    """Times of calls, and of the reference kernel before and after them."""

    times: tuple[float, ...]
    reference: tuple[float, float]


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
        self._kernels: dict[int, _Kernel] = {}

    def check(self, number: int, built: Built, keep: Sequence[int]) -> float:
        for other in [other for other in self._kernels if other not in keep]:
            self._kernels.pop(other).release()
        self._beat(False)
        kernel = _Kernel(built, self._task, self._exam.ordinary, self._blocks)
        error = kernel.check(self._exam.cases, self._beat)
        self._kernels[number] = kernel
        return error

    def time(self, number: int, best: float | None) -> Timed:
        kernel = self._kernels[number]
        self._beat(False)
        kernel.prepare()
        self._beat(True)
        kernel.warm_up()
        reference = _reference(self._task.machine, self._task.threads)
        before = reference.seconds()
        times: list[float] = []
        begin = beaten = time.perf_counter()
        while not _known(times, time.perf_counter() - begin, best):
            times.append(kernel.seconds())
            if time.perf_counter() - beaten > _BEAT_SECONDS:
                self._beat(True)
                beaten = time.perf_counter()
        after = reference.seconds()
        return Timed(tuple(times), (before, after))

    def race(self, numbers: Sequence[int], seconds: float) -> tuple[tuple[float, ...], ...]:
        kernels = [self._kernels[number] for number in numbers]
        self._beat(False)
        for kernel in kernels:
            kernel.prepare()
        times: list[list[float]] = [[] for _ in kernels]
        begin = time.perf_counter()
        beaten = 0.0
        while len(times[0]) < _RACE_TURNS or time.perf_counter() - begin < seconds:
            for kernel, taken in zip(kernels, times, strict=True):
                if time.perf_counter() - beaten > _BEAT_SECONDS:
                    self._beat(True)
                    beaten = time.perf_counter()
                taken.append(kernel.seconds())
        return tuple(map(tuple, times))


def _known(times: Sequence[float], spent: float, best: float | None) -> bool:
    """Whether the median is known well enough, or as well as its worth in time allows."""
    count = len(times)
    if count < _LEAST_CALLS:
        return count >= 2 and best is not None and min(times) > _HOPELESS * best
    if count >= _MOST_CALLS or spent >= _MOST_SECONDS:
        return True
    return spent >= _LEAST_SECONDS and interval_width(times) <= _TIGHT


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
    """Object code with the task's inputs in the order that it wants."""

    def __init__(self, built: Built, task: Sit, ordinary: Case, blocks: Blocks) -> None:
        self._task, self._blocks, self._built = task, blocks, built
        self._ordinary = ordinary
        self._constants = frozenset(task.constants)
        self._packed = {number: self._as_wanted(number, ordinary) for number in self._constants}
        self._executor = built.executor(task.machine, task.threads)
        self._sets: itertools.cycle[tuple[list[int], list[int]]] | None = None
        self._block: np.ndarray | None = None

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
        watched.release()
        beat(False)
        return errors[0]

    def _run_watched(self, watched: Watched, case: Case, threads: int, beat: _Beat) -> None:
        inputs = self._inputs(case)
        watched.fill(inputs)
        _poison(self._task.machine, threads).run()
        beat(True)
        self._executor.threads = threads
        self._executor.run_addresses(watched.addresses[:-1], watched.addresses[-1:])
        beat(False)
        watched.verify(inputs)

    def prepare(self) -> None:
        """Copies of what a call finds in memory and not in a cache, as many as together are beyond the caches."""
        self._executor.threads = self._task.threads
        if self._sets is not None:
            return
        inputs = self._inputs(self._ordinary)
        sizes = [aligned(spec.bytes) for spec in self._built.parameters]
        going_round = [number in self._constants or self._task.cold for number in range(len(sizes) - 1)]
        going_round.append(self._task.cold)
        each = sum(size for size, goes in zip(sizes, going_round, strict=True) if goes)
        copies = _copies(each, self._task.machine)
        staying = sum(sizes) - each
        self._block = self._blocks.take(staying + copies * each)
        end = 0

        def placed(number: int) -> int:
            nonlocal end
            assert self._block is not None
            begin, end = end, end + sizes[number]
            if number < len(inputs):
                values = inputs[number].reshape(-1).view(np.uint8)
                self._block[begin : begin + values.size] = values
            return int(self._block.ctypes.data) + begin

        fixed = {number: placed(number) for number, goes in enumerate(going_round) if not goes}
        sets = []
        for _ in range(copies):
            addresses = [fixed[n] if n in fixed else placed(n) for n in range(len(sizes))]
            sets.append((addresses[:-1], addresses[-1:]))
        self._sets = itertools.cycle(sets)

    def warm_up(self) -> None:
        begin = time.perf_counter()
        self.seconds()
        while time.perf_counter() - begin < _WARM_SECONDS:
            self.seconds()

    def seconds(self) -> float:
        """Of one call, on the next copies."""
        assert self._sets is not None
        return self._executor.seconds_of(*next(self._sets))

    def release(self) -> None:
        if self._block is not None:
            self._blocks.give_back(self._block)


def _copies(size: int, machine: CpuMachine) -> int:
    """Of so many bytes, how many are beyond the caches."""
    if not size:
        return 1
    wanted = math.ceil(2 * machine.caches.last / size)
    return max(1, min(wanted, _MOST_COPIES, _MOST_COPIED_BYTES // size))


# -- our own programs -------------------------------------------------------------------------------------------------


class _Helper:
    """A program of ours, with its inputs."""

    def __init__(
        self, program: Program, machine: CpuMachine, threads: int, inputs: Sequence[np.ndarray]
    ) -> None:
        self._executor = Built.of(program, machine, "fast").executor(machine, threads)
        self._arrays = [*inputs, np.zeros(program.params[-1].size, program.params[-1].dtype.numpy)]
        self._addresses = [array.ctypes.data for array in self._arrays]

    def run(self) -> float:
        return self._executor.seconds_of(self._addresses[:-1], self._addresses[-1:])

    def seconds(self) -> float:
        """The typical time of a call."""
        self.run()
        return statistics.median(self.run() for _ in range(_REFERENCE_CALLS))


@lru_cache(maxsize=4)
def _reference(machine: CpuMachine, threads: int) -> _Helper:
    lanes = machine.lanes(DType.F32)
    program = multiply_add_program(lanes, threads, _REFERENCE_STEPS)
    return _Helper(program, machine, threads, [np.full(lanes, value, np.float32) for value in (1.0, 1e-9)])


@lru_cache(maxsize=4)
def _poison(machine: CpuMachine, threads: int) -> _Helper:
    """Fills the stacks of threads with NaN: scratch memory that a kernel forgets to fill is not zero by accident."""
    program = poison_program(machine.lanes(DType.F32), threads)
    return _Helper(program, machine, threads, [np.zeros(1, np.int64)])


def poison_program(lanes: int, threads: int) -> Program:
    """for p (parallel): scratch[...] = NaN; out[p] = scratch[place[0]], so that all of it must be written."""
    place, out = Buffer("place", DType.I64, 1), Buffer("out", DType.F32, threads)
    scratch = Buffer("scratch", DType.F32, SCRATCH_LIMIT // DType.F32.bytes, Scope.SCRATCH)
    part, step, lane = te.Var("p", threads), te.Var("k", scratch.size // lanes), te.Var("v", lanes)
    body = block(
        nest(
            [(step, Kind.SERIAL), (lane, Kind.VECTOR)],
            Store(scratch, step * lanes + lane, te.const(math.nan, DType.F32)),
        ),
        Store(out, part, te.Load(scratch, (te.Load(place, (te.const(0, DType.I64),)),))),
    )
    return Program("poison", (place, out), For(part, Kind.PARALLEL, body))
