"""The runner: build, validate and time configs of a task in child processes, so that a bad config crashes only its
own.

    build   all configs of a batch, on all cores, by processes that make object code (`building.py`); meanwhile one of
            them makes the task's validation (`validation.py`), once, in shared memory
    check   each kernel's results, by one process that loads the object code (`timing.py`)
    time    it there, alone: the builders wait

A failure has a kind and a message, and costs one trial. A reference kernel is timed between the calls of each
candidate; if it was slow most of the time, the candidate is timed again, a few times at most.

On a GPU, builders do not disturb timing: the next rounds are built meanwhile (`ahead`), and a second process stands
by to replace one that a candidate has corrupted.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import psutil

from tilewright import knobs
from tilewright.errors import MeasurementError
from tilewright.measure.building import BuildReply, BuildRequest, Made, ValidationMade
from tilewright.measure.failed import Failed
from tilewright.measure.jobs import Job, build_request, described_failure, load_request, validation_request
from tilewright.measure.kernel_job import BuiltKernel, Expected
from tilewright.measure.measurement import Measurement
from tilewright.measure.shared_checks import SharedValidation
from tilewright.measure.single import Built
from tilewright.measure.timing import (
    Check,
    CheckDone,
    Heartbeat,
    Race,
    Raced,
    Ready,
    Time,
    Timed,
    TimingReply,
)
from tilewright.space.registration import registering_modules
from tilewright.space.space import Config
from tilewright.support.process import TICK, Child, Dead, wait

BUILDING, TIMING = "tilewright.measure.building:serve", "tilewright.measure.timing:serve"
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

_BUILD_SECONDS = 30.0
_PREPARE_SECONDS = 60.0  # to start, load a kernel, and pack its inputs
_MIN_CALL_SECONDS, _TIMES_BEST = 1.0, 10.0  # limits for a call
_CALL_SECONDS = 10.0  # without a best time to compare with
_GRACE_SECONDS = 0.5  # after a deadline, before running work is ended

_PAUSES = (0.05,)  # seconds before a candidate is timed again because the machine was busy
_MIN_BATCH = 16  # minimum built together, so that builders wait less for each other
_KEPT_BUILDS, _KEPT_VALIDATIONS = 128, 16
_MIN_MEMORY = 2 << 30
_DEVICE_MEMORY = 1 << 46  # bytes of address space, much of which a GPU driver takes
_AHEAD = 6


@dataclass(frozen=True)
class _ValidationFile:
    """A task's validation in a memory file."""

    descriptor: int
    expected: SharedValidation | Expected


@dataclass
class _Order:
    """A build order. `seconds`: the time left for it."""

    request: BuildRequest
    done: Callable[[BuildReply], None]
    seconds: float
    descriptors: tuple[int, ...] = ()


WhenBuilt = Callable[[Job, Config, Made | Failed], None]


class OutOfTime(Exception):
    """The deadline passed."""


