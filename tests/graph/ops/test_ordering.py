from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.graph.ops.checks import (
    FLOATS,
    INF,
    INTS,
    NAN,
    Case,
    lowering_params,
    oracle_of,
    run_lowering,
    run_torch,
    torch_params,
)
from tilewright.dtypes import DType

NUMBERS = (*FLOATS, *INTS)
SPECIAL = np.array([[1.0, NAN, 2.0, 1.0], [INF, 3.0, -INF, 3.0], [NAN, NAN, 0.0, -0.0]])


def positions(x: torch.Tensor, axis: int, descending: bool) -> torch.Tensor:
    order = torch.sort(x, dim=axis, descending=descending, stable=True).indices
    return torch.sort(order, dim=axis, stable=True).indices


def argsort(operand: Any, axis: int, descending: bool, dtypes: Any = NUMBERS) -> Case:
    attrs = {"axis": axis, "descending": descending}
    return Case("argsort", [operand], attrs, lambda x: positions(x, axis, descending), dtypes)


RUNNING: dict[str, Any] = {
    "cumprod": lambda x, axis: torch.cumprod(x, axis, dtype=x.dtype),
    "cummax": lambda x, axis: torch.cummax(x, axis).values,
    "cummin": lambda x, axis: torch.cummin(x, axis).values,
}


def running(name: str, operand: Any, axis: int, dtypes: Any = NUMBERS) -> Case:
    return Case(name, [operand], {"axis": axis}, lambda x: RUNNING[name](x, axis), dtypes)


CASES = [
    *(
        argsort(shape, axis, descending)
        for shape, axis in [((7,), 0), ((3, 5), 1), ((3, 5), 0), ((2, 4, 3), 1), ((2, 1), 1)]
        for descending in (False, True)
    ),
    *(argsort(SPECIAL, 1, descending, FLOATS) for descending in (False, True)),
    *(
        running(name, shape, axis)
        for name in RUNNING
        for shape, axis in [((6,), 0), ((3, 4), 1), ((3, 4), 0), ((2, 3, 2), 1)]
    ),
    *(running(name, SPECIAL, 1, FLOATS) for name in RUNNING),
]


@pytest.mark.parametrize(("case", "dtype"), lowering_params(CASES))
def test_lowering(case: Case, dtype: DType) -> None:
    run_lowering(case, dtype)


@pytest.mark.parametrize(("case", "dtype"), torch_params(CASES))
def test_torch(case: Case, dtype: DType) -> None:
    run_torch(case, dtype)


def test_putting_elements_at_their_positions_sorts_them() -> None:
    x = np.random.default_rng(0).standard_normal((3, 9))
    where = oracle_of("argsort", [x], axis=1, descending=True)
    best = oracle_of("put_along", [np.zeros((3, 4)), where, x], axis=1, combine="set")
    np.testing.assert_array_equal(best, np.sort(x, axis=1)[:, ::-1][:, :4])
