"""Matmuls and convolutions whose results are stored by columns, as where a model returns an image with its channels
first: taken, right on the emulated GPU, compiled, and fused by the partition."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch
from torch import nn

from tests.programs import validation
from tests.space.chains import POINTWISE, Case
from tests.space.checked import Inputs
from tests.space.templates.cuda.tiles import check_it_compiles
from tilewright.codegen.cuda.tensor import tensor_source
from tilewright.dtypes import DType
from tilewright.frontend import import_model
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.hw.gpu import A100, H200, GpuMachine
from tilewright.space.template import GpuWork
from tilewright.space.templates.cuda.chain import TensorCoreChain
from tilewright.space.templates.cuda.matmul import AppliedMatmul, TensorCores
from tilewright.support.trace import Trace
from tilewright.targets.cuda import CudaTarget
from tilewright.targets.target import Cutting
from tilewright.testing.emulator.run import COMPILER, check

F16 = DType.F16


def convolved(
    image: tuple[int, int, int],
    inside: int,
    outside: int,
    window: int = 3,
    stride: int = 1,
    more: bool = False,
) -> Task:
    """A convolution with bias and ReLU, its channels moved to the front; `more`: and something is added there."""
    x, edge = Inputs(), window // 2
    y = x(*image, inside, dtype=F16)
    if edge:
        ends = (0, edge, edge, 0)
        y = apply("pad", y, low=ends, high=ends, interior=(0, 0, 0, 0), value=0.0)
    weight = x(window, window, inside, outside, constant=True, dtype=F16)
    y = apply("conv", y, weight, **{**POINTWISE, "stride": (stride, stride)})
    y = apply("relu", apply("add", y, x(outside, constant=True, dtype=F16)))
    y = apply("permute", y, axes=(0, 3, 1, 2))
    return x.task(apply("add", y, x(*y.shape, dtype=F16)) if more else y)


def random_task(seed: int) -> Task:
    rng = Random(seed)
    image = (rng.randint(2, 3), rng.randint(6, 9), rng.randint(6, 9))
    step = rng.choice((1, 2, 8))
    inside, outside = (step * rng.randint(1, 48 // step) for _ in range(2))
    return convolved(image, inside, 32 + outside, rng.choice((2, 3)), rng.choice((1, 2)), rng.random() < 0.3)


def applied_to(task: Task, machine: GpuMachine = H200) -> AppliedMatmul:
    found = TensorCores().apply(GpuWork(task, machine))
    assert isinstance(found, AppliedMatmul)
    return found


def test_the_pixels_are_rows_and_a_vector_is_a_run_of_them() -> None:
    applied = applied_to(convolved((2, 8, 8), 16, 24))
    assert applied.work.across and applied.work.sizes == (128, 24, 144)
    config = next(iter(applied.space.configs()))
    assert applied.program(config).lanes == 8
    odd = applied_to(convolved((2, 7, 5), 16, 24))
    assert odd.program(next(iter(odd.space.configs()))).lanes == 1
    assert all(dict(config.values)["split"] == 1 for config in odd.space.configs())


def test_a_product_that_can_be_stored_by_rows_is() -> None:
    """One image through a 1x1 convolution: with the weights as the left operand, columns are rows."""
    assert not applied_to(convolved((1, 6, 8), 16, 32, window=1)).work.across


def test_a_chain_stores_rows() -> None:
    x = Inputs()
    y = Case(0, (8, 16, 8), image=(6, 6)).output(x)
    work = GpuWork(x.task(apply("permute", y, axes=(0, 3, 1, 2))), H200)
    assert TensorCoreChain().refusal(work) == "the second GEMM does not read the first as its left operand"
    assert TensorCoreChain().apply(work) is None


@pytest.mark.skipif(COMPILER is None, reason="no g++ here to compile the emulator with")
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.slow if seed > 2 else ()) for seed in range(30)]
)
def test_random_results_are_right_on_the_emulated_gpu(seed: int, tmp_path: Path) -> None:
    task = random_task(seed)
    applied = applied_to(task)
    assert applied.work.across
    config = applied.space.sample(Random(seed))
    assert config is not None
    check(tensor_source(applied.program(config)), validation(task, "fast")[:4], tmp_path)


@pytest.mark.parametrize("machine", [A100, H200], ids=lambda machine: machine.capability)
def test_it_compiles_without_spills(machine: GpuMachine) -> None:
    check_it_compiles(applied_to(convolved((8, 56, 56), 64, 64), machine), machine, 0)


def test_the_last_convolution_of_a_model_stores_in_the_order_of_its_caller() -> None:
    model = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 32, 3, padding=1))
    example = torch.zeros(8, 64, 56, 56, dtype=torch.float16)
    imported = import_model(model.half().eval(), (example,))

    def labels(cutting: str) -> list[str]:
        found = CudaTarget.described(H200).partition(imported, "fast", Trace.off(), cutting=Cutting(cutting))
        return [call.task.label for call in found.calls]

    assert labels("greedy")[-2:] == ["pad+conv+add", "permute"]
    assert labels("dynamic")[-1] == "pad+conv+add+permute"
