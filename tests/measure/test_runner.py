"""Trials in processes of their own: times that can be relied on, and failures that cost one candidate."""

from __future__ import annotations

import importlib
import math
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from random import Random

import pytest

from benchmarks import many_timing
from benchmarks.builds import ManyRunner
from tests.faults.candidates import product, softmax
from tests.faults.kernels import with_part
from tests.space.checked import Inputs
from tilewright.errors import MeasurementError, TilewrightWarning
from tilewright.graph.op import apply
from tilewright.hw import host
from tilewright.measure import timing
from tilewright.measure.building import Made
from tilewright.measure.failed import Failed
from tilewright.measure.measurement import Measurement, typical
from tilewright.measure.reference_kernel import DriftMonitor
from tilewright.measure.runner import Runner
from tilewright.measure.timing import Timed, interval_width
from tilewright.measure.trial import TaskJob
from tilewright.space.candidates import Candidates
from tilewright.space.outcome import FAILURES, Outcome
from tilewright.space.sketches import register, unregister
from tilewright.space.space import Config
from tilewright.space.template import Work
from tilewright.space.templates.default import DEFAULT

NOBODY = Config("nobody", ())


@pytest.fixture(scope="module")
def many() -> Iterator[ManyRunner]:
    with ManyRunner(2, builders=2) as runner:
        yield runner


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner(2, builders=2) as runner:
        yield runner


@pytest.fixture(scope="module")
def job() -> TaskJob:
    return TaskJob.of(Work(product(32, 48, 40), host()), 2)


@pytest.fixture(scope="module")
def configs(job: TaskJob) -> list[Config]:
    return [DEFAULT, *Candidates.of(job.work(), sketches=False).sample(Random(0), 3)]


def test_a_task_survives_the_journey(job: TaskJob) -> None:
    assert TaskJob.of(job.work(), job.threads) == job


def test_one_measurement_for_each_config_in_order(
    runner: Runner, job: TaskJob, configs: list[Config]
) -> None:
    asked = [configs[0], NOBODY, *configs[1:], configs[0]]
    measured = runner.measure(job, asked)
    assert [one.config for one in measured] == asked
    bad = measured.pop(1)
    assert (bad.failure, bad.seconds, bad.times) == ("illegal", None, ()) and "nobody" in bad.message
    assert bad.outcome == Outcome(NOBODY, None, "illegal")
    for one in measured:
        assert one.failure == "" and one.error is not None and one.error < 1e-6
        assert one.times and min(one.times) > 0 and one.build_seconds > 0
        assert min(one.times) <= (one.seconds or 0) <= max(one.times)
        assert one.outcome == Outcome(one.config, one.seconds)


def test_tasks_take_turns(runner: Runner, job: TaskJob) -> None:
    other = TaskJob.of(Work(softmax(), host()), 1)
    for _ in range(2):
        for one in (job, other):
            (measured,) = runner.measure(one, [DEFAULT])
            assert measured.failure == ""


def test_a_race_gives_each_its_times_and_a_bad_one_none(
    runner: Runner, job: TaskJob, configs: list[Config]
) -> None:
    one, nothing, other = runner.race(job, [configs[0], NOBODY, configs[1]], 0.05)
    assert nothing == [] and min(len(one), len(other)) >= 5
    assert runner.race(job, [NOBODY], 0.05) == [[]]


def test_successive_halving_gives_each_its_times_and_those_near_the_best_more(
    many: ManyRunner, job: TaskJob, configs: list[Config]
) -> None:
    made = {
        c: each for c, each in zip(configs, many.build(job, configs), strict=True) if isinstance(each, Made)
    }
    times = many.successive_halving(job, made, 0.1)
    assert set(times) == set(configs) and all(min(each) > 0 for each in times.values())
    assert len(min(times.values(), key=min)) == max(map(len, times.values())), "the best stays to the end"
    broken = with_part(made[configs[0]].built, code=b"nothing")
    bad = {**made, configs[0]: Made(broken, 0.0)}
    assert set(many.successive_halving(job, bad, 0.05)) == set(configs) - {configs[0]}


