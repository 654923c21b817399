"""Programs for GPUs mean what their tensor expressions mean."""

from __future__ import annotations

import numpy as np
import pytest

from tests.loops.formulas import EXAMPLES, Example
from tests.loops.test_default import random_arrays
from tilewright.hw.gpu import A100, H200, GpuMachine
from tilewright.loops.formula import formula_of
from tilewright.loops.gpu.default import default_program
from tilewright.loops.interpret import interpret_program
from tilewright.loops.verify import verify_program
from tilewright.te.interpret import interpret


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.name)
@pytest.mark.parametrize("machine", [A100, H200], ids=lambda m: m.capability)
def test_program_means_the_expression(example: Example, machine: GpuMachine) -> None:
    output, inputs = example.make()
    program = default_program(formula_of(output, inputs, keep_rounding=True), machine)
    verify_program(program)
    arrays = random_arrays(inputs)
    expected = interpret(output, dict(zip(inputs, arrays, strict=True)))
    got = interpret_program(program, arrays).reshape(expected.shape)
    if output.dtype.is_float:
        tolerance = 1e-2 if output.dtype.is_half else 1e-5
        np.testing.assert_allclose(got.astype(float), expected.astype(float), rtol=tolerance, atol=tolerance)
    else:
        np.testing.assert_array_equal(got, expected)
