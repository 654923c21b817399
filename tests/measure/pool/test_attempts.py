"""Which attempts hang."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest

from tests.measure.pool.threads import TestTimer, pool
from tilewright.measure.pool.attempts import Attempt, Overdue, Work

pytest.importorskip("ray")  # its version must agree on all nodes
pytestmark = pytest.mark.usefixtures("token")


def test_an_answer_counts_that_arrives_when_its_worker_is_given_up() -> None:
    let_go = threading.Event()

    class Silent(TestTimer):
        def in_progress(self) -> bytes:
            let_go.wait(20.0)
            return super().in_progress()

    workers = pool(lambda: Silent("node0"))
    workers.refresh(20.0)
    (worker,) = workers.timers()
    work = Work("trial", lambda worker: None, lambda worker, answer: "", lambda: None, None, 0.0)
    answer: Future[Any] = Future()
    running = {answer: Attempt(work, worker, time.monotonic(), 0.0)}
    overdue = Overdue(workers, reply=0.0)
    assert not list(overdue.check(running, set()))  # the worker is asked
    time.sleep(0.01)
    assert not list(overdue.check(running, {answer}))
    time.sleep(0.01)
    assert [reference for reference, _ in overdue.check(running, set())] == [answer]
    let_go.set()
