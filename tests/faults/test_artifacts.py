"""A short version of `python -m tests.faults.artifacts`."""

from __future__ import annotations

from pathlib import Path

from tests.faults.artifacts import campaign


def test_changed_artifacts_are_refused_or_run(tmp_path: Path) -> None:
    counts, failed = campaign(80, 3, tmp_path)
    assert not failed
    assert counts["refused"] > 40 and counts["right"] > 2
