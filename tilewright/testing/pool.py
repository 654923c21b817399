"""Pseudo-devices, for pools without hardware: a timing process that runs nothing.

    Device("cpu:pseudo", timing="tilewright.testing.pool:serve")

It says that every kernel is right, and takes a time for it that follows from its object code alone, so that runs can be
repeated exactly. `serve_slowly` sleeps as long as a real trial would take, without using a core.
"""

from __future__ import annotations

import hashlib
import os
import time

import msgspec

from tilewright.measure.process import Channel
from tilewright.measure.single import Built
from tilewright.measure.timing import Check, CheckDone, LoadTask, Race, Raced, Ready, Time, Timed

REFERENCE_SECONDS = 2e-5
_SLOW_SECONDS = 0.1
_CALLS = 5


def pseudo_seconds(built: Built) -> float:
    """Between 0.1 and 0.2 ms."""
    digest = hashlib.sha256(msgspec.msgpack.encode(built)).digest()
    return 1e-4 * (1 + int.from_bytes(digest[:4], "little") / 2**32)


def serve(channel: Channel, seconds: float = 0.0) -> None:
    """Answers what `measure/timing.py` is asked; each timing sleeps for `seconds`."""
    decoder = msgspec.msgpack.Decoder(LoadTask | Check | Time | Race)
    checked: dict[int, float] = {}
    while True:
        message, descriptors = channel.receive()
        request = decoder.decode(message)
        reply: msgspec.Struct
        if isinstance(request, LoadTask):
            reply = Ready()
        elif isinstance(request, Check):
            checked[request.number] = pseudo_seconds(request.built)
            reply = CheckDone(0.0)
        elif isinstance(request, Time):
            time.sleep(seconds)
            reply = Timed((checked[request.number],) * _CALLS, REFERENCE_SECONDS, True)
        else:
            reply = Raced(tuple((checked[number],) * _CALLS for number in request.numbers))
        for descriptor in descriptors:
            os.close(descriptor)
        channel.send(msgspec.msgpack.encode(reply))


def serve_slowly(channel: Channel) -> None:
    serve(channel, _SLOW_SECONDS)
