"""What the driver does for a trial does not grow with the number of trials that wait."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import pytest

from tests.faults.candidates import product
from tests.measure.pool.threads import LABEL, Handle, TestBuilder, TestTimer, ThreadWorkers
from tilewright.hw import host
from tilewright.measure.building import Made
from tilewright.measure.pool import driver
from tilewright.measure.pool.driver import PoolRunner
from tilewright.measure.single import Built
from tilewright.measure.trial import TaskJob
from tilewright.space.candidates import Candidates
from tilewright.space.space import Config
from tilewright.space.template import Work

pytest.importorskip("ray")  # its version must agree on all nodes
_DRIVER = str(Path(driver.__file__).parent)


class Prompt(Handle):
    """It answers before the call returns, so that a run is the same each time."""

    def call(self, name: str, arguments: tuple[Any, ...], count: int) -> Any:
        result = getattr(self.actor, name)(*(a.result() if isinstance(a, Future) else a for a in arguments))
        futures: list[Future[Any]] = [Future() for _ in range(count)]
        for future, one in zip(futures, result if count > 1 else (result,), strict=True):
            future.set_result(one)
        return futures[0] if count == 1 else tuple(futures)


class OneByOne(ThreadWorkers):
    def wait(self, references: list[Any], seconds: float) -> list[Any]:
        return references[:1]


def steps_of(run: Callable[[], object]) -> int:
    """The bytecode instructions that the driver executes in it."""
    steps = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal steps
        if not frame.f_code.co_filename.startswith(_DRIVER):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        steps += event == "opcode"
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(previous)
    return steps


def test_the_cost_of_a_trial_does_not_grow_with_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)
    made = Made(Built((), (), (), ()), 0.0)
    job = TaskJob.of(Work(product(128, 64, 48), host()), 1)
    sampled = Candidates.of(job.work(), sketches=False).sample(Random(0), 800)
    configs = list(dict.fromkeys(sampled))[:320]
    assert len(configs) == 320

    def cost(some: list[Config]) -> float:
        workers = OneByOne({})
        workers.handles = {
            "builder/node0/0": Prompt(lambda: TestBuilder("node0", made)),
            f"timer/node0/{LABEL}/0": Prompt(lambda: TestTimer("node0")),
        }
        workers.refresh()
        with PoolRunner(workers, 1, user="tester", seed=7) as runner:
            return steps_of(lambda: runner.measure(job, some)) / len(some)

    few, many = cost(configs[:40]), cost(configs)
    assert many < 1.1 * few
