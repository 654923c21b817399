from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graph.ops.checks import (
    F32,
    F64,
    INF,
    NAN,
    Case,
    check_lowering,
    check_torch,
    lowered,
    lowering_params,
    node_of,
    oracle_of,
    run_lowering,
    run_torch,
    torch_params,
)
from tilewright import te
from tilewright.dtypes import DType

ROWS = np.array(
    [
        [1.0, 2.0, 3.0],
        [-INF, 0.0, 1.0],
        [-INF, -INF, -INF],
        [INF, 0.0, 1.0],
        [NAN, 0.0, 1.0],
        [900.0, 0.0, 1.0],
    ]
)


def softmax(operand: Any, axis: int) -> list[Case]:
    return [
        Case("softmax", [operand], {"axis": axis}, lambda x: torch.softmax(x, axis)),
        Case("log_softmax", [operand], {"axis": axis}, lambda x: torch.log_softmax(x, axis)),
    ]


def layer_norm(shape: tuple[int, ...], dims: int, parameters: int, eps: float = 1e-5) -> Case:
    row = shape[len(shape) - dims :]
    return Case(
        "layer_norm",
        [shape, *[row] * parameters],
        {"dims": dims, "eps": eps},
        lambda x, *wb: F.layer_norm(x, row, *wb, eps=eps),
    )


def rms_norm(shape: tuple[int, ...], dims: int, parameters: int, eps: float = 1e-5) -> Case:
    row = shape[len(shape) - dims :]
    return Case(
        "rms_norm",
        [shape, *[row] * parameters],
        {"dims": dims, "eps": eps},
        lambda x, *w: F.rms_norm(x, row, *w, eps=eps),
    )


def group_norm(shape: tuple[int, ...], groups: int, affine: bool) -> Case:
    return Case(
        "group_norm",
        [shape, *[(shape[1],)] * (2 * affine)],
        {"groups": groups, "eps": 1e-5},
        lambda x, *wb: F.group_norm(x, groups, *wb, eps=1e-5),
    )


def batch_norm(shape: tuple[int, ...]) -> Case:
    rng = np.random.default_rng(5)
    parameters = [rng.standard_normal(shape[1]) for _ in range(3)] + [rng.random(shape[1]) + 0.1]
    return Case(
        "batch_norm",
        [shape, *parameters],
        {"eps": 1e-3},
        lambda x, w, b, mean, var: F.batch_norm(x, mean, var, w, b, eps=1e-3),
    )


def attention(
    q: tuple[int, ...],
    k: tuple[int, ...],
    v: tuple[int, ...],
    mask: Any = None,
    *,
    causal: bool = False,
    scale: float = 0.3,
) -> Case:
    def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any = None) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale)

    operands = [q, k, v] if mask is None else [q, k, v, mask]
    return Case("attention", operands, {"causal": causal, "scale": scale}, reference)


LOOK = np.random.default_rng(2).random((2, 1, 4, 5)) < 0.6
BLIND = np.array([[True, False, True], [False, False, False], [True, True, True]])

CASES = [
    *softmax((5,), 0),
    *softmax((3, 4), 1),
    *softmax((3, 4), 0),
    *softmax((2, 3, 4), 1),
    *softmax((2, 1), 1),
    *softmax((0, 3), 1),
    *softmax((3, 0), 1),
    *softmax(ROWS, 1),
    *softmax((2, 3, 50), 2),
    *(
        layer_norm(shape, dims, n)
        for n in range(3)
        for shape, dims in [((7,), 1), ((3, 8), 1), ((2, 3, 4), 2)]
    ),
    layer_norm((2, 3, 4), 3, 2, eps=0.1),
    layer_norm((0, 4), 1, 2),
    *(rms_norm(shape, dims, n) for n in range(2) for shape, dims in [((7,), 1), ((3, 8), 1), ((2, 3, 4), 2)]),
    *(
        group_norm(shape, groups, affine)
        for affine in (False, True)
        for shape, groups in [
            ((2, 6, 4), 3),
            ((2, 6, 3, 4), 2),
            ((1, 4, 2, 3), 4),
            ((1, 4, 2, 3), 1),
            ((2, 4, 2, 2, 2), 2),
            ((3, 6), 2),
        ]
    ),
    Case("group_norm", [(2, 3)], {"groups": 3, "eps": 1.0}),  # one element each: PyTorch refuses
    batch_norm((2, 3)),
    batch_norm((2, 3, 4)),
    batch_norm((2, 3, 4, 5)),
    batch_norm((0, 3, 4)),
    attention((4, 3), (5, 3), (5, 2)),
    attention((2, 3, 4, 6), (2, 3, 5, 6), (2, 3, 5, 7)),
    attention((2, 3, 4, 6), (2, 3, 5, 6), (2, 3, 5, 6), causal=True),
    attention((2, 3, 5, 6), (2, 3, 4, 6), (2, 3, 4, 6), causal=True),
    attention((2, 3, 4, 6), (2, 3, 5, 6), (2, 3, 5, 6), LOOK),
    attention((2, 3, 4, 6), (2, 3, 5, 6), (2, 3, 5, 6), (4, 5)),
    attention((2, 3, 4, 6), (2, 3, 5, 6), (2, 3, 5, 6), np.where(LOOK, 0.0, -INF)),
    attention((1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4), BLIND),
    attention((1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4), np.where(BLIND, 0.0, -INF)),
]