class Runner:
    """Measures configs on `threads` threads. Its processes start with the first measurement and stay alive.

    - `builders`: the number of concurrent build processes (default: all cores).
    - `cold`: no data that a kernel reads is in a cache.
    - `modules`: modules that builders import first, besides those that register templates or rules in this process.
    - `memory`: the bytes that each builder may use.
    - `seed`: the seed of the inputs; None draws fresh ones. It and `threads` may change between two requests.
    - `device`: the number of the GPU that candidates run on; None: the CPU.
    - `confined`: its processes have no network, if the system can.
    """

    def __init__(
        self,
        threads: int,
        *,
        builders: int | None = None,
        cold: bool = False,
        modules: Sequence[str] = (),
        memory: int | None = None,
        build_seconds: float = _BUILD_SECONDS,
        seed: int | None = None,
        device: int | None = None,
        timing: str = TIMING,
        confined: bool = False,
    ) -> None:
        self.threads, self.cold, self.device = threads, cold, device
        self.seed = secrets.randbits(32) if seed is None else seed
        count = builders or knobs.usable_cores()
        total = psutil.virtual_memory().total
        self._modules, self._build_seconds = tuple(modules), build_seconds
        limit = memory or max(_MIN_MEMORY, total // 2 // count)
        self._builders = [Child(BUILDING, limit, ONE_THREAD, confined=confined) for _ in range(count)]
        # A GPU driver takes much address space and makes a process start slowly.
        own = max(_MIN_MEMORY, total * 3 // 4) if device is None else _DEVICE_MEMORY
        self._timer = Child(timing, own, ONE_THREAD, confined=confined)
        self._spare = None if device is None else Child(timing, own, ONE_THREAD, confined=confined)
        self._loaded: tuple[Job, int] | None = None  # the job, and the seed of its inputs
        self._numbers = 0
        self._validations: OrderedDict[tuple[Job, int], _ValidationFile | Failed] = OrderedDict()
        self._drawing: set[tuple[Job, int]] = set()  # those that are ordered
        self._queue: deque[_Order] = deque()
        self._busy: dict[Child, _Order] = {}
        self._building: set[tuple[Job, Config]] = set()  # configs whose builds are ordered
        self._replies: dict[tuple[Job, Config], Made | Failed] = {}  # for those who ordered them
        self._kept: OrderedDict[tuple[Job, Config], Made] = OrderedDict()
        self._first_reference: float | None = None
        self._reference = 0.0

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes. Measuring again starts new ones."""
        self.forget()
        for child in (*self._builders, self._timer, self._spare):
            if child is not None:
                child.close()

    @property
    def is_started(self) -> bool:
        """Whether the process that times is ready."""
        return self._timer.greeted

    def start(self) -> None:
        """Wait until the process that times is ready."""
        self._start_timer()
        self._timer.greet()

    def forget(self) -> None:
        """Drop what was built and drawn for all tasks, and keep the processes."""
        self._abandon()
        self._loaded = None
        self._kept.clear()
        self._replies.clear()
        while self._validations:
            self._drop_validation()

    @property
    def ahead(self) -> int:
        """How many rounds may be built while another is timed."""
        return 0 if self.device is None else _AHEAD

    @property
    def devices(self) -> int:
        """How many devices time at once."""
        return 1

    @property
    def spent(self) -> bool:
        """Whether a budget of device time is used up: this machine's devices have none."""
        return False

    @property
    def drift(self) -> float:
        """The time of the reference kernel now, relative to the start."""
        return self._reference / self._first_reference if self._first_reference else 1.0

    @property
    def reference(self) -> float:
        """Seconds of the reference kernel, alongside the last candidate that was timed."""
        return self._reference

    # -- the interface --------------------------------------------------------------------------------------------

    def expect(self, job: Job) -> None:
        """Announce that this task is measured next, so that its validation is made while the caller chooses
        configs."""
        if not self._has_validation(job):
            self._queue.appendleft(self._validation_order(job))
            self._dispatch()

    def prepare(self, job: Job, configs: Sequence[Config], *, best: float | None = None) -> None:
        """Announce that these configs are measured soon, so that they are built meanwhile."""
        self._start_timer()
        if not self._has_validation(job):
            self._queue.append(self._validation_order(job))
        self._order_builds(job, configs)
        self._dispatch()

    def prepared(self, job: Job, configs: Sequence[Config]) -> list[Measurement]:
        """Prepared configs are built and not measured: there is one device."""
        return []

    def measure(
        self,
        job: Job,
        configs: Sequence[Config],
        *,
        best: float | None = None,
        deadline: float | None = None,
    ) -> list[Measurement]:
        """One measurement per config, in order; those without time before `deadline` (of `time.monotonic`) are
        missing at the end. `best`: the shortest time so far; much slower configs are timed less, or stopped."""
        results: list[Measurement] = []
        batch = max(_MIN_BATCH, 2 * len(self._builders))
        with contextlib.suppress(OutOfTime):
            for begin in range(0, len(configs), batch):
                some = configs[begin : begin + batch]
                for config, made in zip(some, self.build(job, some, deadline), strict=True):
                    if isinstance(made, Failed):
                        results.append(Measurement(config, failure=made.kind, message=made.message))
                        continue
                    measured = self.trial(job, config, made, best=best, deadline=deadline)
                    results.append(measured)
                    if measured.seconds is not None:
                        best = min(best or measured.seconds, measured.seconds)
        return results

    def race(
        self, job: Job, configs: Sequence[Config], seconds: float, *, deadline: float | None = None
    ) -> list[list[float]]:
        """Time configs interleaved, for about this long in total. A config that fails has no times, and none has any
        if they are not built before `deadline`."""
        try:
            made = dict(zip(configs, self.build(job, configs, deadline), strict=True))
        except OutOfTime:
            return [[] for _ in configs]
        running = {config: each for config, each in made.items() if isinstance(each, Made)}
        times = self.race_built(job, running, seconds)
        return [times.get(config, []) for config in configs]

    def race_built(self, job: Job, made: Mapping[Config, Made], seconds: float) -> dict[Config, list[float]]:
        """The same for object code, whoever made it."""
        return self._interleaved(job, made, lambda numbers: Race(numbers, seconds))

    def acknowledge(self, job: Job, measured: Sequence[Measurement]) -> None:
        """These are in the database. A local runner keeps nothing for them."""

    def _interleaved(
        self,
        job: Job,
        made: Mapping[Config, Made],
        request: Callable[[tuple[int, ...]], msgspec.Struct],
    ) -> dict[Config, list[float]]:
        running = list(made)
        while running:
            numbers: dict[Config, int] = {}
            bad = None
            try:
                for config in running:
                    bad = config
                    reply = self._check(job, made[config].built, tuple(numbers.values()), None, None)
                    if isinstance(reply, Failed):
                        raise Dead(reply.kind, reply.message)
                    numbers[config] = self._numbers
                bad = None
                raced = self._ask(request(tuple(numbers.values())), None, None)
                assert isinstance(raced, Raced)
                return {config: list(times) for config, times in zip(numbers, raced.times, strict=True)}
            except Dead:
                if bad is None:
                    break
                running.remove(bad)
        return {}

    # -- the two halves of a trial --------------------------------------------------------------------------------

    def build(
        self, job: Job, configs: Sequence[Config], deadline: float | None = None
    ) -> list[Made | Failed]:
        """The object code of every config. Raises OutOfTime if the deadline passes before all are built."""
        self._start_timer()  # it takes a moment; nothing waits for it yet
        if not self._has_validation(job):
            self._queue.append(self._validation_order(job))
        self._order_builds(job, configs)

        def is_done() -> bool:
            is_ready = (job, self.seed) in self._validations
            return is_ready and not any((job, config) in self._building for config in configs)

        self._work_off(is_done, deadline)
        found: dict[Config, Made | Failed] = {}
        for config in configs:
            reply = self._replies.pop((job, config), None) or found.get(config) or self._kept[job, config]
            found[config] = reply
            if isinstance(reply, Made):
                _keep(self._kept, (job, config), reply, _KEPT_BUILDS)
        return [found[config] for config in configs]

    def _order_builds(self, job: Job, configs: Sequence[Config]) -> None:
        known = {*self._building, *self._replies, *self._kept}

        def done(job: Job, config: Config, reply: Made | Failed) -> None:
            self._building.discard((job, config))
            self._replies[job, config] = reply

        fresh = [(job, config) for config in dict.fromkeys(configs) if (job, config) not in known]
        self._building.update(fresh)
        self._queue.extend(self._build_orders(fresh, done))

    def trial(
        self,
        job: Job,
        config: Config,
        made: Made,
        *,
        best: float | None = None,
        deadline: float | None = None,
    ) -> Measurement:
        """Check and time object code, whoever built it. Raises OutOfTime."""

        def failed(reason: Failed) -> Measurement:
            message = described_failure(job, reason, self.seed)
            return Measurement(config, failure=reason.kind, message=message, build_seconds=made.seconds)

        try:
            checked = self._check(job, made.built, (), best, deadline)
            if isinstance(checked, Failed):
                return failed(checked)
            times = self._steady_times(best, deadline)
        except Dead as death:
            if death.kind == "timeout" and deadline is not None and time.monotonic() > deadline:
                raise OutOfTime from None
            return failed(Failed.of(death))
        if isinstance(times, Failed):
            return failed(times)
        return Measurement(config, times, checked.error, build_seconds=made.seconds)

    # -- building -------------------------------------------------------------------------------------------------

    def _build_orders(self, wanted: Iterable[tuple[Job, Config]], done: WhenBuilt) -> Iterator[_Order]:
        modules = (*self._modules, *registering_modules())
        for job, config in dict.fromkeys(wanted):

            def built(reply: BuildReply, job: Job = job, config: Config = config) -> None:
                assert isinstance(reply, Made | Failed)
                done(job, config, reply)

            request = build_request(job, config, modules)
            if isinstance(request, Failed):
                built(request)
            else:
                yield _Order(request, built, self._build_seconds)

    def _has_validation(self, job: Job) -> bool:
        """Whether the validation exists, or will once the orders are done."""
        return (job, self.seed) in self._validations or (job, self.seed) in self._drawing

    def _validation_order(self, job: Job) -> _Order:
        descriptor, key = _memory_file(), (job, self.seed)
        self._drawing.add(key)

        def done(reply: BuildReply) -> None:
            self._drawing.discard(key)
            if isinstance(reply, Failed) and reply.kind == "disk":
                os.close(descriptor)
                raise MeasurementError(f"cannot store the inputs of a task: {reply.message}")
            if isinstance(reply, ValidationMade):
                self._validations[key] = _ValidationFile(descriptor, reply.validation)
            else:
                os.close(descriptor)
                assert isinstance(reply, Failed)
                self._validations[key] = Failed(reply.kind, f"the oracle of this task: {reply.message}")
            while len(self._validations) > _KEPT_VALIDATIONS:
                self._drop_validation()

        request, seconds = validation_request(job, self.seed)
        return _Order(request, done, seconds, (descriptor,))

    def _drop_validation(self) -> None:
        _, oldest = self._validations.popitem(last=False)
        if isinstance(oldest, _ValidationFile):
            os.close(oldest.descriptor)

    def _work_off(self, is_done: Callable[[], bool], deadline: float | None) -> None:
        """Process orders, as many at a time as there are builders, until `is_done`."""
        try:
            while not is_done():
                self._dispatch()
                ready, waited = wait(*self._busy)
                self._attend(ready, waited)
                if self._busy and deadline is not None and time.monotonic() > deadline + _GRACE_SECONDS:
                    raise OutOfTime
        except BaseException:  # a late answer would be taken for the next one's
            self._abandon()
            raise

    def _dispatch(self) -> None:
        for child in self._builders:
            if self._queue and child not in self._busy:
                order = self._busy[child] = self._queue.popleft()
                child.send(msgspec.msgpack.encode(order.request), order.descriptors)

    def _attend(self, ready: Iterable[Child], waited: float) -> None:
        """Handle messages of builders, and end those that take too long."""
        for child in ready:
            if child not in self._busy:
                continue
            if child.greeted:
                self._busy.pop(child).done(_reply(child, BuildReply))
            else:
                child.greet()
        for child, order in list(self._busy.items()):
            order.seconds -= waited if child.greeted else 0.0
            if order.seconds <= 0:
                child.close()
                self._busy.pop(child).done(Failed("timeout", "it took too long to build, and was ended"))

    def _abandon(self) -> None:
        """Drop all pending orders."""
        for child in self._busy:
            child.close()
        for order in (*self._busy.values(), *self._queue):
            _close_all(order.descriptors)
        self._busy, self._queue = {}, deque()
        self._building.clear()
        self._drawing.clear()

    # -- timing ---------------------------------------------------------------------------------------------------

    def _check(
        self,
        job: Job,
        built: Built | BuiltKernel,
        keep: tuple[int, ...],
        best: float | None,
        deadline: float | None,
    ) -> CheckDone | Failed:
        if deadline is not None and time.monotonic() > deadline:
            raise OutOfTime
        key = (job, self.seed)
        validation = self._validations[key]
        if isinstance(validation, Failed):
            return validation
        self._validations.move_to_end(key)
        if self._loaded != key:
            self._load_task(job, validation)
        self._numbers += 1
        reply = self._ask(Check(self._numbers, built, keep), best, deadline)
        assert isinstance(reply, CheckDone | Failed)
        if isinstance(reply, Failed) and reply.corrupted:
            self._end_timer()
        return reply

    def _load_task(self, job: Job, validation: _ValidationFile) -> None:
        request = load_request(job, validation.expected, self.cold, self.device or 0)
        for _ in range(2):  # a process that an earlier candidate has damaged may die only now
            try:
                reply = self._ask(request, None, None, (validation.descriptor,))
            except Dead as death:
                problem = str(death)
                continue
            assert isinstance(reply, Ready)
            self._loaded = (job, self.seed)
            return
        raise MeasurementError(f"the process that times kernels does not start: {problem}")

    def _steady_times(self, best: float | None, deadline: float | None) -> tuple[float, ...] | Failed:
        """Times of the kernel that was checked last, while the machine is at its usual speed if possible."""
        for pause in (*_PAUSES, None):
            reply = self._ask(Time(self._numbers, best), best, deadline)
            if isinstance(reply, Failed):
                return reply
            assert isinstance(reply, Timed)
            self._first_reference = self._first_reference or reply.reference
            self._reference = reply.reference
            times = reply.times
            if reply.steady or pause is None:
                break
            time.sleep(pause)
        return times

    def _ask(
        self,
        request: msgspec.Struct,
        best: float | None,
        deadline: float | None,
        descriptors: tuple[int, ...] = (),
    ) -> TimingReply:
        call_seconds = _CALL_SECONDS if best is None else max(_MIN_CALL_SECONDS, _TIMES_BEST * best)
        patience = _PREPARE_SECONDS
        try:
            self._timer.send(msgspec.msgpack.encode(request), descriptors)
            while True:
                if deadline is not None:
                    patience = min(patience, max(TICK, deadline + _GRACE_SECONDS - time.monotonic()))
                reply = msgspec.msgpack.decode(self._from_timer(patience), type=TimingReply)
                if not isinstance(reply, Heartbeat):
                    return reply
                patience = call_seconds if reply.native else _PREPARE_SECONDS
        except BaseException:
            self._end_timer()
            raise

    def _from_timer(self, patience: float) -> bytes:
        """The timer's next message; builders are served meanwhile."""
        while self._busy and patience > 0:
            ready, waited = wait(self._timer, *self._busy)
            self._attend([child for child in ready if child is not self._timer], waited)
            self._dispatch()
            if self._timer in ready:
                if self._timer.greeted:
                    break
                self._timer.greet()
            elif self._timer.greeted:
                patience -= waited
        return self._timer.receive(max(0.0, patience))

    def _start_timer(self) -> None:
        self._timer.start()
        if self._spare is not None:
            self._spare.start()

    def _end_timer(self) -> None:
        self._timer.close()
        self._loaded = None
        if self._spare is not None:
            self._timer, self._spare = self._spare, self._timer
            self._spare.start()


def _reply(child: Child, kind: Any) -> Any:
    try:
        return msgspec.msgpack.decode(child.receive(_PREPARE_SECONDS), type=kind)
    except Dead as death:
        return Failed.of(death)


def _keep(kept: OrderedDict[Any, Any], key: Any, value: Any, most: int) -> None:
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > most:
        kept.popitem(last=False)


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _memory_file() -> int:
    """An anonymous file, in memory if the system supports it."""
    try:
        if hasattr(os, "memfd_create"):
            return os.memfd_create("tilewright")
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())
    except OSError as error:
        raise MeasurementError(f"no memory can be shared with other processes: {error}") from None
