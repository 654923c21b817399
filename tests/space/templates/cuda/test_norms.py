"""Matmuls between norms on tensor cores: what is taken and refused, that it is right, compiles, and its choice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch
from torch import nn

from tests.programs import validation
from tests.space.chains import After, Case, NormCase, random_norms
from tests.space.checked import Inputs
from tests.space.templates.cuda.tiles import arrays_of, check_it_compiles, check_on_a_card, compiled
from tilewright.codegen.cuda.tensor import tensor_source
from tilewright.dtypes import DType
from tilewright.frontend import import_model
from tilewright.graph.chain import Chain, chain_of
from tilewright.graph.op import apply
from tilewright.graph.task import Partition, Task
from tilewright.hw.gpu import H200, GpuMachine, detect
from tilewright.runtime.cuda import device
from tilewright.space.chain import subtasks_of
from tilewright.space.template import GpuWork
from tilewright.space.templates.cuda.norms import AppliedNorm, TensorCoreNorm
from tilewright.support.trace import Trace
from tilewright.targets.cuda import CudaTarget
from tilewright.testing.emulator.run import COMPILER, check
from tilewright.tune.choose import best_among, best_of, choose
from tilewright.tune.oracle import PredictedCosts

F16 = DType.F16
RESIDUAL = After(activation="none", residual=True)
CASES = [
    NormCase(197, 768, 2304),
    NormCase(128, 768, 3072, "layer_norm", "", After(activation="gelu")),
    NormCase(100, 256, 256, "", "layer_norm", RESIDUAL),
    NormCase(300, 2048, 256, "", "layer_norm", RESIDUAL, "matmul"),
    NormCase(64, 512, 192, "rms_norm", "rms_norm", RESIDUAL, dtype=DType.BF16),
    NormCase(130, 65, 33, "softmax", "softmax", more=True),
]


def applied_to(task: Task, machine: GpuMachine = H200) -> AppliedNorm:
    found = TensorCoreNorm().apply(GpuWork(task, machine))
    assert isinstance(found, AppliedNorm), TensorCoreNorm().refusal(GpuWork(task, machine))
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_is_taken(case: NormCase) -> None:
    task = case.task()
    applied = applied_to(task)
    assert (applied.work.before is not None, applied.work.after is not None) == (
        bool(case.before),
        bool(case.after),
    )
    assert next(iter(applied.space.configs()), None) is not None
    assert PredictedCosts(H200).can_compute(task)


def test_a_tile_has_all_columns_of_a_norm_after_it() -> None:
    applied = applied_to(NormCase(64, 64, 100, "", "layer_norm").task())
    assert {dict(config.values)["bn"] for config in applied.space.configs()} == {128}


# -- refusals ---------------------------------------------------------------------------------------------------------


def of_columns() -> Task:
    x = Inputs()
    return x.task(apply("matmul", apply("softmax", x(16, 8, dtype=F16), axis=0), x(8, 8, dtype=F16)))


def of_heads() -> Task:
    x = Inputs()
    heads = apply("softmax", x(16, 2, 8, dtype=F16), axis=2)
    return x.task(apply("linear", apply("reshape", heads, shape=(16, 16)), x(8, 16, dtype=F16)))


def of_two_rows() -> Task:
    """Two neighbouring rows of the norm are one of the GEMM."""
    x = Inputs()
    first = apply("softmax", x(16, 8, dtype=F16), axis=1)
    return x.task(apply("linear", apply("reshape", first, shape=(8, 16)), x(8, 16, dtype=F16)))


def batched() -> Task:
    x = Inputs()
    return x.task(apply("matmul", apply("softmax", x(3, 16, 8, dtype=F16), axis=2), x(3, 8, 8, dtype=F16)))


def read_twice() -> Task:
    x = Inputs()
    first = apply("softmax", x(8, 8, dtype=F16), axis=1)
    return x.task(apply("add", apply("matmul", first, x(8, 8, dtype=F16)), first))


def of_two_products() -> Task:
    x = Inputs()
    first = apply("matmul", apply("softmax", x(8, 8, dtype=F16), axis=1), x(8, 8, dtype=F16))
    return x.task(apply("matmul", first, x(8, 8, dtype=F16)))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (of_columns, "the norm"),
        (of_heads, "reshape+linear is not a GEMM of 16-bit floats"),
        (of_two_rows, "reshape+linear is not a GEMM of 16-bit floats"),
        (batched, "batched"),
        (read_twice, "the result of softmax 1 is read twice"),
        (of_two_products, "it is not one GEMM with a norm before or after it"),
        (NormCase(64, 32, 32, dtype=DType.F32).task, "is not a GEMM of 16-bit floats"),
        (NormCase(64, 32, 300, "", "layer_norm").task, "rows of 300 columns; a block keeps at most 256"),
    ],
)
def test_what_it_cannot_compute_is_refused_with_the_reason(make: Callable[[], Task], reason: str) -> None:
    work = GpuWork(make(), H200)
    found = TensorCoreNorm().refusal(work)
    assert found is not None and reason in found
    assert TensorCoreNorm().apply(work) is None
    assert PredictedCosts(H200).refusal(work.task) == found


def test_strict_numerics_fuse_no_norm() -> None:
    found = TensorCoreNorm().refusal(GpuWork(CASES[0].task(), H200, "strict"))
    assert found is not None and "strict" in found


def test_it_has_nothing_to_say_about_tasks_without_a_norm() -> None:
    assert TensorCoreNorm().refusal(GpuWork(Case(64, (32, 32, 32)).task(), H200)) is None


# -- the choice -------------------------------------------------------------------------------------------------------


def predicted(task: Task) -> tuple[float, float]:
    """(as one kernel, as one for each stage)."""
    chain = chain_of(task)
    assert isinstance(chain, Chain)
    one = best_of(GpuWork(task, H200))
    separate = [best_of(GpuWork(sub.task, H200)) for sub in subtasks_of(chain)]
    assert one is not None and all(each is not None for each in separate)
    return one[0], sum(each[0] for each in separate if each is not None)


def test_a_norm_after_a_gemm_is_chosen_where_it_saves_a_kernel() -> None:
    """The end of a block of DETR: attention's projection, a residual and a norm."""
    task = NormCase(100, 256, 256, "", "layer_norm", RESIDUAL).task()
    one, separate = predicted(task)
    assert one < 0.95 * separate
    assert choose(GpuWork(task, H200)).config.template == TensorCoreNorm.name


