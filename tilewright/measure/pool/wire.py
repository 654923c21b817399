"""Messages between the driver of a pool and its nodes: plain data as msgspec bytes, never pickled code.

Object code goes from a builder to a timer as `Made` in bytes, with a seal: an HMAC of the job, the config and the code
with a key derived from the pool's token. A timer loads nothing else. The tensors of a kernel's launch go alongside
as bytes, with their digest in the job.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Sequence

import msgspec

from tilewright.measure.jobs import Job
from tilewright.measure.kernel_job import Grid3, KernelSpec
from tilewright.measure.measurement import Measurement
from tilewright.measure.pool.references import UNKNOWN, Speed
from tilewright.measure.trial import TaskJob
from tilewright.space.space import Config


class Hello(msgspec.Struct, frozen=True):
    """The introduction of a worker: the versions that must equal the driver's, the device, and the node's clock."""

    node: str
    host: str
    pid: int
    version: str
    python: str
    clock: float
    ray: str = ""
    label: str = ""  # of the device, such as "cpu:znver4"; "" for a builder
    machine: str = ""  # the device's description, as `hw.machine.to_text` writes it
    pseudo: bool = False  # a stand-in for a device: its times are not those of a machine
    calibration: str = ""  # of the device's machine, as JSON; "" if it was not calibrated
    network: bool = True  # whether what it runs can reach a network
    speed: Speed = UNKNOWN  # of the device, as drivers before this one saw it


class PoolJob(msgspec.Struct, frozen=True):
    """A task, or a launch of a kernel. `digest`: of the bytes of the launch's tensors, which are sent alongside."""

    task: TaskJob | None = None
    kernel: KernelSpec | None = None
    digest: bytes = b""

    @property
    def described(self) -> str:
        """The machine that the job is for."""
        return self._either.described

    @property
    def threads(self) -> int:
        return self._either.threads

    @property
    def _either(self) -> TaskJob | KernelSpec:
        found = self.task if self.kernel is None else self.kernel
        if found is None:
            raise msgspec.ValidationError("a job is a task or a kernel, and this is neither")
        return found


def pool_job(job: Job, data: bytes = b"") -> PoolJob:
    """The job in the form for the pool. `data`: the bytes of the tensors of a kernel's launch; their local file means
    nothing elsewhere."""
    if isinstance(job, TaskJob):
        return PoolJob(task=job)
    return PoolJob(kernel=msgspec.structs.replace(job.spec, data=""), digest=hashlib.sha256(data).digest())


class InProgress(msgspec.Struct, frozen=True):
    """The requests of a worker by name, with the seconds that it worked on each. Waiting does not count."""

    seconds: dict[str, float]


class BuildRequest(msgspec.Struct, frozen=True):
    """Build one candidate. `name`: of the request. `grid`: of a kernel's launch with this config."""

    name: str
    user: str
    job: PoolJob
    config: Config
    modules: tuple[str, ...] = ()
    grid: Grid3 = (1, 1, 1)


class BuildAnswer(msgspec.Struct, frozen=True):
    """The answer to a `BuildRequest`. `failure`: of the candidate; `trouble`: of the node, and another node gets the
    build."""

    failure: str = ""
    message: str = ""
    trouble: str = ""
    seal: bytes = b""


class Candidate(msgspec.Struct, frozen=True):
    """A config whose object code is sent alongside."""

    config: Config
    seal: bytes


class TrialRequest(msgspec.Struct, frozen=True):
    """Check and time one candidate, on validation inputs of this seed. `trial` is its name. If a timer
    receives the same trial again, it sends its first answer again, until that answer is acknowledged."""

    trial: str
    user: str
    job: PoolJob
    candidate: Candidate
    seed: int
    best: float | None = None


class TrialAnswer(msgspec.Struct, frozen=True):
    """The answer to a `TrialRequest`. `reference`: seconds of the reference kernel, timed alongside. `busy`: seconds
    that the device was used. `trouble`: the node failed, and another node gets the trial."""

    trial: str
    measurement: Measurement | None = None
    reference: float = 0.0
    busy: float = 0.0
    trouble: str = ""


class RaceRequest(msgspec.Struct, frozen=True):
    """Time candidates interleaved, for about so many seconds together. `name` is the request's."""

    name: str
    user: str
    job: PoolJob
    candidates: tuple[Candidate, ...]
    seed: int
    seconds: float


class RaceAnswer(msgspec.Struct, frozen=True):
    times: tuple[tuple[float, ...], ...] = ()
    busy: float = 0.0
    trouble: str = ""


def encode(message: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(message)


def impossible(times: Sequence[float], *seconds: float) -> str:
    """What cannot be true of an answer, or "". `times`: of calls, which take some time; `seconds`: may be 0."""
    for each in times:
        if not 0.0 < each < math.inf:
            return f"it answered a call that took {each} s"
    for each in seconds:
        if not 0.0 <= each < math.inf:
            return f"it answered a duration of {each} s"
    return ""


def seal_key(token: str) -> bytes:
    return hmac.new(token.encode(), b"object code of a tilewright pool", hashlib.sha256).digest()


def seal(key: bytes, job: PoolJob, config: Config, code: bytes) -> bytes:
    what = msgspec.msgpack.encode((job, config)) + hashlib.sha256(code).digest()
    return hmac.new(key, what, hashlib.sha256).digest()


def request_name(kind: str, job: PoolJob, what: object, seed: int) -> str:
    """The name of a request. `what`: a config, or several."""
    return hashlib.sha256(msgspec.msgpack.encode((kind, job, what, seed))).hexdigest()[:24]
