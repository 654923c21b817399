"""Packing puts each block's elements in the order in which they are walked, and can be undone."""

from __future__ import annotations

import itertools
import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tilewright.runtime.packing import Packing, SeparateTail, dense_order
from tilewright.runtime.paired import GROUP, HALF, PairedWeights, pair_signs, prepare_weights
from tilewright.runtime.transform import Transform
from tilewright.runtime.winograd import TAPS, WinogradWeights, matrices


@st.composite
def packings(draw: st.DrawFn) -> Packing:
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    filled = tuple(axis for axis in range(len(shape)) if draw(st.booleans()))
    blocks = tuple(
        draw(st.integers(1, extent + 3 if n in filled else extent)) for n, extent in enumerate(shape)
    )
    order = tuple(draw(st.permutations(range(2 * len(shape)))))
    return Packing(shape, blocks, order, filled)


@st.composite
def packings_with_tails(draw: st.DrawFn) -> Packing:
    """Of the first axis, some of whose elements come behind all else."""
    packing, last = draw(packings()), draw(st.integers(1, 3))
    longer = (packing.shape[0] + last, *packing.shape[1:])
    return replace(packing, shape=longer, transforms=(SeparateTail(0, last),))


@given(packings() | packings_with_tails())
def test_unpack_undoes_pack(packing: Packing) -> None:
    array = np.arange(packing.original_size) + 1
    packed = packing.pack(array)
    assert packed.size == packing.size
    np.testing.assert_array_equal(packing.unpack(packed), array)


@given(packings_with_tails())
def test_a_tail_comes_behind_the_rest(packing: Packing) -> None:
    array = (np.arange(packing.original_size) + 1).reshape(packing.shape)
    (apart,) = packing.transforms
    assert isinstance(apart, SeparateTail)
    last = apart.count
    short = replace(packing, shape=packing.walked, transforms=())
    expected = [*short.pack(array[:-last]), *array[-last:].reshape(-1)]
    np.testing.assert_array_equal(packing.pack(array), expected)


def test_nothing_is_packed_to_nothing() -> None:
    packing = Packing((0, 3), (1, 3), (0, 1, 2, 3))
    assert packing.size == packing.pack(np.empty((0, 3))).size == 0


@given(packings())
def test_packed_order_is_the_order_of_the_walk(packing: Packing) -> None:
    array = (np.arange(packing.original_size) + 1).reshape(packing.shape)
    walked = []
    for place in itertools.product(*map(range, packing.packed_shape)):
        split = [place[packing.order.index(axis)] for axis in range(len(place))]
        index, inside = [], True
        for axis, (extent, block) in enumerate(zip(packing.shape, packing.blocks, strict=True)):
            start = split[2 * axis] * block
            if axis not in packing.zero_filled:
                start = min(start, extent - block)
            index.append(start + split[2 * axis + 1])
            inside = inside and index[-1] < extent
        walked.append(array[tuple(index)] if inside else 0)
    np.testing.assert_array_equal(packing.pack(array), walked)


@pytest.mark.parametrize("outputs", [2, 4, 6])
def test_a_transform_is_followed_by_the_weights_themselves(outputs: int) -> None:
    packing = Packing(
        (3, 3, 5, 8), (1, 1, 5, 3), (0, 2, 6, 4, 1, 3, 5, 7), transforms=(WinogradWeights(outputs),)
    )
    array = np.random.default_rng(0).standard_normal(packing.shape).astype(np.float32)
    packed = packing.pack(array)
    assert packed.size == packing.size == (outputs + 2) ** 2 * 5 * 9 + array.size
    assert packing.begin_of(packing.transforms[0]) == packing.size - array.size
    np.testing.assert_array_equal(packing.unpack(packed), array.reshape(-1))


@pytest.mark.parametrize("outputs", [2, 4, 6])
def test_winograd_matrices_compute_a_convolution(outputs: int) -> None:
    at, g, bt = (np.array([[float(x) for x in row] for row in m]) for m in matrices(outputs))
    rng = np.random.default_rng(1)
    data, window = rng.standard_normal(outputs + TAPS - 1), rng.standard_normal(TAPS)
    expected = [data[n : n + TAPS] @ window for n in range(outputs)]
    np.testing.assert_allclose(at @ ((g @ window) * (bt @ data)), expected, atol=1e-12)


