"""Every operator with a lowering, as machine code, gives what its oracle gives: the cases of the op table's tests."""

from __future__ import annotations

import pytest

from tests.codegen.llvm.native import run_program
from tests.graph.ops.checks import Case, assert_close, lowered, lowering_params, node_of
from tests.graph.ops.test_table import CASES
from tilewright.dtypes import DType
from tilewright.graph.oracle import evaluate_node
from tilewright.hw import host
from tilewright.loops.default import default_program
from tilewright.loops.formula import formula_of
from tilewright.loops.verify import verify_program


# Attention has a reduction inside a reduction: only its template makes a program of it.
@pytest.mark.parametrize(("case", "dtype"), lowering_params(case for case in CASES if case.op != "attention"))
def test_machine_code_gives_the_oracles_result(case: Case, dtype: DType) -> None:
    arrays = case.arrays(dtype)
    node = node_of(case.op, arrays, case.attrs)
    expected = evaluate_node(node, arrays, precise=False)
    if not node.type.size:
        return  # nothing to compute: such a call is left out of a plan
    output, inputs = lowered(node)
    program = default_program(formula_of(output, inputs), host())
    verify_program(program)
    assert_close(run_program(program, arrays).reshape(node.shape), expected, node.dtype)
