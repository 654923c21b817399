"""Processes that stand for the one that races ways on a GPU: one that fails as kernels do, and others that do not."""

from __future__ import annotations

import os
import time
import zlib

import msgspec

from tilewright.measure.gpu_ways import Answer, Finished, Question, Refused, Running, Tried, Trying
from tilewright.measure.process import Channel, Failed


def serve(channel: Channel) -> None:
    _serve(channel, faults=True)


def serve_well(channel: Channel) -> None:
    _serve(channel, faults=False)


def serve_second(channel: Channel) -> None:
    """Of all candidates the second is the fastest."""
    _serve(channel, faults=False, fastest=1)


def serve_by_config(channel: Channel) -> None:
    """Each config takes a time of its own, the same whenever it is asked for."""
    while True:
        message, _ = channel.receive()
        question = msgspec.msgpack.decode(message, type=Question)
        for number, config in enumerate(question.configs):
            seconds = 1e-5 * (1 + zlib.crc32(str(config).encode()) % 997 / 997)
            _say(channel, Tried(number, (seconds,) * 3, 1e-4))
        _say(channel, Finished())


def serve_never(channel: Channel) -> None:
    channel.receive()
    time.sleep(3600)


def serve_first_wrong(channel: Channel) -> None:
    """And no other ever."""
    channel.receive()
    _say(channel, Refused(0, Failed("wrong", "its error is 1.0, of at most 0.002")))
    time.sleep(3600)


def _serve(channel: Channel, *, faults: bool, fastest: int | None = None) -> None:
    while True:
        message, _ = channel.receive()
        question = msgspec.msgpack.decode(message, type=Question)
        for number, config in enumerate(question.configs):
            _say(channel, Trying(number))
            algorithm = dict(config.values).get("algorithm", 0)
            fate = algorithm if faults else 0
            if fate == 1:
                os._exit(1)
            if fate == 2:
                _say(channel, Running(number, 0.2))
                time.sleep(3600)
            if fate == 3:
                _say(channel, Refused(number, Failed("wrong", "its error is 1.0, of at most 0.002")))
            else:
                seconds = 1e-5 * (5 if number == fastest else 10 - algorithm)
                _say(channel, Tried(number, (seconds,) * 3, 1e-4))
        _say(channel, Finished())


def _say(channel: Channel, answer: Answer) -> None:
    channel.send(msgspec.msgpack.encode(answer))
