"""Fair turns of users on a device, and builds and timings of a node kept apart."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.faults.candidates import product
from tilewright.errors import PoolError
from tilewright.hw import host
from tilewright.measure.pool.actors import Builder, Timer
from tilewright.measure.pool.turns import DeviceGate, FairTurns, Requests, Stopwatch, starting
from tilewright.measure.trial import TaskJob
from tilewright.space.template import Work


def test_users_take_turns() -> None:
    turns, order, started = FairTurns(), [], threading.Event()

    def work(user: str) -> None:
        with turns.turn(user):
            order.append(user)

    def hold() -> None:
        with turns.turn("first"):
            started.set()
            while turns.waiting < 6:
                time.sleep(0.001)

    holder = threading.Thread(target=hold)
    holder.start()
    started.wait()
    threads = []
    for number, user in enumerate(["a", "a", "a", "a", "b", "c"]):
        threads.append(threading.Thread(target=work, args=(user,)))
        threads[-1].start()
        while turns.waiting < number + 1 and holder.is_alive():
            time.sleep(0.001)
    for each in (*threads, holder):
        each.join()
    assert order == ["a", "b", "c", "a", "a", "a"]


def test_a_failing_turn_is_over() -> None:
    turns = FairTurns()
    try:
        with turns.turn("a"):
            raise ValueError
    except ValueError:
        pass
    with turns.turn("b"):
        pass


def test_builds_run_together_and_timings_alone(tmp_path: Path) -> None:
    gate = DeviceGate(None, tmp_path)
    inside, overlaps, lock = {"building": 0, "timing": 0}, [], threading.Lock()

    def work(kind: str) -> None:
        with getattr(gate, kind)():
            with lock:
                inside[kind] += 1
                overlaps.append(dict(inside))
            time.sleep(0.02)
            with lock:
                inside[kind] -= 1

    threads = [
        threading.Thread(target=work, args=("timing" if number % 4 == 3 else "building",))
        for number in range(24)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert all(not seen["timing"] or (seen["timing"] == 1 and not seen["building"]) for seen in overlaps)
    assert any(seen["building"] > 1 for seen in overlaps)


def _at_once(first: AbstractContextManager[None], second: AbstractContextManager[None]) -> bool:
    """Whether the second is admitted while the first is inside."""
    admitted = threading.Event()

    def enter() -> None:
        with second:
            admitted.set()

    thread = threading.Thread(target=enter)
    with first:
        thread.start()
        found = admitted.wait(0.2)
    thread.join()
    return found


def test_nodes_of_one_machine_do_not_disturb_each_others_timings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    builder, other = Builder("node2")._gate, Builder("node1")._gate
    cpu, fellow = (Timer(node, "cpu:test", machine="any")._gate for node in ("node1", "node2"))
    gpu, same, next_ = (Timer("node", "cuda:test", number, machine="any")._gate for number in (0, 0, 1))
    assert cpu is not None and fellow is not None
    assert gpu is not None and same is not None and next_ is not None
    assert not _at_once(cpu.timing(), builder.building())
    assert not _at_once(builder.building(), cpu.timing())
    assert not _at_once(cpu.timing(), fellow.timing())
    assert _at_once(builder.building(), other.building())
    assert _at_once(cpu.timing(), gpu.timing())
    assert _at_once(builder.building(), gpu.timing())
    assert not _at_once(gpu.timing(), same.timing())
    assert _at_once(gpu.timing(), next_.timing())


def test_a_gpu_has_one_gate_whatever_its_number_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    second = DeviceGate(1, tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert not _at_once(second.timing(), DeviceGate(0, tmp_path).timing())


def test_locks_are_in_a_folder_of_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user could have made it first, or a link in its place."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = tmp_path / f"tilewright-pool-{os.getuid()}"
    with starting():
        assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(PoolError, match="not a folder of this user alone"):
        DeviceGate()
    folder.chmod(0o700)
    other = os.getuid() + 1
    (tmp_path / f"tilewright-pool-{other}").mkdir(mode=0o700)
    with monkeypatch.context() as patch:
        patch.setattr("os.getuid", lambda: other)
        with pytest.raises(PoolError, match="not a folder of this user alone"):
            DeviceGate()
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PoolError, match="not a folder of this user alone"):
        DeviceGate()


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("kept")
    (tmp_path / "starting").symlink_to(precious)
    with pytest.raises(OSError), starting(tmp_path):
        pass
    assert precious.read_text() == "kept"


def test_the_gate_opens_when_who_is_inside_dies(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from tilewright.measure.pool.turns import DeviceGate\n"
        "with DeviceGate(None, Path(sys.argv[1])).timing(): print('inside', flush=True); time.sleep(600)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"inside\n"
    child.kill()
    child.wait()
    child.stdout.close()
    with DeviceGate(None, tmp_path).building():
        pass


def test_waiting_is_no_work() -> None:
    requests = Requests()
    with requests.one("a") as watch:
        with watch.paused(), watch.paused():
            time.sleep(0.3)
            assert requests.seconds["a"] < 0.2
        assert watch.seconds < 0.2
        time.sleep(0.3)
        assert requests.seconds["a"] >= 0.3
    assert not requests.seconds


def test_of_a_request_that_was_given_again_the_newest_counts() -> None:
    requests = Requests()
    with requests.one("a") as first:
        time.sleep(0.05)
        with requests.one("a") as second:
            assert requests.seconds["a"] < first.seconds
        assert "a" not in requests.seconds
    assert second.seconds < first.seconds


def test_processes_start_one_after_the_other(tmp_path: Path) -> None:
    inside, most = [], []

    def start() -> None:
        with starting(tmp_path):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.02)
            inside.pop()

    threads = [threading.Thread(target=start) for _ in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert most == [1] * 6


def test_a_process_that_hangs_while_it_starts_does_not_hold_up_the_others(tmp_path: Path) -> None:
    with starting(tmp_path):
        begin = time.monotonic()
        with starting(tmp_path, patience=0.2):
            assert time.monotonic() - begin >= 0.2


def test_users_who_take_turns_do_not_restart_the_process_that_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The inputs of each user have a seed of their own."""
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)
    job = TaskJob.of(Work(product(8, 8, 8), host()), 1)
    timer = Timer("node", "cpu:pseudo", None, "tilewright.testing.pool:serve")
    processes, drawn = set(), set()
    for seed in (1, 2, 3, 1, 2, 3):
        with timer._alone(seed, job, 1, Stopwatch()) as runner:
            processes.add(runner._timer.pid)
            drawn.add(runner._validations[job, seed].descriptor)
    assert len(processes) == 1
    assert len(drawn) == 3
    runner.close()
