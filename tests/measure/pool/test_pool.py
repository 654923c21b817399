"""A real pool of two nodes on this machine: measuring, faults, errors, and the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import ray
import torch

import tilewright
import tilewright.tile as tl
from tests.faults.candidates import product
from tests.measure.pool.two_nodes import PSEUDO, free_port, listening
from tilewright.db.database import Database
from tilewright.errors import MeasurementError, OptionError, PoolError
from tilewright.hw import host
from tilewright.measure.kernel_job import KernelJob
from tilewright.measure.pool import cluster
from tilewright.measure.pool.cluster import Share, device_here
from tilewright.measure.pool.driver import PoolRunner
from tilewright.measure.pool.racing import comparable
from tilewright.measure.pool.wire import (
    BuildAnswer,
    BuildRequest,
    Candidate,
    TrialAnswer,
    TrialRequest,
    encode,
    pool_job,
    seal,
    seal_key,
)
from tilewright.measure.pool.workers import Workers
from tilewright.measure.runner import Runner
from tilewright.measure.trial import TaskJob
from tilewright.space.candidates import Candidates
from tilewright.space.space import Config
from tilewright.space.template import Work
from tilewright.support.trace import Trace
from tilewright.tune.progress import Progress

MODEL = "tests.measure.pool.two_nodes:small_model"
pytestmark = pytest.mark.slow  # Ray's nodes take half a minute, and leave threads and handlers in the process


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Two nodes with a builder each: one has this processor, both have a pseudo-device."""
    patch = pytest.MonkeyPatch()
    patch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    patch.delenv("RAY_AUTH_TOKEN", raising=False)
    try:
        address = cluster.up(Share(1, (device_here("cpu"), PSEUDO)), free_port())
        cluster.join(Share(1, (PSEUDO,)), address)
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
    assert len(cluster.nodes_here()) == 2
    assert {ip for ip, _ in listening()} <= {"127.0.0.1", "::1"}


def test_trials_as_a_local_runner_measures_them(
    workers: Workers, job: TaskJob, configs: list[Config]
) -> None:
    only(workers, f"cpu:{host().cpu}")
    with runner_of(workers) as runner:
        measured = runner.measure(job, configs)
        raced = runner.race(job, configs[:3], 0.2)
        runner.acknowledge(job, measured)
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
    answer, code = workers.builders()[0].build(
        encode(BuildRequest("build", "tester", pool_job(job), configs[0]))
    )
    built = msgspec.msgpack.decode(ray.get(answer), type=BuildAnswer)

    def trouble(name: str, code: bytes, seal: bytes, config: Config = configs[0]) -> str:
        request = TrialRequest(name, "tester", pool_job(job), Candidate(config, seal), 7)
        return msgspec.msgpack.decode(
            ray.get(timer.ask("trial", encode(request), code)), type=TrialAnswer
        ).trouble

    made: bytes = ray.get(code)
    changed = made[:-1] + bytes([made[-1] ^ 1])
    foreign = seal(seal_key("another token"), pool_job(job), configs[0], made)
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
        runner.acknowledge(job, [first])
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
    address, before = pool, set(cluster.nodes_here())
    cluster.join(Share(1, (PSEUDO,)), address)
    (newest,) = set(cluster.nodes_here()) - before
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


