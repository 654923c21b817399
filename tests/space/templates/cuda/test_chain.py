"""Chains of products on tensor cores: what is taken and refused, that it compiles, and, on a card, that it is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from tests.programs import validation
from tests.rewrites.helpers import array
from tests.space.chains import POINTWISE, After, Case, random_case
from tests.space.checked import Inputs
from tests.space.templates.cuda.tiles import check_it_compiles, check_on_a_card, compiled
from tilewright.codegen.cuda.tensor import tensor_source
from tilewright.dtypes import DType
from tilewright.graph.chain import Chain, chain_of
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.hw.gpu import H200, GpuMachine, detect
from tilewright.loops.gpu.chain import REGISTERS, SHARED, ChainTiles
from tilewright.runtime.cuda import device
from tilewright.space.chain import subtasks_of
from tilewright.space.template import GpuWork
from tilewright.space.templates.cuda.chain import AppliedChain, TensorCoreChain
from tilewright.testing.emulator.run import COMPILER, check
from tilewright.tune.choose import best_of, choose

F16 = DType.F16
NONE = After(bias=False, activation="none")
CASES = [
    Case(512, (256, 64, 16)),
    Case(300, (576, 128, 64), (After(), NONE), "matmul"),
    Case(1000, (96, 32, 96), dtype=DType.BF16),
    Case(200, (64, 128, 32, 64)),
    Case(0, (48, 48, 48), image=(28, 28)),
    Case(0, (3, 64, 64), image=(56, 56), stride=2),
    Case(130, (65, 33, 17), (After(residual=True),) * 2),
]


def applied_to(task: Task, machine: GpuMachine = H200) -> AppliedChain:
    found = TensorCoreChain().apply(GpuWork(task, machine))
    assert isinstance(found, AppliedChain)
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_is_taken(case: Case) -> None:
    applied = applied_to(case.task())
    assert applied.work.widths == case.widths[1:]
    residents = {dict(config.values)["resident"] for config in applied.space.configs()}
    assert residents == {REGISTERS, SHARED}


# -- refusals ---------------------------------------------------------------------------------------------------------


def refusal(task: Task, numerics: str = "fast", machine: GpuMachine = H200) -> str:
    work = GpuWork(task, machine, numerics)
    found = TensorCoreChain().refusal(work)
    assert found is not None
    applied = TensorCoreChain().apply(work)
    assert applied is None or next(iter(applied.space.configs()), None) is None
    return found


def batched() -> Task:
    x = Inputs()
    first = apply("relu", apply("matmul", x(3, 8, 16, dtype=F16), x(3, 16, 8, dtype=F16)))
    return x.task(apply("matmul", first, x(3, 8, 8, dtype=F16)))


def with_a_window_after_the_first() -> Task:
    x = Inputs()
    first = apply("conv", x(1, 5, 5, 8, dtype=F16), x(1, 1, 8, 8, dtype=F16), **POINTWISE)
    return x.task(apply("conv", first, x(3, 3, 8, 8, dtype=F16), **POINTWISE))


def with_a_stride_after_the_first() -> Task:
    x = Inputs()
    first = apply("conv", x(1, 6, 6, 8, dtype=F16), x(1, 1, 8, 8, dtype=F16), **POINTWISE)
    return x.task(apply("conv", first, x(1, 1, 8, 8, dtype=F16), **{**POINTWISE, "stride": (2, 2)}))


def with_heads_between() -> Task:
    x = Inputs()
    first = apply("matmul", x(2, 8, 16, dtype=F16), x(16, 8, dtype=F16))
    heads = apply("permute", apply("reshape", first, shape=(2, 8, 2, 4)), axes=(0, 2, 1, 3))
    return x.task(apply("matmul", heads, x(4, 8, dtype=F16)))


def cut_into_other_rows() -> Task:
    x = Inputs()
    first = apply("matmul", x(8, 16, dtype=F16), x(16, 8, dtype=F16))
    return x.task(apply("matmul", apply("reshape", first, shape=(16, 4)), x(4, 8, dtype=F16)))


def with_a_computed_weight() -> Task:
    x = Inputs()
    first = apply("matmul", x(8, 16, dtype=F16), x(16, 8, dtype=F16))
    return x.task(apply("matmul", first, apply("tanh", x(8, 8, dtype=F16))))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (batched, "batched"),
        (Case(64, (32, 32, 32), dtype=DType.F32).task, "16-bit floats"),
        (with_a_window_after_the_first, "reads other rows than the block computes"),
        (with_a_stride_after_the_first, "reads other rows than the block computes"),
        (with_heads_between, "reads other rows than the block computes"),
        (cut_into_other_rows, "reshape+matmul is not a GEMM"),
        (with_a_computed_weight, "weight of the second GEMM is computed"),
        (Case(512, (768, 3072, 768)).task, "GEMM 1 has 3072 columns; a block keeps at most 256"),
        (Case(512, (768, 256, 256, 256)).task, "bytes of a block's 232448 of shared memory"),
        (Case(64, (32, 32)).task, "fewer than two contractions"),
    ],
)
def test_what_it_cannot_compute_is_refused_with_the_reason(make: Callable[[], Task], reason: str) -> None:
    assert reason in refusal(make())


def test_strict_numerics_have_no_chains() -> None:
    assert "strict" in refusal(CASES[0].task(), "strict")


def test_tiles_that_are_not_legal() -> None:
    applied = applied_to(Case(4096, (64, 128, 64)).task())
    legal = ChainTiles(64, 32, 4, 1, 2, False, REGISTERS)
    assert applied.is_legal(legal)
    for wrong, why in (
        (
            ChainTiles(64, 32, 2, 2, 2, False, REGISTERS),
            "two warps share the rows of a left operand in registers",
        ),
        (ChainTiles(64, 32, 8, 1, 2, False, REGISTERS), "a warp has at least 16 rows"),
        (ChainTiles(32, 32, 2, 1, 2, False, SHARED), "a warp has too many columns of the first product"),
        (ChainTiles(128, 32, 2, 1, 2, False, REGISTERS), "too many registers"),
        (ChainTiles(32, 32, 2, 1, 2, True, REGISTERS), "there is no second tile for a block"),
    ):
        assert not applied.is_legal(wrong), why


def test_less_shared_memory_leaves_fewer_configs() -> None:
    task = Case(4096, (64, 256, 128)).task()
    small = replace(H200, shared_block=128 << 10)
    fewer, more = (len(list(applied_to(task, machine).space.configs())) for machine in (small, H200))
    assert 0 < fewer < more
    assert "of a block's 32768 of shared memory" in refusal(
        task, machine=replace(H200, shared_block=32 << 10)
    )


# -- the choice -------------------------------------------------------------------------------------------------------


def predicted(task: Task) -> tuple[float, float]:
    """(as one kernel, as one for each stage)."""
    chain = chain_of(task)
    assert isinstance(chain, Chain)
    one = best_of(GpuWork(task, H200))
    separate = [best_of(GpuWork(sub.task, H200)) for sub in subtasks_of(chain)]
    assert one is not None and all(each is not None for each in separate)
    return one[0], sum(each[0] for each in separate if each is not None)


def test_a_chain_is_chosen_where_it_gains() -> None:
    """Narrow products of many rows are bound by memory: the intermediate result is most of the traffic."""
    one, separate = predicted(Case(128320, (96, 32, 96)).task())
    assert one < 0.9 * separate
    assert choose(GpuWork(Case(16384, (256, 64, 16)).task(), H200)).config.template == TensorCoreChain.name


def test_a_chain_is_not_chosen_where_it_loses() -> None:
    """Few rows with a long sum: a block with all columns leaves most multiprocessors without work."""
    one, separate = predicted(Case(64, (4096, 256, 256)).task())
    assert one > separate


def test_more_work_takes_longer() -> None:
    times = []
    for rows, widths in (
        (4096, (64, 64, 64)),
        (65536, (64, 64, 64)),
        (65536, (64, 64, 256)),
        (65536, (64, 256, 256)),
    ):
        found = best_of(GpuWork(Case(rows, widths).task(), H200))
        assert found is not None
        times.append(found[0])
    assert times == sorted(times)


# -- code -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("case", "machine", "seed"), compiled(CASES, quick=3))
def test_random_configs_compile_without_spills(case: Case, machine: GpuMachine, seed: int) -> None:
    check_it_compiles(applied_to(case.task(), machine), machine, seed)


@pytest.mark.skipif(COMPILER is None, reason="no g++ here to compile the emulator with")
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.slow if seed > 2 else ()) for seed in range(40)]
)
def test_random_chains_are_right_on_the_emulated_gpu(seed: int, tmp_path: Path) -> None:
    """Any chain of the generator, with any config."""
    task = random_case(Random(seed)).task()
    applied = applied_to(task)
    config = applied.space.sample(Random(seed))
    assert config is not None
    check(tensor_source(applied.program(config)), validation(task, "fast")[:6], tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not device.count(), reason="no NVIDIA GPU")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_is_right_on_a_card(case: Case) -> None:
    task, machine = case.task(), detect()
    arrays = [array(*n.shape, seed=i, dtype=n.dtype) for i, n in enumerate(task.graph.inputs)]
    most = 2e-2 if case.dtype is DType.BF16 else 3e-3
    check_on_a_card(applied_to(task, machine), task, arrays, machine, most)


@pytest.mark.gpu
@pytest.mark.skipif(not device.count(), reason="no NVIDIA GPU")
@pytest.mark.parametrize("seed", range(40))
def test_random_chains_are_right_on_a_card(seed: int) -> None:
    case, machine = random_case(Random(seed)), detect()
    task = case.task()
    arrays = [array(*n.shape, seed=i, dtype=n.dtype) for i, n in enumerate(task.graph.inputs)]
    check_on_a_card(
        applied_to(task, machine), task, arrays, machine, 5e-2 if case.dtype is DType.BF16 else 5e-3
    )