@pytest.mark.parametrize(("case", "dtype"), lowering_params(CASES))
def test_lowering_equals_oracle(case: Case, dtype: DType) -> None:
    run_lowering(case, dtype)


@pytest.mark.parametrize(("case", "dtype"), torch_params(CASES))
def test_oracle_equals_torch(case: Case, dtype: DType) -> None:
    run_torch(case, dtype)


def test_a_masked_causal_attention_applies_both() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 4, 3)) for _ in range(3))
    mask = rng.random((4, 4)) < 0.7
    both = torch.from_numpy(mask & np.tri(4, dtype=bool))
    expected = F.scaled_dot_product_attention(*map(torch.from_numpy, (q, k, v)), both, scale=0.5)
    check_torch(oracle_of("attention", [q, k, v, mask], causal=True, scale=0.5), expected)


@given(st.data())
@settings(max_examples=40)
def test_softmax_rows_sum_to_one(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    axis = data.draw(st.integers(0, len(shape) - 1))
    scale = data.draw(st.sampled_from([1.0, 100.0, 1e4]))
    x = (np.random.default_rng(0).standard_normal(shape) * scale).astype(np.float32)
    np.testing.assert_allclose(check_lowering("softmax", [x], axis=axis).sum(axis), 1, rtol=1e-5)


def test_norms_of_large_numbers_are_accurate() -> None:
    x = (1000 + np.arange(16)).astype(np.float32).reshape(2, 8)
    check_lowering("layer_norm", [x], dims=1, eps=0.0)
    check_lowering("group_norm", [x], groups=2, eps=0.0)
    assert np.isfinite(oracle_of("rms_norm", [x], dims=1, eps=0.0)).all()


# -- the form that templates look for -----------------------------------------------------------------------------


def stages_of(op: str, shapes: list[tuple[int, ...]], **attrs: Any) -> list[te.Compute]:
    output, _ = lowered(node_of(op, [np.zeros(shape, np.float16) for shape in shapes], attrs))
    return te.stages(output)


def test_softmax_is_a_maximum_a_sum_and_a_last_stage() -> None:
    maximum, total, last = stages_of("softmax", [(2, 3, 4)], axis=1)
    assert maximum.reduction is not None and maximum.reduction.kind == "max"
    assert total.reduction is not None and total.reduction.kind == "sum"
    assert maximum.shape == total.shape == (2, 4) and maximum.dtype is total.dtype is F32
    assert last.reduction is None


def test_norms_reduce_whole_rows() -> None:
    stages = stages_of("layer_norm", [(2, 3, 4), (4,), (4,)], dims=1, eps=1e-5)
    assert [stage.name.removeprefix("layer_norm") for stage in stages] == [
        "_sum",
        "_mean",
        "_squares",
        "_rstd",
        "",
    ]
    assert all(stage.shape == (2, 3) and stage.dtype is F32 for stage in stages[:-1])
    stages = stages_of("group_norm", [(2, 6, 5)], groups=3, eps=1e-5)
    assert all(stage.shape == (2, 3) for stage in stages[:-1])
    last = stages[-1]
    rows = {
        load.indices for load in te.loads(last.body) if load.source is not last and len(load.indices) == 2
    }
    assert rows == {(last.axes[0], last.axes[1] // 2)}


def test_batch_norm_is_decomposed_before_lowering() -> None:
    case = next(case for case in CASES if case.op == "batch_norm")
    with pytest.raises(AssertionError):
        lowered(node_of(case.op, case.arrays(F64), case.attrs))
