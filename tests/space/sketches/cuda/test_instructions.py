"""An instruction that a user registers for GPUs is a knob of the sketch for tensor cores, if it fits there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.loops.gpu.products import Product
from tests.nvrtc import needs_nvrtc
from tests.programs import GPU, validation
from tests.space.sketches.cuda.tasks import product_task
from tilewright.codegen.cuda.build import build, source_of
from tilewright.dtypes import DType
from tilewright.errors import IntrinsicError
from tilewright.extend import register_intrinsic, unregister_intrinsic
from tilewright.hw.gpu import GpuMachine
from tilewright.hw.intrinsics import Intrinsic
from tilewright.hw.tensor_cores import load_matrices, multiply
from tilewright.space.candidates import Candidates
from tilewright.space.sketches.cuda.tensorised import NAME
from tilewright.space.space import Config
from tilewright.space.template import GpuWork
from tilewright.testing.emulator.run import COMPILER, check

TASK = product_task(Product(9, 20, 40, transposed_b=False))
MINE = replace(multiply(16, DType.F16), name="mine.m16n8k16")


@pytest.fixture
def mine(request: pytest.FixtureRequest) -> Iterator[Intrinsic]:
    intrinsic = getattr(request, "param", MINE)
    register_intrinsic(intrinsic)
    yield intrinsic
    unregister_intrinsic(intrinsic.name)


def configs_of(machine: GpuMachine = GPU) -> list[Config]:
    applied = Candidates.of(GpuWork(TASK, machine)).applied
    (found,) = (each for each in applied if each.space.template == NAME)
    return list(found.space.configs())


def test_its_program_computes_the_task(mine: Intrinsic, tmp_path: Path) -> None:
    candidates = Candidates.of(GpuWork(TASK, GPU))
    config = next(c for c in configs_of() if dict(c.values)["instruction"] == mine.digest)
    assert candidates.is_legal(config) and config.int("instruction_k") == 16
    program = candidates.program(config)
    assert mine.name in str(program)
    if COMPILER is not None:
        check(source_of(program), validation(TASK, "fast")[:4], tmp_path)
    needs_nvrtc()
    assert build(source_of(program), GPU, "fast", None).threads


def test_without_one_there_is_no_such_knob() -> None:
    assert all("instruction" not in dict(config.values) for config in configs_of())


def test_an_older_record_is_that_of_the_tensor_cores(mine: Intrinsic) -> None:
    candidates = Candidates.of(GpuWork(TASK, GPU))
    config = next(c for c in configs_of() if not dict(c.values)["instruction"])
    values = {name: value for name, value in config.values if name != "instruction"}
    assert candidates.recalled(Config.of(NAME, values)) == config


def _other_layout() -> Intrinsic:
    mma = multiply(16, DType.F16)
    rows = mma.fragments[1].element
    left = replace(mma.fragments[1], element=lambda lane, n: (rows(lane, n)[0], 15 - rows(lane, n)[1]))
    return replace(mma, name="other.layout", fragments=(mma.fragments[0], left, mma.fragments[2]))


@pytest.mark.parametrize(
    "mine",
    [
        replace(load_matrices(4, DType.F16, False), name="no.product"),
        replace(multiply(16, DType.BF16), name="other.type"),
        replace(MINE, name="of.tomorrow", features=("sm_80", "sm_999")),
        _other_layout(),
    ],
    indirect=True,
    ids=lambda intrinsic: intrinsic.name,
)
def test_one_that_does_not_fit_is_not_offered(mine: Intrinsic) -> None:
    assert all("instruction" not in dict(config.values) for config in configs_of())


def test_an_instruction_of_gpus_names_what_it_needs() -> None:
    with pytest.raises(IntrinsicError, match="must name the capability that it needs"):
        register_intrinsic(replace(MINE, features=()))
