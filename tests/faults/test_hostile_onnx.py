"""Some sixty hostile ONNX files, refused or right; at length `python -m tests.faults.hostile_onnx`."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.faults.hostile import crafted
from tests.faults.hostile_onnx import limit_memory, short, wanted
from tilewright.codegen.llvm.workers import worker_processes


def test_hostile_files_are_refused_or_right() -> None:
    """In a child with a limit on its memory and its time: a crash or a hang there ends this test, not the others."""
    command = [sys.executable, "-m", "tests.faults.hostile_onnx", "--short"]
    child = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert child.returncode == 0, child.stdout[-4000:] + child.stderr[-2000:]
    counts = {kind: int(n) for n, kind in re.findall(r"(\d+) (refused|right|unchecked)", child.stdout)}
    assert sum(counts.values()) == len(short()) >= 45
    assert counts["refused"] > len(short()) // 2 and counts["right"] > 3


def test_the_limits_reach_all_of_a_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_BUILD_PROCESSES", "3")
    monkeypatch.setattr("resource.setrlimit", lambda *_: None)
    assert worker_processes(1000) == 3
    limit_memory()
    assert worker_processes(1000) == 0


def test_there_are_hundreds() -> None:
    assert len(crafted()) >= 350


def test_nothing_is_left_out_unless_asked() -> None:
    """Negative numbers were: a minus in the name stood for nothing to leave out."""
    assert wanted("Reshape to -1", "", "") and wanted("Reshape to -1", "reshape", "Tile")
    assert not wanted("Reshape to -1", "", "RESHAPE") and not wanted("Reshape to -1", "Tile", "")
