"""What a user registers takes part in compilations, and what is wrong with it costs its own candidates at most."""

from __future__ import annotations

import importlib
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tilewright
from tests.hw.declared import FMA
from tests.testing import extensions
from tilewright.codegen.generator import code_of
from tilewright.cost.models import cost_model_named
from tilewright.db.database import Database
from tilewright.db.record import Decision
from tilewright.errors import OptionError, TargetError, TilewrightWarning
from tilewright.extend import (
    register_cost_model,
    register_search,
    register_target,
    register_template,
    unregister_cost_model,
    unregister_intrinsic,
    unregister_rule,
    unregister_search,
    unregister_target,
    unregister_template,
)
from tilewright.hw import host
from tilewright.search import Search
from tilewright.space.candidates import Candidates
from tilewright.space.space import Config
from tilewright.space.template import Work
from tilewright.targets.cpu import CpuTarget
from tilewright.testing import gemm, softmax_rows

X = torch.randn(6, 40)


class TheirsFirst(Search):
    """Configs of the sketches with a name first: a budget of seconds may not reach them otherwise."""

    name = ""

    def propose(self, count: int) -> list[Config]:
        return sorted(
            self.candidates.sample(self.rng, 64), key=lambda config: self.name not in config.template
        )


class Softmax(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, -1)


@pytest.fixture
def registered(request: pytest.FixtureRequest) -> Iterator[str]:
    """A module that registers a template when it is imported, here and in the processes that build."""
    module = f"tests.testing.registering.{request.param}"
    importlib.import_module(module)
    name = request.param.replace("_", " ")
    yield name
    unregister_template(name)
    del sys.modules[module]


def tuned(tmp_path: Path) -> dict[str, set[str]]:
    """The kinds of failures of each template's trials, "" for those that were right."""
    path = tmp_path / "tuning.sqlite"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TilewrightWarning)
        fast = tilewright.compile(Softmax().eval(), (X,), effort="quick", budget=6, db=path)
    assert torch.allclose(fast(X), torch.softmax(X, -1), atol=1e-6)
    found: dict[str, set[str]] = {}
    with Database.open(path) as database:
        for record in database.records():
            found.setdefault(record.config.template, set()).add(record.failure)
    return found


@pytest.mark.parametrize("registered", ["plain"], indirect=True)
def test_a_template_takes_part_in_compile_and_tune(registered: str, tmp_path: Path) -> None:
    fast = tilewright.compile(Softmax().eval(), (X,), db=tmp_path / "none.sqlite")
    assert [info.origin.kind for info in fast.plan.tasks.values()] == ["predicted"]
    assert tuned(tmp_path)[registered] == {""}


@pytest.mark.parametrize("registered", ["raises"], indirect=True)
def test_one_that_raises_is_left_out_with_a_warning(registered: str) -> None:
    with pytest.warns(
        TilewrightWarning, match="template 'raises' cannot be asked about softmax.*ZeroDivisionError"
    ):
        fast = tilewright.compile(Softmax().eval(), (X,))
    assert torch.allclose(fast(X), torch.softmax(X, -1), atol=1e-6)


@pytest.mark.parametrize("registered", ["raises_later"], indirect=True)
def test_one_whose_programs_cannot_be_made_costs_its_trials(registered: str, tmp_path: Path) -> None:
    assert tuned(tmp_path)[registered] == {"illegal"}


@pytest.mark.parametrize("registered", ["wrong"], indirect=True)
def test_one_that_is_wrong_and_lies_about_its_cost_never_wins(registered: str, tmp_path: Path) -> None:
    kinds = tuned(tmp_path)
    assert kinds[registered] and "" not in kinds[registered]


@pytest.mark.parametrize("registered", ["plain"], indirect=True)
def test_a_config_that_is_none_of_its_space_is_refused(registered: str) -> None:
    candidates = Candidates.of(Work(softmax_rows(), host()))
    assert not candidates.is_legal(Config.of(registered, {"choice": 3}))
    assert candidates.recalled(Config.of(registered, {})) == Config.of(registered, {"choice": 1})


