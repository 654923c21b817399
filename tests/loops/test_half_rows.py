"""Rows of 16-bit floats that several passes read are converted once, while they stay in L1."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.loops.test_memory_bound import check, checked_program, statements, with_vectors
from tests.rewrites.helpers import array
from tests.space.checked import Inputs
from tilewright import te
from tilewright.dtypes import DType
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.loops.ir import Program, Store

HALF = pytest.mark.parametrize("dtype", [DType.F16, DType.BF16], ids=lambda dtype: dtype.short)
OPERATORS = pytest.mark.parametrize("op", ["softmax", "layer_norm"])


def rows_of(op: str, dtype: DType, rows: int, columns: int) -> Task:
    x = Inputs()
    data = x(rows, columns, dtype=dtype)
    wide = data if dtype is DType.F32 else apply("cast", data, dtype=DType.F32)
    if op == "softmax":
        result = apply("softmax", wide, axis=1)
    else:
        result = apply("layer_norm", wide, x(columns), x(columns), dims=1, eps=1e-5)
    return x.task(result if dtype is DType.F32 else apply("cast", result, dtype=dtype))


def converting(program: Program) -> set[str]:
    """The buffers that are stored to by statements that read the input."""
    stores = [store for store in statements(program, Store) if isinstance(store, Store)]
    return {s.buffer.name for s in stores if any(load.source.name == "x0" for load in te.loads(s.value))}


@HALF
@OPERATORS
@pytest.mark.parametrize("vector_bytes", [16, 32, 64])
@pytest.mark.parametrize(("rows", "columns"), [(1, 64), (3, 197), (8, 128), (6, 1000)])
def test_the_first_pass_converts(op: str, dtype: DType, rows: int, columns: int, vector_bytes: int) -> None:
    task = rows_of(op, dtype, rows, columns)
    arrays = [array(*n.shape, seed=i, dtype=n.dtype) for i, n in enumerate(task.graph.inputs)]
    arrays[0][rows // 2, columns - 1] = np.nan
    with np.errstate(all="ignore"):
        program = check(task, with_vectors(vector_bytes), arrays)
    assert "converted once" in program.decisions
    assert converting(program) == {"widened"}


@HALF
@OPERATORS
def test_what_does_not_stay_in_l1_is_converted_by_each_pass(op: str, dtype: DType) -> None:
    machine = with_vectors(64)
    small = replace(machine, caches=replace(machine.caches, l1=4 << 10))
    for columns, machine in ((16 << 10, with_vectors(64)), (512, small)):
        program = checked_program(rows_of(op, dtype, 8, columns), machine)
        assert "converted once" not in program.decisions


@OPERATORS
def test_f32_needs_no_copy(op: str) -> None:
    assert "widened" not in str(checked_program(rows_of(op, DType.F32, 8, 128), with_vectors(64)))


@HALF
def test_a_single_pass_keeps_nothing(dtype: DType) -> None:
    x = Inputs()
    total = apply("sum", apply("cast", x(8, 128, dtype=dtype), dtype=DType.F32), axes=(1,), keepdims=False)
    program = check(x.task(apply("cast", total, dtype=dtype)), with_vectors(64))
    assert "converted once" not in program.decisions