def test_object_code_that_dies_with_its_node_is_built_again(
    pool: str, job: TaskJob, configs: list[Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All processes of the node that built it are killed before it is timed."""
    before = set(cluster.nodes_here())
    with monkeypatch.context() as patch:
        patch.setenv(
            "RAY_max_direct_call_object_size", "0"
        )  # all answers stay on their node, as large ones do
        cluster.join(Share(1, ()), pool)
    (newest,) = set(cluster.nodes_here()) - before
    with cluster.connected(pool, cluster.read_token(pool)):
        workers = Workers()
        workers.refresh()
        others = [each for each in workers.builders() if each.hello.node != newest]
        for each in others:
            workers.set_aside(each, "not yet", for_good=True)
        with runner_of(only(workers, PSEUDO.label)) as runner:
            runner.build(job, configs)
            node = psutil.Process(cluster.nodes_here()[newest]["pid"])
            processes = [node, *node.children(recursive=True)]
            for process in processes:
                process.kill()
            psutil.wait_procs(processes, timeout=10)
            for each in others:
                del workers.aside[each.name]
            measured = runner.measure(job, configs)
            assert [each.config for each in measured] == configs
            assert all(each.seconds for each in measured)
            assert runner.given_again >= len(configs)
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
    with pytest.raises(PoolError, match="no pool answers"):
        cluster.rows("127.0.0.1:1", token)
    with pytest.raises(PoolError, match="is not the address of a pool"):
        cluster.rows("nowhere", token)
    with pytest.raises(PoolError, match="cannot listen"):
        cluster.up(Share(), int(pool.rpartition(":")[2]))
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


# -- kernels of the tile language, several devices ---------------------------------------------------------------------


@tilewright.kernel
def scale(x, out, n, factor, BLOCK: tl.constexpr, WRONG: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    value = tl.load(x + offsets, mask=inside) * factor
    if WRONG:
        value += 1.0
    tl.store(out + offsets, value, mask=inside)


def test_a_tile_kernel_is_tuned_on_the_pool(pool: str, tmp_path: Path) -> None:
    space = {"BLOCK": (64, 256, 1024), "WRONG": (False, True)}
    db = tmp_path / "tuning.sqlite"
    tuned = tilewright.autotune(space, key=["n"], db=db)(scale)
    x = np.random.default_rng(0).standard_normal(4000).astype(np.float32)
    out = np.zeros_like(x)

    def grid(meta: dict[str, Any]) -> tuple[int]:
        return (-(-meta["n"] // meta["BLOCK"]),)

    where = tilewright.Pool(pool, f"cpu:{host().cpu}")
    progress = Progress()
    found = tuned.tune(grid, x, out, 4000, 3.0, pool=where, trace=Trace(listener=progress))
    assert not out.any()  # nothing is stored to the caller's tensors
    assert found.origin.kind == "tuned" and not found.config["WRONG"]
    assert set(found.failures) == {"wrong"}  # as many as the search tried
    assert sum(use["trials"] for use in progress.devices.values()) >= 3
    tuned[grid](x, out, 4000, 3.0)
    np.testing.assert_allclose(out, 3.0 * x, rtol=1e-6)
    assert tuned.best(grid, x, out, 4000, 3.0) == found.config
    with pytest.raises(OptionError, match="needs no pool"):
        tuned.tune(grid, x, out, 4000, 3.0, pool=where, effort="none")


def test_tensors_that_were_changed_are_refused(
    workers: Workers, tmp_path: Path, configs: list[Config], job: TaskJob
) -> None:
    """The digest of a launch's tensors is part of its job, which the seal covers."""
    timer = next(each for each in workers.timers() if each.hello.label == PSEUDO.label)
    tuned = tilewright.autotune({"BLOCK": (64,), "WRONG": (False,)}, key=["n"])(scale)
    x = np.zeros(64, np.float32)
    call = tuned._call((1,), tuned._bound((x, x, 64, 1.0), {}))
    kernel = call.tunable().job
    assert isinstance(kernel, KernelJob)
    data = Path(kernel.spec.data).read_bytes()
    sent, config = pool_job(kernel, data), Config(kernel.spec.start.template, kernel.spec.start.values)
    answer, code = workers.builders()[0].build(encode(BuildRequest("build", "tester", sent, config)))
    built = msgspec.msgpack.decode(ray.get(answer), type=BuildAnswer)
    call.close()

    def trouble(name: str, data: bytes) -> str:
        request = encode(TrialRequest(name, "tester", sent, Candidate(config, built.seal), 7))
        return msgspec.msgpack.decode(
            ray.get(timer.ask("trial", request, code, data)), type=TrialAnswer
        ).trouble

    assert trouble("changed", data[:-1] + b"\x01") == "the tensors are not those that the job names"
    assert trouble("right", data) == ""


def test_several_models_for_several_devices(pool: str, tmp_path: Path) -> None:
    models = [
        (torch.nn.Linear(24, 16).eval(), (torch.randn(8, 24),)),
        (torch.nn.Sequential(torch.nn.Linear(24, 8), torch.nn.ReLU()).eval(), (torch.randn(8, 24),)),
    ]
    own = f"cpu:{host().cpu}"
    results = tilewright.compile_for_devices(
        models, pool=pool, devices={own: None, PSEUDO.label: "0.001s"}, budget="30s", db=tmp_path / "db"
    )
    assert set(results) == {own, PSEUDO.label}
    for label, result in results.items():
        assert result.error is None and len(result.models) == 2
        assert all(device.startswith(label) for device in result.use)
        for compiled, (model, inputs) in zip(result.models, models, strict=True):
            torch.testing.assert_close(compiled(*inputs), model(*inputs))
    trials = {label: sum(use.trials for use in result.use.values()) for label, result in results.items()}
    assert 0 < trials[PSEUDO.label] < trials[own]  # its device time was spent at once
    with pytest.raises(OptionError, match="no device is named"):
        tilewright.compile_for_devices(models, pool=pool, devices=[])
    with pytest.raises(PoolError, match="has no device 'cuda:h200'"):
        tilewright.compile_for_devices(models, pool=pool, devices=[own, "cuda:h200"])


def test_the_command_line_tunes_for_several_devices(pool: str, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "tilewright.cli",
        "tune",
        MODEL,
        "--json",
        "--db",
        str(tmp_path / "db"),
    ]
    command += [
        "--pool",
        pool,
        "--device",
        f"cpu:{host().cpu}=20s",
        "--device",
        PSEUDO.label,
        "--budget",
        "25s",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["by_device"]
    assert set(found) == {f"cpu:{host().cpu}", PSEUDO.label}
    for label, result in found.items():
        assert result["trials"] and result["error"] is None
        assert all(
            device.startswith(label) and use["seconds"] > 0 for device, use in result["devices"].items()
        )