@given(st.lists(st.integers(2, 5), min_size=1, max_size=4), st.randoms())
def test_dense_order_finds_the_axes_of_a_dense_array(extents: list[int], random) -> None:
    order = list(range(len(extents)))
    random.shuffle(order)
    strides = [0] * len(extents)
    stride = 1
    for axis in reversed(order):
        strides[axis] = stride
        stride *= extents[axis]
    assert dense_order(extents, strides) == tuple(order)
    assert stride == math.prod(extents)
    assert dense_order(extents, [s * 2 for s in strides]) is None


@given(packings(), st.data())
def test_columns_of_pairs_are_scaled_exactly_and_bring_their_corrections(
    packing: Packing, data: st.DataObject
) -> None:
    """The sum of two columns' products is that of the pairs' products without both corrections; the taps may be several
    axes, in any order."""
    axes = data.draw(st.permutations(range(len(packing.shape))))
    taps = tuple(axes[: data.draw(st.integers(1, len(axes)))])
    packing = replace(packing, transforms=(PairedWeights(taps),))
    array = np.random.default_rng(0).standard_normal(packing.shape).astype(np.float32)
    packed = packing.pack(array)
    assert packed.size == packing.size
    np.testing.assert_array_equal(packing.unpack(packed), array.reshape(-1))

    extent = math.prod(packing.shape[axis] for axis in taps)
    one = np.moveaxis(array, taps, range(len(taps))).reshape(extent, -1)
    columns, corrections, sizes, ratios = prepare_weights(one)
    trailing = [*corrections, *sizes, *ratios, *pair_signs(extent)]
    np.testing.assert_array_equal(packed[-len(trailing) :], trailing)
    whole = np.zeros((-(-extent // GROUP), 2, HALF, corrections.size))
    whole.reshape(-1, corrections.size)[:extent] = columns
    first, second = whole[:, 0], whole[:, 1]
    pairs = ((first + second[..., ::-1]) * (second + first[..., ::-1])).sum(axis=(0, 1))
    got = (pairs - corrections - corrections[::-1]) * sizes * sizes[::-1]
    np.testing.assert_allclose(got, (one.astype(np.float64) * one[:, ::-1]).sum(axis=0), atol=1e-4)


@given(packings_with_tails())
def test_what_the_last_transform_stores_comes_first_behind_the_blocks(packing: Packing) -> None:
    both = replace(packing, transforms=(PairedWeights((0,)), *packing.transforms))
    array = np.random.default_rng(0).standard_normal(both.shape).astype(np.float32)
    packed = both.pack(array)
    assert packed.size == both.size
    np.testing.assert_array_equal(both.unpack(packed), array.reshape(-1))
    paired, apart = both.transforms
    scaled, trailing = paired.apply(array)
    np.testing.assert_array_equal(packed[both.begin_of(paired) :], trailing)
    np.testing.assert_array_equal(
        packed[both.begin_of(apart) : both.begin_of(paired)], apart.apply(scaled)[1]
    )


@pytest.mark.parametrize(
    "transform",
    [
        SeparateTail(1, 0),
        SeparateTail(4, 1),
        SeparateTail(-1, 1),
        SeparateTail(0, 3),
        SeparateTail(0, -1),
        PairedWeights(()),
        PairedWeights((0, 0)),
        PairedWeights((4,)),
        PairedWeights((-1,)),
        WinogradWeights(3),
        WinogradWeights(-2),
    ],
)
def test_a_transform_that_cannot_be_is_not_sound(transform: Transform) -> None:
    shape = (3, 3, 5, 8)
    assert transform.is_sound(shape) is (transform == SeparateTail(1, 0))
    assert not WinogradWeights(2).is_sound((3, 3)) and not WinogradWeights(2).is_sound((3, 2, 5, 8))


@pytest.mark.parametrize("transform", [SeparateTail(3, 2), PairedWeights((0, 1, 2)), WinogradWeights(4)])
def test_a_saved_packing_is_the_same_when_it_is_read(transform: Transform) -> None:
    packing = Packing((3, 3, 5, 8), (3, 3, 5, 2), tuple(range(8)), transforms=(transform,))  # type: ignore[arg-type]
    assert msgspec.json.decode(msgspec.json.encode(packing), type=Packing) == packing
