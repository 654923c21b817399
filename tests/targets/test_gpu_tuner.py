"""The race of ways on a GPU, with a process in the place of the card: what fails is typed, and costs one candidate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from tilewright import frontend
from tilewright.db.database import Database
from tilewright.graph.task import Task
from tilewright.hw.gpu import H200
from tilewright.space.vendor.pieces import Way
from tilewright.support.trace import Trace
from tilewright.targets.cuda import CudaTarget
from tilewright.targets.target import together
from tilewright.tune import gpu
from tilewright.tune.effort import Tuning
from tilewright.tune.gpu import GpuTuner

BOTH = frozenset({"cublaslt", "torch"})


def tasks() -> dict[str, tuple[Task, int]]:
    model = nn.Linear(256, 64).half().eval()
    imported = frontend.import_model(model, (torch.randn(512, 256).half(),))
    return together([CudaTarget(H200, 0, BOTH).partitioned(imported, "fast", Trace.off())])


@pytest.fixture
def tuner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GpuTuner:
    monkeypatch.setattr(gpu, "_FROM_TEMPLATES", 0)
    monkeypatch.setattr(gpu, "_FROM_SKETCHES", 0)
    tuning = Tuning(db=tmp_path / "tuning.db")
    return GpuTuner(H200, 0, "fast", BOTH, tuning, Trace.off(), "tests.targets.faulty:serve")


def test_each_failure_costs_one_candidate_and_what_is_known_is_not_measured_again(
    tuner: GpuTuner, tmp_path: Path
) -> None:
    ways = tuner.tune(tasks())
    (winner,) = ways.values()
    assert dict(winner.config.values)["algorithm"] == 4
    with Database.open(tmp_path / "tuning.db") as database:
        records = database.records()
        (decision,) = database.decisions()
    failures = {(dict(r.config.values)["algorithm"], r.failure) for r in records if r.config.values}
    assert failures == {(0, ""), (1, "crash"), (2, "timeout"), (3, "wrong"), (4, "")}
    assert len(tuner.replaced) == sum(r.failure in ("crash", "timeout") for r in records)
    assert decision.config == winner.config
    assert len(records) == tuner.trials == decision.trials

    again = GpuTuner(H200, 0, "fast", BOTH, tuner.tuning, Trace.off(), "no:where")
    assert [way.config for way in again.tune(tasks()).values()] == [winner.config]
    assert again.trials == 0


def test_a_winner_that_slows_the_model_down_is_taken_back_for_good(tuner: GpuTuner, tmp_path: Path) -> None:
    (plain,) = tasks().values()
    rule = gpu.choose(plain[0], H200, "fast", BOTH).config

    def models(ways: Mapping[str, Way]) -> Callable[[], float]:
        (way,) = ways.values()
        return lambda: 1e-3 if way.config == rule else 1.1e-3

    tuner = replace(tuner, serve="tests.targets.faulty:serve_well", models=models)
    (way,) = tuner.tune(tasks()).values()
    assert way.config == rule
    again = GpuTuner(H200, 0, "fast", BOTH, tuner.tuning, Trace.off(), "no:where")
    assert [way.config for way in again.tune(tasks()).values()] == [rule]
    assert again.trials == 0
