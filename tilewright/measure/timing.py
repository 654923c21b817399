"""The timing process: it loads built candidates, validates them, and times them alone.

Its messages are the same for all machines; a Timer runs candidates on one kind of machine: `cpu_timer.py` and
`gpu_timer.py`.
"""

from __future__ import annotations

import errno
import importlib
import math
import os
import statistics
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from tilewright.errors import ModelSizeError, TilewrightError
from tilewright.hw.machine import from_text
from tilewright.measure.failed import Failed
from tilewright.measure.kernel_job import BuiltKernel
from tilewright.measure.kernel_timer import KernelFailed, KernelTimer, LoadKernel
from tilewright.measure.shared_checks import SharedValidation, load_validation
from tilewright.measure.single import Built
from tilewright.measure.validation import OutOfBoundsWrite, WrongResult
from tilewright.support.process import Channel

SendHeartbeat = Callable[[bool], None]  # called before a kernel call (True) or other work

_TIGHT = 0.02  # of the median: the width of its confidence interval that suffices
_INTERVAL = 0.98  # ranks on each side of the median, over the square root of their number: 95% confidence
_MIN_CALLS, _MIN_SECONDS = 5, 0.003
_MAX_CALLS, _MAX_SECONDS = 400, 0.015
_UNSTEADY_SECONDS = 0.04  # how long to wait for the machine to be idle
_SLACK = (
    0.2  # a kernel that is slower than the best may have an interval wider by this share of the difference
)
_HOPELESS, _HOPELESS_CALLS = 3.0, 3  # factor of the best time above which the exact time does not matter
RACE_ROUNDS = 5  # minimum
HEARTBEAT_SECONDS = 0.05


class LoadTask(msgspec.Struct, frozen=True, tag=True):
    """Start a task: its validation is in the file whose descriptor comes with this message."""

    validation: SharedValidation
    described: str  # the machine
    numerics: str
    threads: int
    constants: tuple[int, ...]
    cold: bool
    device: int = 0  # the GPU's number

    @property
    def machine(self) -> Any:
        return from_text(self.described)


class Check(msgspec.Struct, frozen=True, tag=True):
    """Load a kernel under a number and validate it. Others are dropped, except those in `keep`."""

    number: int
    built: Built | BuiltKernel
    keep: tuple[int, ...] = ()


class Time(msgspec.Struct, frozen=True, tag=True):
    """Time a validated kernel. `best`: the time to beat, if any."""

    number: int
    best: float | None = None


class Race(msgspec.Struct, frozen=True, tag=True):
    """Time validated kernels interleaved, for about this long in total."""

    numbers: tuple[int, ...]
    seconds: float


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The task was loaded."""


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Not an answer: a kernel call starts now (`native`), or other work does."""

    native: bool


class CheckDone(msgspec.Struct, frozen=True, tag=True):
    error: float


class Timed(msgspec.Struct, frozen=True, tag=True):
    """Call times, from series in which the machine had its usual speed if `steady`, and the typical time of the
    reference kernel between them."""

    times: tuple[float, ...]
    reference: float
    steady: bool


class Raced(msgspec.Struct, frozen=True, tag=True):
    times: tuple[tuple[float, ...], ...]


TimingRequest = LoadTask | LoadKernel | Check | Time | Race
TimingReply = Ready | Heartbeat | CheckDone | Timed | Raced | Failed


class Timer(Protocol):
    """A task and its validated candidates, on one kind of machine."""

    def check(self, number: int, built: Any, keep: Sequence[int]) -> float:
        """Run a candidate on every case of the validation, and return its error on the first. Raises WrongResult."""

    def time(self, number: int, best: float | None) -> Timed: ...

    def race(self, numbers: Sequence[int], seconds: float) -> tuple[tuple[float, ...], ...]: ...


_TIMERS = {"cpu": "tilewright.measure.cpu_timer:CpuTimer", "cuda": "tilewright.measure.gpu_timer:GpuTimer"}


def _timer_of(request: LoadTask | LoadKernel, descriptor: int, heartbeat: SendHeartbeat) -> Timer:
    if isinstance(request, LoadKernel):
        return KernelTimer(request, descriptor, heartbeat)
    module, _, name = _TIMERS[request.machine.kind].partition(":")
    validation = load_validation(request.validation, descriptor)
    found: Timer = getattr(importlib.import_module(module), name)(request, validation, heartbeat)
    return found


