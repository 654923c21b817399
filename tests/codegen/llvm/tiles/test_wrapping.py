"""Indices that wrap around inside a vector are what NumPy says, also where they are widened afterwards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tilewright
import tilewright.tile as tl

_EDGE = 2**31


@tilewright.kernel
def widened(
    out, below, start, limit, N: tl.constexpr, STEP: tl.constexpr, FACTOR: tl.constexpr, ADDED: tl.constexpr
):
    """Indices that are stored as numbers, and compared, in 64 bits."""
    n = tl.arange(0, N)
    wide = (start + n * STEP).to(tl.int64) * FACTOR + ADDED
    tl.store(out + n, wide)
    tl.store(below + n, wide < limit)


@tilewright.kernel
def narrowed(out, start, N: tl.constexpr, STEP: tl.constexpr):
    n = tl.arange(0, N)
    tl.store(out + n, (start + n.to(tl.int64) * STEP).to(tl.int32).to(tl.int64))


@tilewright.kernel
def rows(out, start, M: tl.constexpr, N: tl.constexpr):
    """Widened along both axes of a tile, one of which wraps around."""
    m, n = tl.arange(0, M), tl.arange(0, N)
    wide = (start + m[:, None] * N + n[None, :]).to(tl.int64)
    tl.store(out + m[:, None] * N + n[None, :], wide)
    tl.store(out + M * N + n[:, None] * M + m[None, :], tl.trans(wide))


@tilewright.kernel
def aligned(out, x, columns, BLOCK: tl.constexpr):
    """Offsets in 64 bits, as users write them for large tensors."""
    n = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    tl.store(out + n, tl.load(x + n, mask=n < columns, other=0.0), mask=n < columns)


def _indices(start: int, count: int, step: int) -> Any:
    return (start + np.arange(count, dtype=np.int64) * step).astype(np.int32).astype(np.int64)


@pytest.mark.parametrize("count", [4, 16, 64, 1024])
@pytest.mark.parametrize("step, factor, added", [(1, 1, 0), (-1, 1, 7), (3, 5, -1), (1 << 30, 2, 0)])
@given(distance=st.integers(-1100, 1100), beyond=st.integers(-40, 40))
def test_indices_wrap_around_before_they_are_widened(
    count: int, step: int, factor: int, added: int, distance: int, beyond: int
) -> None:
    start = (_EDGE + distance + _EDGE) % (2 * _EDGE) - _EDGE
    limit = (_EDGE + beyond) * factor
    out, below = np.zeros(count, np.int64), np.zeros(count, np.bool_)
    widened[1](out, below, start, limit, N=count, STEP=step, FACTOR=factor, ADDED=added)
    wanted = _indices(start, count, step) * factor + added
    np.testing.assert_array_equal(out, wanted)
    np.testing.assert_array_equal(below, wanted < limit)


@pytest.mark.parametrize("step", [1, (1 << 32) + 1, 1 << 33, -(1 << 31) - 3])
@given(start=st.integers(-(2**40), 2**40))
def test_indices_that_are_narrowed_keep_their_low_bits(step: int, start: int) -> None:
    out = np.zeros(32, np.int64)
    narrowed[1](out, start, N=32, STEP=step)
    wanted = start + np.arange(32, dtype=np.int64) * step
    np.testing.assert_array_equal(out, wanted.astype(np.int32).astype(np.int64))


@pytest.mark.parametrize("shape", [(4, 16), (16, 4), (16, 32)])
@given(distance=st.integers(-600, 100))
def test_indices_of_a_matrix_wrap_around(shape: tuple[int, int], distance: int) -> None:
    start = (2 * _EDGE + distance) % (2 * _EDGE) - _EDGE
    out = np.zeros((2, shape[0] * shape[1]), np.int64)
    rows[1](out, start, M=shape[0], N=shape[1])
    wanted = _indices(start, shape[0] * shape[1], 1).reshape(shape)
    np.testing.assert_array_equal(out[0].reshape(shape), wanted)
    np.testing.assert_array_equal(out[1].reshape(shape[::-1]), wanted.T)


def test_wide_offsets_are_still_loaded_as_vectors() -> None:
    x = np.arange(1000, dtype=np.float32)
    out = np.zeros_like(x)
    aligned[8](out, x, 1000, BLOCK=128)
    np.testing.assert_array_equal(out, x)
    code = aligned.compiled(out, x, 1000, BLOCK=128)
    assert "gather" not in code and "scatter" not in code
