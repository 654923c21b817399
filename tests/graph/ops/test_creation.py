from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.graph.ops.checks import (
    BOOL,
    F64,
    FLOATS,
    I8,
    I32,
    I64,
    INF,
    INTS,
    NAN,
    U8,
    Case,
    lowering_params,
    node_of,
    run_lowering,
    run_torch,
    torch_params,
)
from tilewright.dtypes import DType
from tilewright.graph.oracle import evaluate_node


def full(value: float, shape: tuple[int, ...], dtype: DType) -> Case:
    kind = torch.float64 if dtype.is_float else getattr(torch, str(dtype.numpy))
    attrs = {"value": value, "shape": shape, "dtype": dtype}
    return Case("full", [], attrs, lambda: torch.full(shape, value, dtype=kind), dtypes=[F64])


def iota(shape: tuple[int, ...], axis: int, dtype: DType) -> Case:
    kind = torch.float64 if dtype.is_float else getattr(torch, str(dtype.numpy))

    def reference() -> torch.Tensor:
        line = torch.arange(shape[axis], dtype=kind).reshape(
            [-1 if d == axis else 1 for d in range(len(shape))]
        )
        return line.expand(shape)

    return Case("iota", [], {"shape": shape, "axis": axis, "dtype": dtype}, reference, dtypes=[F64])


CASES = [
    *(full(value, (2, 3), dtype) for dtype in FLOATS for value in (1.5, -2, NAN, INF)),
    *(full(7, (), dtype) for dtype in INTS),
    full(-128, (2,), I8),
    full(255, (2,), U8),
    full(2**40, (1,), I64),
    full(True, (3,), BOOL),
    full(False, (0, 3), BOOL),
    *(iota((3, 4, 5), axis, dtype) for axis in range(3) for dtype in (*FLOATS, I64, I32, U8)),
    iota((1,), 0, I64),
    iota((0, 4), 0, I64),
]


@pytest.mark.parametrize(("case", "dtype"), lowering_params(CASES))
def test_lowering_equals_oracle(case: Case, dtype: DType) -> None:
    run_lowering(case, dtype)


@pytest.mark.parametrize(("case", "dtype"), torch_params(CASES))
def test_oracle_equals_torch(case: Case, dtype: DType) -> None:
    run_torch(case, dtype)


def test_iota_of_a_long_axis_in_a_half_is_rounded_not_wrong() -> None:
    """Beyond 2048 a half holds every second number, beyond 4096 every fourth; ties go to the even one."""
    case = iota((5000,), 0, DType.F16)
    run_lowering(case, F64)
    counted = evaluate_node(node_of("iota", [], case.attrs), [], precise=False)
    assert counted.dtype == np.float16
    assert counted[[2047, 2048, 2049, 2051, 4097, 4098, 4099]].tolist() == [
        2047,
        2048,
        2048,
        2052,
        4096,
        4096,
        4100,
    ]
