"""The benchmark of both ways into Tilewright from PyTorch runs, and its ratio is what it says."""

from __future__ import annotations

import pytest

from benchmarks.torch_compile_overhead import MODELS, beyond_guards, measured
from tilewright.integrations.torch_compile import register


def test_the_smallest_model() -> None:
    register()
    row = measured(MODELS["mlp"], 0.02, threads=1)
    assert set(row) == {"tilewright", "torch_compile", "dynamo", "pytorch"}
    assert all(time > 0 for time in row.values()) and row["torch_compile"] > row["tilewright"]


def test_the_ratio() -> None:
    row = {"tilewright": 10.0, "torch_compile": 16.0, "dynamo": 5.0, "pytorch": 40.0}
    assert beyond_guards(row) == pytest.approx(1.1)
