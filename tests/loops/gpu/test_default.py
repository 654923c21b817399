"""Programs for GPUs mean what their tensor expressions mean."""

from __future__ import annotations

import numpy as np
import pytest

from tests.loops.formulas import EXAMPLES, Example
from tests.loops.test_default import assert_computes, random_arrays
from tilewright import te
from tilewright.dtypes import DType
from tilewright.hw.gpu import A100, H200, GpuMachine
from tilewright.loops.formula import formula_of
from tilewright.loops.gpu.default import default_program
from tilewright.loops.interpret import interpret_program
from tilewright.loops.ir import Store, walk_stmts
from tilewright.loops.verify import verify_program
from tilewright.loops.weights import with_weights


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.name)
@pytest.mark.parametrize("machine", [A100, H200], ids=lambda m: m.capability)
def test_program_means_the_expression(example: Example, machine: GpuMachine) -> None:
    output, inputs = example.make()
    program = default_program(formula_of(output, inputs, keep_rounding=True), machine)
    verify_program(program)
    arrays = random_arrays(inputs)
    assert_computes(interpret_program(program, arrays), output, dict(zip(inputs, arrays, strict=True)))


def rows_of(rows: int, columns: int, dtype: DType = DType.F32) -> tuple[te.Tensor, list[te.Tensor]]:
    """A softmax, with its exponentials in two passes."""
    x = te.Tensor("x", (rows, columns), dtype)
    (r,) = te.reduce_axes([columns])
    top = te.compute("top", (rows,), DType.F32, lambda i: te.reduce_over("max", x[i, r], [r]))
    total = te.compute(
        "total", (rows,), DType.F32, lambda i: te.reduce_over("sum", te.call("exp", x[i, r] - top[i]), [r])
    )
    return te.compute(
        "out", (rows, columns), dtype, lambda i, j: te.call("exp", x[i, j] - top[i]) / total[i]
    ), [x]


@pytest.mark.parametrize(
    ("rows", "columns", "dtype"),
    [(3, 40, DType.F32), (5, 197, DType.F16), (2, 256, DType.F16)],
)
def test_rows_in_registers(rows: int, columns: int, dtype: DType) -> None:
    output, inputs = rows_of(rows, columns, dtype)
    program = default_program(with_weights(formula_of(output, inputs)), H200)
    verify_program(program)
    assert program.decisions.startswith("rows")
    (x,) = random_arrays(inputs)
    weights = np.exp(x.astype(float) - x.astype(float).max(1, keepdims=True))
    expected = weights / weights.sum(1, keepdims=True)
    got = interpret_program(program, [x]).reshape(x.shape).astype(float)
    np.testing.assert_allclose(got, expected, rtol=2e-3 if dtype.is_half else 1e-5, atol=1e-7)
    exponentials = sum(
        isinstance(node, te.Call) and node.op == "exp2_weight"
        for stmt in walk_stmts(program.body)
        if isinstance(stmt, Store)
        for node in te.walk(stmt.value)
    )
    assert exponentials == 1, "what is kept is not computed again"
