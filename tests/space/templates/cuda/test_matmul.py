"""Matrix products on tensor cores: what they take, that they compile, and, on a card, that they are right."""

from __future__ import annotations

import numpy as np
import pytest

from tests.loops.gpu.products import PRODUCTS, Product
from tests.loops.test_default import random_arrays
from tests.space.templates.cuda.tiles import TILES
from tilewright.codegen.cuda.build import build
from tilewright.codegen.cuda.tensor import tensor_source
from tilewright.dtypes import DType
from tilewright.hw.gpu import A100, H200, GpuMachine, detect
from tilewright.loops.formula import formula_of
from tilewright.loops.gpu.tensor import MatrixTiles
from tilewright.measure.gpu import GpuProgram
from tilewright.runtime.cuda import device
from tilewright.space.templates.cuda.matmul import MatrixWork, is_legal, matrix_work, product


def work_of(case: Product) -> MatrixWork:
    output, inputs = case.expression()
    work = matrix_work(formula_of(output, inputs))
    assert work is not None
    return work


def expected(case: Product, arrays: list[np.ndarray]) -> np.ndarray:
    a, b, *rest = (array.astype(np.float64) for array in arrays)
    total = (a.swapaxes(1, 2) if case.turned_a else a) @ (b if case.turned_b else b.swapaxes(1, 2))
    return np.maximum(total + rest[0], 0) + rest[1] if rest else total


@pytest.mark.parametrize("case", PRODUCTS, ids=lambda case: case.name)
def test_every_transposition_and_alignment_is_taken(case: Product) -> None:
    work = work_of(case)
    assert work.sizes == (case.m, case.n, case.k)
    made = product(work, TILES[0])
    assert made.a.turned == case.turned_a and made.b.turned == case.turned_b
    along = case.m if case.turned_a else case.k
    assert made.a.lanes == next(lanes for lanes in (8, 4, 2, 1) if along % lanes == 0)


def test_other_types_are_declined() -> None:
    output, inputs = Product(64, 64, 64, dtype=DType.F32).expression()
    assert matrix_work(formula_of(output, inputs)) is None


def test_what_the_card_cannot_hold_is_not_legal() -> None:
    work = work_of(PRODUCTS[0])
    large = MatrixTiles(256, 256, 64, 4, 4, 3)
    assert large.shared_bytes > A100.shared_block and not is_legal(work, large, A100)
    assert not is_legal(work, MatrixTiles(64, 64, 32, 8, 1, 2), H200), "a warp has at least 16 rows"
    assert all(is_legal(work, tiles, machine) for tiles in TILES for machine in (A100, H200))


@pytest.mark.parametrize("number", range(len(PRODUCTS)), ids=lambda number: PRODUCTS[number].name)
def test_it_compiles_without_spills(number: int) -> None:
    pytest.importorskip(
        "cuda.bindings.nvrtc", reason="NVRTC is not installed: pip install 'tilewright[cuda]'"
    )
    tiles, machine = TILES[number % len(TILES)], (A100, H200)[number % 2]
    kernel = build(tensor_source(product(work_of(PRODUCTS[number]), tiles)), machine, "fast", None)
    used = kernel.resources
    assert not used.spilled_bytes and not used.stack_bytes
    assert machine.resident_blocks(kernel.threads, used.registers, kernel.shared_bytes) >= 1


@pytest.fixture(scope="module")
def card() -> tuple[device.Device, GpuMachine]:
    return device.Device(), detect()


@pytest.mark.gpu
@pytest.mark.skipif(not device.count(), reason="no NVIDIA GPU")
@pytest.mark.parametrize("tiles", TILES, ids=lambda t: f"{t.bm}x{t.bn}x{t.bk}x{t.stages}")
@pytest.mark.parametrize("case", PRODUCTS, ids=lambda case: case.name)
def test_it_is_right_on_a_card(
    case: Product, tiles: MatrixTiles, card: tuple[device.Device, GpuMachine]
) -> None:
    on, machine = card
    _, inputs = case.expression()
    arrays = random_arrays(inputs)
    kernel = GpuProgram(tensor_source(product(work_of(case), tiles)), machine, on)
    results = [kernel.run(arrays) for _ in range(3)]
    kernel.close()
    assert all(result.tobytes() == results[0].tobytes() for result in results), "not the same bits each time"
    right = expected(case, arrays).reshape(-1)
    error = np.linalg.norm(results[0].astype(np.float64) - right) / np.linalg.norm(right)
    assert error < (4e-4 if case.dtype is DType.F16 else 4e-3)
