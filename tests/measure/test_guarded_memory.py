"""Canaries: whatever is written outside of a kernel's output is seen."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.measure.guarded_memory import BlockPool, GuardedMemory, OutOfBoundsWrite
from tilewright.runtime.plan import TensorSpec

SPECS = (
    TensorSpec("a", "f32", (100,)),
    TensorSpec("b", "i8", (33,)),
    TensorSpec("out", "f32", (50,)),
)
INPUTS = [np.arange(100, dtype=np.float32), np.arange(33, dtype=np.int8)]


def filled(shifted: bool = False) -> GuardedMemory:
    guarded = GuardedMemory(BlockPool(), SPECS, shifted=shifted, aligned_ones=frozenset({1}))
    guarded.fill(INPUTS)
    return guarded


@pytest.mark.parametrize("shifted", [False, True])
def test_the_output_is_nonsense_before_and_may_be_written(shifted: bool) -> None:
    guarded = filled(shifted)
    assert np.isnan(guarded.output).all()
    guarded.output[:] = 1.0
    guarded.verify(INPUTS)
    a, b, out = (address % 64 for address in guarded.addresses)
    assert (a, b, out) == ((4, 0, 4) if shifted else (0, 0, 0))


@given(position=st.integers(0, 3 * 4096 + 4096 + 400 + 33 + 200 - 1), bit=st.integers(0, 7))
@settings(max_examples=200)
def test_a_bit_that_changes_anywhere_else_is_seen(position: int, bit: int) -> None:
    guarded = filled()
    begin, end = guarded._spans[-1]
    guarded._memory[position] ^= 1 << bit
    if begin <= position < end:
        guarded.verify(INPUTS)
    else:
        with pytest.raises(OutOfBoundsWrite):
            guarded.verify(INPUTS)


def test_memory_is_used_again() -> None:
    blocks = BlockPool()
    first = GuardedMemory(blocks, SPECS)
    first.release()
    assert GuardedMemory(blocks, SPECS)._block is first._block
    assert GuardedMemory(blocks, SPECS)._block is not first._block
