"""Packing puts each tile's elements in the order in which they are walked, and can be undone."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tilewright.runtime.packing import Packing


@st.composite
def packings(draw: st.DrawFn) -> Packing:
    extent = draw(st.integers(1, 20))
    width = draw(st.integers(1, extent))
    extents = draw(st.lists(st.integers(1, 4), max_size=3))
    # The original is dense, its axes in any order but for the contiguous one.
    order = draw(st.permutations(range(len(extents))))
    strides, stride = [0] * len(extents), extent
    for axis in order:
        strides[axis] = stride
        stride *= extents[axis]
    return Packing(extent, width, tuple(zip(extents, strides, strict=True)))


@given(packings())
def test_unpack_undoes_pack(packing: Packing) -> None:
    array = np.arange(packing.original_size)
    packed = packing.pack(array)
    assert packed.size == packing.size
    np.testing.assert_array_equal(packing.unpack(packed), array)


@given(packings())
def test_packed_order_is_the_order_of_the_walk(packing: Packing) -> None:
    array = np.arange(packing.original_size)
    walked = []
    for tile in range(packing.tiles):
        start = min(tile * packing.width, packing.extent - packing.width)
        for indices in itertools.product(*(range(extent) for extent, _ in packing.loops)):
            offset = sum(i * stride for i, (_, stride) in zip(indices, packing.loops, strict=True))
            walked.extend(start + offset + lane for lane in range(packing.width))
    np.testing.assert_array_equal(packing.pack(array), walked)
