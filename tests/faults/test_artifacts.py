"""A short version of `python -m tests.faults.artifacts`."""

from __future__ import annotations

from pathlib import Path

from tests.faults.artifacts import campaign


def test_changed_artifacts_are_refused_or_run(tmp_path: Path) -> None:
    found = campaign(80, 3, tmp_path)
    assert not found.failed
    assert found.counts["refused"] > 40 and found.counts["right"] > 2
    assert found.fitted["refused"] > 5 and found.fitted.total() < 40
