"""Canaries: whatever is written outside of a kernel's output is seen."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.measure.watched import Blocks, StrayWrite, Watched
from tilewright.runtime.plan import TensorSpec

SPECS = (
    TensorSpec("a", "f32", (100,)),
    TensorSpec("b", "i8", (33,)),
    TensorSpec("out", "f32", (50,)),
)
INPUTS = [np.arange(100, dtype=np.float32), np.arange(33, dtype=np.int8)]


def filled(shifted: bool = False) -> Watched:
    watched = Watched(Blocks(), SPECS, shifted=shifted, aligned_ones=frozenset({1}))
    watched.fill(INPUTS)
    return watched


@pytest.mark.parametrize("shifted", [False, True])
def test_the_output_is_nonsense_before_and_may_be_written(shifted: bool) -> None:
    watched = filled(shifted)
    assert np.isnan(watched.output).all()
    watched.output[:] = 1.0
    watched.verify(INPUTS)
    a, b, out = (address % 64 for address in watched.addresses)
    assert (a, b, out) == ((4, 0, 4) if shifted else (0, 0, 0))


@given(place=st.integers(0, 3 * 4096 + 4096 + 400 + 33 + 200 - 1), bit=st.integers(0, 7))
@settings(max_examples=200)
def test_a_bit_that_changes_anywhere_else_is_seen(place: int, bit: int) -> None:
    watched = filled()
    begin, end = watched._spans[-1]
    watched._memory[place] ^= 1 << bit
    if begin <= place < end:
        watched.verify(INPUTS)
    else:
        with pytest.raises(StrayWrite):
            watched.verify(INPUTS)


def test_memory_is_used_again() -> None:
    blocks = Blocks()
    first = Watched(blocks, SPECS)
    first.release()
    assert Watched(blocks, SPECS)._block is first._block
    assert Watched(blocks, SPECS)._block is not first._block
