"""The options of the torch.compile backend: what was tuned is used, locks of several graphs, and wrong values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tilewright
from tests.tune.test_known import INPUTS, THREADS, database, kinds, model, rows
from tilewright.errors import OptionError
from tilewright.hw import host
from tilewright.hw.gpu import H200
from tilewright.integrations import options as options_module
from tilewright.integrations import torch_compile
from tilewright.integrations.options import Options
from tilewright.runtime.model import CompiledModel
from tilewright.tune.effort import EFFORTS, Effort

torch_compile.register()
__all__ = ["database"]  # a fixture


def run(module: nn.Module, *inputs: torch.Tensor, **options: Any) -> list[CompiledModel]:
    """The models that a call through torch.compile made."""
    made: list[CompiledModel] = []

    class Watched(Options):
        def compiled(self, *arguments: Any) -> CompiledModel:
            made.append(super().compiled(*arguments))
            return made[-1]

    torch._dynamo.reset()
    checked = Options.of({"threads": THREADS, "fallback": False, **options})
    watched = Watched(**{name: getattr(checked, name) for name in Options.__dataclass_fields__})

    def backend(graph: Any, examples: Any) -> Any:
        return torch_compile.CompiledGraph(graph, watched)

    with torch.no_grad():
        got = torch.compile(module, backend=backend)(*inputs)
        assert torch.allclose(got, module(*inputs), atol=1e-4)
    return made


def test_what_was_tuned_is_used(database: Path) -> None:
    kept = rows(database)
    (made,) = run(model(), *INPUTS)
    assert kinds(made) == {"tuned": 2} and rows(database) == kept
    (plain,) = run(model(), *INPUTS, db=str(database.parent / "no.sqlite"))
    assert kinds(plain) == {"predicted": 2}
    whole = tilewright.compile(model(), INPUTS, threads=THREADS)
    assert set(made.plan.kernels) == set(whole.plan.kernels)


def test_it_can_tune_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EFFORTS, "quick", Effort(60.0, 4, 8))
    path = tmp_path / "own.sqlite"
    (made,) = run(nn.Linear(24, 40).eval(), torch.ones(8, 24), effort="quick", budget="30s", db=path, seed=3)
    assert rows(path) and kinds(made) == {"tuned": 1}


class Broken(nn.Module):
    """Two graphs, with one of PyTorch's breaks between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 12), nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return torch.sigmoid(self.second(x))


def test_one_lock_file_is_of_all_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.lock"
    torch.manual_seed(0)
    made = run(Broken().eval(), torch.ones(3, 8), lock=path)
    assert len(made) == 2
    locked = json.loads(path.read_text())["tasks"]
    assert set(locked) == {task for one in made for task in one.plan.tasks}
    monkeypatch.setattr(options_module, "_lock_files", options_module._LockFiles())  # as in a later process
    again = run(Broken().eval(), torch.ones(3, 8), lock=path)
    assert [kinds(one) for one in again] == [{"lock": 1}] * 2
    with pytest.raises(Exception, match="the lock has no such task"):
        run(Broken().eval(), torch.ones(4, 8), lock=path)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"thread": 1}, "no option 'thread'(?s:.*)use one of target, effort, budget"),
        ({"variants": 0}, "1 at least"),
        ({"numerics": "no"}, "numerics"),
        ({"effort": "some"}, "effort must be one of 'none', 'quick', 'full', got 'some'"),
        ({"budget": "5s"}, "needs no budget"),
        ({"effort": "quick", "budget": "soon"}, "got 'soon'"),
        ({"threads": -1}, "threads=-1"),
        ({"seed": "x"}, "seed='x'"),
        ({"freeze": "yes"}, "freeze='yes' must be True or False"),
        ({"target": "cuda"}, "target='cuda', and the tensors of the graph are on cpu"),
        ({"target": H200}, "a described GPU is not here"),
        ({"lock": "/nowhere/at/all.lock"}, "the folder /nowhere/at does not exist"),
    ],
)
def test_wrong_options_reach_the_caller_as_they_are(options: dict[str, Any], message: str) -> None:
    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(OptionError, match=message) as caught:
        torch.compile(nn.Linear(2, 2), backend="tilewright", options=options)(torch.ones(1, 2))
    assert "try:" in str(caught.value)


def test_a_processor_may_be_described(database: Path) -> None:
    (made,) = run(model(), *INPUTS, target=host())
    assert kinds(made) == {"tuned": 2}
