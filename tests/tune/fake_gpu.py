"""Processes that stand for the one that checks and times on a GPU: made-up times, and failures such as kernels have.

They speak the protocol of `measure/timing.py`. The time of a candidate is a function of what was built, so that it is
the same at every request. Environment variables say the rest, since a child inherits nothing else:

    PRETENDED_LOG     a file to which each process appends "pid, what it was asked, the candidate"
    PRETENDED_FAST    words: a candidate that has one of them among its names and decisions takes a tenth of its time
    PRETENDED_SLOW    the same, and it takes ten times as long
    PRETENDED_SCALE   all times are multiplied by this
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from tilewright.measure.failed import Failed
from tilewright.measure.shared_checks import load_validation
from tilewright.measure.single import Built
from tilewright.measure.timing import (
    Check,
    CheckDone,
    Heartbeat,
    LoadTask,
    Race,
    Raced,
    Ready,
    Time,
    Timed,
    TimingReply,
)
from tilewright.support.process import Channel

LOG, FAST, SLOW, SCALE = "PRETENDED_LOG", "PRETENDED_FAST", "PRETENDED_SLOW", "PRETENDED_SCALE"
_TIMES = 5

# Of a candidate that is checked: None where it is right.
Fault = Callable[[Channel, Built], Failed | None]


def words_of(built: Built) -> str:
    return " ".join(f"{part.name} {part.symbol} {part.decisions} {part.vendor}" for part in built.parts)


def seconds_of(built: Built) -> float:
    """20 to 40 us, by what was built; a library's call 11 to 15, the less the higher the number of its algorithm."""
    words = words_of(built)
    seconds = 2e-5 * (1 + zlib.crc32(words.encode()) % 997 / 997)
    algorithm = algorithm_of(built)
    if algorithm is not None:
        seconds = 1e-5 * (1.5 - algorithm / 10)
    for variable, factor in ((FAST, 0.1), (SLOW, 10.0)):
        if any(word in words for word in os.environ.get(variable, "").split(",") if word):
            seconds *= factor
    return seconds * float(os.environ.get(SCALE, "1"))


def algorithm_of(built: Built) -> int | None:
    calls = [part.vendor for part in built.parts if part.vendor is not None]
    found: int | None = calls[0].options.get("algorithm") if calls else None
    return found


# -- what may be served -----------------------------------------------------------------------------------------------


def serve(channel: Channel) -> None:
    """Everything is right."""
    _serve(channel, lambda channel, built: None)


def serve_faults(channel: Channel) -> None:
    """Of a library's algorithms, 1 crashes, 2 hangs, 3 is wrong and 4 spoils the context of its process."""

    def fault(channel: Channel, built: Built) -> Failed | None:
        algorithm = algorithm_of(built)
        if algorithm == 1:
            os._exit(3)
        if algorithm == 2:
            _say(channel, Heartbeat(True))
            time.sleep(3600)
        if algorithm == 3:
            return Failed("wrong", "its error is 1.0, of at most 0.002")
        if algorithm == 4:
            return Failed("illegal", "CUDA_ERROR_ILLEGAL_ADDRESS", corrupted=True)
        return None

    _serve(channel, fault)


def serve_never(channel: Channel) -> None:
    """A card that does not answer."""
    channel.receive()
    time.sleep(3600)


def serve_slowly(channel: Channel) -> None:
    """A tenth of a second for each candidate."""

    def fault(channel: Channel, built: Built) -> None:
        time.sleep(0.1)

    _serve(channel, fault)


def _serve(channel: Channel, fault: Fault) -> None:
    decoder = msgspec.msgpack.Decoder(LoadTask | Check | Time | Race)
    numbered: dict[int, Built] = {}
    while True:
        message, descriptors = channel.receive()
        request = decoder.decode(message)
        reply: TimingReply
        if isinstance(request, LoadTask):
            load_validation(request.validation, descriptors[0])
            os.close(descriptors[0])
            numbered = {}
            _log("sit")
            reply = Ready()
        elif isinstance(request, Check):
            _log("check", request.built)
            numbered = {n: built for n, built in numbered.items() if n in request.keep}
            numbered[request.number] = request.built
            reply = fault(channel, request.built) or CheckDone(1e-4)
        elif isinstance(request, Time):
            _say(channel, Heartbeat(True))
            reply = Timed((seconds_of(numbered[request.number]),) * _TIMES, 1.0, True)
        else:
            reply = Raced(tuple((seconds_of(numbered[n]),) * _TIMES for n in request.numbers))
        _say(channel, reply)


def _log(what: str, built: Built | None = None) -> None:
    path = os.environ.get(LOG)
    if path:
        algorithm = "" if built is None else algorithm_of(built)
        with Path(path).open("a") as file:
            file.write(f"{os.getpid()} {what} {algorithm}\n")


def _say(channel: Channel, reply: TimingReply) -> None:
    channel.send(msgspec.msgpack.encode(reply))