def test_a_screening_runs_what_nobody_has_checked(many: ManyRunner, job: TaskJob) -> None:
    drawn = dict.fromkeys(Candidates.of(job.work(), sketches=False).sample(Random(0), 20))
    configs = start, other, wrong, bad = tuple(drawn)[:4]
    made = {
        c: each for c, each in zip(configs, many.build(job, configs), strict=True) if isinstance(each, Made)
    }
    x = Inputs()
    summed = apply("add", apply("matmul", x(32, 40), x(40, 48, constant=True)), x(48, constant=True))
    (unlike,) = many.build(TaskJob.of(Work(x.task(apply("neg", summed)), host()), 2), [wrong])
    assert isinstance(unlike, Made)
    broken = Made(with_part(made[bad].built, code=b"nothing"), 0.0)
    screened = many.screen(job, start, {**made, wrong: unlike, bad: broken})
    assert tuple(screened) == configs
    for config in (start, other, wrong):
        ratio = screened[config]
        assert isinstance(ratio, float) and 0 < ratio < math.inf
    failed = screened[bad]
    assert isinstance(failed, Failed) and failed.kind == "build"
    assert many.screen(job, bad, {bad: broken}) == {bad: failed}
    assert set(many.successive_halving(job, {**made, wrong: unlike}, 0.05)) == {
        start,
        other,
        bad,
    }  # here it is found out


def test_configs_of_many_tasks_are_handed_over_as_they_are_built(
    many: ManyRunner, job: TaskJob, configs: list[Config]
) -> None:
    other = TaskJob.of(Work(softmax(), host()), 2)
    wanted = [(job, NOBODY), *((job, config) for config in configs), (other, DEFAULT)]
    found: dict[tuple[TaskJob, Config], Made | Failed] = {}
    many.build_all(wanted, lambda job, config, made: found.update({(job, config): made}))
    assert set(found) == set(wanted)
    assert [each for each in wanted if isinstance(found[each], Failed)] == [(job, NOBODY)]


def test_of_many_those_near_the_best_go_on() -> None:
    times = {number: [1.0 + 0.01 * number] * 3 for number in range(100)}
    assert many_timing._near(times, range(100), math.inf) == list(range(100))
    assert many_timing._near(times, range(100), 1.5) == list(range(51))
    assert many_timing._near(times, range(100), 1.1) == list(range(30))
    assert many_timing._near({**times, 7: []}, range(100), 1.1) == list(range(100))


def test_an_validation_that_is_expected_is_drawn_once(runner: Runner) -> None:
    """By the time it is wanted, or never: descriptors are closed either way."""
    job, other = (TaskJob.of(Work(softmax(rows, 33), host()), 2) for rows in (6, 9))
    for expected in (job, job, other):
        runner.expect(expected)
    (measured,) = runner.measure(job, [DEFAULT])
    assert measured.seconds is not None
    before = len(os.listdir("/proc/self/fd"))
    runner.expect(job)  # it is there
    with Runner(2, builders=1) as one:
        one.expect(other)
    assert len(os.listdir("/proc/self/fd")) == before


def test_processes_that_die_are_replaced(runner: Runner, job: TaskJob) -> None:
    runner.measure(job, [DEFAULT])
    for child in (runner._timer, *runner._builders):
        if child.pid is not None:
            os.kill(child.pid, signal.SIGKILL)
    measured = [one for config in (NOBODY, DEFAULT, DEFAULT) for one in runner.measure(job, [config])]
    assert all(one.failure in ("", *FAILURES) for one in measured)
    assert measured[-1].failure == ""


def test_what_there_is_no_time_for_is_missing_from_the_end(
    runner: Runner, job: TaskJob, configs: list[Config]
) -> None:
    assert runner.measure(job, configs, deadline=time.monotonic() - 1) == []
    begin = time.monotonic()
    many = Candidates.of(job.work(), sketches=False).sample(Random(1), 200)
    measured = runner.measure(job, many, deadline=begin + 1.0)
    assert [one.config for one in measured] == many[: len(measured)] and len(measured) < len(many)


def test_an_interrupt_is_passed_on_and_leaves_no_stale_answer(runner: Runner, job: TaskJob) -> None:
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT))
    many = Candidates.of(job.work(), sketches=False).sample(Random(2), 200)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        runner.measure(job, many)
    (measured,) = runner.measure(job, [DEFAULT])
    assert measured.failure == ""


