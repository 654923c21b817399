"""The options of a compilation: one record, in the order of every signature, checked before any work."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.programs import AVX2
from tilewright import compile, compile_all
from tilewright.cli.options import BuildOptions
from tilewright.errors import OptionError
from tilewright.targets.options import CompileOptions
from tilewright.tune.effort import KNOWN, Tuning


@pytest.mark.parametrize("function", [compile, compile_all])
def test_the_record_has_the_order_and_the_defaults_of_the_signatures(function: Callable[..., Any]) -> None:
    names = [each.name for each in fields(CompileOptions)]
    parameters = inspect.signature(function).parameters
    assert [name for name in parameters if name in names] == names
    usual = {each.name: each.default for each in fields(CompileOptions)} | (
        {"effort": "quick"} if function is compile_all else {}
    )
    assert {name: parameters[name].default for name in names} == usual
    assert MISSING not in usual.values()


def test_the_command_line_has_every_option() -> None:
    usual = {each.name: each.default for each in fields(BuildOptions)}
    for each in fields(CompileOptions):
        assert usual[each.name] == each.default, each.name
    assert CompileOptions(**BuildOptions(partition="greedy").compiling) == CompileOptions(partition="greedy")


def test_options_are_resolved_once() -> None:
    with CompileOptions().resolved() as settings:
        assert settings.target.is_here and settings.tuning == KNOWN and settings.lock is None
    options = CompileOptions(
        "cpu", "quick", "2m", 3, "random", "analytical", "heaviest", "dynamic", "a.lock", "b.db", "strict", 1
    )
    with options.resolved() as settings:
        assert settings.tuning == Tuning("quick", 120.0, 3, "random", Path("b.db"), "analytical", "heaviest")
        assert (settings.numerics, settings.threads, settings.lock) == ("strict", 1, Path("a.lock"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"effort": "ful"}, "effort must be one of 'none', 'quick', 'full', got 'ful'"),
        ({"allocation": "slowest"}, "allocation must be one of"),
        ({"numerics": "exact"}, "numerics must be one of"),
        ({"search": "best"}, "search must be one of"),
        ({"cost_model": "oracle"}, "cost_model must be one of"),
        ({"budget": "soon", "effort": "quick"}, "budget must be a time above 0"),
        ({"budget": 5}, "measures nothing and needs no budget"),
        ({"seed": 1.5}, "seed=1.5 must be a whole number"),
        ({"threads": -1}, "threads=-1"),
        ({"seed": 3}, 'effort="none" measures nothing and needs no seed'),
        ({"search": "random", "cost_model": "analytical"}, "needs no search or cost_model"),
        ({"allocation": "heaviest"}, "needs no allocation"),
    ],
)
def test_a_wrong_option_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        CompileOptions(**given).check()


def test_a_gpu_has_no_threads_to_choose() -> None:
    with (
        pytest.raises(OptionError, match="threads=2 is for processors, and the target is a GPU"),
        CompileOptions("sm_90", threads=2).resolved(),
    ):
        raise AssertionError("it was resolved")
    with CompileOptions("sm_90", threads=0).resolved() as settings:  # as many as the target has
        assert settings.threads == 0


@pytest.mark.parametrize(
    "given", [{"objective": "geomean"}, {"latency": ["1s"]}, {"task_latency": {"linear": "1s"}}]
)
def test_goals_without_measuring_are_refused(given: dict[str, Any]) -> None:
    models = [(nn.Linear(4, 3).eval(), (torch.ones(2, 4),))]
    (name,) = given
    with pytest.raises(OptionError, match=f"measures nothing and needs no {name}"):
        compile_all(models, effort="none", **given)


def test_measuring_for_another_machine_is_refused() -> None:
    with (
        pytest.raises(OptionError, match="the target is another"),
        CompileOptions(AVX2, "quick").resolved(),
    ):
        raise AssertionError("it was resolved")