def test_it_is_not_chosen_where_many_blocks_would_compute_the_statistics() -> None:
    task = NormCase(4096, 1024, 4096).task()
    alone = best_among(GpuWork(task, H200), [applied_to(task)])
    _, separate = predicted(task)
    assert alone is not None and alone[0] > separate
    assert choose(GpuWork(task, H200)).config.template != TensorCoreNorm.name


# -- code -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("case", "machine", "seed"), compiled(CASES, quick=3))
def test_random_configs_compile_without_spills(case: NormCase, machine: GpuMachine, seed: int) -> None:
    check_it_compiles(applied_to(case.task(), machine), machine, seed)


@pytest.mark.skipif(COMPILER is None, reason="no g++ here to compile the emulator with")
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.slow if seed > 2 else ()) for seed in range(40)]
)
def test_random_norms_are_right_on_the_emulated_gpu(seed: int, tmp_path: Path) -> None:
    """Any case of the generator, with any config."""
    task = random_norms(Random(seed)).task()
    applied = applied_to(task)
    config = applied.space.sample(Random(seed))
    assert config is not None
    check(tensor_source(applied.program(config)), validation(task, "fast")[:6], tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not device.count(), reason="no NVIDIA GPU")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_is_right_on_a_card(case: NormCase) -> None:
    task, machine = case.task(), detect()
    most = 2e-2 if case.dtype is DType.BF16 else 3e-3
    check_on_a_card(applied_to(task, machine), task, arrays_of(task), machine, most)


# -- in a model -------------------------------------------------------------------------------------------------------


class PostNorm(nn.Module):
    """A linear layer with a residual, and a norm after the sum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.out, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.out(x))


def partition_of(width: int) -> Partition:
    example = torch.zeros(1, 100, width, dtype=torch.float16)
    imported = import_model(PostNorm(width).half().eval(), (example,))
    return CudaTarget.described(H200).partition(imported, "fast", Trace.off())


def test_the_partition_puts_a_norm_into_the_kernel_of_the_gemm() -> None:
    assert [call.task.label for call in partition_of(256).calls] == ["matmul+add+add+reshape+layer_norm"]


def test_explain_has_the_reason_of_a_norm_that_stays_apart() -> None:
    found = partition_of(768)
    assert len(found.calls) == 2 and found.fusion is not None
    (refused,) = found.fusion.refused
    assert refused.reason == "the norm has rows of 768 columns; a block keeps at most 256 on chip"
    assert {"out", "norm"} <= set(refused.layers)
