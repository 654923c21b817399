"""The table that compares two builds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.before_after import BUILDS, Row, orders, table

ROOT = Path(__file__).resolve().parents[2]


def test_a_row_that_is_slower_beyond_its_interval_says_so() -> None:
    steady = (1.0, 1.01, 0.99, 1.0, 1.0)
    slower = tuple(1.1 * each for each in steady)
    rows = [Row("models", "equal", steady, steady), Row("models", "slower", steady, slower)]
    equal, worse, mean = table(rows).splitlines()[2:]
    assert "1.000x |" in equal and "slower" not in equal.replace("| slower |", "")
    assert "0.909x slower" in worse
    assert mean.startswith("| models | geometric mean of 2 | | | 0.953x")


def test_a_noisy_row_is_not_called_slower() -> None:
    noisy = Row("operators", "noisy", (1.0, 1.4, 0.8, 1.2, 0.9), (1.1, 0.8, 1.5, 0.9, 1.3))
    assert "slower" not in table([noisy])


def test_each_build_goes_first_as_often() -> None:
    assert [order[0] for order in orders(4)] == [*BUILDS, *BUILDS]


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "before_after.py"), str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 2 and "git worktree add" in done.stderr
