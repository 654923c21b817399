from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graph.ops.checks import (
    BOOL,
    F16,
    F32,
    FLOATS,
    I8,
    I32,
    INF,
    INTS,
    NAN,
    Case,
    check_lowering,
    check_torch,
    lowering_params,
    oracle_of,
    run_lowering,
    run_torch,
    torch_params,
)
from tilewright.dtypes import DType

NUMBERS = (*FLOATS, *INTS)
SPECIAL = np.array([[1.0, NAN, 2.0], [INF, 3.0, -INF], [-INF, -INF, -INF], [5.0, 5.0, NAN]])


def torch_sum(x: torch.Tensor, axes: tuple[int, ...], keepdims: bool) -> torch.Tensor:
    return torch.sum(x, axes, keepdims, dtype=x.dtype) if axes else x


def torch_prod(x: torch.Tensor, axes: tuple[int, ...], keepdims: bool) -> torch.Tensor:
    for axis in reversed(axes):
        x = torch.prod(x, axis, keepdims, dtype=x.dtype)
    return x


REFERENCES: dict[str, Any] = {
    "sum": torch_sum,
    "prod": torch_prod,
    "mean": lambda x, axes, keepdims: torch.mean(x, axes, keepdims) if axes else x,
    "amax": lambda x, axes, keepdims: torch.amax(x, axes, keepdims) if axes else x,
    "amin": lambda x, axes, keepdims: torch.amin(x, axes, keepdims) if axes else x,
    "any": lambda x, axes, keepdims: torch.any(x, axes, keepdims) if axes else x,
    "all": lambda x, axes, keepdims: torch.all(x, axes, keepdims) if axes else x,
}
TYPES: dict[str, Any] = {"mean": FLOATS, "any": [BOOL], "all": [BOOL]}


def reduction(name: str, operand: Any, axes: tuple[int, ...], keepdims: bool) -> Case:
    return Case(
        name,
        [operand],
        {"axes": axes, "keepdims": keepdims},
        lambda x: REFERENCES[name](x, axes, keepdims),
        dtypes=TYPES.get(name, NUMBERS),
    )


def arg(name: str, operand: Any, axis: int, keepdims: bool, dtypes: Any = NUMBERS) -> Case:
    function = getattr(torch, name)
    return Case(
        name, [operand], {"axis": axis, "keepdims": keepdims}, lambda x: function(x, axis, keepdims), dtypes
    )


def var(shape: tuple[int, ...], axes: tuple[int, ...], correction: float, keepdims: bool) -> Case:
    return Case(
        "var",
        [shape],
        {"axes": axes, "correction": correction, "keepdims": keepdims},
        lambda x: torch.var(x, axes, correction=correction, keepdim=keepdims),
    )


def cumsum(operand: Any, axis: int, dtypes: Any = NUMBERS) -> Case:
    return Case("cumsum", [operand], {"axis": axis}, lambda x: torch.cumsum(x, axis, dtype=x.dtype), dtypes)


CASES = [
    reduction(name, shape, axes, keepdims)
    for name in REFERENCES
    for shape, axes, keepdims in [
        ((5,), (0,), False),
        ((3, 4), (1,), True),
        ((3, 4), (0,), False),
        ((2, 3, 4), (0, 2), False),
        ((2, 3, 4), (0, 1, 2), True),
        ((2, 1, 3), (1,), False),
        ((2, 3), (), False),
        ((0, 3), (1,), False),
    ]
]
CASES += [
    *(
        Case(case.op, case.operands, case.attrs, case.torch, FLOATS)
        for name in ("sum", "prod", "mean", "amax", "amin")
        for case in [reduction(name, SPECIAL, (1,), False)]
    ),
    reduction("sum", (2, 0), (1,), False),
    reduction("prod", (2, 0), (1,), True),
    reduction("mean", (2, 0), (1,), False),
    reduction("any", (2, 0), (1,), False),
    reduction("all", (2, 0), (1,), False),
    *(
        arg(name, operand, axis, keepdims)
        for name in ("argmax", "argmin")
        for operand, axis, keepdims in [
            ((7,), 0, False),
            ((3, 5), 1, True),
            ((3, 5), 0, False),
            ((2, 3, 4), 1, False),
        ]
    ),
    *(arg(name, SPECIAL, 1, False, FLOATS) for name in ("argmax", "argmin")),
    *(
        var(shape, axes, correction, keepdims)
        for shape, axes in [((6,), (0,)), ((3, 5), (1,)), ((2, 3, 4), (0, 2))]
        for correction, keepdims in [(1, False), (0, True), (2.5, False)]
    ),
    var((3, 1), (1,), 1, False),
    cumsum((6,), 0),
    cumsum((3, 5), 1),
    cumsum((3, 5), 0),
    cumsum((2, 0), 1),
    cumsum(SPECIAL, 1, FLOATS),
]


@pytest.mark.parametrize(("case", "dtype"), lowering_params(CASES))
def test_lowering_equals_oracle(case: Case, dtype: DType) -> None:
    run_lowering(case, dtype)


@pytest.mark.filterwarnings("ignore:.*degrees of freedom.*")
@pytest.mark.parametrize(("case", "dtype"), torch_params(CASES))
def test_oracle_equals_torch(case: Case, dtype: DType) -> None:
    run_torch(case, dtype)


@given(st.data())
@settings(max_examples=60)
def test_any_axes(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), max_size=4)))
    axes = tuple(sorted(data.draw(st.sets(st.sampled_from(range(len(shape))))))) if shape else ()
    keepdims = data.draw(st.booleans())
    dtype = data.draw(st.sampled_from([F32, F16, I32, I8]))
    name = data.draw(st.sampled_from(["sum", "amax", "amin", "prod"]))
    x = np.random.default_rng(0).integers(-3, 4, shape).astype(dtype.numpy)
    result = check_lowering(name, [x], axes=axes, keepdims=keepdims)
    if dtype is I32:
        expected = REFERENCES[name](torch.from_numpy(x), axes, keepdims)
        check_torch(result, expected)


def test_halves_are_summed_in_f32() -> None:
    x = np.full(4096, 1.0, np.float16)
    assert check_lowering("sum", [x], axes=(0,), keepdims=False) == 4096
    assert check_lowering("mean", [x], axes=(0,), keepdims=False) == 1


def test_the_first_of_equals_and_the_first_nan_win() -> None:
    x = np.array([[2, 7, 7, 1, 1], [2, NAN, 9, NAN, -9]], np.float32)
    np.testing.assert_array_equal(check_lowering("argmax", [x], axis=1, keepdims=False), [1, 1])
    np.testing.assert_array_equal(check_lowering("argmin", [x], axis=1, keepdims=False), [3, 1])


def test_variance_of_large_numbers_is_accurate() -> None:
    x = (1e4 + np.arange(8)).astype(np.float32)
    np.testing.assert_allclose(
        check_lowering("var", [x], axes=(0,), correction=0, keepdims=False), 5.25, rtol=1e-5
    )


def test_integer_sums_keep_their_type_and_wrap_around() -> None:
    x = np.full(5, 100, np.int8)
    result = oracle_of("sum", [x], axes=(0,), keepdims=False)
    assert result.dtype == np.int8 and result == 500 - 512
