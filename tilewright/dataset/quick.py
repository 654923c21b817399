"""Quick trials on a GPU, many configs a second: processes that build in parallel and time one after the other.

The tuner builds, validates and times a config in steps, and takes 0.15 s for it. A data set needs the times alone:
each process here builds a config, waits until it has the GPU to itself (a lock file), and times it as a CUDA graph,
as the tuner does. Results are not compared with the oracle, so the record of a quick trial has no `error`.

A config that crashes or hangs costs its process; a lock file is free again once its owner has ended.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import tempfile
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tilewright.errors import DeviceError, KernelError, ScheduleError, SpaceError, VerificationError
from tilewright.measure.failed import Failed
from tilewright.measure.gpu_timer import _kind
from tilewright.measure.single import Built, KernelRun, plan_of
from tilewright.measure.trial import TaskJob
from tilewright.runtime.cuda.device import Device
from tilewright.runtime.cuda.executor import GpuExecutor
from tilewright.space.candidates import Candidates
from tilewright.space.space import Config
from tilewright.support.process import Channel, Child, Dead, wait

SERVE = "tilewright.dataset.quick:serve"
_MEMORY = 1 << 46  # bytes of address space, much of which a GPU driver takes
_GRAPH_SECONDS, _MAX_REPEATS = 4e-4, 20
_TIMES, _MIN_TIMES = 5, 3
_SLOW_SECONDS = 2e-3  # kernels that need no repetition
_RANDOM_BYTES = 1 << 26
_KEPT_JOBS = 96
_ILLEGAL = (SpaceError, ScheduleError, VerificationError, KernelError)


@dataclass(frozen=True)
class QuickLimits:
    """Seconds after which a process is ended: while it builds or samples, while it loads, and while it times."""

    build: float = 40.0
    load: float = 20.0
    run: float = 6.0


class Sample(msgspec.Struct, frozen=True, tag=True):
    """A request: choose this many configs of a task."""

    job: TaskJob
    count: int
    seed: int


class QuickTrial(msgspec.Struct, frozen=True, tag=True):
    """A request: build a config and time it, with exclusive use of the GPU while the lock is held."""

    job: TaskJob
    config: Config
    lock: str


class Sampled(msgspec.Struct, frozen=True, tag=True):
    configs: tuple[Config, ...]


class Running(msgspec.Struct, frozen=True, tag=True):
    """A message, not an answer: the config has been built and is being loaded, or it is being timed with exclusive use
    of the GPU."""

    alone: bool


class QuickTimes(msgspec.Struct, frozen=True, tag=True):
    times: tuple[float, ...]
    build_seconds: float


Request = Sample | QuickTrial
Reply = Sampled | Running | QuickTimes | Failed


# -- in the child -----------------------------------------------------------------------------------------------------


def serve(channel: Channel) -> None:
    worker = _Worker(channel)
    decode = msgspec.msgpack.Decoder(Request).decode
    while True:
        message, _ = channel.receive()
        channel.send(msgspec.msgpack.encode(worker.answer(decode(message))))


class _Worker:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._candidates: OrderedDict[TaskJob, Candidates] = OrderedDict()
        self._device: Device | None = None
        self._random = 0

    def answer(self, request: Request) -> Reply:
        try:
            if isinstance(request, Sample):
                from tilewright.dataset.sample import sample

                return Sampled(tuple(sample(self._of(request.job), request.count, request.seed)))
            return self._trial(request)
        except MemoryError:
            return Failed("memory", "it ran out of memory")
        except DeviceError as error:
            return Failed(_kind(error), error.message[:300], corrupted=True)
        except _ILLEGAL as error:
            return Failed("illegal", f"{type(error).__name__}: {error}"[:300])
        except Exception as error:  # from a template, the code generator or a library: the candidate's result
            return Failed("build", f"{type(error).__name__}: {error}"[:300])

    def _of(self, job: TaskJob) -> Candidates:
        if job not in self._candidates:
            self._candidates[job] = Candidates.of(job.work())
            while len(self._candidates) > _KEPT_JOBS:
                self._candidates.popitem(last=False)
        self._candidates.move_to_end(job)
        return self._candidates[job]

    def _trial(self, request: QuickTrial) -> Reply:
        job, begin = request.job, time.perf_counter()
        implementation = self._of(job).implementation(request.config)
        built = Built.of(implementation, job.machine, job.numerics, None)
        build_seconds = time.perf_counter() - begin
        if built.uses_library and importlib.util.find_spec("torch") is not None:
            import torch  # the libraries come with it

            torch.empty(1, device="cuda:0")
        self._channel.send(msgspec.msgpack.encode(Running(False)))
        executor, repeats, seconds = self._loaded(built, job)
        count = _TIMES if seconds < _SLOW_SECONDS else _MIN_TIMES
        with _alone(request.lock):
            self._channel.send(msgspec.msgpack.encode(Running(True)))
            executor.seconds_of_graph()
            times = tuple(executor.seconds_of_graph() / repeats for _ in range(count))
        return QuickTimes(times, build_seconds)

    def _loaded(self, built: Built, job: TaskJob) -> tuple[GpuExecutor, int, float]:
        """(the executor that repeats the kernel, the number of repetitions, about how many seconds one takes). Other
        kernels may be timed at the same time: then one or two of five runs are slower, which does not affect the
        median."""
        once = self._executor(built, job, 1)
        self._fill(once)
        seconds = min(once.seconds_of_graph() for _ in range(2))
        repeats = max(1, min(_MAX_REPEATS, int(_GRAPH_SECONDS / max(seconds, 1e-7))))
        if repeats == 1:
            return once, 1, seconds
        repeated = self._executor(built, job, repeats)
        self._fill(repeated)
        return repeated, repeats, seconds

    def _executor(self, built: Built, job: TaskJob, repeats: int) -> GpuExecutor:
        inputs = len(built.parameters) - 1
        runs = [KernelRun(built, range(inputs), 0)] * repeats
        plan, objects = plan_of(runs, job.machine, inputs=inputs, outputs=1, numerics=job.numerics)
        return GpuExecutor(plan, [], objects, 0, dependent_launch="off")

    def _fill(self, executor: GpuExecutor) -> None:
        """Random inputs. With zeros, a GPU at its power limit would run faster than with real data."""
        loaded = executor.loaded()
        device = loaded.device
        if self._device is None:
            self._device = device
            values = (
                np.random.default_rng(0).standard_normal(_RANDOM_BYTES // 2, np.float32).astype(np.float16)
            )
            self._random = device.allocate(_RANDOM_BYTES)
            device.upload(self._random, values.ctypes.data, _RANDOM_BYTES)
        stream = loaded.stream.handle
        for address, spec in zip(loaded.inputs, executor.plan.inputs, strict=True):
            for offset in range(0, spec.bytes, _RANDOM_BYTES):
                device.copy_on(
                    stream, address + offset, self._random, min(_RANDOM_BYTES, spec.bytes - offset)
                )
        loaded.stream.synchronise()


@contextmanager
def _alone(lock: str) -> Iterator[None]:
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


# -- in the parent ----------------------------------------------------------------------------------------------------

Done = Callable[[Any, Reply], None]  # the request's tag, and what came of it


class QuickPool:
    """Processes that answer requests in any order. Use it as a context."""

    def __init__(self, processes: int, serve: str = SERVE, limits: QuickLimits = QuickLimits()) -> None:
        self._limits = limits
        self._children = [Child(serve, _MEMORY, {"OMP_NUM_THREADS": "1"}) for _ in range(processes)]
        self._queue: deque[tuple[Any, Sample | tuple[TaskJob, Config]]] = deque()
        self._busy: dict[Child, tuple[Any, float]] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="tilewright-")
        self._lock = str(Path(self._folder.name) / "gpu.lock")

    def __enter__(self) -> QuickPool:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            child.close()
        self._folder.cleanup()

    def add(self, tag: Any, request: Sample | tuple[TaskJob, Config], first: bool = False) -> None:
        (self._queue.appendleft if first else self._queue.append)((tag, request))

    def run(self, done: Done, deadline: float) -> int:
        """Process the queue until `deadline`; `done` may add requests. Returns the number of requests that are left."""
        while self._busy or (self._queue and time.monotonic() < deadline):
            for child in self._children:
                if self._queue and child not in self._busy and time.monotonic() < deadline:
                    self._start(child, *self._queue.popleft())
            ready, waited = wait(*self._busy)
            for child in ready:
                self._attend(child, done)
            for child, (tag, left) in list(self._busy.items()):
                left -= waited if child.greeted else 0.0
                self._busy[child] = tag, left
                if left <= 0:
                    child.close()
                    del self._busy[child]
                    done(tag, Failed("timeout", "it took too long, and was ended"))
        return len(self._queue)

    def _start(self, child: Child, tag: Any, request: Sample | tuple[TaskJob, Config]) -> None:
        message = request if isinstance(request, Sample) else QuickTrial(*request, self._lock)
        self._busy[child] = tag, self._limits.build
        child.send(msgspec.msgpack.encode(message))

    def _attend(self, child: Child, done: Done) -> None:
        if not child.greeted:
            child.greet()
            return
        tag, _ = self._busy[child]
        try:
            reply = msgspec.msgpack.decode(child.receive(self._limits.load), type=Reply)
        except Dead as death:
            del self._busy[child]
            done(tag, Failed.of(death))
            return
        except msgspec.DecodeError as error:
            del self._busy[child]
            child.close()
            done(tag, Failed("crash", f"its answer is damaged: {error}"))
            return
        if isinstance(reply, Running):
            self._busy[child] = tag, self._limits.run if reply.alone else self._limits.load
            return
        del self._busy[child]
        if isinstance(reply, Failed) and reply.corrupted:
            child.close()
        done(tag, reply)


def quick_trials(
    jobs: Sequence[TaskJob],
    count: int,
    known: Callable[[TaskJob, Config], bool],
    found: Callable[[TaskJob, Config, QuickTimes | Failed], None],
    unsampled: Callable[[TaskJob, Failed], None],
    *,
    seconds: float,
    processes: int,
    seed: int = 0,
    serve: str = SERVE,
    limits: QuickLimits = QuickLimits(),
) -> int:
    """Time `count` configs of each task, the tasks interleaved, for about this many seconds; `known` ones are skipped.
    `unsampled`: called for a task whose configs could not be chosen. Returns how many configs were left, among them all
    those of tasks without a sample."""
    deadline = time.monotonic() + seconds
    wanted: dict[TaskJob, list[Config]] = {}

    def done(tag: Any, reply: Reply) -> None:
        kind, *rest = tag
        if kind == "sample":
            (job,) = rest
            if isinstance(reply, Sampled):
                wanted[job] = [config for config in reply.configs if not known(job, config)]
            elif isinstance(reply, Failed):
                unsampled(job, reply)
            return
        assert isinstance(reply, QuickTimes | Failed)
        found(rest[0], rest[1], reply)

    with QuickPool(processes, serve, limits) as pool:
        for job in jobs:
            pool.add(("sample", job), Sample(job, count, seed))
        samples = pool.run(done, deadline)
        for turn in range(count):
            for job in jobs:
                if turn < len(wanted.get(job, ())):
                    config = wanted[job][turn]
                    pool.add(("trial", job, config), (job, config))
        return pool.run(done, deadline) - samples + count * (len(jobs) - len(wanted))