def serve(channel: Channel) -> None:
    answer_requests(channel, TimingRequest, _timer_of, ask_timer)


def answer_requests(
    channel: Channel,
    requests: Any,
    timer_of: Callable[[Any, int, SendHeartbeat], Any],
    asked: Callable[[Any, Any], TimingReply],
) -> None:
    """Answer until the parent ends. `requests`: their types. `timer_of`: makes the timer of a task that is loaded;
    `asked`: what the timer answers to a request."""
    timer: Any = None
    decoder = msgspec.msgpack.Decoder(requests)

    def heartbeat(native: bool) -> None:
        channel.send(msgspec.msgpack.encode(Heartbeat(native)))

    while True:
        message, descriptors = channel.receive()
        request = decoder.decode(message)
        reply: TimingReply
        if isinstance(request, LoadTask | LoadKernel):
            timer = timer_of(request, descriptors[0], heartbeat)
            os.close(descriptors[0])
            reply = Ready()
        else:
            assert timer is not None
            reply = _failing(asked, timer, request)
        channel.send(msgspec.msgpack.encode(reply))


def ask_timer(timer: Timer, request: Check | Time | Race) -> TimingReply:
    if isinstance(request, Check):
        return CheckDone(timer.check(request.number, request.built, request.keep))
    if isinstance(request, Time):
        return timer.time(request.number, request.best)
    return Raced(timer.race(request.numbers, request.seconds))


def _failing(asked: Callable[[Any, Any], TimingReply], timer: Any, request: Any) -> TimingReply:
    """The timer's answer, or why the candidate has failed."""
    try:
        return asked(timer, request)
    except CandidateFailed as error:
        return Failed(error.kind, str(error), corrupted=error.corrupted)
    except WrongResult as error:
        return Failed("wrong", str(error), corrupted=isinstance(error, OutOfBoundsWrite))
    except (MemoryError, ModelSizeError):
        return Failed("memory", "its buffers do not fit into memory")
    except TilewrightError as error:  # the object code cannot be loaded
        return Failed("build", str(error))
    except KernelFailed as error:
        return Failed("build", str(error))
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        return Failed("memory", "its buffers do not fit into memory")


class CandidateFailed(Exception):
    """A candidate failed with a known kind. After a `corrupted` one, its process cannot be trusted."""

    def __init__(self, kind: str, message: str, corrupted: bool = False) -> None:
        self.kind, self.corrupted = kind, corrupted
        super().__init__(message)


class Times:
    """The call times of a kernel so far; those of steady series are separate."""

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
        return len(self._steady) >= _MIN_CALLS or self._hopeless

    @property
    def _hopeless(self) -> bool:
        if self._best is None or len(self._steady) < _HOPELESS_CALLS:
            return False
        return min(self._steady) > _HOPELESS * self._best

    def suffice(self, spent: float) -> bool:
        """Whether the median is known well enough, or as well as its worth in time allows."""
        if len(self._steady) < _MIN_CALLS:
            return self._hopeless or (spent >= _UNSTEADY_SECONDS and len(self._all) >= _MIN_CALLS)
        if spent >= _MAX_SECONDS or len(self._steady) >= _MAX_CALLS:
            return True
        return self._hopeless or (spent >= _MIN_SECONDS and interval_width(self._steady) <= self._tight)

    @property
    def _tight(self) -> float:
        """The required accuracy, lower for kernels that are not among the best."""
        if self._best is None:
            return _TIGHT
        return _TIGHT + _SLACK * max(0.0, min(self._steady) / self._best - 1)

    def result(self) -> Timed:
        times = self._steady if self.are_steady else self._all
        return Timed(tuple(times), statistics.median(self.references), self.are_steady)


def interval_width(times: Sequence[float]) -> float:
    """The width of the 95% confidence interval of the median, by ranks, as a share of the median."""
    ordered = sorted(times)
    count = len(ordered)
    below = math.floor(count / 2 - _INTERVAL * math.sqrt(count))
    if below < 0:
        return math.inf
    return (ordered[count - 1 - below] - ordered[below]) / statistics.median(ordered)
