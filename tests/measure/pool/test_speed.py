"""Devices whose speed changes: who is set aside, and which trials another device measures again."""

from __future__ import annotations

import msgspec
import pytest

from tests.measure.pool.threads import (
    LABEL,
    Driver,
    Ended,
    Handle,
    TestTimer,
    ThreadWorkers,
    Trouble,
    expected,
    pool,
    seconds,
    until,
    works_a_little,
)
from tilewright.measure.pool.references import DRIFT, References, Speed
from tilewright.measure.pool.turns import Stopwatch
from tilewright.measure.pool.wire import TrialAnswer, TrialRequest
from tilewright.measure.trial import TaskJob
from tilewright.space.space import Config

pytest.importorskip("ray")  # its version must agree on all nodes
pytestmark = pytest.mark.usefixtures("token")


def test_a_device_that_is_slower_than_its_fellows_is_set_aside(job: TaskJob, configs: list[Config]) -> None:
    workers = pool(lambda: TestTimer("node0"), lambda: TestTimer("node1", reference=1.6e-5))
    with Driver(workers) as runner:
        for config in configs:
            runner.measure(job, [config])
        for _ in until(lambda: "timer/node1" in str(workers.aside)):
            runner.measure(job, configs)
    assert workers.aside == {
        f"timer/node1/{LABEL}/0": "its reference kernel takes 1.60x the time of its fellows'"
    }


class Slowing(TestTimer):
    """Its reference kernel takes twice as long after some trials."""

    def _measured(self, request: TrialRequest, code: bytes, data: bytes, watch: Stopwatch) -> TrialAnswer:
        answer = super()._measured(request, code, data, watch)
        return msgspec.structs.replace(answer, reference=1e-5 if len(self.measured) <= 4 else 2e-5)


def test_a_device_that_becomes_slower_is_set_aside(job: TaskJob, configs: list[Config]) -> None:
    workers = pool(lambda: Slowing("node0"), lambda: TestTimer("node1", works_a_little))
    with Driver(workers) as runner:
        for _ in range(20):
            runner.acknowledge(job, runner.measure(job, configs))
            if workers.aside:
                break
    assert workers.aside == {
        f"timer/node0/{LABEL}/0": "it became 2.00x slower: its clock or its load changed"
    }


def test_the_only_device_is_used_although_it_becomes_slower(job: TaskJob, configs: list[Config]) -> None:
    workers = pool(lambda: Slowing("node0"))
    with Driver(workers) as runner:
        assert seconds(runner, job, configs) == expected(job, configs)
    assert not workers.aside
    (note,) = runner.notes
    assert "it became 2.00x slower" in note and "No other device can do its work" in note


def again(workers: ThreadWorkers) -> ThreadWorkers:
    """The same actors, as a new driver meets them."""
    met = ThreadWorkers({})
    met.handles = workers.handles
    return met


def test_a_new_driver_knows_of_a_device_that_it_became_slower(job: TaskJob, configs: list[Config]) -> None:
    """The device tells it; else the slow times would be the first ones, which are what it is compared with."""
    workers = pool(lambda: Slowing("node0"))
    with Driver(workers) as first:
        first.acknowledge(job, first.measure(job, configs))
    met = again(workers)
    met.handles[f"timer/node1/{LABEL}/0"] = Handle(lambda: TestTimer("node1", works_a_little))
    with Driver(met) as second:
        second.measure(job, configs[:1])
    assert list(met.aside) == [f"timer/node0/{LABEL}/0"] and "2.00x slower" in str(met.aside)


class Unreached(TestTimer):
    """Does not answer the first greetings of a driver."""

    greetings = 2

    def hello(self) -> bytes:
        self.greetings -= 1
        if self.greetings >= 0:
            raise Ended("its connections broke")
        return super().hello()


def test_a_slower_device_waits_for_those_that_cannot_be_reached(job: TaskJob, configs: list[Config]) -> None:
    workers = pool(lambda: Slowing("node0"))
    with Driver(workers) as first:
        first.acknowledge(job, first.measure(job, configs))
    met = again(workers)
    met.handles[f"timer/node1/{LABEL}/0"] = Handle(lambda: Unreached("node1"))
    slow, steady = (met.handles[f"timer/node{n}/{LABEL}/0"].actor for n in range(2))
    before = len(slow.measured)
    with Driver(met) as second:
        assert seconds(second, job, configs) == expected(job, configs)
    assert f"timer/node0/{LABEL}/0" in met.aside
    assert (
        len(steady.measured) == len(configs) and len(slow.measured) - before <= 2
    )  # what it was given first


