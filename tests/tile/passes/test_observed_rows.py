"""Which rows of a dot are seen: by masks, by block pointers, through loops; and that nothing else is left out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewright
import tilewright.tile as tl
from tests.tile import kernels
from tilewright.tile.passes.observed_rows import observed_rows
from tilewright.tile.passes.standard import simplified

X = np.zeros((8, 8), np.float32)
N, BLOCK = 16, 32


@pytest.mark.parametrize(
    ("program", "dots"),
    [
        (lambda: kernels.matmul_gelu.program(X, X, X[0], X, 8, 8, 8, BM=16, BN=16, BK=16), 1),
        (lambda: kernels.batched_matmul.program(X, X, X, 8, 8, 8, BM=16, BN=16, BK=16), 1),
        (lambda: kernels.attention.program(X, X, X, X, 8, 0.5, D=16, BM=16, BN=16, CAUSAL=True), 2),
        (
            lambda: kernels.grouped_matmul.program(
                X, X, X, np.zeros(2, np.int32), 2, 8, 8, BM=16, BN=16, BK=16
            ),
            1,
        ),
    ],
)
def test_kernels_with_masked_rows(program: Any, dots: int) -> None:
    assert len(observed_rows(simplified(program()))) == dots


@tilewright.kernel
def masked(x, y, out, rows, KIND: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr):
    """x is BLOCK x N, y N x N; of the result, BLOCK x N, only `rows` rows are stored, or what KIND adds to them."""
    m, n = tl.arange(0, BLOCK), tl.arange(0, N)
    at, inside = m[:, None] * N + n[None, :], (m[:, None] < rows) & (n[None, :] < N)
    made = tl.dot(tl.load(x + at), tl.load(y + n[:, None] * N + n[None, :]))
    if KIND == "sum of columns":
        made += tl.sum(made, axis=0)[None, :]
    if KIND == "both":
        tl.store(out + BLOCK * N + at, made)
    if KIND == "from below":
        inside = (m[:, None] >= rows) & (n[None, :] < N)
    if KIND == "flipped":
        made = tl.flip(made, 0)
    if KIND == "as weights":
        made += tl.dot(made, tl.load(y + n[:, None] * N + n[None, :])) + tl.max(made, axis=1)[:, None]
    if KIND == "other rows":
        other = m[:, None] + 1 < rows
        tl.store(out + BLOCK * N + at, made, mask=other & inside)
    tl.store(out + at, made, mask=inside)


@pytest.mark.parametrize(
    ("kind", "left_out"),
    [
        ("plain", True),
        ("as weights", True),
        ("other rows", True),
        ("sum of columns", False),
        ("both", False),
        ("from below", False),
        ("flipped", False),
    ],
)
@pytest.mark.parametrize("rows", [-3, 0, 1, 7, 8, 9, 31, 32, 100])
def test_rows_that_are_stored_are_computed(kind: str, left_out: bool, rows: int) -> None:
    random = np.random.default_rng(rows % 7)
    x, y = (random.integers(-3, 4, (size, N)).astype(np.float32) for size in (BLOCK, N))
    y[3, 5] = np.nan
    found, wanted = (np.full((2, BLOCK, N), -7, np.float32) for _ in range(2))
    constants = {"KIND": kind, "BLOCK": BLOCK, "N": N}
    program = masked.program(x, y, found, rows, **constants)
    assert bool(observed_rows(simplified(program))) == left_out
    masked[1](x, y, found, rows, **constants)
    masked.interpret[1](x, y, wanted, rows, **constants)
    np.testing.assert_array_equal(found, wanted)


@tilewright.kernel
def later(x, out, count, BLOCK: tl.constexpr):
    """Each iteration stores what the one before has multiplied, at other rows."""
    n = tl.arange(0, BLOCK)
    at = n[:, None] * BLOCK + n[None, :]
    made = tl.zeros((BLOCK, BLOCK), tl.float32)
    for step in range(count):
        m = step * 8 + n
        tl.store(out + step * BLOCK * BLOCK + at, made, mask=m[:, None] < 8 * count - 5)
        made = tl.dot(tl.load(x + at), tl.load(x + at), made)


def test_the_rows_of_another_iteration() -> None:
    x = np.random.default_rng(0).integers(-3, 4, (BLOCK, BLOCK)).astype(np.float32)
    found, wanted = (np.zeros((3, BLOCK, BLOCK), np.float32) for _ in range(2))
    assert not observed_rows(simplified(later.program(x, found, 3, BLOCK=BLOCK)))
    later[1](x, found, 3, BLOCK=BLOCK)
    later.interpret[1](x, wanted, 3, BLOCK=BLOCK)
    np.testing.assert_array_equal(found, wanted)


@tilewright.kernel
def at_the_end(x, out, start, end, N: tl.constexpr):
    n = tl.arange(0, N)
    m = start + n
    at = n[:, None] * N + n[None, :]
    made = tl.dot(tl.load(x + at), tl.load(x + at))
    tl.store(out + at, made, mask=m[:, None] < end)


@pytest.mark.parametrize(
    ("start", "end"), [(2**31 - 10, 2**31 - 3), (2**31 - 20, -(2**31) + 7), (-5, 20), (-(2**31), 2**31 - 1)]
)
def test_numbers_of_rows_that_wrap_around(start: int, end: int) -> None:
    x = np.random.default_rng(0).integers(-3, 4, (BLOCK, BLOCK)).astype(np.float32)
    found, wanted = np.zeros_like(x), np.zeros_like(x)
    at_the_end[1](x, found, start, end, N=BLOCK)
    at_the_end.interpret[1](x, wanted, start, end, N=BLOCK)
    np.testing.assert_array_equal(found, wanted)
