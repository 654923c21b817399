"""Machine code for GPUs means its program: run on a card."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from tests.loops.formulas import EXAMPLES, Example
from tests.loops.gpu.test_default import rows_of
from tests.loops.gpu.test_pooling import CASES as POOLS
from tests.loops.gpu.test_pooling import pool
from tests.loops.gpu.test_staged_rows import groups_of, normalised
from tests.loops.schedule.gpu import operands, warpgroups
from tests.loops.test_default import assert_computes, random_arrays
from tilewright import te
from tilewright.dtypes import DType
from tilewright.hw.gpu import GpuMachine, detect
from tilewright.loops.formula import formula_of
from tilewright.loops.gpu import pooling
from tilewright.loops.gpu.default import default_program
from tilewright.loops.softmax_exp import with_softmax_exp
from tilewright.measure.gpu import GpuProgram
from tilewright.runtime.cuda import device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not device.count(), reason="no NVIDIA GPU"),
]


@pytest.fixture(scope="module")
def card() -> Iterator[tuple[device.Device, GpuMachine]]:
    yield device.Device(), detect()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.name)
def test_machine_code_means_the_expression(example: Example, card: tuple[device.Device, GpuMachine]) -> None:
    on, machine = card
    output, inputs = example.make()
    program = default_program(formula_of(output, inputs, keep_rounding=True), machine)
    arrays = random_arrays(inputs)
    kernel = GpuProgram(program, machine, on)
    results = [kernel.run(arrays) for _ in range(3)]
    kernel.close()
    assert all(result.tobytes() == results[0].tobytes() for result in results), "not the same bits each time"
    assert_computes(results[0], output, dict(zip(inputs, arrays, strict=True)))


@pytest.mark.parametrize("columns", [31, 197, 1024, 5000, 16_400, 65536, 70001, 131_072, 140_000])
def test_rows_of_any_length(columns: int, card: tuple[device.Device, GpuMachine]) -> None:
    """Short ones in a part of a warp, longer ones in registers, of several blocks too, the longest in parts."""
    on, machine = card
    output, inputs = rows_of(7, columns, DType.F16)
    program = default_program(with_softmax_exp(formula_of(output, inputs)), machine)
    (x,) = random_arrays(inputs)
    kernel = GpuProgram(program, machine, on)
    got = kernel.run([x]).reshape(x.shape).astype(float)
    kernel.close()
    weights = np.exp(x.astype(float) - x.astype(float).max(1, keepdims=True))
    np.testing.assert_allclose(got, weights / weights.sum(1, keepdims=True), rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize(("rows", "columns"), [(1_000, 24_576), (1_056, 65_536)])
def test_long_rows_one_after_another(rows: int, columns: int, card: tuple[device.Device, GpuMachine]) -> None:
    on, machine = card
    output, inputs = rows_of(rows, columns, DType.F16)
    program = default_program(with_softmax_exp(formula_of(output, inputs)), replace(machine, sms=132))
    assert program.decisions.startswith("staged rows")
    (x,) = random_arrays(inputs)
    kernel = GpuProgram(program, machine, on)
    results = [kernel.run([x]) for _ in range(3)]
    kernel.close()
    assert all(result.tobytes() == results[0].tobytes() for result in results)
    weights = np.exp(x.astype(np.float32) - x.astype(np.float32).max(1, keepdims=True))
    got = results[0].reshape(x.shape).astype(np.float32)
    np.testing.assert_allclose(got, weights / weights.sum(1, keepdims=True), rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("size", [3_136, 2_312], ids=["even", "with a rest"])
def test_long_rows_that_several_blocks_hold(size: int, card: tuple[device.Device, GpuMachine]) -> None:
    on, machine = card
    output, inputs = groups_of(32, 32, 8, size)
    program = default_program(formula_of(output, inputs), replace(machine, sms=132))
    assert program.decisions.startswith("held rows")
    x, weight = random_arrays(inputs)
    kernel = GpuProgram(program, machine, on)
    results = [kernel.run([x, weight]) for _ in range(3)]
    kernel.close()
    assert all(result.tobytes() == results[0].tobytes() for result in results)
    got = results[0].reshape(x.shape).astype(float)
    np.testing.assert_allclose(got, normalised(x, weight, 32), rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize(("kind", "size", "taps", "stride", "low"), [case[:5] for case in POOLS])
def test_pooled(
    kind: str,
    size: int,
    taps: int,
    stride: int,
    low: int,
    card: tuple[device.Device, GpuMachine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pooling, "_BUSY", 0)
    on, machine = card
    output, inputs = pool(kind, size, taps, stride, low)
    program = default_program(formula_of(output, inputs, keep_rounding=True), machine)
    assert program.decisions.startswith("pooled")
    arrays = random_arrays(inputs)
    kernel = GpuProgram(program, machine, on)
    got = kernel.run(arrays)
    kernel.close()
    assert_computes(got, output, dict(zip(inputs, arrays, strict=True)))


@pytest.mark.parametrize("extents", [(64, 64), (72, 136), (40, 76), (33, 70), (1000, 520)])
def test_transposed_tiles(extents: tuple[int, int], card: tuple[device.Device, GpuMachine]) -> None:
    on, machine = card
    x = te.Tensor("x", extents, DType.F16)
    output = te.compute("y", extents[::-1], DType.F16, lambda j, i: x[i, j])
    kernel = GpuProgram(default_program(formula_of(output, [x]), machine), machine, on)
    (array,) = random_arrays([x])
    got = kernel.run([array]).reshape(extents[::-1])
    kernel.close()
    np.testing.assert_array_equal(got, array.T)


@pytest.mark.parametrize("specialise", [False, True], ids=["one role", "roles"])
@pytest.mark.parametrize(
    ("shape", "block", "stages"),
    [
        ((1024, 1024, 1024), (128, 256, 64), 4),
        ((1000, 520, 1000), (128, 128, 64), 5),
        ((130, 72, 264), (64, 64, 64), 3),
        ((4096, 192, 64 * 40), (192, 96, 64), 6),
    ],
)
def test_a_scheduled_matmul_by_warpgroups(
    shape: tuple[int, int, int],
    block: tuple[int, int, int],
    stages: int,
    specialise: bool,
    card: tuple[device.Device, GpuMachine],
) -> None:
    """Rings of the tensor copy engine and roles of threads, of a schedule."""
    on, machine = card
    if not machine.warpgroup_mma:
        pytest.skip("no instructions of warpgroups here")
    arrays = [*operands(shape), np.arange(shape[1], dtype=np.float16) % 7]
    kernel = GpuProgram(warpgroups(shape, block, stages, specialise=specialise).program(), machine, on)
    results = [kernel.run(arrays) for _ in range(3)]
    kernel.close()
    assert all(result.tobytes() == results[0].tobytes() for result in results), "not the same bits each time"
    a, b, bias = (array.astype(np.float32) for array in arrays)
    np.testing.assert_array_equal(
        results[0].reshape(shape[:2]), np.maximum(a @ b.T + bias, 0).astype(np.float16)
    )


@pytest.mark.parametrize("rows", [300_000, 300_001])
def test_many_short_rows(rows: int, card: tuple[device.Device, GpuMachine]) -> None:
    """Several of them in a warp; in shared memory, and not."""
    on, machine = card
    output, inputs = rows_of(rows, 37, DType.F16)
    program = default_program(with_softmax_exp(formula_of(output, inputs)), machine)
    (x,) = random_arrays(inputs)
    kernel = GpuProgram(program, machine, on)
    got = kernel.run([x]).reshape(x.shape)
    kernel.close()
    wide = x.astype(np.float32)
    weights = np.exp(wide - wide.max(1, keepdims=True))
    np.testing.assert_allclose(got, weights / weights.sum(1, keepdims=True), rtol=2e-3, atol=1e-6)
