"""Matmuls on tensor cores: what they take, that they compile, and, on a card, that they are right."""

from __future__ import annotations

from dataclasses import replace
from itertools import product as product_of

import numpy as np
import pytest

from tests.loops.gpu.products import PRODUCTS, Product
from tests.loops.test_default import random_arrays
from tests.space.templates.cuda.tiles import (
    LARGE,
    PERSISTENT,
    SPLIT,
    TILES,
    check_it_compiles,
    compiled,
)
from tilewright.codegen.cuda.build import build
from tilewright.codegen.cuda.tensor import tensor_source
from tilewright.dtypes import DType
from tilewright.errors import CodegenError
from tilewright.hw.gpu import A10, A100, H200, GpuMachine, detect
from tilewright.loops.formula import formula_of
from tilewright.loops.gpu.tensor import MatrixTiles
from tilewright.measure.gpu import GpuProgram
from tilewright.runtime.cuda import device
from tilewright.space.templates.cuda.matmul import AppliedMatmul, gemm, is_legal
from tilewright.space.templates.cuda.matrices import MatrixWork, matrix_work


def work_of(case: Product) -> MatrixWork:
    output, inputs = case.expression()
    work = matrix_work(formula_of(output, inputs))
    assert work is not None
    return work


def expected(case: Product, arrays: list[np.ndarray]) -> np.ndarray:
    a, b, *rest = (array.astype(np.float64) for array in arrays)
    total = (a.swapaxes(1, 2) if case.transposed_a else a) @ (b if case.transposed_b else b.swapaxes(1, 2))
    return np.maximum(total + rest[0], 0) + rest[1] if rest else total


@pytest.mark.parametrize("case", PRODUCTS, ids=lambda case: case.name)
def test_every_transposition_and_alignment_is_taken(case: Product) -> None:
    work = work_of(case)
    assert work.sizes == (case.m, case.n, case.k)
    made = gemm(work, TILES[0], H200)
    assert made.a.transposed == case.transposed_a and made.b.transposed == case.transposed_b
    along = case.m if case.transposed_a else case.k
    assert made.a.lanes == next(lanes for lanes in (8, 4, 2, 1) if along % lanes == 0)


def test_other_types_are_declined() -> None:
    output, inputs = Product(64, 64, 64, dtype=DType.F32).expression()
    assert matrix_work(formula_of(output, inputs)) is None


def test_what_the_card_cannot_do_is_not_legal() -> None:
    work = work_of(PRODUCTS[0])
    large = MatrixTiles(128, 256, 64, 2, 4, 4)
    assert large.shared_bytes > A100.shared_block and not is_legal(work, large, A100)
    assert is_legal(work, large, H200)
    assert not is_legal(work, MatrixTiles(64, 64, 32, 8, 1, 2), H200), "a warp has at least 16 rows"
    assert all(is_legal(work, tiles, machine) for tiles in TILES + LARGE for machine in (A100, H200))
    deep = work_of(Product(64, 64, 256))
    assert is_legal(deep, SPLIT[0], H200) and not is_legal(deep, SPLIT[0], A100), "no clusters before sm_90"
    assert not is_legal(work_of(Product(64, 64, 32)), SPLIT[0], H200), "there is one step to divide"


@pytest.mark.parametrize("machine", [A10, A100, H200], ids=lambda machine: machine.capability)
def test_space_and_builder_agree_about_shared_memory(machine: GpuMachine) -> None:
    """Among tiles that differ in nothing else: what the one does not offer the other refuses, before it compiles."""
    work = work_of(Product(512, 512, 512))
    refused = 0
    for bm, bn, bk, stages in product_of((64, 128), (64, 128), (32, 64), (2, 3, 4, 6, 8)):
        tiles = MatrixTiles(bm, bn, bk, 2, 2, stages)
        source = tensor_source(gemm(work, tiles, machine))
        assert (source.shared_bytes <= machine.shared_block) == is_legal(work, tiles, machine)
        if not is_legal(work, tiles, machine):
            refused += 1
            with pytest.raises(CodegenError, match=f"of shared memory, of at most {machine.shared_block}"):
                build(source, machine, "fast", None)
    assert refused


@pytest.mark.parametrize(("case", "machine", "seed"), compiled(PRODUCTS, quick=3))
def test_random_configs_compile_without_spills(case: Product, machine: GpuMachine, seed: int) -> None:
    """What the predicate calls legal, the compiler takes, within the card's limits."""
    check_it_compiles(AppliedMatmul(work_of(case), machine), machine, seed)


@pytest.fixture(scope="module")
def card() -> tuple[device.Device, GpuMachine]:
    return device.Device(), detect()


on_card = pytest.mark.skipif(not device.count(), reason="no NVIDIA GPU")


@pytest.mark.gpu
@on_card
@pytest.mark.parametrize(
    "tiles",
    TILES + LARGE + SPLIT + PERSISTENT,
    ids=lambda t: f"{t.bm}x{t.bn}x{t.bk}x{t.stages}x{t.split}{'p' * t.persistent}",
)
@pytest.mark.parametrize("case", PRODUCTS, ids=lambda case: case.name)
def test_it_is_right_on_a_card(
    case: Product, tiles: MatrixTiles, card: tuple[device.Device, GpuMachine]
) -> None:
    on, machine = card
    if not is_legal(work_of(case), replace(tiles, persistent=False), machine):
        pytest.skip("not legal here")
    _, inputs = case.expression()
    arrays = random_arrays(inputs)
    few = replace(machine, sms=1)  # a persistent block has several tiles then
    kernel = GpuProgram(tensor_source(gemm(work_of(case), tiles, few)), machine, on)
    results = [kernel.run(arrays) for _ in range(20)]
    kernel.close()
    assert all(result.tobytes() == results[0].tobytes() for result in results), "not the same bits each time"
    right = expected(case, arrays).reshape(-1)
    error = np.linalg.norm(results[0].astype(np.float64) - right) / np.linalg.norm(right)
    assert error < (4e-4 if case.dtype is DType.F16 else 4e-3)


@pytest.mark.gpu
@on_card
@pytest.mark.parametrize("k", [64, 67])
def test_nan_and_infinity_stay_in_their_rows_and_columns(
    k: int, card: tuple[device.Device, GpuMachine]
) -> None:
    on, machine = card
    case = Product(70, 50, k, transposed_b=False, epilogue=False)
    a, b = random_arrays(case.expression()[1])
    a[0, 3, 5], a[0, 9, k - 1], b[0, 7, 0] = np.nan, np.inf, -np.inf
    kernel = GpuProgram(tensor_source(gemm(work_of(case), TILES[0], machine)), machine, on)
    got = kernel.run([a, b]).reshape(70, 50).astype(np.float64)
    kernel.close()
    with np.errstate(invalid="ignore"):
        right = expected(case, [a, b])[0]
    np.testing.assert_array_equal(np.isnan(got), np.isnan(right))
    np.testing.assert_array_equal(np.isinf(got), np.isinf(right))
    np.testing.assert_array_equal(np.sign(got[np.isinf(got)]), np.sign(right[np.isinf(right)]))
