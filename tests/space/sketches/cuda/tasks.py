"""Products and convolutions as tasks, for the tests of sketches for GPUs."""

from __future__ import annotations

from tests.loops.gpu.products import Product
from tests.space.checked import Inputs
from tests.space.templates.cuda.test_convolution import CASES, Case
from tilewright.dtypes import DType
from tilewright.graph.op import apply
from tilewright.graph.task import Task

CONVOLUTIONS = [
    *CASES,
    Case((9, 10), (5, 12), stride=2, dtype=DType.F32),
    Case((7, 8), (16, 24), dtype=DType.F32),
]


def product_task(case: Product) -> Task:
    """relu(a @ b + bias) + residual, or a @ b alone."""
    x = Inputs()
    g, m, n, k = case.batch, case.m, case.n, case.k
    a = x(*((g, k, m) if case.transposed_a else (g, m, k)), dtype=case.dtype)
    b = x(*((g, k, n) if case.transposed_b else (g, n, k)), dtype=case.dtype)
    left = apply("permute", a, axes=(0, 2, 1)) if case.transposed_a else a
    right = b if case.transposed_b else apply("permute", b, axes=(0, 2, 1))
    total = apply("matmul", left, right)
    if not case.epilogue:
        return x.task(total)
    bias = apply("broadcast_to", apply("reshape", x(n, dtype=case.dtype), shape=(1, 1, n)), shape=(g, m, n))
    return x.task(apply("add", apply("relu", apply("add", total, bias)), x(g, m, n, dtype=case.dtype)))
