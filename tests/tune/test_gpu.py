"""What is chosen on a GPU without a measurement."""

from __future__ import annotations

import pytest
from tilewright.tune.gpu_rule import choose

from tests.space.checked import Inputs
from tilewright.dtypes import DType
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.hw.gpu import H200


def summed(rows: int, columns: int, axis: int) -> Task:
    x = Inputs()
    return x.task(apply("sum", x(rows, columns), axes=(axis,), keepdims=False))


def product(m: int, n: int, k: int, dtype: DType) -> Task:
    x = Inputs()
    return x.task(apply("matmul", x(m, k, dtype=dtype), x(k, n, dtype=dtype)))


@pytest.mark.parametrize(
    ("task", "chosen"),
    [
        (summed(16384, 512, 0), "shared-sums"),
        (summed(512, 16384, 1), "default"),
        (summed(32, 500_000, 0), "default"),
        (product(512, 512, 512, DType.F32), "tiled"),
        (product(512, 512, 512, DType.F16), "tensor-product"),
        (product(1, 512, 512, DType.F32), "shared-sums"),
    ],
    ids=["columns", "rows", "many", "f32", "f16", "one row"],
)
def test_without_libraries(task: Task, chosen: str) -> None:
    assert choose(task, H200, "fast", ()).config.template == chosen
