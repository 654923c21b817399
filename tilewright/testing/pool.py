"""Pseudo-devices, for pools without hardware: a timing process that runs nothing.

    Device("cpu:pseudo", timing="tilewright.testing.pool:serve")

`FaultyTimer` is a timer that fails now and then in one of the ways of `FAULTS`, and `SlowingTimer` one that becomes
slower, for trying what a pool survives.

A pseudo-device says that every kernel is right, and takes a time for it that follows from its object code alone, so
that runs can be repeated exactly. `serve_slowly` sleeps in trials and races for as long as real ones may take, and uses
no core meanwhile.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import socket
import stat
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from tilewright.measure.kernel_timer import LoadKernel
from tilewright.measure.pool.actors import Timer
from tilewright.measure.pool.turns import Stopwatch
from tilewright.measure.pool.wire import TrialAnswer, TrialRequest, encode
from tilewright.measure.timing import Check, CheckDone, LoadTask, Race, Raced, Ready, Time, Timed
from tilewright.support.process import Channel

REFERENCE_SECONDS = 2e-5
SLOW_SECONDS = 1.0
_CALLS = 5


def pseudo_seconds(built: msgspec.Struct) -> float:
    """Between 0.1 and 0.2 ms."""
    digest = hashlib.sha256(msgspec.msgpack.encode(built)).digest()
    return 1e-4 * (1 + int.from_bytes(digest[:4], "little") / 2**32)


def serve(channel: Channel, seconds: float = 0.0) -> None:
    """Answers what `measure/timing.py` is asked; each timing sleeps for `seconds`."""
    decoder = msgspec.msgpack.Decoder(LoadTask | LoadKernel | Check | Time | Race)
    checked: dict[int, float] = {}
    while True:
        message, descriptors = channel.receive()
        request = decoder.decode(message)
        reply: msgspec.Struct
        if isinstance(request, LoadTask | LoadKernel):
            reply = Ready()
        elif isinstance(request, Check):
            checked[request.number] = pseudo_seconds(request.built)
            reply = CheckDone(0.0)
        elif isinstance(request, Time):
            time.sleep(seconds)
            reply = Timed((checked[request.number],) * _CALLS, REFERENCE_SECONDS, True)
        else:
            time.sleep(request.seconds if seconds else 0.0)
            reply = Raced(tuple((checked[number],) * _CALLS for number in request.numbers))
        for descriptor in descriptors:
            os.close(descriptor)
        channel.send(msgspec.msgpack.encode(reply))


def serve_slowly(channel: Channel) -> None:
    serve(channel, SLOW_SECONDS)


FAULTS = ("kill", "stop", "slow", "corrupt", "zero", "accuse", "drop", "disconnect")
_FAULT_RATE = 0.1
_STEADY_TRIALS = 50  # of a device that becomes slower


def fault_log() -> Path:
    """A line for each fault that a pool on this machine had."""
    return Path(tempfile.gettempdir()) / f"tilewright-pool-faults-{os.getuid()}.log"


def note_fault(fault: str) -> None:
    with open(fault_log(), "a") as log:
        log.write(f"{fault}\n")


class FaultyTimer(Timer):
    """A timer of which one trial in ten goes wrong: its process is killed or stopped, it answers late, or nonsense, or
    never, or its network connections break; or its answer is well-formed and wrong: a call took no time, or a candidate
    crashed that did not."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._random = Random()

    def _tried(self, request: TrialRequest, code: bytes, data: bytes, watch: Stopwatch) -> bytes:
        if self._random.random() >= _FAULT_RATE:
            return super()._tried(request, code, data, watch)
        fault = self._random.choice(FAULTS)
        note_fault(fault)
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault == "slow":
            time.sleep(1.0)
        elif fault == "corrupt":
            return b"\xc1" + super()._tried(request, code, data, watch)[1:]
        elif fault == "zero":
            return _changed(super()._tried(request, code, data, watch), times=(0.0,))
        elif fault == "accuse":
            return _changed(super()._tried(request, code, data, watch), times=(), failure="crash")
        elif fault == "drop":
            time.sleep(3600.0)
        else:
            _disconnect()
        return super()._tried(request, code, data, watch)


class SlowingTimer(Timer):
    """A timer on which everything takes twice as long after some trials, the reference kernel too."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._count = 0

    def _measured(self, request: TrialRequest, code: bytes, data: bytes, watch: Stopwatch) -> TrialAnswer:
        answer = super()._measured(request, code, data, watch)
        self._count += 1
        if self._count <= _STEADY_TRIALS or answer.measurement is None:
            return answer
        if self._count == _STEADY_TRIALS + 1:
            note_fault("slowing")
        times = tuple(2 * each for each in answer.measurement.times)
        slower = msgspec.structs.replace(answer.measurement, times=times)
        return msgspec.structs.replace(answer, measurement=slower, reference=2 * answer.reference)


def _changed(message: bytes, **wrong: Any) -> bytes:
    """The same answer with another measurement."""
    answer = msgspec.msgpack.decode(message, type=TrialAnswer)
    if answer.measurement is None:
        return message
    measurement = msgspec.structs.replace(answer.measurement, **wrong)
    return encode(msgspec.structs.replace(answer, measurement=measurement))


def _disconnect() -> None:
    """Shut down all network connections of this process."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    if connection.family in (socket.AF_INET, socket.AF_INET6):
                        connection.shutdown(socket.SHUT_RDWR)
