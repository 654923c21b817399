"""A real pool of two nodes on this machine: measuring, faults, errors, and the command line."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import msgspec
import psutil
import pytest
import ray
import torch

import tilewright
from tests.faults.candidates import product
from tilewright.db.database import Database
from tilewright.errors import MeasurementError, OptionError, PoolError
from tilewright.hw import host
from tilewright.measure.pool import cluster
from tilewright.measure.pool.cluster import Device, device_here
from tilewright.measure.pool.driver import PoolRunner, comparable
from tilewright.measure.pool.wire import (
    BuildAnswer,
    BuildRequest,
    Candidate,
    TrialAnswer,
    TrialRequest,
    encode,
    seal,
    seal_key,
)
from tilewright.measure.pool.workers import Workers
from tilewright.measure.runner import Runner
from tilewright.measure.trial import TaskJob
from tilewright.space.candidates import Candidates
from tilewright.space.space import Config
from tilewright.space.template import Work

pytestmark = pytest.mark.slow  # Ray's nodes take half a minute, and leave threads and handlers in the process

PSEUDO = Device("cpu:pseudo", timing="tilewright.testing.pool:serve")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Two nodes with a builder each: one has this processor, both have a pseudo-device."""
    patch = pytest.MonkeyPatch()
    patch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    patch.delenv("RAY_AUTH_TOKEN", raising=False)
    try:
        address = cluster.up(port=free_port(), builders=1, devices=(device_here("cpu"), PSEUDO))
        cluster.join(address, builders=1, devices=(PSEUDO,))
        yield address
    finally:
        cluster.down()
        patch.undo()


@pytest.fixture
def workers(pool: str) -> Iterator[Workers]:
    with cluster.connected(pool, cluster.read_token(pool)):
        found = Workers()
        found.refresh()
        yield found


@pytest.fixture(scope="module")
def job() -> TaskJob:
    return TaskJob.of(Work(product(32, 48, 40), host()), 2)


@pytest.fixture(scope="module")
def configs(job: TaskJob) -> list[Config]:
    return Candidates.of(job.work(), sketches=False).sample(Random(0), 6)


def runner_of(workers: Workers, **options: float) -> PoolRunner:
    return PoolRunner(workers, 2, user="tester", seed=7, **options)


def only(workers: Workers, *labels: str) -> Workers:
    """Without the other devices."""
    for each in workers.timers():
        if each.hello.label not in labels:
            workers.set_aside(each, "not in this test", for_good=True)
    return workers


