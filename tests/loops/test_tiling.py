"""Axes that are counted as one."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tilewright import te
from tilewright.dtypes import DType
from tilewright.loops.ir import Buffer
from tilewright.loops.tiling import counted_by
from tilewright.te.index import simplify


@given(
    extents=st.lists(st.integers(2, 5), min_size=2, max_size=3),
    steps=st.lists(st.integers(0, 40), min_size=3, max_size=3),
    dense=st.booleans(),
    own=st.integers(1, 4),
)
def test_what_is_counted_by_one_number_is_where_it_was(
    extents: list[int], steps: list[int], dense: bool, own: int
) -> None:
    """Offsets of loads and of a store, whether they walk the axes as one or not."""
    axes = [te.Var(f"a{n}", extent) for n, extent in enumerate(extents)]
    number, other = te.Var("number", int(np.prod(extents))), te.Var("other", 7)
    if dense:
        steps = [own * int(np.prod(extents[n + 1 :])) for n in range(len(axes))]
    offset = te.as_index(3) + other
    for axis, step in zip(axes, steps, strict=False):
        offset = offset + axis * step
    load = te.Load(Buffer("x", DType.F32, 1000), (offset,))
    by_number = counted_by(number, axes, load)
    assert isinstance(by_number, te.Load)
    for count, values in enumerate(itertools.product(*map(range, extents))):
        at = dict(zip(axes, map(te.as_index, values), strict=True))
        expected = simplify(te.substitute(offset, at))
        for found in (by_number.indices[0], counted_by(number, axes, offset)):
            assert simplify(te.substitute(found, {number: te.as_index(count)})) == expected


def test_axes_that_are_walked_as_one_need_no_division() -> None:
    y, x, channel, pixel = te.Var("y", 7), te.Var("x", 9), te.Var("c", 5), te.Var("pixel", 63)
    position = (y * 9 + x) * 5 + channel
    assert simplify(counted_by(pixel, (y, x), position)) == simplify(pixel * 5 + channel)
