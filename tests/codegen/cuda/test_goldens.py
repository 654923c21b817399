"""CUDA C++ as text: of a loop program, and what fills the holes of each hand-written pipeline."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.codegen.cuda.tensor_kernels import KERNELS, Kernel
from tests.loops.gpu.test_goldens import CASES as DEFAULTS
from tests.programs import GPU, default_program, holes

Golden = Callable[[str, str], None]


@pytest.mark.parametrize("name", ["elementwise", "rows-softmax"])
def test_a_loop_program_is_the_golden(name: str, golden: Golden) -> None:
    golden(f"{name}.cu", holes(default_program(DEFAULTS[name](), GPU)))


@pytest.mark.parametrize("kernel", [k for k in KERNELS if k.golden], ids=lambda kernel: kernel.name)
def test_the_holes_of_a_pipeline_are_the_golden(kernel: Kernel, golden: Golden) -> None:
    golden(f"{kernel.name}.cu", holes(kernel.made()))