def test_devices_that_become_slower_together_go_on(job: TaskJob, configs: list[Config]) -> None:
    """Such as all cards of a machine whose clocks were lowered."""
    workers = pool(*(lambda n=n: TestTimer(f"node{n}", works_a_little) for n in range(3)))
    with Driver(workers) as first:
        for _ in until(
            lambda: all(t.references.change == 1.0 and t.references.are_known for t in workers.timers())
        ):
            first.acknowledge(job, first.measure(job, configs))
    for name, handle in workers.handles.items():
        if name.startswith("timer/"):
            handle.actor._reference *= 1.5
            handle.actor._references = References(Speed((1e-5,) * 3, (1.5e-5,) * 3, 9))
    met = again(workers)
    with Driver(met) as second:
        for _ in until(lambda: len(second.notes) >= 3):
            second.acknowledge(job, second.measure(job, configs))
    assert not met.aside and all("like its fellows" in note for note in second.notes[:3])


class Changing(TestTimer):
    """After some trials everything takes so many times as long, and after others as long as at first."""

    def __init__(self, node: str, factor: float, trials: range, trouble: Trouble) -> None:
        super().__init__(node, trouble)
        self._factor, self._trials = factor, trials

    def _measured(self, request: TrialRequest, code: bytes, data: bytes, watch: Stopwatch) -> TrialAnswer:
        answer = super()._measured(request, code, data, watch)
        assert answer.measurement is not None
        if len(self.measured) not in self._trials:
            return answer
        times = tuple(self._factor * each for each in answer.measurement.times)
        measured = msgspec.structs.replace(answer.measurement, times=times)
        return msgspec.structs.replace(
            answer, measurement=measured, reference=self._factor * answer.reference
        )


@pytest.mark.parametrize("factor", [2.0, 0.5])
@pytest.mark.parametrize("trials", [range(5, 6), range(5, 100)], ids=["for one trial", "for good"])
def test_trials_of_a_device_that_changes_are_measured_again(
    job: TaskJob, configs: list[Config], factor: float, trials: range
) -> None:
    workers = pool(
        lambda: Changing("node0", factor, trials, lambda request, watch: None),
        lambda: TestTimer("node1", works_a_little),
        lambda: TestTimer("node2", works_a_little),
    )
    timer, is_for_good = workers.handles[f"timer/node0/{LABEL}/0"].actor, len(trials) > 1
    with Driver(workers) as runner:
        for _ in until(lambda: workers.aside if is_for_good else len(timer.measured) >= 9):
            found = runner.measure(job, configs)
            assert [each.seconds for each in found] == expected(job, configs)
            runner.acknowledge(job, found)
    assert bool(workers.aside) == is_for_good


def test_a_device_that_is_faster_than_two_others_is_set_aside(job: TaskJob, configs: list[Config]) -> None:
    workers = pool(
        lambda: TestTimer("node0", reference=0.5e-5),
        lambda: TestTimer("node1", works_a_little),
        lambda: TestTimer("node2", works_a_little),
    )
    with Driver(workers) as runner:
        for _ in until(lambda: workers.aside):
            runner.acknowledge(job, runner.measure(job, configs))
    assert workers.aside == {
        f"timer/node0/{LABEL}/0": "its reference kernel takes 0.50x the time of its fellows'"
    }


def test_the_only_device_is_compared_with_its_faster_times(job: TaskJob, configs: list[Config]) -> None:
    """It was slowed at first: no change to the worse is noticed."""
    workers = pool(lambda: Changing("node0", 3.0, range(1, 4), lambda request, watch: None))
    with Driver(workers) as runner:
        runner.measure(job, configs)
    assert not workers.aside
    (note,) = runner.notes
    assert "it became 3.00x faster than at first" in note


def test_a_slow_drift_is_noticed() -> None:
    """From one trial to the next nothing happens: the first times are what counts."""
    seen = References()
    for trial in range(10_000):
        seen.add(1e-5 * (1 + trial / 30_000))
    assert seen.change > DRIFT
