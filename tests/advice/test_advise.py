"""`advise` measures what it says, on this machine, and refuses what it cannot do."""

from __future__ import annotations

import json
from dataclasses import replace
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
from tilewright.rewrites.local import Judge
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
    assert {"activation", "pointwise"} <= kinds
    (pointwise,) = [finding for finding in layer.findings if finding.kind == "pointwise"]
    assert pointwise.change == "one more 1x1 convolution of 23" and pointwise.advice.count("adds") == 1
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
    asked = Cutting(partition, 1, path)
    assert seen == [asked, asked, replace(asked, pads=False)]


def test_another_partition_is_refused() -> None:
    model, inputs = small()
    with pytest.raises(tilewright.OptionError, match="partition must be one of 'dynamic', 'greedy'"):
        tilewright.advise(model, inputs, partition="magic")


def test_channels_are_those_that_the_model_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """`compile` pads them: what it computes has 48 channels, and the advice is about 46."""
    monkeypatch.setattr(Judge, "prefers", lambda judge, after, before: True)
    model = nn.Sequential(nn.Conv2d(64, 46, 3), nn.ReLU(), nn.Conv2d(46, 64, 3)).eval()
    inputs = (torch.randn(1, 64, 9, 9),)
    found = tilewright.advise(model, inputs, partition="greedy", budget=300)
    layers = {layer.layer: layer for layer in found.layers}
    first, second = layers["0 + 1"], layers["2"]
    assert "46" in first.output and first.padded == "46 -> 48 output channels"
    assert second.padded == "46 -> 48 input channels"
    changes = [finding.change for layer in (first, second) for finding in layer.findings]
    assert {"46 -> 48 output channels", "46 -> 48 input channels"} <= set(changes)
    assert "measured as written; compile pads 46 -> 48 output channels by itself" in str(found)


class Mixed(nn.Module):
    """A chain of convolutions, attention, and a product of two activations."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.filter = nn.Conv2d(8, 48, 1), nn.Conv2d(48, 48, 3, padding=1, groups=48)
        self.project = nn.Conv2d(48, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.project(nn.functional.relu6(self.filter(nn.functional.relu6(self.expand(x)))))
        tokens = x.flatten(2).transpose(1, 2).unsqueeze(1)
        mixed = nn.functional.scaled_dot_product_attention(tokens, tokens, tokens)
        return mixed @ mixed.transpose(2, 3)


def test_layers_that_are_not_varied_are_named_with_the_reason() -> None:
    found = tilewright.advise(Mixed().eval(), (torch.randn(1, 8, 14, 14),), partition="greedy", budget=300)
    notes = " ".join(found.notes)
    assert "left out, because one kernel computes several of them: expand" in notes
    assert "left out, because attention has no weights: scaled_dot_product_attention" in notes
    assert "left out, because their weights are computed: matmul" in notes


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
