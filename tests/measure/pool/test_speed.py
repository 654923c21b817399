"""Devices whose speed changes: who is set aside, and which trials another device measures again."""

from __future__ import annotations

import msgspec
import pytest

from tests.measure.pool.threads import (
    LABEL,
    Driver,
    TestTimer,
    Trouble,
    expected,
    pool,
    seconds,
    until,
    works_a_little,
)
from tilewright.measure.pool.references import DRIFT, References
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
