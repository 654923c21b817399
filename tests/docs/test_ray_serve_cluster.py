"""examples/ray_serve.py in Ray Serve: two replicas, a new file in both, a replica that is replaced, and strangers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("ray.serve")
pytest.importorskip("starlette")

_SECONDS = 600.0  # it takes a minute on two idle cores


@pytest.mark.slow
def test_two_replicas(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.docs.ray_serve_cluster", str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_SECONDS, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert found["loopback"] > 5
    assert found["elsewhere"] == ["UNAUTHENTICATED"] * 2  # of each replica one, for Ray Serve's own calls
    for what in (
        "both replicas answer",
        "both replicas take up the new file",
        "a replica is replaced",
        "the new one answers instead",
    ):
        assert found[what], what
    assert not found["errors"]
