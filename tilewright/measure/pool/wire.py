"""What travels between the driver of a pool and its nodes: plain data as msgspec bytes, never pickled code.

Object code goes from a builder to a timer as `Made` in bytes, with a seal: an HMAC of the job, the config and the code
with a key that follows from the pool's token. A timer loads nothing else.
"""

from __future__ import annotations

import hashlib
import hmac

import msgspec

from tilewright.measure.runner import Measurement
from tilewright.measure.trial import TaskJob
from tilewright.space.space import Config


class Hello(msgspec.Struct, frozen=True):
    """Who answers: the versions that must agree with the driver's, the device, and the node's clock."""

    node: str
    host: str
    pid: int
    version: str
    python: str
    clock: float
    label: str = ""  # of the device, such as "cpu:znver4"; "" for a builder
    machine: str = ""  # the device's description, as `hw.machine.to_text` writes it
    pseudo: bool = False  # a stand-in for a device: its times are not those of a machine


class BuildRequest(msgspec.Struct, frozen=True):
    job: TaskJob
    config: Config
    modules: tuple[str, ...] = ()


class BuildAnswer(msgspec.Struct, frozen=True):
    """`failure`: the candidate's own; `trouble`: the node's, and the build is given to another."""

    failure: str = ""
    message: str = ""
    trouble: str = ""
    seal: bytes = b""


class Candidate(msgspec.Struct, frozen=True):
    """A config whose object code comes alongside."""

    config: Config
    seal: bytes


class TrialRequest(msgspec.Struct, frozen=True):
    """Check and time one candidate, on validation inputs of this seed. `trial` names it: a timer that is asked for a
    trial again answers what it found the first time, until that is acknowledged."""

    trial: str
    user: str
    job: TaskJob
    candidate: Candidate
    seed: int
    best: float | None = None


class TrialAnswer(msgspec.Struct, frozen=True):
    """`reference`: seconds of the reference kernel alongside; `trouble`: the node's, and the trial is given to
    another."""

    trial: str
    measurement: Measurement | None = None
    reference: float = 0.0
    trouble: str = ""


class RaceRequest(msgspec.Struct, frozen=True):
    """Time candidates interleaved, for about so many seconds together."""

    user: str
    job: TaskJob
    candidates: tuple[Candidate, ...]
    seed: int
    seconds: float


class RaceAnswer(msgspec.Struct, frozen=True):
    times: tuple[tuple[float, ...], ...] = ()
    trouble: str = ""


def encode(message: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(message)


def seal_key(token: str) -> bytes:
    return hmac.new(token.encode(), b"object code of a tilewright pool", hashlib.sha256).digest()


def seal(key: bytes, job: TaskJob, config: Config, code: bytes) -> bytes:
    what = msgspec.msgpack.encode((job, config)) + hashlib.sha256(code).digest()
    return hmac.new(key, what, hashlib.sha256).digest()


def trial_name(job: TaskJob, config: Config, seed: int) -> str:
    return hashlib.sha256(msgspec.msgpack.encode((job, config, seed))).hexdigest()[:24]