class Outer(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * y


@pytest.fixture(params=["tiles2d", "fma"])
def derived(request: pytest.FixtureRequest) -> Iterator[tuple[str, nn.Module, tuple[torch.Tensor, ...]]]:
    """A module that registers a rule or an intrinsic: (part of the names of its sketches, a model, its inputs)."""
    if request.param == "fma" and FMA.missing(host()):
        pytest.skip("needs AVX2 and FMA")
    module = f"tests.testing.registering.{request.param}"
    importlib.import_module(module)
    if request.param == "fma":
        model = nn.Linear(32, 48, bias=False).eval()
        yield FMA.name, model, (torch.randn(24, 32),)
        unregister_intrinsic(FMA.name)
    else:
        yield "tiles2d", Outer().eval(), (torch.randn(30, 1), torch.randn(50))
        unregister_rule("tiles2d")
    del sys.modules[module]


def test_a_rule_and_an_intrinsic_take_part_in_compile_and_tune(
    derived: tuple[str, nn.Module, tuple[torch.Tensor, ...]], tmp_path: Path
) -> None:
    name, model, inputs = derived
    path = tmp_path / "tuning.sqlite"
    register_search("theirs first", TheirsFirst)
    TheirsFirst.name = name
    options: dict[str, Any] = {"effort": "quick", "budget": 15, "search": "theirs first", "threads": 1}
    try:
        fast = tilewright.compile(model, inputs, db=path, **options)
    finally:
        unregister_search("theirs first")
    assert torch.allclose(fast(*inputs), model(*inputs), atol=1e-5)
    with Database.open(path) as database:
        mine = [record for record in database.records() if name in record.config.template]
        assert mine and {record.failure for record in mine} == {""}
        work = mine[0].work()
        assert work is not None
        config = mine[0].config
        code = code_of(Candidates.of(work).implementation(config), work.machine, work.numerics)
        database.decide(Decision(mine[0].key, config, 1e-9, "quick", 60.0, 12, time.time() + 1, code=code))
    # It has won: a compilation without measuring takes it, and `explain` says so.
    fast = tilewright.compile(model, inputs, db=path, threads=1)
    assert torch.allclose(fast(*inputs), model(*inputs), atol=1e-5)
    (row,) = fast.explain(inputs).rows
    assert row.program == str(config) and row.origin.kind == "tuned" and name in row.program


def test_what_is_no_template_is_refused() -> None:
    with pytest.raises(OptionError, match="is not a template"):
        register_template(object())  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"target must be one of 'cpu', 'cuda', 'gemmini', got 'tpu'"):
        register_template(extensions.Plain(), target="tpu")
    for taken in ("contraction", "default", "sketch:mine"):
        with pytest.raises(OptionError, match="already"):
            register_template(type("Taken", (extensions.Plain,), {"name": taken})())


def test_a_search_and_a_cost_model_of_ones_own(tmp_path: Path) -> None:
    register_search("first ones", extensions.FirstOnes)
    register_cost_model("optimist", extensions.optimist)
    try:
        fast = tilewright.compile(
            Softmax().eval(),
            (X,),
            effort="quick",
            budget=4,
            search="first ones",
            cost_model="optimist",
            db=tmp_path / "tuning.sqlite",
        )
        assert torch.allclose(fast(X), torch.softmax(X, -1), atol=1e-6)
        with pytest.raises(OptionError, match="there is a cost model 'optimist' already"):
            register_cost_model("optimist", extensions.optimist)
    finally:
        unregister_search("first ones")
        unregister_cost_model("optimist")
    with pytest.raises(
        OptionError, match="cost_model must be one of 'boosted', 'analytical', 'attention', got 'optimist'"
    ):
        cost_model_named("optimist")
    with pytest.raises(OptionError, match="cost_model must be one of"):
        tilewright.compile(Softmax().eval(), (X,), cost_model="optimist")
    with pytest.raises(OptionError, match="is not a cost model"):
        register_cost_model("other", None)  # type: ignore[arg-type]


def test_a_target_of_ones_own() -> None:
    made = []

    def mine(number: int) -> CpuTarget:
        made.append(number)
        return CpuTarget(host())

    register_target("mine", mine)
    try:
        fast = tilewright.compile(Softmax().eval(), (X,), target="mine:3")
        assert made == [3]
        assert torch.allclose(fast(X), torch.softmax(X, -1), atol=1e-6)
        with pytest.raises(OptionError, match="a target cannot be called 'mine'"):
            register_target("mine", mine)
    finally:
        unregister_target("mine")
    with pytest.raises(TargetError, match="got 'mine'"):
        tilewright.compile(Softmax().eval(), (X,), target="mine")


def test_candidates_of_a_registered_template_are_the_same_in_every_process() -> None:
    register_template(extensions.Plain())
    try:
        found = Candidates.of(Work(gemm(), host())).implementation(Config.of("plain", {"choice": 2}))
        assert found.program.params[-1].size == int(np.prod(gemm().output.shape))
    finally:
        unregister_template("plain")
