"""Rounds of the tuner on a pool: all devices are busy, and none holds a run up beyond its end."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.faults.candidates import product
from tests.measure.pool.threads import (
    LABEL,
    SEED,
    Driver,
    TestTimer,
    expected,
    pool,
    seconds,
    seconds_of,
    until,
)
from tilewright.db.database import Database
from tilewright.errors import MeasurementError
from tilewright.graph.task import Task
from tilewright.hw import host
from tilewright.measure.pool.turns import Stopwatch
from tilewright.measure.pool.wire import (
    RaceAnswer,
    RaceRequest,
    TrialRequest,
    encode,
    pool_job,
    request_name,
)
from tilewright.measure.trial import TaskJob
from tilewright.space.space import Config
from tilewright.space.template import Work
from tilewright.support.trace import Trace
from tilewright.tune.choose import Choice
from tilewright.tune.effort import Tuning
from tilewright.tune.tunable import TunableTask
from tilewright.tune.tuner import tune

pytest.importorskip("ray")  # its version must agree on all nodes
pytestmark = pytest.mark.usefixtures("token")
_DEVICES = 8
_TASKS = [product(32, 48, 40), product(64, 64, 64), product(17, 96, 33)]


class Racing(TestTimer):
    """It races too, with the times of its trials. `holds`: is called first."""

    def __init__(self, node: str, *options: Any, holds: Callable[[], object] = lambda: None) -> None:
        super().__init__(node, *options)
        self._holds = holds

    def race(self, message: bytes, data: bytes, *codes: bytes) -> bytes:
        request = msgspec.msgpack.decode(message, type=RaceRequest)
        self._holds()
        names = [request_name("trial", request.job, each.config, SEED) for each in request.candidates]
        return encode(RaceAnswer(tuple((seconds_of(name),) for name in names), 0.1))


class AllAtOnce:
    """The first trials wait for each other, until so many devices have one."""

    def __init__(self, devices: int) -> None:
        self._barrier, self.happened = threading.Barrier(devices), threading.Event()

    def __call__(self, request: TrialRequest, watch: Stopwatch) -> None:
        if not self.happened.is_set() and not self._barrier.broken:
            try:
                self._barrier.wait(20.0)
            except threading.BrokenBarrierError:
                return
            self.happened.set()


def tuned(runner: Driver, tasks: list[Task], tuning: Tuning) -> dict[str, Choice]:
    return tune(
        {task.key: (TunableTask(Work(task, host()), 1), 1) for task in tasks},
        tuning,
        threads=1,
        trace=Trace.off(),
        runner=lambda threads: runner,
    )


@pytest.mark.parametrize("tasks", [1, 3])
def test_a_tuner_keeps_eight_devices_busy(tasks: int, tmp_path: Path) -> None:
    together = AllAtOnce(_DEVICES)
    workers = pool(*(lambda n=n: Racing(f"node{n}", together) for n in range(_DEVICES)))
    tuning = Tuning("quick", 60.0, search="random", db=tmp_path / "tuning.db", trials=12 * tasks)
    with Driver(workers) as runner:
        choices = tuned(runner, _TASKS[:tasks], tuning)
    assert together.happened.is_set()
    assert {choice.origin.kind for choice in choices.values()} == {"tuned"}
    with Database.open(tuning.db) as database:
        trials = [(record.key, record.config) for record in database.records()]
    assert len(trials) == len(set(trials)) == 12 * tasks
    assert sum(use.trials for use in runner.use.values()) == 12 * tasks


def test_trials_that_have_ended_are_kept_when_no_device_is_left(tmp_path: Path) -> None:
    workers = pool(lambda: Racing("node0", lambda request, watch: drain()))
    timer = workers.handles[f"timer/node0/{LABEL}/0"].actor

    def drain() -> None:
        if len(timer.measured) == 4:
            timer.drain()

    tuning = Tuning("quick", 60.0, search="random", db=tmp_path / "tuning.db", trials=36)
    with Driver(workers) as runner, pytest.raises(MeasurementError, match="times kernels for this device"):
        tuned(runner, _TASKS, tuning)
    with Database.open(tuning.db) as database:
        assert len(database.records()) == len(timer.measured) >= 4


def test_prepared_trials_run_beside_others(job: TaskJob, configs: list[Config]) -> None:
    together = AllAtOnce(2)
    workers = pool(lambda: TestTimer("node0", together), lambda: TestTimer("node1", together))
    with Driver(workers) as runner:
        runner.prepare(job, configs[:1])
        assert seconds(runner, job, configs[1:2]) == expected(job, configs[1:2])
        assert together.happened.is_set()
        assert seconds(runner, job, configs[:1]) == expected(job, configs[:1])
        assert sum(use.trials for use in runner.use.values()) == 2


def test_prepared_trials_that_have_ended_are_kept(job: TaskJob, configs: list[Config]) -> None:
    """The other one is forgotten, and can be measured later."""
    begun, let_go = threading.Event(), threading.Event()
    (late,) = (request_of(job, config) for config in configs[1:2])

    def trouble(request: TrialRequest, watch: Stopwatch) -> None:
        if request.trial == late:
            begun.set()
            let_go.wait(60.0)

    workers = pool(*(lambda n=n: TestTimer(f"node{n}", trouble) for n in range(3)))  # one that is always free
    with Driver(workers) as runner:
        runner.build(job, configs[:3])
        runner.prepare(job, configs[:2])
        assert begun.wait(60.0)
        for _ in until(lambda: runner._trials[job, configs[0]].has_ended):
            runner.measure(job, configs[2:3])
        assert [each.config for each in runner.prepared(job, configs[:2])] == configs[:1]
        let_go.set()
        assert seconds(runner, job, configs[1:2]) == expected(job, configs[1:2])


def test_a_prepared_trial_counts_whose_answer_has_arrived(job: TaskJob, configs: list[Config]) -> None:
    with Driver(pool(lambda: TestTimer("node0"))) as runner:
        runner.build(job, configs[:1])
        runner.prepare(job, configs[:1])
        assert not wait_for(list(runner._running), 60.0).not_done
        assert [each.config for each in runner.prepared(job, configs[:1])] == configs[:1]


def test_a_forgotten_trial_that_fails_is_not_given_again(job: TaskJob, configs: list[Config]) -> None:
    begun, let_go = threading.Event(), threading.Event()
    late, tried = request_of(job, configs[0]), []

    def trouble(request: TrialRequest, watch: Stopwatch) -> None:
        tried.append(request.trial)
        if request.trial == late:
            begun.set()
            let_go.wait(60.0)
            raise OSError(errno.ENOSPC, "No space left on device")

    workers = pool(lambda: TestTimer("node0", trouble), lambda: TestTimer("node1", trouble))
    with Driver(workers) as runner:
        runner.build(job, configs)
        runner.prepare(job, configs[:1])
        assert begun.wait(60.0)
        assert runner.prepared(job, configs[:1]) == []
        let_go.set()
        for _ in until(lambda: workers.aside):
            runner.measure(job, configs[1:2])
        runner.measure(job, configs[2:])
        assert runner.given_again == 0 and tried.count(late) == 1


def request_of(job: TaskJob, config: Config) -> str:
    return request_name("trial", pool_job(job), config, SEED)


def test_a_race_that_hangs_ends_with_the_run(job: TaskJob, configs: list[Config]) -> None:
    let_go = threading.Event()
    workers = pool(lambda: Racing("node0", holds=lambda: let_go.wait(20.0)))
    with Driver(workers) as runner:
        assert runner.race(job, configs[:2], 0.1, deadline=time.monotonic() + 0.2) == [[], []]
        let_go.set()
        assert all(runner.race(job, configs[2:4], 0.1, deadline=time.monotonic() + 60.0))


def test_a_winner_is_chosen_without_the_race_that_hangs(tmp_path: Path) -> None:
    for budget in (2.0, 4.0, 8.0, 16.0, 32.0):  # on a busy machine a run may be over before its first trial
        let_go = threading.Event()
        workers = pool(lambda let_go=let_go: Racing("node0", holds=lambda: let_go.wait(60.0)))
        tuning = Tuning("quick", budget, search="random", db=tmp_path / f"{budget}.db", trials=12)
        with Driver(workers) as runner:
            (choice,) = tuned(runner, _TASKS[:1], tuning).values()
        let_go.set()
        if choice.seconds is not None:
            break
    assert choice.seconds is not None and choice.seconds < 1.0
    with Database.open(tuning.db) as database:
        assert database.records()


def test_races_have_what_trials_leave_of_a_budget(job: TaskJob, configs: list[Config]) -> None:
    """Each trial uses half a second of the device, and each race a tenth."""
    soon = time.monotonic() + 60.0
    with Driver(pool(lambda: Racing("node0")), budget=1.05) as runner:
        runner.measure(job, configs[:2])
        assert runner.spent
        assert runner.measure(job, configs[2:3], deadline=soon) == []
        assert all(runner.race(job, configs[:2], 0.1, deadline=soon))
        assert runner.race(job, configs[:2], 0.1, deadline=soon) == [[], []]
