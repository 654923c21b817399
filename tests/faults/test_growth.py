"""A process that compiles many models keeps little of each: a small run of `python -m tests.faults.growth`."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.faults.growth import growth


def test_growth_counts_from_the_largest_size_of_the_warm_up() -> None:
    assert growth([100.0, 130.0, 120.0, 125.0, 128.0, 131.0, 132.0, 133.0, 134.0, 135.0]) == 5.0
    assert growth([100.0]) == 0.0


@pytest.mark.slow
def test_models_that_are_dropped_are_forgotten() -> None:
    """Code generation once kept a megabyte of each model, in passes of LLVM that were not freed."""
    command = [sys.executable, "-m", "tests.faults.growth", "--models", "60", "--limit", "40"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
