"""The first node of a pool is lost during a run: the driver says so, records are kept, and a new run goes on."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytest.importorskip("ray")

from tests.measure.pool.tuning_run import SLOW, records
from tests.measure.pool.two_nodes import free_port
from tilewright.measure.pool import cluster
from tilewright.measure.pool.cluster import Share
from tilewright.measure.pool.workers import answers

_SECONDS = 300.0  # for a part of a test, on a busy machine


def run(address: str, db: Path, seconds: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.measure.pool.tuning_run", address, str(db), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def killed() -> None:
    """All processes of this machine's nodes at once, as when the machine fails."""
    nodes = [psutil.Process(node["pid"]) for node in cluster.nodes_here().values()]
    for process in [each for node in nodes for each in (node, *node.children(recursive=True))]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "pool down"])
def test_the_first_node_is_lost_during_a_run(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    db = tmp_path / "tuning.sqlite"
    try:
        driver = run(cluster.up(Share(1, (SLOW,)), free_port()), db, 600)
        deadline = time.monotonic() + _SECONDS
        while not records(db) and driver.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
        recorded = records(db)
        killed() if how == "killed" else cluster.down()
        said, _ = driver.communicate(timeout=_SECONDS)
        assert driver.returncode == 1, said
        assert "PoolError: the first node of the pool" in said and "what was recorded is kept" in said
        assert records(db) >= recorded > 0

        cluster.down()
        before = records(db)
        again = run(cluster.up(Share(1, (SLOW,)), free_port()), db, 10)
        said, _ = again.communicate(timeout=_SECONDS)
        assert said.splitlines()[0] == str(before) and said.splitlines()[-1] == "done"
        assert records(db) >= before
    finally:
        cluster.down()


def test_whether_a_pool_answers() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert not answers(address, 60.0)  # refused: at once
        server.listen()
        assert answers(address, 0.0)
