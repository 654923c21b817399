"""Every shape of loop nest that `loops/default.py` gives a CPU, once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.programs import AVX512, default_program, program_text
from tests.space.checked import Inputs
from tilewright.dtypes import DType
from tilewright.graph.op import apply
from tilewright.graph.task import Task


def elementwise() -> Task:
    x = Inputs()
    return x.task(apply("relu", apply("add", x(64, 100), x(100))))


def scalar() -> Task:
    x = Inputs()
    return x.task(apply("add", x(), x()))


def transposed(rows: int, columns: int) -> Task:
    x = Inputs()
    return x.task(apply("permute", x(rows, columns), axes=(1, 0)))


def upsampled() -> Task:
    x = Inputs()
    return x.task(apply("resize", x(3, 8, 40), sizes=(8, 80), mode="linear", coordinates="half_pixel"))


def matmul() -> Task:
    x = Inputs()
    return x.task(apply("matmul", x(24, 32), x(32, 64, constant=True)))


def max_pool() -> Task:
    x = Inputs()
    attrs: dict[str, Any] = {
        "kernel": (3, 3),
        "stride": (2, 2),
        "padding": (1, 1),
        "dilation": (1, 1),
        "ceil_mode": False,
    }
    return x.task(apply("max_pool", x(1, 4, 16, 64), layout="channels_first", **attrs))


def column_sums() -> Task:
    x = Inputs()
    return x.task(apply("sum", x(512, 2048), axes=(0,), keepdims=False))


def softmax(rows: int, columns: int, dtype: DType = DType.F32) -> Task:
    x = Inputs()
    scores = x(rows, columns, dtype=dtype)
    if dtype is not DType.F32:
        scores = apply("cast", scores, dtype=DType.F32)
    weights = apply("exp", apply("sub", scores, apply("amax", scores, axes=(1,), keepdims=True)))
    share = apply("div", weights, apply("sum", weights, axes=(1,), keepdims=True))
    return x.task(apply("cast", share, dtype=dtype) if dtype is not DType.F32 else share)


def argmax() -> Task:
    x = Inputs()
    return x.task(apply("argmax", x(32, 200), axis=1, keepdims=False))


CASES: dict[str, Callable[[], Task]] = {
    "elementwise": elementwise,
    "scalar": scalar,
    "transposed": lambda: transposed(96, 64),
    "transposed-unaligned": lambda: transposed(5000, 5001),
    "upsampled": upsampled,
    "tiled-matmul": matmul,
    "pooled-max": max_pool,
    "columns-sum": column_sums,
    "rows-softmax": lambda: softmax(64, 256),
    "rows-softmax-streamed": lambda: softmax(200_000, 100),
    "rows-argmax": argmax,
}


@pytest.mark.parametrize("name", CASES)
def test_the_default_program_is_the_golden(name: str, golden: Callable[[str, str], None]) -> None:
    task = CASES[name]()
    golden(f"{name}.txt", program_text(task, default_program(task, AVX512), AVX512))
