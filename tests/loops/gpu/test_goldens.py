"""Every shape of loop nest that `loops/gpu/default.py` gives a GPU, once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.loops.test_goldens import softmax
from tests.programs import GPU, default_program, program_text
from tests.space.checked import Inputs
from tilewright.dtypes import DType
from tilewright.graph.op import apply
from tilewright.graph.task import Task

F16 = DType.F16


def elementwise() -> Task:
    x = Inputs()
    return x.task(apply("relu", apply("add", x(4096, 1024, dtype=F16), x(1024, dtype=F16))))


def transposed() -> Task:
    x = Inputs()
    return x.task(apply("permute", x(1000, 512, dtype=F16), axes=(1, 0)))


def depthwise() -> Task:
    x = Inputs()
    attrs: dict[str, Any] = {"stride": (1, 1), "padding": ((0, 0), (0, 0)), "dilation": (1, 1), "groups": 64}
    image, weight = x(16, 114, 114, 64, dtype=F16), x(3, 3, 1, 64, constant=True, dtype=F16)
    return x.task(apply("relu", apply("conv", image, weight, layout="channels_last", **attrs)))


def max_pool() -> Task:
    x = Inputs()
    attrs: dict[str, Any] = {
        "kernel": (3, 3),
        "stride": (2, 2),
        "padding": (1, 1),
        "dilation": (1, 1),
        "ceil_mode": False,
    }
    return x.task(apply("max_pool", x(32, 64, 112, 112, dtype=F16), layout="channels_first", **attrs))


def group_norm() -> Task:
    """Of groups that are rows, without weights."""
    x = Inputs()
    rows = apply("cast", x(2048, 25_088, dtype=F16), dtype=DType.F32)
    apart = apply("sub", rows, apply("mean", rows, axes=(1,), keepdims=True))
    variance = apply("mean", apply("mul", apart, apart), axes=(1,), keepdims=True)
    return x.task(apply("cast", apply("mul", apart, apply("rsqrt", variance)), dtype=F16))


def column_sums() -> Task:
    x = Inputs()
    return x.task(apply("sum", x(512, 2048), axes=(0,), keepdims=False))


CASES: dict[str, Callable[[], Task]] = {
    "elementwise": elementwise,
    "transposed": transposed,
    "rows-softmax": lambda: softmax(512, 1000, F16),
    "rows-shared": lambda: softmax(4096, 197, F16),
    "rows-held": group_norm,
    "rows-staged": lambda: softmax(2048, 65536, F16),
    "windows-depthwise": depthwise,
    "pooled-max": max_pool,
    "columns-sum": column_sums,
}


@pytest.mark.parametrize("name", CASES)
def test_the_default_program_is_the_golden(name: str, golden: Callable[[str, str], None]) -> None:
    task = CASES[name]()
    golden(f"{name}.txt", program_text(task, default_program(task, GPU), GPU))