def test_everything_listens_on_loopback_alone(pool: str) -> None:
    nodes = [psutil.Process(node["pid"]) for node in cluster.nodes_here().values()]
    assert len(nodes) == 2
    processes = [each for node in nodes for each in (node, *node.children(recursive=True))]
    listening = [
        connection.laddr.ip
        for process in processes
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert listening and {address.removeprefix("::ffff:") for address in listening} <= {"127.0.0.1", "::1"}


def test_trials_as_a_local_runner_measures_them(
    workers: Workers, job: TaskJob, configs: list[Config]
) -> None:
    only(workers, f"cpu:{host().cpu}")
    with runner_of(workers) as runner:
        measured = runner.measure(job, configs)
        raced = runner.race(job, configs[:3], 0.2)
        runner.acknowledge(measured)
    assert [each.config for each in measured] == configs
    assert all(each.seconds and each.error is not None and each.error < 1e-5 for each in measured)
    assert all(raced)
    with Runner(2, builders=1, seed=7) as local:
        for ours, theirs in zip(measured, local.measure(job, configs), strict=True):
            assert (ours.failure, ours.error) == (theirs.failure, theirs.error)


def test_an_illegal_config_is_a_result(workers: Workers, job: TaskJob, configs: list[Config]) -> None:
    with runner_of(only(workers, PSEUDO.label)) as runner:
        wrong, right = runner.measure(job, [Config("nobody", ()), configs[0]])
    assert (wrong.failure, right.failure) == ("illegal", "")
    assert runner.given_again == 0


def test_a_killed_timer_costs_nothing(workers: Workers, job: TaskJob, configs: list[Config]) -> None:
    only(workers, PSEUDO.label)
    with runner_of(workers) as runner:
        expected = [each.seconds for each in runner.measure(job, configs)]
        os.kill(workers.timers()[0].hello.pid, signal.SIGKILL)
        again = runner_of(workers)
        assert [each.seconds for each in again.measure(job, configs)] == expected


def test_a_timer_that_hangs_is_given_up_and_started_anew(
    workers: Workers, job: TaskJob, configs: list[Config]
) -> None:
    only(workers, PSEUDO.label)
    with runner_of(workers) as runner:
        expected = [each.seconds for each in runner.measure(job, configs)]
    stopped = workers.timers()[0].hello.pid
    os.kill(stopped, signal.SIGSTOP)
    with runner_of(workers, patience=3.0) as runner:
        assert [each.seconds for each in runner.measure(job, configs)] == expected
        assert runner.given_again
    deadline = time.monotonic() + 20
    while psutil.pid_exists(stopped) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not psutil.pid_exists(stopped)


def test_code_that_no_builder_made_is_refused(workers: Workers, job: TaskJob, configs: list[Config]) -> None:
    timer = next(each for each in workers.timers() if each.hello.label == PSEUDO.label)
    answer, code = workers.builders()[0].build(encode(BuildRequest(job, configs[0])))
    built = msgspec.msgpack.decode(ray.get(answer), type=BuildAnswer)

    def trouble(name: str, code: bytes, seal: bytes, config: Config = configs[0]) -> str:
        request = TrialRequest(name, "tester", job, Candidate(config, seal), 7)
        return msgspec.msgpack.decode(
            ray.get(timer.ask("trial", encode(request), code)), type=TrialAnswer
        ).trouble

    made: bytes = ray.get(code)
    changed = made[:-1] + bytes([made[-1] ^ 1])
    foreign = seal(seal_key("another token"), job, configs[0], made)
    assert trouble("right", made, built.seal) == ""
    assert "builder of this pool" in trouble("changed", changed, built.seal)
    assert "builder of this pool" in trouble("another config", made, built.seal, configs[1])
    assert "builder of this pool" in trouble("another pool", made, foreign)


def test_an_answer_is_kept_until_it_is_acknowledged(
    workers: Workers, job: TaskJob, configs: list[Config]
) -> None:
    only(workers, f"cpu:{host().cpu}")
    with runner_of(workers) as runner:
        (first,) = runner.measure(job, configs[:1])
        (kept,) = runner_of(workers).measure(job, configs[:1])
        assert kept.times == first.times
        runner.acknowledge([first])
        (fresh,) = runner_of(workers).measure(job, configs[:1])
        assert fresh.times != first.times


def test_compile_tunes_on_the_pool(pool: str, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(24, 16), torch.nn.ReLU()).eval()
    x = torch.randn(8, 24)
    db = tmp_path / "tuning.sqlite"
    where = tilewright.Pool(pool, f"cpu:{host().cpu}")
    fast = tilewright.compile(model, (x,), effort="quick", budget="40s", pool=where, db=db)
    torch.testing.assert_close(fast(x), model(x))
    with Database.open(db) as database:
        assert any(record.times for record in database.records())
    again = tilewright.compile(model, (x,), db=db)
    assert {info.origin.kind for info in again.plan.tasks.values()} == {"tuned"}


def test_a_label_that_nobody_has(workers: Workers) -> None:
    with pytest.raises(PoolError, match="has no device 'cuda:h200'; it has cpu:"):
        workers.choose("cuda:h200")
    with pytest.raises(PoolError, match="names no device"):
        workers.choose(None)


def test_a_device_is_not_mixed_with_others_of_the_same_description(
    workers: Workers, job: TaskJob, configs: list[Config]
) -> None:
    own = f"cpu:{host().cpu}"
    assert workers.choose(own) == job.described
    with runner_of(workers) as runner:
        assert len(runner.measure(job, configs[:3])) == 3
    assert all(device.startswith(own) for device in runner.use)


def test_the_callers_signal_handler_is_kept(pool: str) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with cluster.connected(pool, cluster.read_token(pool)):
        pass
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_drained_node_takes_no_more(pool: str, job: TaskJob, configs: list[Config]) -> None:
    address = pool
    cluster.join(address, builders=1, devices=(PSEUDO,))
    newest = max(cluster.nodes_here(), key=lambda each: cluster.nodes_here()[each]["pid"])
    assert cluster.drain(newest, address) == 2
    with cluster.connected(address, cluster.read_token(address)):
        workers = Workers()
        workers.refresh()
        with runner_of(only(workers, PSEUDO.label)) as runner:
            assert len(runner.measure(job, configs)) == len(configs)
            assert not any(newest in device for device in runner.use)
    with pytest.raises(PoolError, match="no node 'nobody'"):
        cluster.drain("nobody", address)
    assert cluster.down((newest,)) == [newest]


def test_nobody_left(workers: Workers, job: TaskJob, configs: list[Config]) -> None:
    with runner_of(only(workers)) as runner, pytest.raises(MeasurementError, match="not in this test"):
        runner.measure(job, configs[:1])


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_a_wrong_token(pool: str, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("0" * 64)
    code = (
        "import sys; from pathlib import Path; from tilewright.measure.pool import cluster\n"
        "cluster.rows(sys.argv[1], Path(sys.argv[2]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, pool, str(token)], capture_output=True, text=True, check=False
    )
    assert "PoolError" in done.stderr and "refuses this process" in done.stderr


def test_addresses_and_options(pool: str, tmp_path: Path) -> None:
    missing = tmp_path / "none"
    with pytest.raises(PoolError, match="no token for the pool"):
        cluster.rows("127.0.0.1:1", missing)
    token = cluster.token_file(pool)
    with pytest.raises(PoolError, match="nobody answers"):
        cluster.rows("127.0.0.1:1", token)
    with pytest.raises(PoolError, match="no address"):
        cluster.rows("nowhere", token)
    with pytest.raises(PoolError, match="cannot listen"):
        cluster.up(port=int(pool.rpartition(":")[2]))
    with pytest.raises(OptionError, match="cpu, cuda"):
        device_here("tpu")
    with pytest.raises(PoolError, match="no node 'x'"):
        cluster.down(("x",))
    x = torch.zeros(2, 2)
    with pytest.raises(OptionError, match="needs no pool"):
        tilewright.compile(torch.nn.ReLU(), (x,), pool=pool)
    with pytest.raises(OptionError, match="device of the pool is the target"):
        tilewright.compile(torch.nn.ReLU(), (x,), pool=pool, target="cpu", effort="quick")
    with pytest.raises(OptionError, match="dynamic=True"):
        tilewright.compile(torch.nn.ReLU(), (x,), pool=pool, dynamic=True, effort="quick")


def test_another_version_is_not_used(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright.measure.pool.workers.VERSION", "9.9")
    reasons = Workers().refresh()
    assert reasons and all("the driver 9.9" in reason for reason in reasons.values())


def test_races_on_two_devices_are_made_comparable() -> None:
    a, b, c = (Config(name, ()) for name in "abc")
    times = comparable([{a: (1.0, 1.0), b: (2.0,)}, {a: (2.0, 2.0), c: (3.0,)}], a)
    assert times == {a: [1.0, 1.0], b: [2.0], c: [1.5]}


def test_the_command_line(pool: str) -> None:
    def tilewright_(*arguments: str) -> str:
        command = [sys.executable, "-m", "tilewright.cli", "pool", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    shown = tilewright_("ls", pool)
    assert f"cpu:{host().cpu}#" in shown and "builder" in shown
    assert '"state": "ready"' in tilewright_("ls", pool, "--json")
