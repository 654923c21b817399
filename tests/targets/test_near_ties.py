"""Groups whose predicted times hardly differ are measured, and the partition is solved again with their times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tilewright
from tilewright.db.database import Database
from tilewright.rewrites import dynamic
from tilewright.runtime.model import CompiledModel
from tilewright.runtime.plan import FusionReport, GroupReport
from tilewright.support.trace import Trace
from tilewright.tune.effort import EFFORTS, Effort

APART, TOGETHER = ["0 + 1", "2"], "0 + 1 + 2"


@pytest.fixture
def block() -> tuple[nn.Module, tuple[torch.Tensor]]:
    """Two linear layers, which one kernel can compute."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)).eval()
    return layers, (torch.randn(256, 64),)


def tuned(
    block: Any, path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[CompiledModel, list[str]]:
    """The model, and the layers of the tasks that were measured, in this order."""
    monkeypatch.setitem(EFFORTS, "quick", Effort(60.0, 4, 4))
    Database.open(path).close()
    trace = Trace()
    model = tilewright.compile(
        *block, target="cpu", effort="quick", db=path, threads=1, trace=trace, **options
    )
    (begin,) = (event for event in trace.events if event.name == "tune.begin")
    names = {task["key"]: task["layer"] for task in begin.notes["tasks"]}
    rounds = [names[event.notes["task"]] for event in trace.events if event.name == "tune.round"]
    return model, list(dict.fromkeys(rounds))


def test_both_ways_are_measured_and_the_faster_one_is_used(
    block: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dynamic, "MARGIN", 0.9)  # every prediction is a near-tie
    path = tmp_path / "tuning.sqlite"
    measured: set[str] = set()
    rows: list[GroupReport] = []
    for _ in range(3):  # all trials of a task may time out on a busy machine; tuning then goes on
        model, labels = tuned(block, path, monkeypatch)
        measured |= set(labels)
        fusion = model.plan.fusion
        assert isinstance(fusion, FusionReport)
        rows = [row for row in fusion.considered if row.source == row.parts_source == "measured"]
        if rows:
            break
    assert measured == {*APART, TOGETHER}
    assert rows
    assert all((row.gain > 0) == row.used for row in rows)
    torch.testing.assert_close(model(*block[1]), block[0](*block[1]), atol=1e-4, rtol=1e-4)
    with Database.open(path) as database:
        decided = {database.decision(record.key) is not None for record in database.records()}
    assert decided == {True}


def test_what_is_clear_is_not_measured(block: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamic, "MARGIN", 0.0)  # no prediction is
    model, measured = tuned(block, tmp_path / "tuning.sqlite", monkeypatch)
    assert set(measured) <= {step.layer for step in model.plan.steps}


def test_a_lock_file_keeps_the_predicted_cut(
    block: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its choices are found again by a compilation that predicts, so what is measured must not change the cut."""
    monkeypatch.setattr(dynamic, "MARGIN", 0.9)
    lock = tmp_path / "model.lock"
    model, measured = tuned(block, tmp_path / "tuning.sqlite", monkeypatch, lock=lock)
    assert set(measured) <= {step.layer for step in model.plan.steps}
    again = tilewright.compile(*block, target="cpu", lock=lock, threads=1)
    assert [step.task for step in again.plan.steps] == [step.task for step in model.plan.steps]


def test_the_groups_in_doubt_are_measured_before_the_others(
    block: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dynamic, "MARGIN", 0.9)
    linear, (x,) = block
    wide = nn.Sequential(*linear, nn.Softmax(0), nn.Linear(64, 2048)).eval()
    _, measured = tuned((wide, (x,)), tmp_path / "tuning.sqlite", monkeypatch)
    assert set(measured[:3]) == {*APART, TOGETHER} and "4" in measured[3:]
