"""Two GEMMs by instructions of warpgroups: what is taken and refused, that the second reads registers, that it is right
on the emulated GPU, and that it compiles."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from tests.nvrtc import needs_nvrtc
from tests.programs import validation
from tests.space.chains import ACTIVATIONS, After, Case, NormCase
from tests.space.checked import Inputs
from tilewright.codegen.cuda.build import build
from tilewright.codegen.cuda.tiles.call import call_source
from tilewright.dtypes import DType
from tilewright.graph.chain import Refused
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.hw.gpu import A100, H200
from tilewright.space.candidates import Candidates
from tilewright.space.sketches.cuda.warpgroup_chain import (
    NAME,
    AppliedWarpgroupChain,
    WarpgroupChain,
    warpgroup_work,
)
from tilewright.space.template import GpuWork
from tilewright.testing.emulator.run import COMPILER, check
from tilewright.tune.choose import choose

F16 = DType.F16
NONE = After(bias=False, activation="none")
CASES = [
    Case(200, (64, 32, 48)),
    Case(300, (96, 40, 24), (After(activation="gelu"), After(activation="none", residual=True)), "matmul"),
    Case(130, (72, 128, 64), (NONE, NONE), dtype=DType.BF16),
    Case(65, (33, 17, 50), (After(activation="tanh"), After(activation="silu"))),
]


def applied_to(task: Task) -> AppliedWarpgroupChain:
    found = WarpgroupChain().apply(GpuWork(task, H200))
    assert isinstance(found, AppliedWarpgroupChain), warpgroup_work(GpuWork(task, H200))
    return found


def random_case(seed: int) -> Case:
    rng = Random(seed)
    step = rng.choice((1, 2, 8, 8))
    widths = tuple(step * rng.randint(1, 96 // step) for _ in range(3))
    after = tuple(After(rng.random() < 0.7, rng.choice(ACTIVATIONS), rng.random() < 0.4) for _ in range(2))
    kind = rng.choice(("linear", "matmul"))
    return Case(rng.randint(2, 300), widths, after, kind, dtype=rng.choice((F16, DType.BF16)))


@pytest.mark.skipif(COMPILER is None, reason="no g++ here to compile the emulator with")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_second_product_reads_registers_and_the_result_is_right(case: Case, tmp_path: Path) -> None:
    task = case.task()
    config = next(iter(applied_to(task).space.configs()))
    source = call_source(applied_to(task).program(config), H200)
    second = applied_to(task).blocks[1]
    assert re.search(rf"multiply_m64n{second}k16_\w+_registers", source.text)
    check(source, validation(task, "fast")[:3], tmp_path, granule=1)


@pytest.mark.skipif(COMPILER is None, reason="no g++ here to compile the emulator with")
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.slow if seed > 1 else ()) for seed in range(30)]
)
def test_random_chains_are_right_on_the_emulated_gpu(seed: int, tmp_path: Path) -> None:
    task = random_case(seed).task()
    applied = applied_to(task)
    config = applied.space.sample(Random(seed))
    assert config is not None
    check(call_source(applied.program(config), H200), validation(task, "fast")[:4], tmp_path, granule=1)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "widths",
    [(256, 128, 64), pytest.param((64, 64, 256), marks=SLOW), pytest.param((96, 96, 96), marks=SLOW)],
    ids=str,
)
def test_it_compiles_without_spills(widths: tuple[int, ...]) -> None:
    needs_nvrtc()
    applied, rng = applied_to(Case(4096, widths).task()), Random(0)
    for _ in range(4):
        config = applied.space.sample(rng)
        assert config is not None
        made = build(call_source(applied.program(config), H200), H200, "fast", None)
        assert made.resources.spilled_bytes == 0, str(config)


# -- refusals ---------------------------------------------------------------------------------------------------------


def with_two_residuals() -> Task:
    x = Inputs()
    y = apply("linear", x(64, 32, dtype=F16), x(32, 32, constant=True, dtype=F16))
    y = apply("add", apply("add", y, x(64, 32, dtype=F16)), x(64, 32, dtype=F16))
    return x.task(apply("linear", y, x(32, 32, constant=True, dtype=F16)))


def with_another_activation() -> Task:
    x = Inputs()
    y = apply("exp", apply("linear", x(64, 32, dtype=F16), x(32, 32, constant=True, dtype=F16)))
    return x.task(apply("linear", y, x(32, 32, constant=True, dtype=F16)))


def with_a_sum_behind_the_activation() -> Task:
    x = Inputs()
    y = apply("relu", apply("linear", x(64, 32, dtype=F16), x(32, 32, constant=True, dtype=F16)))
    y = apply("add", y, x(64, 32, dtype=F16))
    return x.task(apply("linear", y, x(32, 32, constant=True, dtype=F16)))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Case(64, (32, 32, 32, 32)).task, "two products"),
        (Case(0, (8, 16, 16), image=(6, 6)).task, "the first GEMM does not read rows of a matrix"),
        (Case(64, (32, 512, 32)).task, "512 columns"),
        (with_two_residuals, "more than a bias and a tensor"),
        (with_another_activation, "exp is not a bias, a sum or an activation"),
        (with_a_sum_behind_the_activation, "add is not a bias, a sum or an activation"),
    ],
)
def test_what_it_cannot_compute_is_refused_with_the_reason(make: Callable[[], Task], reason: str) -> None:
    work = GpuWork(make(), H200)
    found = warpgroup_work(work)
    assert isinstance(found, Refused) and reason in found.reason
    assert WarpgroupChain().apply(work) is None


def test_only_gpus_with_warpgroups_have_it() -> None:
    found = warpgroup_work(GpuWork(CASES[0].task(), A100))
    assert isinstance(found, Refused) and "sm_80" in found.reason
    assert WarpgroupChain().apply(GpuWork(NormCase(64, 32, 32).task(), H200)) is None


def test_tuning_tries_it_and_predictions_do_not_choose_it() -> None:
    work = GpuWork(CASES[0].task(), H200)
    assert NAME in {applied.space.template for applied in Candidates.of(work).applied}
    assert choose(work).config.template != NAME
