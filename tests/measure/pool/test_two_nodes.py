"""The default run's pool: two real nodes, a killed timer, and nothing that listens beyond this machine."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tilewright.measure.pool import cluster
from tilewright.support.confinement import can_remove_network

_SECONDS = 480.0  # it takes some thirty on two idle cores, and four minutes on two that eight others use
_NOT_DONE = {"UNAUTHENTICATED", "PERMISSION_DENIED", "UNIMPLEMENTED", "DEADLINE_EXCEEDED"}

pytest.importorskip("ray")


def test_a_pool_of_two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-m", "tests.measure.pool.two_nodes", str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=False, env=environment
        )
    finally:
        monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
        cluster.down()  # what a process that was killed has left
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["nodes"], found["timers"], found["builders"]) == (2, 2, 2)
    assert found["network"] != can_remove_network()
    assert found["listening"] and set(found["listening"]) <= {"127.0.0.1", "::1"}
    assert "no node of the pool" in found["elsewhere"] and "--device none --builders 0" in found["elsewhere"]
    if importlib.util.find_spec("grpc"):  # which the extra `serve` brings
        refuse_strangers(found["strangers"])
    assert len(found["measured"]) == 6 and all(found["measured"])
    assert found["on"] == 2  # both nodes had work
    assert found["after a timer was killed"] == found["measured"]
    assert found["given again"] >= 1
    assert found["limit restored"]


def refuse_strangers(ports: dict[str, dict[str, dict[str, str]]]) -> None:
    """Every port refuses each request without the token; those of Ray's metrics, which not all installations have,
    show counts."""
    for port, answers in ports.items():
        codes, statuses = set(answers["grpc"].values()), set(answers["http"].values()) - {"metrics"}
        assert codes or answers["http"], port
        assert codes <= _NOT_DONE, (port, answers["grpc"])
        assert all(status.startswith("4") for status in statuses), (port, answers["http"])
    assert any("UNAUTHENTICATED" in answers["grpc"].values() for answers in ports.values())
