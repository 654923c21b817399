from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.graph.ops.checks import (
    BOOL,
    F32,
    FLOATS,
    INTS,
    Case,
    lowering_params,
    oracle_of,
    run_lowering,
    run_torch,
    torch_params,
)
from tilewright.dtypes import DType

NUMBERS = (*FLOATS, *INTS)
REDUCE = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


def scattered(x: torch.Tensor, index: torch.Tensor, updates: torch.Tensor, axis: int, combine: str) -> Any:
    index = torch.where(index < 0, index + x.shape[axis], index).long()
    if combine == "set":
        return x.scatter(axis, index, updates)
    return x.scatter_reduce(axis, index, updates, REDUCE[combine], include_self=True)


def put_along(shape: tuple[int, ...], index: Any, axis: int, combine: str, dtypes: Any = NUMBERS) -> Case:
    index = np.array(index)
    return Case(
        "put_along",
        [shape, index, index.shape],
        {"axis": axis, "combine": combine},
        lambda x, i, u: scattered(x, i, u, axis, combine),
        dtypes,
    )


def put(shape: tuple[int, ...], index: Any, axis: int, combine: str, dtypes: Any = NUMBERS) -> Case:
    index = np.array(index, dtype=np.int64)
    updates = (*shape[:axis], index.size, *shape[axis + 1 :])
    lay = [-1 if d == axis else 1 for d in range(len(shape))]
    return Case(
        "put",
        [shape, index, updates],
        {"axis": axis, "combine": combine},
        lambda x, i, u: scattered(x, i.reshape(lay).expand(u.shape), u, axis, combine),
        dtypes,
    )


CASES = [
    *(
        put_along(shape, index, axis, combine)
        for combine in ("set", *REDUCE)
        for shape, index, axis in [
            ((5,), [3, 0], 0),
            ((2, 4), [[0, 3, 1], [2, 0, -1]], 1),
            ((3, 4), [[0, 2, 1]], 0),  # shorter than x on the other axis
            ((2, 3, 2), [[[1, 0]], [[2, 2]]], 1),
        ]
    ),
    *(put_along((4,), [1, 1, 3, 1], 0, combine) for combine in REDUCE),
    put_along((2, 4), [[0, 3], [2, 1]], 1, "set", [BOOL]),
    *(
        put(shape, index, axis, combine)
        for combine in ("set", *REDUCE)
        for shape, index, axis in [
            ((5,), [4, 0], 0),
            ((2, 4), [-1, 0, 2], 1),
            ((3, 2), [1], 0),
            ((3, 2), [], 0),
        ]
    ),
    *(put((3, 2), [1, 1, 0], 0, combine) for combine in REDUCE),
]


@pytest.mark.parametrize(("case", "dtype"), lowering_params(CASES))
def test_lowering(case: Case, dtype: DType) -> None:
    run_lowering(case, dtype)


@pytest.mark.parametrize(("case", "dtype"), torch_params(CASES))
def test_torch(case: Case, dtype: DType) -> None:
    run_torch(case, dtype)


@pytest.mark.parametrize("op", ["put", "put_along"])
def test_the_last_update_wins_and_those_out_of_range_are_dropped(op: str) -> None:
    x, updates = np.zeros(3), np.arange(1.0, 7.0)
    index = np.array([0, 2, 2, 3, -4, 100])
    case = Case(op, [x, index, updates], {"axis": 0, "combine": "set"})
    np.testing.assert_array_equal(oracle_of(op, [x, index, updates], **case.attrs), [1, 0, 3])
    run_lowering(case, F32)
