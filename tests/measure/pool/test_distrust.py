"""Devices that cannot be trusted: who is believed, and who is set aside."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from tests.measure.pool.threads import (
    LABEL,
    SEED,
    Driver,
    TestTimer,
    Trouble,
    expected,
    pool,
    seconds,
    until,
)
from tilewright.measure.measurement import Measurement
from tilewright.measure.pool.turns import Stopwatch
from tilewright.measure.pool.wire import (
    RaceAnswer,
    TrialAnswer,
    TrialRequest,
    encode,
    pool_job,
    request_name,
)
from tilewright.measure.trial import TaskJob
from tilewright.space.space import Config
from tilewright.testing.pool import FaultyTimer, fault_log

pytest.importorskip("ray")  # its version must agree on all nodes
pytestmark = pytest.mark.usefixtures("token")


def one_after_the_other() -> tuple[Trouble, Trouble]:
    """For two devices: the second answers nothing before the first has a trial, so that it does not take all."""
    begun = threading.Event()

    def first(request: TrialRequest, watch: Stopwatch) -> None:
        begun.set()

    def second(request: TrialRequest, watch: Stopwatch) -> None:
        begun.wait(20)

    return first, second


def test_a_device_that_calls_right_candidates_wrong_is_set_aside(job: TaskJob, configs: list[Config]) -> None:
    first, second = one_after_the_other()
    workers = pool(lambda: TestTimer("node0", first, failure="wrong"), lambda: TestTimer("node1", second))
    with Driver(workers) as runner:
        assert seconds(runner, job, configs) == expected(job, configs)
    assert workers.aside == {
        f"timer/node0/{LABEL}/0": "it failed a candidate (wrong) that is right on timer/node1/cpu:test/0"
    }


class Crashing(TestTimer):
    """Its first trial crashes, as when the system ends a process."""

    def _measured(self, request: TrialRequest, code: bytes, data: bytes, watch: Stopwatch) -> TrialAnswer:
        answer = super()._measured(request, code, data, watch)
        if len(self.measured) > 1:
            return answer
        return TrialAnswer(request.trial, Measurement(request.candidate.config, failure="crash"), 1e-5, 0.5)


def test_a_device_comes_back_after_one_crash(
    job: TaskJob, configs: list[Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tilewright.measure.pool.workers._PAUSE", 0.01)
    first, second = one_after_the_other()
    workers = pool(lambda: Crashing("node0", first), lambda: TestTimer("node1", second))
    with Driver(workers) as runner:
        assert seconds(runner, job, configs) == expected(job, configs)
        assert any("it failed a candidate (crash) that is right on timer/node1/" in n for n in runner.notes)
    deadline = time.monotonic() + 10
    while len(workers.timers()) < 2 and time.monotonic() < deadline:
        workers.refresh(0.1)
    assert len(workers.timers()) == 2


class Wrong(TestTimer):
    """Its answers are well-formed; `changed`: what is wrong in them."""

    def __init__(self, node: str, trouble: Trouble, **changed: Any) -> None:
        super().__init__(node, trouble)
        self._changed = changed

    def _measured(self, request: TrialRequest, code: bytes, data: bytes, watch: Stopwatch) -> TrialAnswer:
        answer = super()._measured(request, code, data, watch)
        inner = {name: value for name, value in self._changed.items() if name not in ("reference", "busy")}
        outer = {name: value for name, value in self._changed.items() if name not in inner}
        assert answer.measurement is not None
        return msgspec.structs.replace(
            answer, measurement=msgspec.structs.replace(answer.measurement, **inner), **outer
        )


@pytest.mark.parametrize(
    "changed",
    [
        {"times": (0.0,)},
        {"times": (1e-5, math.nan)},
        {"times": (-1e-5,)},
        {"times": (math.inf,)},
        {"times": ()},
        {"reference": math.nan},
        {"busy": -5.0},
    ],
    ids=str,
)
def test_times_that_cannot_be_true(job: TaskJob, configs: list[Config], changed: dict[str, Any]) -> None:
    first, second = one_after_the_other()
    workers = pool(lambda: Wrong("node0", first, **changed), lambda: TestTimer("node1", second))
    with Driver(workers) as runner:
        assert seconds(runner, job, configs) == expected(job, configs)
        assert set(runner.use) == {f"{LABEL} on node1"}
    assert any("timer/node0/" in note and "it answered " in note for note in runner.notes)


def test_races_with_times_that_cannot_be_true(job: TaskJob, configs: list[Config]) -> None:
    class Racing(TestTimer):
        wrong = 3

        def race(self, message: bytes, data: bytes, *codes: bytes) -> bytes:
            self.wrong -= 1
            return encode(RaceAnswer(((1e-5,), (0.0 if self.wrong > 0 else 2e-5,)), 0.1))

    with Driver(pool(lambda: Racing("node0"))) as runner:
        assert runner.race(job, configs[:2], 0.1) == [[1e-5], [2e-5]]
        assert runner.given_again == 2


class Lying(FaultyTimer, TestTimer):
    """Half of its answers are well-formed and wrong, or damaged."""

    __test__ = False


def test_answers_that_are_well_formed_and_wrong(
    job: TaskJob, configs: list[Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("tilewright.testing.pool._FAULT_RATE", 0.5)
    monkeypatch.setattr("tilewright.testing.pool.FAULTS", ("zero", "accuse", "corrupt"))
    monkeypatch.setattr("tilewright.measure.pool.workers._PAUSE", 0.01)
    workers = pool(lambda: Lying("node0"), lambda: TestTimer("node1"))
    workers.handles[f"timer/node0/{LABEL}/0"].actor._random = Random(3)
    with Driver(workers) as runner:
        while len(set(logged := fault_log().read_text().split() if fault_log().exists() else [])) < 3:
            found = runner.measure(job, configs)
            assert [each.seconds for each in found] == expected(job, configs)
            runner.acknowledge(job, found)
    assert set(logged) == {"zero", "accuse", "corrupt"}


class Accusing(TestTimer):
    """It calls one candidate wrong. `accused`: its trial."""

    accused = ""

    def _measured(self, request: TrialRequest, code: bytes, data: bytes, watch: Stopwatch) -> TrialAnswer:
        self._failure = "wrong" if request.trial == self.accused else ""
        return super()._measured(request, code, data, watch)


class Flickering(TestTimer):
    """Its speed is another when it first measures one candidate. `off`: its trial; `then`: is called after it."""

    off = ""

    def then(self) -> None:
        pass

    def _measured(self, request: TrialRequest, code: bytes, data: bytes, watch: Stopwatch) -> TrialAnswer:
        answer = super()._measured(request, code, data, watch)
        if request.trial != self.off:
            return answer
        self.then()
        return msgspec.structs.replace(answer, reference=1e-5 if self.measured.count(self.off) > 1 else 2e-5)


@pytest.mark.parametrize("first", ["Accusing", "Flickering"])
def test_a_device_does_not_confirm_itself(
    job: TaskJob, configs: list[Config], monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """Both devices have tried a candidate: one calls it wrong, and the other was off its speed. Nor does the driver
    leave such answers with the devices, which would repeat them."""
    workers = pool(lambda: Accusing("node0"), lambda: Flickering("node1"))
    names = {"Accusing": f"timer/node0/{LABEL}/0", "Flickering": f"timer/node1/{LABEL}/0"}
    accusing, flickering = (workers.handles[name].actor for name in names.values())
    accusing.accused = flickering.off = trial = request_name("trial", pool_job(job), configs[7], SEED)
    preferred = [names[first]]
    flickering.then = lambda: preferred.append(names["Accusing"])
    timers = workers.timers
    monkeypatch.setattr(
        workers,
        "timers",
        lambda machine=None: sorted(timers(machine), key=lambda each: each.name != preferred[-1]),
    )
    with Driver(workers) as runner:
        for _ in until(lambda: all(each.references.are_known for each in workers.timers())):
            runner.measure(job, configs[:7])
        assert seconds(runner, job, configs[7:]) == expected(job, configs[7:])
    assert trial in accusing.measured and trial in flickering.measured
    assert workers.aside[names["Accusing"]].startswith("it failed a candidate (wrong) that is right on ")
    for _ in until(lambda: trial not in accusing._answers):
        time.sleep(0.01)
