"""Long rows, one after another: the next on its way while one is computed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.loops.gpu.test_default import rows_of
from tests.loops.test_default import random_arrays
from tilewright.codegen.cuda.build import build
from tilewright.dtypes import DType
from tilewright.hw.gpu import A100, H200, GpuMachine
from tilewright.loops.formula import formula_of
from tilewright.loops.gpu import staged_rows
from tilewright.loops.gpu.default import default_program
from tilewright.loops.interpret import interpret_program
from tilewright.loops.verify import verify_program
from tilewright.loops.weights import with_weights


@pytest.mark.parametrize("rows", [9, 8])
def test_rows_follow_each_other(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a card of two multiprocessors, with short rows for long ones; the last row is computed twice, and not."""
    for name, value in (("_THREADS", 8), ("_FEWEST", 64), ("_ROWS", 2)):
        monkeypatch.setattr(staged_rows, name, value)
    output, inputs = rows_of(rows, 128, DType.F16)
    program = default_program(with_weights(formula_of(output, inputs)), replace(H200, sms=2))
    verify_program(program)
    turns = -(-rows // 2)
    assert program.decisions.endswith(f"{turns} for each of 2 blocks of 8 threads")
    (x,) = random_arrays(inputs)
    weights = np.exp(x.astype(float) - x.astype(float).max(1, keepdims=True))
    got = interpret_program(program, [x]).reshape(x.shape).astype(float)
    np.testing.assert_allclose(got, weights / weights.sum(1, keepdims=True), rtol=2e-3, atol=1e-7)


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
    assert staged_rows.staged_rows_program(with_weights(formula_of(output, inputs)), H200) is None


@pytest.mark.parametrize("machine", [A100, H200], ids=lambda machine: machine.capability)
def test_it_compiles_without_spills(machine: GpuMachine) -> None:
    output, inputs = rows_of(2_048, 65_536, DType.F16)
    kernel = build(default_program(with_weights(formula_of(output, inputs)), machine), machine, "fast", None)
    assert kernel.threads == 1_024 and kernel.shared_bytes == 2 * 65_536
    assert not kernel.resources.spilled_bytes
