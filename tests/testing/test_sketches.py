"""Sketches that a user registers are candidates of every task on their target, without a GPU too."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import tilewright
from tests.nvrtc import needs_nvrtc
from tests.programs import GPU, validation
from tests.testing import extensions
from tilewright.codegen.cuda.build import build, source_of
from tilewright.errors import OptionError, TilewrightWarning
from tilewright.extend import register_sketch, unregister_sketch
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.hw import host
from tilewright.space.candidates import Candidates
from tilewright.space.registration import registering_modules
from tilewright.space.space import Config
from tilewright.space.template import GpuWork, Work
from tilewright.testing import Inputs
from tilewright.testing.emulator.run import COMPILER, check
from tilewright.tune.choose import choose

NAME = extensions.Strips.name


@pytest.fixture
def strips() -> Iterator[None]:
    """The sketch as a user's module registers it."""
    module = "tests.testing.registering.strips"
    importlib.import_module(module)
    yield
    unregister_sketch(NAME, "cuda")
    del sys.modules[module]


def tanh(size: int = 640) -> Task:
    x = Inputs()
    return x.task(apply("tanh", apply("mul", x(size), x(size))))


@pytest.mark.usefixtures("strips")
def test_its_configs_are_candidates_with_a_cost() -> None:
    candidates = Candidates.of(GpuWork(tanh(), GPU))
    config = Config.of(NAME, {"threads": 64})
    assert candidates.is_legal(config) and config in set(candidates.configs())
    assert NAME not in {c.template for c in Candidates.of(GpuWork(tanh(), GPU), sketches=False).configs()}
    assert NAME not in {c.template for c in Candidates.of(Work(tanh(), host())).configs()}, "another target"
    assert "tests.testing.registering.strips" in registering_modules(), "for the processes that build"


@pytest.mark.usefixtures("strips")
@pytest.mark.skipif(COMPILER is None, reason="no g++ here to compile the emulator with")
def test_its_programs_compute_the_task(tmp_path: Path) -> None:
    program = Candidates.of(GpuWork(tanh(), GPU)).program(Config.of(NAME, {"threads": 64}))
    check(source_of(program), validation(tanh(), "fast"), tmp_path)


@pytest.mark.usefixtures("strips")
def test_it_is_chosen_where_it_is_predicted_to_be_the_fastest_and_is_compiled() -> None:
    needs_nvrtc()
    choice = choose(GpuWork(tanh(), GPU))
    assert choice.config.template == NAME
    assert build(source_of(choice.program), GPU, "fast", None).threads in (32, 64, 128)
    x = torch.randn(640)
    model = tilewright.compile(nn.Tanh().eval(), (x,), target=GPU)
    (info,) = model.plan.tasks.values()
    assert info.program == "strips"


@pytest.mark.usefixtures("strips")
def test_a_name_can_be_registered_once() -> None:
    with pytest.raises(OptionError, match=r"there is a sketch 'sketch:strips' already"):
        register_sketch(extensions.Strips(), target="cuda")


def test_what_is_no_sketch_is_refused() -> None:
    with pytest.raises(OptionError, match="is not a sketch"):
        register_sketch(object())  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"target must be one of 'cpu', 'cuda', 'gemmini', got 'tpu'"):
        register_sketch(extensions.Strips(), target="tpu")
    with pytest.raises(OptionError, match=r"must begin with 'sketch:', got 'plain'"):
        register_sketch(extensions.Plain())
    for taken in ("sketch:tiled", "sketch:tensorised"):
        with pytest.raises(OptionError, match="already"):
            register_sketch(type("Taken", (extensions.Strips,), {"name": taken})(), target="cuda")


def test_one_that_raises_is_left_out_with_a_warning() -> None:
    raises = type("Raises", (extensions.Raises,), {"name": "sketch:raises"})()
    register_sketch(raises, target="cuda")
    try:
        with pytest.warns(TilewrightWarning, match=r"sketch 'sketch:raises' cannot be asked about mul\+tanh"):
            assert choose(GpuWork(tanh(), GPU)).config.template != "sketch:raises"
    finally:
        unregister_sketch("sketch:raises", "cuda")
