"""Matmuls of 32-bit floats that may be rounded, and of bytes: the same pipeline, other instructions."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from tests.loops.gpu.products import Product
from tests.loops.test_default import random_arrays
from tests.nvrtc import needs_nvrtc
from tests.space.checked import Inputs
from tests.space.implementations import WITH_LIBRARIES, library_calls
from tests.space.templates.cuda.test_matmul import expected
from tests.space.templates.cuda.tiles import FEW_BYTES
from tilewright import te
from tilewright.codegen.cuda.build import build
from tilewright.codegen.cuda.tensor import tensor_source
from tilewright.dtypes import DType
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.hw.gpu import A100, H200, GpuMachine, detect
from tilewright.loops.formula import formula_of
from tilewright.measure.gpu import GpuProgram
from tilewright.runtime.cuda import device
from tilewright.space.template import GpuWork
from tilewright.space.templates.cuda.matmul import AppliedMatmul, TensorCores
from tilewright.space.templates.cuda.matrices import MatrixWork, matrix_work

ROUNDED = [
    Product(128, 128, 64, dtype=DType.F32),
    Product(256, 192, 320, transposed_b=False, dtype=DType.F32),
    Product(100, 72, 40, batch=3, transposed_a=True, dtype=DType.F32),
    Product(127, 769, 511, transposed_b=False, dtype=DType.F32),
    Product(33, 50, 66, transposed_a=True, transposed_b=False, dtype=DType.F32),
    Product(1, 64, 256, dtype=DType.F32),
]
BYTES = [(128, 128, 64), (256, 192, 320), (100, 72, 36), (33, 50, 1028)]


def rounded_work(case: Product) -> MatrixWork:
    output, inputs = case.expression()
    work = matrix_work(formula_of(output, inputs), rounded=True)
    assert work is not None
    return work


def product_of_bytes(m: int, n: int, k: int, transposed: bool = False) -> tuple[te.Tensor, list[te.Tensor]]:
    a, b = te.Tensor("a", (m, k), DType.I8), te.Tensor("b", (k, n) if transposed else (n, k), DType.I8)
    (r,) = te.reduce_axes([k])

    def element(i: te.Expr, j: te.Expr) -> te.Expr:
        right = b[r, j] if transposed else b[j, r]
        return te.reduce_over("sum", te.cast(a[i, r], DType.I32) * te.cast(right, DType.I32), [r])

    return te.compute("total", (m, n), DType.I32, element), [a, b]


def bytes_work(m: int, n: int, k: int) -> MatrixWork:
    output, inputs = product_of_bytes(m, n, k)
    work = matrix_work(formula_of(output, inputs))
    assert work is not None
    return work


@pytest.mark.parametrize("time", ["the first time", "and again"])
def test_a_constant_of_bytes_is_stored_as_the_pipeline_wants_it(time: str) -> None:
    """Again: what is remembered of indices then has buffers that are equal, and not the same objects."""
    m, n, k = 32, 48, 64
    output, inputs = product_of_bytes(m, n, k, transposed=True)
    formula = formula_of(output, inputs)
    work = matrix_work(replace(formula, constants=frozenset(formula.inputs[1:])))
    assert work is not None
    made = AppliedMatmul(work, H200).program(next(iter(AppliedMatmul(work, H200).space.configs())))
    assert made.packings[0] is None and made.packings[1] is not None
    b = np.arange(k * n, dtype=np.int8).reshape(k, n)
    assert np.array_equal(made.packings[1].pack(b).reshape(n, k), b.T)
    assert made.b.pitch == k and not made.b.transposed


def test_what_is_taken() -> None:
    output, inputs = ROUNDED[0].expression()
    assert matrix_work(formula_of(output, inputs)) is None, "only where rounding is allowed"
    assert rounded_work(ROUNDED[0]).left.lanes == 4
    assert bytes_work(64, 64, 64).left.lanes == 16
    for case in (product_of_bytes(64, 64, 62), product_of_bytes(64, 64, 64, transposed=True)):
        assert matrix_work(formula_of(*case)) is None, "bytes go four at a time, along rows of k"


def product_task() -> Task:
    x = Inputs()
    return x.task(apply("matmul", x(512, 256), x(256, 128, constant=True)))


def test_float32_is_rounded_only_where_that_is_allowed() -> None:
    task = product_task()
    assert TensorCores().apply(GpuWork(task, H200, "fast")) is None
    assert TensorCores().apply(GpuWork(task, H200, "tf32")) is not None
    for numerics, rounded in (("fast", None), ("strict", None), ("tf32", True)):
        made = [each for _, each in library_calls(GpuWork(task, WITH_LIBRARIES, numerics))]
        calls = [part.call for each in made for part in each.parts if part.call is not None]
        assert {call.options.get("rounded") for call in calls} == {rounded}


@pytest.mark.parametrize(
    ("work", "machine"),
    [(rounded_work(ROUNDED[0]), A100), (rounded_work(ROUNDED[4]), H200), (bytes_work(*BYTES[1]), A100)],
    ids=["tf32", "tf32 of other transpositions", "bytes"],
)
def test_random_configs_compile_without_spills(work: MatrixWork, machine: GpuMachine) -> None:
    needs_nvrtc()
    applied = AppliedMatmul(work, machine)
    config = applied.space.sample(Random(0))
    assert config is not None
    kernel = build(tensor_source(applied.program(config)), machine, "fast", None)
    assert kernel.resources.spilled_bytes <= FEW_BYTES, config
    assert machine.resident_blocks(kernel.threads, kernel.resources.registers, kernel.shared_bytes) >= 1


def results_on_a_card(work: MatrixWork, arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Of a few random configs; each gives the same bits every time."""
    applied, on, rng = AppliedMatmul(work, detect()), device.Device(), Random(0)
    found = []
    for _ in range(4):
        config = applied.space.sample(rng)
        assert config is not None
        kernel = GpuProgram(tensor_source(applied.program(config)), detect(), on)
        results = [kernel.run(arrays) for _ in range(5)]
        kernel.close()
        assert all(result.tobytes() == results[0].tobytes() for result in results), config
        found.append(results[0])
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("case", ROUNDED, ids=lambda case: case.name)
def test_rounded_products_on_a_card(case: Product) -> None:
    arrays = random_arrays(case.expression()[1])
    right = expected(case, arrays).reshape(-1)
    for result in results_on_a_card(rounded_work(case), arrays):
        assert np.linalg.norm(result - right) < 6e-4 * np.linalg.norm(right)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", BYTES)
def test_sums_of_bytes_are_exact_on_a_card(sizes: tuple[int, int, int]) -> None:
    m, n, k = sizes
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-128, 128, shape).astype(np.int8) for shape in ((m, k), (n, k)))
    right = a.astype(np.int64) @ b.astype(np.int64).T
    for result in results_on_a_card(bytes_work(*sizes), [a, b]):
        np.testing.assert_array_equal(result.reshape(m, n), right)
