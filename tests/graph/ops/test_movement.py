from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graph.ops.checks import (
    BOOL,
    FLOATS,
    I8,
    I64,
    INF,
    U8,
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
from tilewright.graph.ops.movement import reshape_segments

ALL = (*FLOATS, I64, I8, U8, BOOL)


def reshape(source: tuple[int, ...], target: tuple[int, ...]) -> Case:
    return Case("reshape", [source], {"shape": target}, lambda x: x.reshape(target), dtypes=ALL)


def permute(shape: tuple[int, ...], axes: tuple[int, ...]) -> Case:
    return Case("permute", [shape], {"axes": axes}, lambda x: x.permute(axes), dtypes=ALL)


def broadcast(source: tuple[int, ...], target: tuple[int, ...]) -> Case:
    return Case("broadcast_to", [source], {"shape": target}, lambda x: x.broadcast_to(target), dtypes=ALL)


def sliced(shape: tuple[int, ...], *bounds: tuple[int, int, int]) -> Case:
    starts, stops, steps = (tuple(column) for column in zip(*bounds, strict=True)) if bounds else ((), (), ())
    attrs = {"starts": starts, "stops": stops, "steps": steps}
    return Case("slice", [shape], attrs, lambda x: x[tuple(slice(*b) for b in bounds)], dtypes=ALL)


def flip(shape: tuple[int, ...], axes: tuple[int, ...]) -> Case:
    return Case("flip", [shape], {"axes": axes}, lambda x: x.flip(axes), dtypes=ALL)


def pad(
    shape: tuple[int, ...],
    low: tuple[int, ...],
    high: tuple[int, ...],
    value: Any = 0.0,
    interior: tuple[int, ...] | None = None,
    dtypes: Any = FLOATS,
) -> Case:
    def reference(x: torch.Tensor) -> torch.Tensor:
        flat = [entry for pair in reversed(list(zip(low, high, strict=True))) for entry in pair]
        return torch.nn.functional.pad(x, flat, value=value)

    attrs = {"low": low, "high": high, "interior": interior or (0,) * len(shape), "value": value}
    plain = interior is None and len(shape) > 0
    return Case("pad", [shape], attrs, reference if plain else None, dtypes)


def concat(axis: int, *shapes: tuple[int, ...]) -> Case:
    return Case("concat", shapes, {"axis": axis}, lambda *parts: torch.cat(parts, axis), dtypes=ALL)


def take(shape: tuple[int, ...], axis: int, indices: Any, kind: Any = np.int64) -> Case:
    def reference(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        counted = torch.where(index < 0, index + shape[axis], index).long()
        flat = torch.index_select(x, axis, counted.reshape(-1))
        return flat.reshape(shape[:axis] + tuple(index.shape) + shape[axis + 1 :])

    return Case("take", [shape, np.array(indices, kind)], {"axis": axis}, reference, dtypes=ALL)


def take_along(shape: tuple[int, ...], axis: int, indices: np.ndarray) -> Case:
    return Case(
        "take_along",
        [shape, indices],
        {"axis": axis},
        lambda x, i: torch.gather(x, axis, i.long()),
        dtypes=ALL,
    )


def random_indices(extent: int, shape: tuple[int, ...], kind: Any = np.int64) -> np.ndarray:
    return np.random.default_rng(1).integers(0, extent, shape).astype(kind)


CASES = [
    reshape((2, 3, 4), (6, 4)),
    reshape((2, 3, 4), (2, 12)),
    reshape((6, 4), (2, 3, 4)),
    reshape((4, 6), (3, 8)),
    reshape((2, 9, 5), (2, 3, 3, 5)),
    reshape((2, 1, 6), (3, 4, 1)),
    reshape((1,), ()),
    reshape((), (1, 1)),
    reshape((0, 3), (3, 0, 2)),
    reshape((5,), (5,)),
    permute((2, 3, 4), (2, 0, 1)),
    permute((2, 3, 4, 5), (0, 2, 3, 1)),
    permute((3,), (0,)),
    permute((), ()),
    broadcast((3, 1), (2, 3, 4)),
    broadcast((), (2, 2)),
    broadcast((1,), (0,)),
    broadcast((4,), (4,)),
    sliced((5, 6), (1, 4, 1), (0, 6, 2)),
    sliced((7,), (2, 7, 3)),
    sliced((7,), (3, 3, 1)),
    sliced((4, 3), (0, 4, 1), (1, 2, 5)),
    sliced(()),
    flip((3, 4), (0,)),
    flip((3, 4), (1, 0)),
    flip((3, 4), ()),
    pad((3, 4), (1, 0), (0, 2)),
    pad((3, 4), (1, 2), (2, 1), value=-INF),
    pad((2, 3), (0, 0), (0, 0)),
    pad((1, 3), (2, 0), (1, 0), value=5.0),
    pad((3, 4), (1, 0), (2, 0), interior=(2, 1)),
    pad((1, 4), (0, 1), (0, 0), interior=(3, 0)),
    pad((0, 2), (1, 0), (2, 1), value=1.0),
    pad((0,), (0,), (0,)),
    pad((), (), ()),
    pad((3,), (1,), (1,), value=7, dtypes=[I64, I8, U8]),
    pad((3,), (1,), (1,), value=True, dtypes=[BOOL]),
    concat(0, (2, 3), (1, 3), (4, 3)),
    concat(1, (2, 3), (2, 1)),
    concat(0, (3,)),
    concat(0, (0, 2), (3, 2), (0, 2), (1, 2)),
    concat(1, (2, 0), (2, 0)),
    take((5, 3), 0, [0, 4, -1, -5, 2]),
    take((5, 3), 0, [[0, 4], [1, 1], [3, 2]], np.int32),
    take((2, 5, 3), 1, 3),
    take((2, 3, 4), 2, [[1], [-2]]),
    take((4,), 0, []),
    take_along((3, 5), 1, random_indices(5, (3, 2))),
    take_along((3, 5), 0, random_indices(3, (4, 5), np.int32)),
    take_along((4, 3, 2), 1, random_indices(3, (2, 7, 2))),
    take_along((4,), 0, random_indices(4, (0,))),
]


@pytest.mark.parametrize(("case", "dtype"), lowering_params(CASES))
def test_lowering_equals_oracle(case: Case, dtype: DType) -> None:
    run_lowering(case, dtype)


@pytest.mark.parametrize(("case", "dtype"), torch_params(CASES))
def test_oracle_equals_torch(case: Case, dtype: DType) -> None:
    run_torch(case, dtype)


def factorings(size: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of `size` elements."""

    @st.composite
    def draw_shape(draw: st.DrawFn) -> tuple[int, ...]:
        left, shape = size, []
        while left > 1:
            factor = draw(st.sampled_from([d for d in range(1, left + 1) if left % d == 0]))
            shape.append(factor)
            left //= factor
        return tuple(shape)

    return draw_shape()


@given(st.data())
@settings(max_examples=80)
def test_any_reshape(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([1, 2, 12, 24, 30, 36, 64]))
    source, target = data.draw(factorings(size)), data.draw(factorings(size))
    x = np.arange(size, dtype=np.float32).reshape(source)
    check_lowering("reshape", [x], shape=target)
    for left, right in reshape_segments(source, target):
        assert math.prod(source[axis] for axis in left) == math.prod(target[axis] for axis in right)


def test_reshape_leaves_shared_axes_alone() -> None:
    x = np.zeros((2, 3, 4, 5), np.float32)
    output, _ = lowered(node_of("reshape", [x], {"shape": (2, 12, 5)}))
    assert isinstance(output, te.Compute)
    (load,) = te.loads(output.body)
    assert load.indices[0] is output.axes[0] and load.indices[3] is output.axes[2]
    output, _ = lowered(node_of("reshape", [x], {"shape": (6, 20)}))
    assert isinstance(output, te.Compute)
    (load,) = te.loads(output.body)
    assert load.indices[0] == output.axes[0] // 3 and load.indices[3] == output.axes[1] % 5


@given(st.data())
@settings(max_examples=80)
def test_any_pad(data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, 3))

    def entries(low: int, high: int) -> tuple[int, ...]:
        return tuple(data.draw(st.lists(st.integers(low, high), min_size=rank, max_size=rank)))

    x = np.random.default_rng(0).standard_normal(entries(0, 4))
    low, high, interior = entries(0, 2), entries(0, 2), entries(0, 2)
    result = check_lowering("pad", [x], low=low, high=high, interior=interior, value=9.0)
    assert (result == 9.0).sum() == result.size - x.size


def test_pad_has_no_condition_where_there_is_no_padding() -> None:
    x = np.zeros((3, 4), np.float32)
    attrs = {"low": (0, 1), "high": (0, 0), "interior": (0, 0), "value": 0.0}
    output, _ = lowered(node_of("pad", [x], attrs))
    assert isinstance(output, te.Compute) and isinstance(output.body, te.Select)
    assert te.variables(output.body.cond) == {output.axes[1]}


@given(st.data())
@settings(max_examples=60)
def test_any_slice_and_concat(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    x = np.random.default_rng(0).standard_normal(shape)
    starts = tuple(data.draw(st.integers(0, extent)) for extent in shape)
    stops = tuple(data.draw(st.integers(start, extent)) for start, extent in zip(starts, shape, strict=True))
    steps = tuple(data.draw(st.integers(1, 3)) for _ in shape)
    check_lowering("slice", [x], starts=starts, stops=stops, steps=steps)
    axis = data.draw(st.integers(0, len(shape) - 1))
    cuts = sorted(data.draw(st.lists(st.integers(0, shape[axis]), max_size=3)))
    parts = np.split(x, cuts, axis)
    np.testing.assert_array_equal(check_lowering("concat", parts, axis=axis), x)


def test_an_index_out_of_range_is_clamped() -> None:
    x = np.arange(4.0)
    indices = np.array([-(2**62), -5, -4, 3, 4, 2**62])
    np.testing.assert_array_equal(check_lowering("take", [x, indices], axis=0), [0, 0, 0, 3, 3, 3])
    np.testing.assert_array_equal(check_lowering("take_along", [x, indices], axis=0), [0, 0, 0, 3, 3, 3])


def test_embedding_is_take() -> None:
    table, indices = np.random.default_rng(0).standard_normal((7, 3)), random_indices(7, (2, 5))
    expected = torch.nn.functional.embedding(torch.from_numpy(indices), torch.from_numpy(table))
    check_torch(oracle_of("take", [table, indices], axis=0), expected)


def test_movement_keeps_nan_and_infinities() -> None:
    x = np.array([[np.nan, np.inf], [-np.inf, 0.0]], np.float32)
    np.testing.assert_array_equal(check_lowering("permute", [x], axes=(1, 0)), x.T)
    np.testing.assert_array_equal(check_lowering("flip", [x], axes=(0,)), x[::-1])
