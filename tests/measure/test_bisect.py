from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import tilewright
from tilewright.graph.ir import Graph, rebuild
from tilewright.graph.op import apply
from tilewright.measure.bisect import check_model
from tilewright.space.template import Work
from tilewright.targets import stages


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.eval()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = torch.tanh(self.first(x))
        result = self.second(hidden).softmax(-1)
        return {"result": result, "best": result.argmax(-1)}


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("numerics", ["fast", "strict"])
def test_a_right_model(x: torch.Tensor, numerics: str) -> None:
    model = Model()
    report = check_model(tilewright.compile(model, (x,), numerics=numerics), model, (x,))
    assert report.ok and report.deviation is None
    assert len(report.outputs) == 2 and report.outputs[0].error < 1e-6
    assert str(report).startswith("OK: 2 outputs match")


def test_16_bits(x: torch.Tensor) -> None:
    model = Model().bfloat16()
    report = check_model(tilewright.compile(model, (x.bfloat16(),)), model, x.bfloat16())
    assert report.outputs[0].ok and report.outputs[0].framework_error > 1e-4


def test_a_wrong_task_is_named(x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    right = stages.choose

    def wrong(work: Work) -> object:
        """tanh is compiled as sin."""
        graph: Graph = rebuild(
            work.task.graph, lambda node, inputs: apply("sin", *inputs) if node.op == "tanh" else None
        )
        choice = right(replace(work, task=replace(work.task, graph=graph)))
        (part,) = choice.implementation.parts
        made = replace(choice.implementation, parts=(replace(part, task=work.task),))
        return replace(choice, implementation=made)

    monkeypatch.setattr(stages, "choose", wrong)
    model = Model()
    report = check_model(tilewright.compile(model, (x,)), model, {"x": x})
    assert not report.ok and report.deviation is not None
    assert "tanh" in report.deviation.label and report.deviation.error > 1e-3
    assert f"step {report.deviation.step} of {report.steps}" in str(report)


def test_a_wrong_graph_is_told_apart(x: torch.Tensor) -> None:
    """Every task is right, and the model is another one."""
    model, other = Model(), Model()
    with torch.no_grad():
        other.second.weight.mul_(2)
    report = check_model(tilewright.compile(model, (x,)), other, (x,))
    assert not report.ok and report.deviation is None
    assert "before it was cut into tasks" in str(report)


def test_a_nan_of_ours_is_wrong() -> None:
    from tilewright.measure.bisect import _error

    assert _error(np.array([1.0, np.nan]), np.array([1.0, 2.0])) == np.inf
    assert _error(np.zeros(2), np.zeros(3)) == np.inf
