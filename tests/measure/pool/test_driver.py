"""The driver and its workers, without Ray: what hangs and what only waits, bad nodes, and what counts."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tests.faults.candidates import product
from tests.measure.pool.threads import (
    LABEL,
    MADE,
    SEED,
    Driver,
    Handle,
    TestBuilder,
    TestTimer,
    ThreadWorkers,
    expected,
    pool,
    seconds,
    works_a_little,
)
from tilewright.errors import MeasurementError, PoolError
from tilewright.hw import host
from tilewright.measure.building import Made
from tilewright.measure.failed import Failed
from tilewright.measure.pool.connection import seed_of
from tilewright.measure.pool.turns import Stopwatch
from tilewright.measure.pool.wire import (
    BuildAnswer,
    BuildRequest,
    Hello,
    RaceAnswer,
    TrialRequest,
    encode,
    pool_job,
    request_name,
)
from tilewright.measure.pool.workers import LostObject
from tilewright.measure.trial import TaskJob
from tilewright.space.space import Config
from tilewright.space.template import Work

pytest.importorskip("ray")  # its version must agree on all nodes
pytestmark = pytest.mark.usefixtures("token")


def once(what: Callable[[TrialRequest, Stopwatch], None]) -> Callable[[TrialRequest, Stopwatch], None]:
    """For the first trial alone."""
    trials: list[str] = []

    def trouble(request: TrialRequest, watch: Stopwatch) -> None:
        trials.append(request.trial)
        if len(trials) == 1:
            what(request, watch)

    return trouble


# -- what hangs, and what waits ----------------------------------------------------------------------------------------


def starts_slowly(request: TrialRequest, watch: Stopwatch) -> None:
    with watch.paused():
        time.sleep(2.5)


def works_long(request: TrialRequest, watch: Stopwatch) -> None:
    time.sleep(4.0)


def test_a_process_that_starts_slowly_does_not_hang(job: TaskJob, configs: list[Config]) -> None:
    starting = once(starts_slowly)
    workers = pool(lambda: TestTimer("node0", starting), lambda: TestTimer("node1", starting))
    with Driver(workers, patience=2.0) as runner:
        assert seconds(runner, job, configs) == expected(job, configs)
        assert runner.given_again == 0
    assert all(handle.starts == 1 for handle in workers.handles.values())


def test_a_trial_that_takes_too_long_hangs(job: TaskJob, configs: list[Config]) -> None:
    long = once(works_long)
    workers = pool(lambda: TestTimer("node0", long), lambda: TestTimer("node1", long))
    with Driver(workers, patience=0.3) as runner:
        assert seconds(runner, job, configs) == expected(job, configs)
        assert 1 <= runner.given_again <= 2  # that one, and perhaps what waited behind it
        assert any("is set aside: TimeoutError: no answer within 0 s of its work" in n for n in runner.notes)
    assert sum(handle.starts for handle in workers.handles.values()) == 4  # one was started anew


def test_a_worker_that_does_not_reply_hangs(job: TaskJob, configs: list[Config]) -> None:
    class Silent(TestTimer):
        def in_progress(self) -> bytes:
            time.sleep(4.0)
            return super().in_progress()

    long = once(works_long)
    with Driver(pool(lambda: Silent("node0", long)), patience=0.2, reply=0.3) as runner:
        assert seconds(runner, job, configs[:3]) == expected(job, configs[:3])
        assert any("no reply within 0 s" in note for note in runner.notes)


def test_a_lost_request_is_given_again(job: TaskJob, configs: list[Config]) -> None:
    lost = threading.Event()

    class Losing(TestTimer):
        def trial(self, message: bytes, code: bytes, data: bytes = b"") -> bytes:
            if not lost.is_set():
                lost.set()
                time.sleep(6.0)
            return super().trial(message, code, data)

    with Driver(pool(lambda: Losing("node0")), patience=0.2) as runner:
        assert seconds(runner, job, configs[:3]) == expected(job, configs[:3])
        assert any("does not have the request any more" in note for note in runner.notes)


class Unreachable(TestTimer):
    """Its connections break in its first trial: it lives, and nothing reaches it. What starts anew can be reached."""

    starts, pid = 0, 4321

    def __init__(self, node: str) -> None:
        type(self).starts += 1
        self._is_cut, self._cuts = False, self.starts == 1
        super().__init__(node)

    def trial(self, message: bytes, code: bytes, data: bytes = b"") -> bytes:
        self._is_cut = self._cuts
        self._reach()
        return super().trial(message, code, data)

    def hello(self) -> bytes:
        self._reach()
        hello = msgspec.msgpack.decode(super().hello(), type=Hello)
        return encode(msgspec.structs.replace(hello, pid=self.pid))

    def in_progress(self) -> bytes:
        self._reach()
        return super().in_progress()

    def _reach(self) -> None:
        if self._is_cut:
            raise ConnectionError("failed to connect")


def test_a_worker_that_cannot_be_reached_is_started_anew(
    job: TaskJob, configs: list[Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tilewright.measure.pool.workers._PAUSE", 0.01)
    monkeypatch.setattr(Unreachable, "starts", 0)
    ended: list[int] = []

    class Ending(TestBuilder):
        def end(self, pid: int) -> None:
            ended.append(pid)
            workers.handles[f"timer/node0/{LABEL}/0"].restart()

    workers = pool(lambda: Unreachable("node0"), lambda: TestTimer("node1", works_a_little), builders=())
    workers.handles["builder/node0/0"] = Handle(lambda: Ending("node0", MADE))
    with Driver(workers) as runner:
        until = time.monotonic() + 20
        while Unreachable.starts < 2 and time.monotonic() < until:
            assert seconds(runner, job, configs) == expected(job, configs)
            workers.refresh(0.1)
    deadline = time.monotonic() + 10
    while len(workers.timers()) < 2 and time.monotonic() < deadline:
        workers.refresh(0.1)
    assert len(workers.timers()) == 2
    assert ended == [Unreachable.pid]


def test_a_worker_ends_only_workers_of_its_node() -> None:
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as child:  # not one that its parent has started
        worker = TestTimer("node0")
        worker.end(child.pid)
        assert child.poll() is None
        child.communicate(b"\n")
    assert child.returncode == 0


def test_waiting_for_another_user_is_no_hang(job: TaskJob, configs: list[Config]) -> None:
    """All have their trials at one device, and most wait there for longer than a trial may take."""

    def work(request: TrialRequest, watch: Stopwatch) -> None:
        time.sleep(0.4)

    workers = pool(lambda: TestTimer("node0", work))
    own_configs = {user: configs[2 * n : 2 * n + 2] for n, user in enumerate("abcd")}
    found: dict[str, list[float | None]] = {}

    def drive(user: str) -> None:
        own = ThreadWorkers({})
        own.handles = workers.handles
        with Driver(own, user, patience=2.0) as runner:
            found[user] = seconds(runner, job, own_configs[user])
            assert runner.given_again == 0

    drivers = [threading.Thread(target=drive, args=(user,)) for user in own_configs]
    for each in drivers:
        each.start()
    for each in drivers:
        each.join(60)
    assert found == {user: expected(job, some) for user, some in own_configs.items()}


# -- bad nodes: a message with the node's name, and the rest goes on ---------------------------------------------------


def introduced(**changed: Any) -> type[TestTimer]:
    """A timer that says something else of itself."""

    class Other(TestTimer):
        def hello(self) -> bytes:
            hello = msgspec.msgpack.decode(super().hello(), type=Hello)
            return encode(msgspec.structs.replace(hello, **changed))

    return Other


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"version": "0.0.9"}, "has tilewright 0.0.9, the driver "),
        ({"ray": "1.2.3"}, "has Ray 1.2.3, the driver "),
        ({"ray": ""}, "has Ray of an unknown version, the driver "),
        ({"python": "3.99.1"}, "has Python 3.99, the driver "),
    ],
)
def test_another_version_on_a_node(
    job: TaskJob, configs: list[Config], changed: dict[str, str], message: str
) -> None:
    workers = pool(lambda: introduced(**changed)("node0"), lambda: TestTimer("node1"))
    with Driver(workers) as runner:
        assert seconds(runner, job, configs) == expected(job, configs)
        assert set(runner.use) == {f"{LABEL} on node1"}
    (note,) = runner.notes
    assert "the node node0 on " in note and message in note


def test_a_clock_that_is_off(job: TaskJob, configs: list[Config]) -> None:
    workers = pool(lambda: introduced(clock=time.time() - 5000.0)("node0"), lambda: TestTimer("node1"))
    with Driver(workers) as runner:
        assert len(workers.timers()) == 2
        assert seconds(runner, job, configs) == expected(job, configs)
        runner._refresh()
    (note,) = runner.notes
    assert note.startswith("the clock of the node node0 on ") and "is off by -500" in note


def test_a_device_that_nobody_has() -> None:
    workers = pool(lambda: TestTimer("node0"))
    workers.refresh(2.0)
    with pytest.raises(PoolError, match=f"the pool has no device 'cuda:h200'; it has {LABEL}"):
        workers.choose("cuda:h200")


def full(request: TrialRequest, watch: Stopwatch) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_of_a_timer(job: TaskJob, configs: list[Config]) -> None:
    workers = pool(lambda: TestTimer("node0", full), lambda: TestTimer("node1", works_a_little))
    with Driver(workers) as runner:
        assert seconds(runner, job, configs) == expected(job, configs)
    assert any("timer/node0/" in note and "the disk is full" in note for note in runner.notes)


def test_a_full_disk_of_a_builder(job: TaskJob, configs: list[Config]) -> None:
    no_space = Failed("crash", "OSError: [Errno 28] No space left on device")
    workers = pool(lambda: TestTimer("node0"), builders=(no_space, MADE))
    with Driver(workers) as runner:
        assert seconds(runner, job, configs) == expected(job, configs)
    assert any("builder/node0/0" in note and "No space left" in note for note in runner.notes)


def test_a_node_with_another_token(
    job: TaskJob, configs: list[Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stranger() -> TestTimer:
        with monkeypatch.context() as patch:
            patch.setenv("RAY_AUTH_TOKEN", "f" * 64)
            return TestTimer("node0")

    with Driver(pool(stranger, lambda: TestTimer("node1", works_a_little))) as runner:
        assert seconds(runner, job, configs) == expected(job, configs)
        assert set(runner.use) == {f"{LABEL} on node1"}
    assert any("timer/node0/" in n and "is not what a builder of this pool made" in n for n in runner.notes)


def test_all_nodes_are_in_trouble(job: TaskJob, configs: list[Config]) -> None:
    """A trial is given to workers three times at most, and then missing."""
    with Driver(pool(lambda: TestTimer("node0", full), lambda: TestTimer("node1", full))) as runner:
        assert runner.measure(job, configs[:1]) == []
        assert runner.given_again == 2
        assert any("given up after 3 attempts: the disk is full" in note for note in runner.notes)


@pytest.mark.parametrize("shared", [False, True], ids=["other configs", "equal configs"])
def test_builds_of_another_job_that_fail_cost_this_one_nothing(
    job: TaskJob, configs: list[Config], shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tilewright.measure.pool.workers._PAUSE", 0.01)
    other = TaskJob.of(Work(product(16, 24, 40), host()), 1)

    class Picky(TestBuilder):
        def _built(self, request: BuildRequest, watch: Stopwatch) -> tuple[bytes, bytes]:
            if request.job == pool_job(other):
                return encode(BuildAnswer(trouble="not this job")), b""
            return super()._built(request, watch)

    workers = pool(lambda: TestTimer("node0", lambda request, watch: time.sleep(0.2)), builders=())
    workers.handles["builder/node0/0"] = Handle(lambda: Picky("node0", MADE))
    mine = configs[:4]
    with Driver(workers) as runner:
        runner.prepare(other, mine[:2] if shared else configs[4:6])
        assert seconds(runner, job, mine) == expected(job, mine)
        assert runner.measure(other, mine[:1]) == []
    assert any("given up after 3 attempts: not this job" in note for note in runner.notes)


def test_nobody_is_left(job: TaskJob, configs: list[Config]) -> None:
    workers = pool(lambda: TestTimer("node0"))
    with Driver(workers) as runner:
        workers.set_aside(workers.timers()[0], "it is being drained", for_good=True)
        with pytest.raises(MeasurementError, match=f"timer/node0/{LABEL}/0: it is being drained"):
            runner.measure(job, configs)


class Counting(TestBuilder):
    """It lists the configs that it received."""

    def __init__(self, node: str, reply: Made | Failed) -> None:
        super().__init__(node, reply)
        self.built: list[Config] = []

    def _built(self, request: BuildRequest, watch: Stopwatch) -> tuple[bytes, bytes]:
        self.built.append(request.config)
        return super()._built(request, watch)


class Forgetful(TestTimer):
    """The object code of its first requests is gone: it was on a node that died."""

    losses = 2

    def trial(self, message: bytes, code: bytes, data: bytes = b"") -> bytes:
        self._lose()
        return super().trial(message, code, data)

    def race(self, message: bytes, data: bytes, *codes: bytes) -> bytes:
        self._lose()
        return encode(RaceAnswer(((1e-5,), (2e-5,)), 0.1))

    def _lose(self) -> None:
        if self.losses:
            self.losses -= 1
            raise LostObject("gone")


def counting(timer: Callable[[], Any]) -> tuple[ThreadWorkers, Counting]:
    workers = pool(timer, builders=())
    workers.handles["builder/node0/0"] = Handle(lambda: Counting("node0", MADE))
    return workers, workers.handles["builder/node0/0"].actor


def test_lost_object_code_is_built_again(job: TaskJob, configs: list[Config]) -> None:
    workers, builder = counting(lambda: Forgetful("node0"))
    with Driver(workers) as runner:
        assert seconds(runner, job, configs) == expected(job, configs)
        assert runner.given_again == 2 and not runner.notes
    assert len(builder.built) == len(configs) + 2


def test_lost_object_code_of_a_race_is_built_again(job: TaskJob, configs: list[Config]) -> None:
    workers, builder = counting(lambda: Forgetful("node0"))
    with Driver(workers) as runner:
        assert runner.race(job, configs[:2], 0.1) == [[1e-5], [2e-5]]
    assert len(builder.built) == 3 * 2


def test_object_code_that_is_lost_again_and_again_is_given_up(job: TaskJob, configs: list[Config]) -> None:
    class Always(Forgetful):
        losses = 100

    workers, builder = counting(lambda: Always("node0"))
    with Driver(workers) as runner:
        assert runner.measure(job, configs[:1]) == []
        assert runner.race(job, configs[1:3], 0.1) == [[], []]
    assert len(builder.built) == 3 + 3 * 2


# -- what counts -------------------------------------------------------------------------------------------------------


def test_a_driver_that_is_started_again_has_the_answers(job: TaskJob, configs: list[Config]) -> None:
    workers = pool(lambda: TestTimer("node0"))
    with Driver(workers) as runner:
        first = runner.measure(job, configs)  # and is killed before it acknowledges
    timer = workers.handles[f"timer/node0/{LABEL}/0"].actor
    assert len(timer.measured) == len(configs)
    with Driver(workers) as runner:
        assert runner.measure(job, configs) == first
        assert len(timer.measured) == len(configs)  # nothing was measured again
        runner.acknowledge(job, first)
    deadline = time.monotonic() + 10
    while timer._answers and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not timer._answers


def test_an_answer_after_the_deadline_is_kept(job: TaskJob, configs: list[Config]) -> None:
    """It is in no database, so a driver that is started again can have it."""
    late = request_name("trial", pool_job(job), configs[0], SEED)

    def slow(request: TrialRequest, watch: Stopwatch) -> None:
        if request.trial == late:
            time.sleep(0.5)

    workers = pool(lambda: TestTimer("node0", slow))
    timer = workers.handles[f"timer/node0/{LABEL}/0"].actor
    with Driver(workers) as runner:
        runner.build(job, configs)
        assert runner.measure(job, configs[:1], deadline=time.monotonic() + 0.1) == []
        found = runner.measure(job, configs[1:2])
        assert set(timer._answers) == {late, request_name("trial", pool_job(job), configs[1], SEED)}
        runner.acknowledge(job, found)
        runner.measure(job, configs[2:3])
    deadline = time.monotonic() + 10
    while len(timer._answers) > 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(timer._answers) == {late, request_name("trial", pool_job(job), configs[2], SEED)}


def test_seeds_of_validation_inputs() -> None:
    assert seed_of("a" * 64, "me@here") == seed_of("a" * 64, "me@here")
    assert (
        len({seed_of("a" * 64, "me@here"), seed_of("a" * 64, "you@here"), seed_of("b" * 64, "me@here")}) == 3
    )


def test_budgets_of_device_time(job: TaskJob, configs: list[Config]) -> None:
    """Each trial uses half a second of the device."""
    with Driver(pool(lambda: TestTimer("node0")), budget=1.0) as runner:
        runner.measure(job, configs[:1])
        assert not runner.spent
        runner.measure(job, configs[1:2])
        assert runner.spent
        assert runner.measure(job, configs[2:], deadline=time.monotonic() + 60) == []