def test_builders_have_the_rules_that_a_users_module_registers(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = Inputs()
    job = TaskJob.of(Work(x.task(apply("add", x(12, 20), x(20))), host()), 2)
    own_rule = importlib.import_module("tests.measure.own_rule")
    try:
        config = Config(f"sketch:{own_rule.NAME}", ())
        (measured,) = runner.measure(job, [config])
        assert measured.failure == "" and measured.seconds
        unregister(own_rule.NAME)
        monkeypatch.setattr(own_rule.Columns, "__module__", "__main__")
        monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
        register(own_rule.Columns())
        with pytest.warns(TilewrightWarning, match="put it into a module"):
            runner.measure(job, [DEFAULT])
    finally:
        unregister(own_rule.NAME)


def test_cold_and_warm(job: TaskJob) -> None:
    with Runner(1, builders=1, cold=True) as cold:
        (measured,) = cold.measure(TaskJob.of(job.work(), 1), [DEFAULT])
    assert measured.failure == "" and measured.seconds is not None


def test_a_candidate_that_was_timed_on_a_machine_with_other_work_is_timed_again() -> None:
    runner = Runner(2, builders=1)
    answers = iter(
        [
            Timed((1.0,), 1.0, True),
            *(Timed((2.0,), 1.3, False), Timed((1.5,), 1.1, True)),
            *(Timed((3.0 + number,), 1.5, False) for number in range(2)),  # it stays so: the last counts
        ]
    )
    runner._ask = lambda *_: next(answers)  # type: ignore[method-assign, assignment]
    assert [runner._steady_times(None, None) for _ in range(3)] == [(1.0,), (1.5,), (4.0,)]
    assert runner.drift == pytest.approx(1.5)


def test_stretches_in_which_the_machine_was_slower_do_not_count() -> None:
    times = timing.Times(best=None)
    for number in range(20):
        slow = number % 3 == 0
        times.add(2.0 if slow else 1.0, 1.3 if slow else 1.0, is_steady=not slow)
    assert times.suffice(1.0) and set(times.result().times) == {1.0} and times.result().steady
    disturbed = timing.Times(best=None)
    for _ in range(20):
        disturbed.add(2.0, 1.3, is_steady=False)
    assert not disturbed.suffice(0.01) and disturbed.suffice(1.0)
    assert not disturbed.result().steady and len(disturbed.result().times) == 20


def test_the_drift_of_the_machine() -> None:
    drift_monitor = DriftMonitor(host(), 1)
    drift_monitor._recent.clear()
    drift_monitor.note([1.0] * 100)
    assert (
        drift_monitor.is_steady(1.0, 1.05)
        and not drift_monitor.is_steady(1.0, 1.3)
        and not drift_monitor.is_steady(1.3, 1.0)
    )
    drift_monitor.note([1.3] * 50)
    assert not drift_monitor.is_steady(1.3, 1.3)
    drift_monitor.note([1.3] * 100)
    assert drift_monitor.is_steady(1.3, 1.3)  # it stays so
    drift_monitor.note([1.0] * 200)
    assert not drift_monitor.is_steady(1.3, 1.3)  # and it has recovered


def test_how_well_a_median_is_known() -> None:
    rng = Random(0)
    steady = [1 + rng.gauss(0, 0.01) for _ in range(60)]
    restless = [1 + rng.gauss(0, 0.2) for _ in range(60)]
    assert interval_width(steady) < 0.02 < interval_width(restless)
    assert interval_width([1.0, 1.0, 1.0]) == float("inf")
    for values, suffices in ((steady, True), (restless, False)):
        times = timing.Times(best=None)
        for value in values:
            times.add(value, 1.0, is_steady=True)
        assert times.suffice(0.01) == suffices and times.suffice(1.0)
    hopeless = timing.Times(best=0.1)
    for _ in range(3):
        hopeless.add(1.0, 1.0, is_steady=True)
    assert hopeless.suffice(0.0) and hopeless.result().steady


def test_the_interval_holds_the_median_as_often_as_it_says() -> None:
    rng = Random(1)
    held = 0
    for _ in range(300):
        times = sorted(rng.gauss(10, 1) for _ in range(41))
        below = round(41 / 2 - 0.98 * 41**0.5 - 0.5)
        held += times[below] <= 10 <= times[40 - below]
    assert held / 300 > 0.9


def test_typical_is_the_median() -> None:
    assert typical([3.0, 1.0, 2.0]) == 2.0
    assert Measurement(DEFAULT, times=(3.0, 1.0, 2.0)).seconds == statistics.median([1.0, 2.0, 3.0])


LIMITED = """
import resource, sys
from tests.measure.test_runner import full_disk
full_disk()
"""


def full_disk() -> None:
    """In a process of its own: files cannot grow, and no folder can be written."""
    import resource

    from tilewright.measure.runner import Runner

    job = TaskJob.of(Work(product(), host()), 1)
    with Runner(1, builders=1) as runner:
        (measured,) = runner.measure(job, [DEFAULT])
    assert measured.failure == "", measured
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with Runner(1, builders=1) as runner:
        try:
            runner.measure(job, [DEFAULT])
        except MeasurementError as error:
            print(error)


def test_without_a_writable_folder_it_works_and_a_full_disk_has_its_error() -> None:
    environment = {
        **os.environ,
        "TMPDIR": "/nonexistent",
        "TILEWRIGHT_CACHE_DIR": "/nonexistent",
        "PYTHONPATH": ".",
    }
    ran = subprocess.run(
        [sys.executable, "-c", LIMITED], check=False, capture_output=True, text=True, env=environment
    )
    assert "cannot store the inputs of a task" in ran.stdout, ran.stderr
    assert "disk space" in ran.stdout
