"""What is chosen on a GPU without a measurement."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.space.checked import Inputs
from tilewright.cost.analytical import Analytical
from tilewright.dtypes import DType
from tilewright.errors import SpaceError
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.hw.gpu import H200
from tilewright.space.candidates import Candidates
from tilewright.space.template import Work
from tilewright.tune.choose import choose


def summed(rows: int, columns: int, axis: int) -> Task:
    x = Inputs()
    return x.task(apply("sum", x(rows, columns), axes=(axis,), keepdims=False))


def product(m: int, n: int, k: int, dtype: DType) -> Task:
    x = Inputs()
    return x.task(apply("matmul", x(m, k, dtype=dtype), x(k, n, dtype=dtype)))


@pytest.mark.parametrize(
    ("task", "chosen"),
    [
        (summed(16384, 512, 0), "two-pass-reduction sketch:block-reduction"),
        (summed(512, 16384, 1), "default"),
        (summed(32, 500_000, 0), "default"),
        (product(512, 512, 512, DType.F32), "sketch:tiled"),
        (product(512, 512, 512, DType.F16), "tensor-core-matmul"),
        (product(1, 512, 512, DType.F32), "sketch:block-reduction"),
    ],
    ids=["columns", "rows", "many", "f32", "f16", "one row"],
)
def test_without_libraries(task: Task, chosen: str) -> None:
    """`chosen`: one of these. Of sums of columns either is good: measured on an H200, shared sums take 11.1 us."""
    assert choose(Work(task, H200)).config.template in chosen.split()


def test_a_choice_is_a_candidate_with_its_predicted_time() -> None:
    """And it is the same again: nothing in it depends on what was asked before."""
    work = Work(product(512, 512, 512, DType.F16), replace(H200, libraries=("cublaslt", "torch")))
    choice = choose(work)
    candidates = Candidates.of(work)
    assert candidates.is_legal(choice.config) and choice.origin.kind == "predicted"
    assert choice.seconds == pytest.approx(Analytical(candidates, 0).seconds(choice.config))
    assert choose(Work(work.task, work.machine)).config == choice.config


@pytest.mark.parametrize("shape", [(4096, 4096, 4096), (8192, 8192, 1024)])
def test_a_large_product_is_the_librarys_where_there_is_one(shape: tuple[int, int, int]) -> None:
    """Its kernels use instructions that the templates do not (wgmma)."""
    machine = replace(H200, libraries=("cublaslt", "torch"))
    assert choose(Work(product(*shape, DType.F16), machine)).config.template == "cublaslt"
    assert choose(Work(product(*shape, DType.F16), H200)).config.template == "tensor-core-matmul"


def test_attention_without_a_kernel_is_not_left_whole() -> None:
    """No template takes 160 channels of a head, and without PyTorch there is no library."""
    x = Inputs()
    heads = [x(2, 4, 64, 160, dtype=DType.F16) for _ in range(3)]
    task = x.task(apply("attention", *heads, scale=0.1, causal=False))
    with pytest.raises(SpaceError, match="no template computes attention"):
        choose(Work(task, H200))
    assert choose(Work(task, replace(H200, libraries=("torch",)))).config.template == "sdpa"
