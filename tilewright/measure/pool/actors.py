"""The builders and timers of a pool's nodes: Ray actors around the local processes of `measure`.

A candidate can only crash the child process that it is in. A fault of the node itself (no disk space, object
code that was corrupted in transfer) is `trouble`: the driver gives the work to another node.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import importlib.metadata
import os
import platform
import socket
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace

import msgspec
import numpy as np
import psutil

from tilewright.errors import MeasurementError, PoolError
from tilewright.hw import host
from tilewright.hw.machine import to_text
from tilewright.measure.building import Build, BuildReply, Made
from tilewright.measure.failed import Failed
from tilewright.measure.jobs import Job
from tilewright.measure.kernel_build import BuildKernel
from tilewright.measure.kernel_job import DataFile, Grid3, KernelJob
from tilewright.measure.measurement import Measurement
from tilewright.measure.pool import calibrations
from tilewright.measure.pool.references import UNKNOWN, References, Speed
from tilewright.measure.pool.turns import DeviceGate, FairTurns, Requests, Stopwatch, starting
from tilewright.measure.pool.wire import (
    BuildAnswer,
    BuildRequest,
    Candidate,
    Hello,
    InProgress,
    PoolJob,
    RaceAnswer,
    RaceRequest,
    TrialAnswer,
    TrialRequest,
    encode,
    seal,
    seal_key,
)
from tilewright.measure.runner import BUILDING, ONE_THREAD, TIMING, Runner
from tilewright.space.space import Config
from tilewright.support.confinement import can_remove_network
from tilewright.support.process import Child, Dead
from tilewright.support.version import VERSION

_BUILD_SECONDS = 45.0
_BUILDER_MEMORY = 4 << 30
_KEPT_ANSWERS = 1024
_KEPT_LAUNCHES = 4  # of kernels, with the files of their tensors
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class _Worker:
    """The base of builders and timers: it introduces itself, reports its work, and shares the worker fairly among
    users."""

    def __init__(self, node: str) -> None:
        self._node, self._key = node, _key()
        self._turns, self._requests = FairTurns(), Requests()
        self._draining = False

    def drain(self) -> None:
        """Finish running requests; refuse all others."""
        self._draining = True

    def end(self, pid: int) -> None:
        """End another worker of this node, which cannot be reached. Ray starts it anew."""
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            if pid != os.getpid() and process.ppid() == os.getppid():
                process.kill()

    def in_progress(self) -> bytes:
        """The requests in progress, as an InProgress."""
        return encode(InProgress(self._requests.seconds))

    @contextmanager
    def _turn(self, user: str, watch: Stopwatch) -> Iterator[None]:
        with ExitStack() as stack:
            with watch.paused():
                stack.enter_context(self._turns.turn(user))
            yield

    def _introduced(
        self,
        label: str = "",
        machine: str = "",
        pseudo: bool = False,
        calibration: str = "",
        speed: Speed = UNKNOWN,
    ) -> bytes:
        """The reply to a greeting, as a Hello."""
        hello = Hello(
            self._node,
            socket.gethostname(),
            os.getpid(),
            VERSION,
            platform.python_version(),
            time.time(),
            importlib.metadata.version("ray"),
            label,
            machine,
            pseudo,
            calibration,
            not can_remove_network(),
            speed,
        )
        return encode(hello)


class Builder(_Worker):
    """Compiles candidates for any device, one at a time, in a process of its own."""

    def __init__(self, node: str) -> None:
        super().__init__(node)
        self._gate = DeviceGate()
        self._child = Child(BUILDING, _BUILDER_MEMORY, ONE_THREAD, confined=True)

    def hello(self) -> bytes:
        return self._introduced()

    def build(self, message: bytes) -> tuple[bytes, bytes]:
        """Build a candidate; returns (BuildAnswer, object code)."""
        if self._draining:
            return encode(BuildAnswer(trouble="draining")), b""
        request = msgspec.msgpack.decode(message, type=BuildRequest)
        with self._requests.one(request.name) as watch, self._turn(request.user, watch):
            return self._built(request, watch)

    def _built(self, request: BuildRequest, watch: Stopwatch) -> tuple[bytes, bytes]:
        with ExitStack() as stack:
            try:
                with watch.paused():
                    if not self._child.greeted:
                        with starting():
                            self._child.start()
                            self._child.greet()
                    stack.enter_context(self._gate.building())
                self._child.send(msgspec.msgpack.encode(_order(request)))
                reply = msgspec.msgpack.decode(self._child.receive(_BUILD_SECONDS), type=BuildReply)
            except Dead as death:
                reply = Failed.of(death)
            except MeasurementError as error:  # the process does not start
                return encode(BuildAnswer(trouble=str(error))), b""
        if isinstance(reply, Made):
            code = msgspec.msgpack.encode(reply)
            return encode(BuildAnswer(seal=seal(self._key, request.job, request.config, code))), code
        assert isinstance(reply, Failed)
        if "No space left on device" in reply.message or "Disk quota exceeded" in reply.message:
            return encode(BuildAnswer(trouble=reply.message)), b""
        return encode(BuildAnswer(failure=reply.kind, message=reply.message)), b""


def _order(request: BuildRequest) -> Build | BuildKernel:
    """The request for the process that builds."""
    job = request.job
    if job.task is not None:
        return Build(job.task, request.config, request.modules)
    assert job.kernel is not None
    return BuildKernel(job.kernel, request.config, request.grid)


class Timer(_Worker):
    """Validates and times candidates on one device, one after another, and alternates between users. `label`: the
    device's name in the pool. `device`: the number of a GPU, None for the node's processor. `timing`: what runs in the
    timing process, for pseudo-devices."""

    def __init__(
        self, node: str, label: str, device: int | None = None, timing: str = "", machine: str = ""
    ) -> None:
        super().__init__(node)
        self._label, self._device, self._timing = label, device, timing
        self._gate = None if timing else DeviceGate(device)
        self._machine = machine or _machine_here(device)
        self._runner: Runner | None = None  # for all users: their validation inputs have different seeds
        self._launches: OrderedDict[bytes, tuple[KernelJob, DataFile]] = OrderedDict()
        self._answers: OrderedDict[str, bytes] = OrderedDict()  # found, and not yet acknowledged
        self._references = References()  # kept here too: a device outlives its drivers

    def hello(self) -> bytes:
        measured = "" if self._timing else calibrations.stored(self._machine)
        speed = self._references.speed
        return self._introduced(self._label, self._machine, bool(self._timing), measured, speed)

    def acknowledge(self, trials: list[str]) -> None:
        """Forget these answers: the driver has written them to disk."""
        for trial in trials:
            self._answers.pop(trial, None)

    def trial(self, message: bytes, code: bytes, data: bytes = b"") -> bytes:
        """Run a trial; returns a TrialAnswer. `data`: the tensors of a kernel's launch."""
        request = msgspec.msgpack.decode(message, type=TrialRequest)
        if self._draining:
            return encode(TrialAnswer(request.trial, trouble="draining"))
        with self._requests.one(request.trial) as watch:
            return self._tried(request, code, data, watch)

    def _tried(self, request: TrialRequest, code: bytes, data: bytes, watch: Stopwatch) -> bytes:
        with self._turn(request.user, watch):
            if request.trial in self._answers:
                return self._answers[request.trial]
            if trouble := self._refused(request.job, request.candidate, code, data):
                return encode(TrialAnswer(request.trial, trouble=trouble))
            try:
                measured = self._measured(request, code, data, watch)
            except (OSError, MeasurementError) as error:
                return encode(TrialAnswer(request.trial, trouble=_trouble(error)))
            if measured.reference:
                self._references.add(measured.reference)
            answer = encode(measured)
            self._answers[request.trial] = answer
            while len(self._answers) > _KEPT_ANSWERS:
                self._answers.popitem(last=False)
            return answer

    def race(self, message: bytes, data: bytes, *codes: bytes) -> bytes:
        """Time candidates interleaved; returns a RaceAnswer."""
        request = msgspec.msgpack.decode(message, type=RaceRequest)
        if self._draining:
            return encode(RaceAnswer(trouble="draining"))
        with self._requests.one(request.name) as watch, self._turn(request.user, watch):
            for candidate, code in zip(request.candidates, codes, strict=True):
                if trouble := self._refused(request.job, candidate, code, data):
                    return encode(RaceAnswer(trouble=trouble))
            made = {
                candidate.config: msgspec.msgpack.decode(code, type=Made)
                for candidate, code in zip(request.candidates, codes, strict=True)
            }
            try:
                job = self._local(request.job, data)
                with self._alone(request.seed, job, request.job.threads, watch) as runner:
                    begin = time.monotonic()
                    times = runner.race_built(job, made, request.seconds)
                    busy = time.monotonic() - begin
            except (OSError, MeasurementError) as error:
                return encode(RaceAnswer(trouble=_trouble(error)))
            found = tuple(tuple(times.get(c.config, ())) for c in request.candidates)
            return encode(RaceAnswer(found, busy))

    def _refused(self, job: PoolJob, candidate: Candidate, code: bytes, data: bytes) -> str:
        if job.described != self._machine:
            return "the device is not the machine that the job is for"
        if not hmac.compare_digest(candidate.seal, seal(self._key, job, candidate.config, code)):
            return "the object code is not what a builder of this pool made"
        if job.kernel is not None and hashlib.sha256(data).digest() != job.digest:
            return "the tensors are not those that the job names"
        return ""

    def _measured(self, request: TrialRequest, code: bytes, data: bytes, watch: Stopwatch) -> TrialAnswer:
        job = self._local(request.job, data)
        made = msgspec.msgpack.decode(code, type=Made)
        with self._alone(request.seed, job, request.job.threads, watch) as runner:
            begin = time.monotonic()
            found: Measurement = runner.trial(job, request.candidate.config, made, best=request.best)
            busy = time.monotonic() - begin
        return TrialAnswer(request.trial, found, runner.reference, busy)

    def _local(self, job: PoolJob, data: bytes) -> Job:
        """The job for this node's runner: the tensors of a launch are in a local file."""
        if job.task is not None:
            return job.task
        assert job.kernel is not None
        name = hashlib.sha256(encode(job)).digest()
        if name not in self._launches:
            while len(self._launches) >= _KEPT_LAUNCHES:
                self._launches.popitem(last=False)[1][1].close()
            file = DataFile()
            file.add(np.frombuffer(data, np.uint8))
            spec = msgspec.structs.replace(job.kernel, data=file.path, size=file.finish())
            self._launches[name] = KernelJob(spec, _no_grid), file
        self._launches.move_to_end(name)
        return self._launches[name][0]

    @contextmanager
    def _alone(self, seed: int, job: Job, threads: int, watch: Stopwatch) -> Iterator[Runner]:
        """A runner that is ready for a job. Nothing else is timed on the device at the same time, and nothing is built
        on this machine, except for a GPU, which builds do not disturb."""
        with ExitStack() as stack:
            with watch.paused():
                runner = self._ready(seed, job, threads)
                if self._gate is not None:
                    stack.enter_context(self._gate.timing())
            yield runner

    def _ready(self, seed: int, job: Job, threads: int) -> Runner:
        """The runner, whose processes have started and whose validation inputs for the job exist."""
        if self._runner is None:
            timing = self._timing or TIMING
            self._runner = Runner(threads, builders=1, device=self._device, timing=timing, confined=True)
        runner = self._runner
        runner.threads, runner.seed = threads, seed
        with nullcontext() if runner.is_started else starting():
            runner.start()
            runner.build(job, [])
        return runner


def _no_grid(config: Config) -> Grid3:
    raise MeasurementError("the driver computes the grids of a kernel's launches")


def _key() -> bytes:
    """The key for seals, derived from the pool's token, which every process of the pool has."""
    token = os.environ.get("RAY_AUTH_TOKEN", "")
    if not token:
        raise PoolError("this node of the pool was started without a token", remedy="tilewright pool join")
    return seal_key(token)


def _machine_here(device: int | None) -> str:
    if device is None:
        return to_text(host())
    from tilewright.hw.gpu import detect  # with the driver's library: only where there is a GPU
    from tilewright.runtime.cuda import vendor

    there = tuple(sorted(name for name, found in vendor.is_available().items() if found))
    return to_text(replace(detect(device), libraries=there))


def _trouble(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno in _DISK_FULL:
        return f"the disk is full: {error}"
    return f"{type(error).__name__}: {error}"
