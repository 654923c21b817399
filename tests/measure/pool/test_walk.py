"""The two shells of docs/pool.md, through the command line in processes of their own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.measure.pool.two_nodes import free_port
from tilewright.hw import host
from tilewright.measure.pool import cluster

pytest.importorskip("ray")

_SECONDS = 600.0  # for a command, on a busy machine
_PAGE = Path(__file__).parents[3] / "docs" / "pool.md"


def commands() -> list[list[str]]:
    """The commands of the page's section, without comments."""
    section = _PAGE.read_text().split("## Two minutes, two shells")[1].split("\n## ")[0]
    found = re.findall(r"^\$ tilewright ([^#\n]*)", section, re.MULTILINE)
    return [each.split() for each in found]


def test_the_page_shows_the_whole_walk() -> None:
    names = [" ".join(words[:2]) if words[0] == "pool" else words[0] for words in commands()]
    assert commands()[3][-2:] == ["--budget", "30s"]
    assert names == ["pool up", "pool ls", "pool join", "tune", "pool down"]


@pytest.mark.slow
def test_two_shells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    port = free_port()

    def shell(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "tilewright.cli", *words],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
            env=environment,
        )
        assert done.returncode == 0, (words, done.stdout[-500:], done.stderr[-2000:])
        return done.stdout

    def nodes() -> set[str]:
        return {each["node"] for each in json.loads(shell("pool", "ls", "--json"))}

    label, said = f"cpu:{host().cpu}", {}
    up, ls, join, tune, down = (
        [word.replace("127.0.0.1:6379", f"127.0.0.1:{port}") for word in words] for words in commands()
    )
    try:
        said["up"] = shell(*up, "--port", str(port))
        said["ls"] = shell(*ls)
        (first,) = nodes()
        said["join"] = shell(*join)
        (second,) = nodes() - {first}
        for seconds in (30, 60, 120, 240):  # a run on a busy machine may be over before its first trial
            found = json.loads(shell(*tune[:-1], f"{seconds}s", "--json"))
            if found["trials"]:
                break
        said["drain"] = shell("pool", "drain", second)
        said["down"] = shell(*down)
    finally:
        cluster.down()
    assert f"the pool is at 127.0.0.1:{port}; this machine has {label} for it" in said["up"]
    assert f"{label}#" in said["ls"] and "builder" in said["ls"]
    assert "this machine has no device for it" in said["join"]
    assert found["trials"] and all(device.startswith(label) for device in found["devices"])
    assert second in said["drain"] and "take no more work" in said["drain"]
    assert first in said["down"] and second in said["down"]
