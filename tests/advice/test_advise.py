"""`advise` measures what it says, on this machine, and refuses what it cannot do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tilewright
from tests.cli.inprocess import run_here
from tilewright.db.database import Database
from tilewright.graph.task import Partition
from tilewright.hw.gpu import H200
from tilewright.targets.cpu import CpuTarget
from tilewright.targets.target import Cutting


def small() -> tuple[nn.Module, tuple[torch.Tensor]]:
    model = nn.Sequential(nn.Conv2d(12, 23, 3, padding=1), nn.GELU(), nn.Conv2d(23, 32, 1)).eval()
    return model, (torch.randn(1, 12, 12, 12),)


def test_what_it_measures() -> None:
    model, inputs = small()
    found = tilewright.advise(model, inputs, layers=1, budget=300)
    (layer,) = found.layers
    assert layer.seconds > 0 and layer.gflops > 0
    kinds = {finding.kind for finding in layer.findings}
    assert kinds & {"channels", "cliff", "activation"}
    activations = [finding for finding in layer.findings if finding.kind == "activation"]
    assert {finding.change.split()[0] for finding in activations} == {
        "no",
        "relu",
        "gelu",
        "hardswish",
        "softplus",
    }
    assert all(finding.seconds > 0 and finding.layer_seconds == layer.seconds for finding in layer.findings)
    assert any("1 more layers" in note for note in found.notes)
    assert layer.layer in str(found)
    assert json.dumps(found.to_dict())


def test_without_the_device() -> None:
    model, inputs = small()
    with pytest.raises(
        tilewright.OptionError, match="advice is measured, and the target is not this machine"
    ):
        tilewright.advise(model, inputs, target=H200)


@pytest.mark.parametrize("partition", ["dynamic", "greedy"])
def test_the_model_is_cut_as_compile_cuts_it(
    partition: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "tuning.sqlite"
    Database.open(path).close()
    seen: list[Cutting] = []
    cut = CpuTarget.partition

    def recorded(*given: Any, **named: Any) -> Partition:
        seen.append(named["cutting"])
        return cut(*given, **named)

    monkeypatch.setattr(CpuTarget, "partition", recorded)
    model, inputs = small()
    options = {"partition": partition, "threads": 1, "db": path, "target": "cpu"}
    tilewright.compile(model, inputs, **options)
    tilewright.advise(model, inputs, budget=1e-6, **options)
    assert seen == [Cutting(partition, 1, path)] * 2


def test_another_partition_is_refused() -> None:
    model, inputs = small()
    with pytest.raises(tilewright.OptionError, match="partition must be one of 'dynamic', 'greedy'"):
        tilewright.advise(model, inputs, partition="magic")


def test_a_spent_budget_is_said() -> None:
    model, inputs = small()
    found = tilewright.advise(model, inputs, budget=1e-6)
    assert not found.layers
    assert any("the budget was spent" in note for note in found.notes)


@pytest.mark.parametrize(
    "options,words", [({"layers": 0}, "1 at least"), ({"budget": "soon"}, "a time above 0")]
)
def test_options_that_are_refused(options: dict[str, object], words: str) -> None:
    model, inputs = small()
    with pytest.raises(tilewright.OptionError, match=words):
        tilewright.advise(model, inputs, **options)  # type: ignore[arg-type]


def test_the_command_refuses_to_tune(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run_here(monkeypatch, capsys, "advise", "resnet18", "--effort", "quick")
    assert done.code == 1
    assert "advice measures variations and tunes nothing" in done.err
