"""Arithmetic of sizes: as the real numbers have it."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from tilewright.support.arith import ceil_div, evenly_spread, round_up


@given(st.integers(-1000, 1000), st.integers(1, 50))
def test_quotients_are_rounded_up(a: int, b: int) -> None:
    assert ceil_div(a, b) == math.ceil(a / b)
    assert round_up(a, b) == b * math.ceil(a / b)


@given(st.lists(st.integers(), max_size=20, unique=True), st.integers(2, 8))
def test_some_values_evenly_spread(values: list[int], count: int) -> None:
    kept = evenly_spread(values, count)
    assert len(kept) == min(len(values), count) == len(set(kept))
    assert kept[:1] == values[:1] and kept[-1:] == values[-1:]
    assert [value for value in values if value in kept] == kept
