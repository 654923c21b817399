"""Long rows in shared memory: several at once, or one after another, the next on its way while one is computed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.loops.gpu.test_default import rows_of
from tests.loops.test_default import random_arrays
from tilewright import te
from tilewright.codegen.cuda.build import build
from tilewright.dtypes import DType
from tilewright.hw.gpu import A100, H200, GpuMachine
from tilewright.loops.formula import formula_of
from tilewright.loops.gpu import staged_rows
from tilewright.loops.gpu.default import default_program
from tilewright.loops.interpret import interpret_program
from tilewright.loops.softmax_exp import with_softmax_exp
from tilewright.loops.verify import verify_program


@pytest.mark.parametrize("rows", [9, 8])
def test_rows_follow_each_other(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a card of two multiprocessors, with short rows for long ones; the last row is computed twice, and not."""
    for name, value in (("_THREADS", 8), ("_MIN", 64), ("_ROWS", 2)):
        monkeypatch.setattr(staged_rows, name, value)
    output, inputs = rows_of(rows, 128, DType.F16)
    program = default_program(with_softmax_exp(formula_of(output, inputs)), replace(H200, sms=2))
    verify_program(program)
    turns = -(-rows // 2)
    assert program.decisions.endswith(f"{turns} for each of 2 blocks of 8 threads")
    (x,) = random_arrays(inputs)
    weights = np.exp(x.astype(float) - x.astype(float).max(1, keepdims=True))
    got = interpret_program(program, [x]).reshape(x.shape).astype(float)
    np.testing.assert_allclose(got, weights / weights.sum(1, keepdims=True), rtol=2e-3, atol=1e-7)


def groups_of(images: int, groups: int, channels: int, size: int) -> tuple[te.Tensor, list[te.Tensor]]:
    """A group norm: a row has several channels, each with a weight of its own."""
    x = te.Tensor("x", (images, groups * channels, size), DType.F16)
    weight = te.Tensor("weight", (groups * channels,), DType.F16)
    c, s, d, t = te.reduce_axes([channels, size, channels, size])
    count = channels * size
    shape = (images, groups)
    total = te.compute(
        "total", shape, DType.F32, lambda n, g: te.reduce_over("sum", x[n, g * channels + c, s], [c, s])
    )

    def squared(n: te.Expr, g: te.Expr) -> te.Expr:
        apart = x[n, g * channels + d, t] - total[n, g] / count
        return te.reduce_over("sum", apart * apart, [d, t])

    squares = te.compute("squares", shape, DType.F32, squared)

    def element(n: te.Expr, i: te.Expr, j: te.Expr) -> te.Expr:
        group = i // channels
        scale = te.call("rsqrt", squares[n, group] / count + 1e-5)
        return (x[n, i, j] - total[n, group] / count) * scale * weight[i]

    return te.compute("out", x.shape, DType.F16, element), [x, weight]


def normalised(x: np.ndarray, weight: np.ndarray, groups: int) -> np.ndarray:
    rows = x.astype(np.float64).reshape(len(x), groups, -1)
    apart = rows - rows.mean(2, keepdims=True)
    scaled = apart / np.sqrt((apart * apart).mean(2, keepdims=True) + 1e-5)
    return np.asarray(scaled.reshape(x.shape) * weight.astype(np.float64)[:, None])


@pytest.mark.parametrize("size", [128, 144], ids=["even", "with a rest"])
def test_rows_that_several_blocks_hold(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_rows, "_MIN", 64)
    output, inputs = groups_of(2, 3, 4, size)
    program = default_program(formula_of(output, inputs), replace(H200, sms=1))
    verify_program(program)
    assert program.decisions.startswith("held rows") and program.decisions.endswith("32 threads each")
    x, weight = random_arrays(inputs)
    got = interpret_program(program, [x, weight]).reshape(x.shape).astype(float)
    np.testing.assert_allclose(got, normalised(x, weight, 3), rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("machine", [A100, H200], ids=lambda machine: machine.capability)
def test_a_multiprocessor_has_room_for_several_blocks(machine: GpuMachine) -> None:
    output, inputs = groups_of(64, 32, 8, 3_136)
    program = default_program(formula_of(output, inputs), machine)
    kernel = build(program, machine, "fast", None)
    assert program.decisions.startswith("held rows") and kernel.threads == 448, "of seven vectors each"
    shared = kernel.shared_bytes + kernel.resources.static_shared_bytes
    assert machine.resident_blocks(kernel.threads, kernel.resources.registers, shared) >= 3
    assert not kernel.resources.spilled_bytes


def test_few_groups_are_left_to_others() -> None:
    output, inputs = groups_of(8, 32, 8, 3_136)
    assert staged_rows.staged_rows_program(formula_of(output, inputs), H200) is None


@pytest.mark.parametrize(
    ("rows", "columns", "dtype"),
    [
        (2_048, 16_384, DType.F16),
        (100, 65_536, DType.F16),
        (2_048, 65_536 + 8, DType.F16),
        (2_048, 32_768, DType.F32),
    ],
)
def test_short_few_or_longer_rows_are_left_to_others(rows: int, columns: int, dtype: DType) -> None:
    output, inputs = rows_of(rows, columns, dtype)
    assert staged_rows.staged_rows_program(with_softmax_exp(formula_of(output, inputs)), H200) is None


@pytest.mark.parametrize("machine", [A100, H200], ids=lambda machine: machine.capability)
def test_it_compiles_without_spills(machine: GpuMachine) -> None:
    output, inputs = rows_of(2_048, 65_536, DType.F16)
    kernel = build(
        default_program(with_softmax_exp(formula_of(output, inputs)), machine), machine, "fast", None
    )
    assert kernel.threads == 1_024 and kernel.shared_bytes == 2 * 65_536
    assert not kernel.resources.spilled_bytes
