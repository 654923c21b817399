"""A value that is put from one order into another is the same value."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.rewrites.layout_choices import reshape_stored
from tilewright.rewrites.orders import AxisBlock, Order, axis_of, blocks_of, conversions, fits, stored
from tilewright.rewrites.shapes import moves_nothing


@st.composite
def orders(draw: st.DrawFn, rank: int) -> Order:
    """Any order of the axes, some of them in blocks."""
    cut = draw(st.sets(st.integers(0, rank - 1), max_size=2))
    blocks = [AxisBlock(axis, draw(st.sampled_from((1, 2, 3, 4, 6, 8)))) for axis in sorted(cut)]
    return tuple(draw(st.permutations([*range(rank), *blocks])))


def in_order(value: np.ndarray, order: Order) -> np.ndarray:
    """What is stored, by every axis cut in two."""
    sizes = blocks_of(order)
    split = [
        part
        for axis, extent in enumerate(value.shape)
        for part in ((extent // sizes.get(axis, 1), sizes.get(axis, 1)) if extent != 1 else (1, 1))
    ]
    positions = [2 * axis_of(entry) + isinstance(entry, AxisBlock) for entry in order]
    left = [axis for axis in range(len(split)) if axis not in positions]
    return value.reshape(split).transpose(*positions, *left).reshape(stored(value.shape, order))


@settings(max_examples=100, deadline=None)
@given(data=st.data(), shape=st.lists(st.sampled_from((0, 1, 2, 12, 24)), min_size=2, max_size=4).map(tuple))
def test_a_value_in_another_order(data: st.DataObject, shape: tuple[int, ...]) -> None:
    have, need = (data.draw(orders(len(shape)).filter(lambda order: fits(shape, order))) for _ in range(2))
    value = np.arange(np.prod(shape)).reshape(shape)
    now, after = in_order(value, have), in_order(value, need)
    for parts, axes in conversions(shape, have, need):
        then = now.reshape(parts).transpose(axes)
        if moves_nothing(parts, axes):
            np.testing.assert_array_equal(now.reshape(-1), then.reshape(-1))
        now = then
    np.testing.assert_array_equal(now.reshape(after.shape), after)


def test_blocks_of_one_and_of_all_move_nothing() -> None:
    shape, image = (2, 8, 3, 5), (0, 1, 2, 3)

    def still(have: Order, need: Order) -> bool:
        return all(moves_nothing(*each) for each in conversions(shape, have, need))

    assert still(image, (*image, AxisBlock(1, 1)))
    assert still((0, 2, 3, 1), (*image, AxisBlock(1, 8)))
    assert not still(image, (*image, AxisBlock(1, 4)))


def test_one_permute_between_blocks_of_whole_blocks_and_two_between_others() -> None:
    shape, image = (1, 48, 5, 15), (0, 1, 2, 3)

    def permutes(have: int, need: int) -> list[tuple[int, ...]]:
        return [
            parts
            for parts, _ in conversions(shape, (*image, AxisBlock(1, have)), (*image, AxisBlock(1, need)))
        ]

    assert permutes(8, 24) == [(1, 2, 3, 5, 15, 8)]
    assert permutes(24, 16) == [(1, 2, 5, 15, 24), (1, 5, 15, 3, 16)]


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ((2, 8, 1, 1), (2, 8), ((2, 2, 4), (0, 1, AxisBlock(1, 4)))),
        ((2, 8, 6, 8), (2, 8, 48), ((2, 2, 48, 4), (0, 1, 2, AxisBlock(1, 4)))),
        ((1, 8, 6, 8), (8, 6, 8), ((2, 6, 8, 4), (0, 1, 2, AxisBlock(0, 4)))),
        ((2, 8, 6, 8), (2, 2, 4, 6, 8), None),
        ((2, 8, 6, 8), (16, 6, 8), None),
    ],
)
def test_reshapes_keep_blocks_of_axes_that_they_leave_alone(
    source: tuple[int, ...], target: tuple[int, ...], expected: tuple[tuple[int, ...], Order] | None
) -> None:
    assert reshape_stored(source, target, (0, 1, 2, 3, AxisBlock(1, 4))) == expected
