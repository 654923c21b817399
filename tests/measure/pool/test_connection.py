"""What a driver states of itself to a pool."""

from __future__ import annotations

import os
import threading
import time
from itertools import count

import pytest

from tests.measure.pool.threads import ThreadWorkers, until
from tilewright.hw import host
from tilewright.hw.machine import to_text
from tilewright.measure.pool.connection import PoolDevice
from tilewright.measure.pool.turns import FairTurns
from tilewright.support.trace import Trace


def driver() -> str:
    """The user of another driver process of this user."""
    device = PoolDevice(ThreadWorkers({}), to_text(host()), threading.Event(), Trace(), None, 7)
    with device.runner(1) as runner:
        return runner.user


def test_many_drivers_of_a_user_have_one_share(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = count(1000)
    monkeypatch.setattr(os, "getpid", lambda: next(processes))
    turns, order = FairTurns(), []

    def work(user: str) -> None:
        with turns.turn(user):
            order.append(user)

    with turns.turn("first"):
        waiting = []
        for user in (*(driver() for _ in range(6)), "somebody else", "somebody else"):
            waiting.append(threading.Thread(target=work, args=(user,)))
            waiting[-1].start()
            for _ in until(lambda: turns.waiting == len(waiting)):
                time.sleep(0.001)
    for thread in waiting:
        thread.join(20)
    assert [user == "somebody else" for user in order] == [False, True, False, True, *[False] * 4]
