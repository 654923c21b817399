"""LLVM IR as the emitter prints it, before any optimisation: one elementwise kernel and one GEMM."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.programs import AVX2, cpu_program, default_program, ir_text
from tests.space.checked import Inputs
from tilewright.graph.op import apply
from tilewright.loops.ir import Program


def elementwise() -> Program:
    x = Inputs()
    return default_program(x.task(apply("relu", apply("add", x(4, 40), x(40)))), AVX2)


def gemm() -> Program:
    x = Inputs()
    task = x.task(apply("matmul", x(4, 8), x(8, 16, constant=True)))
    return cpu_program("contraction", task, AVX2, rows=2, vectors=1, unroll=1, prefetch=0)[1]


@pytest.mark.parametrize("make", [elementwise, gemm], ids=lambda make: make.__name__)
def test_the_text_is_the_golden(make: Callable[[], Program], golden: Callable[[str, str], None]) -> None:
    golden(f"{make.__name__}.ll", ir_text(make(), AVX2))
