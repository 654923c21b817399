"""Atomics other than add, and split, cat and flip: in the interpreter's debug mode, and compiled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewright
import tilewright.tile as tl
from tilewright.errors import KernelShapeError, KernelTypeError, UnwrittenReadError

MODES = pytest.mark.parametrize("mode", [{"debug": True}, {}, {"options": {"threads": 2}}])


@tilewright.kernel
def combined(x, bins, old, n, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Element i goes to bin i % 4; instances share the bins."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    value = tl.load(x + at, mask=inside, other=0)
    if KIND == "max":
        before = tl.atomic_max(bins + at % 4, value, mask=inside)
    elif KIND == "min":
        before = tl.atomic_min(bins + at % 4, value, mask=inside)
    elif KIND == "and":
        before = tl.atomic_and(bins + at % 4, value, mask=inside)
    elif KIND == "or":
        before = tl.atomic_or(bins + at % 4, value, mask=inside)
    elif KIND == "xor":
        before = tl.atomic_xor(bins + at % 4, value, mask=inside)
    else:
        before = tl.atomic_add(bins + at % 4, value, mask=inside)
    tl.store(old + at, before, mask=inside)


@MODES
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32, np.uint64])
@pytest.mark.parametrize("kind", ["max", "min", "and", "or", "xor"])
def test_atomics_combine_all_elements(kind: str, dtype: Any, mode: dict[str, Any]) -> None:
    x = np.random.default_rng(0).integers(-1000, 1000, 77).astype(dtype)
    bins, old = np.full(4, 5, dtype), np.zeros(77, dtype)  # unsigned ones reach beyond the signed ones
    combined[5](x, bins, old, 77, KIND=kind, BLOCK=16, **mode)
    function = {"max": np.maximum, "min": np.minimum, "and": np.bitwise_and, "or": np.bitwise_or}
    reduce = function.get(kind, np.bitwise_xor).reduce
    np.testing.assert_array_equal(bins, [reduce([dtype(5), *x[b::4]]) for b in range(4)])
    assert all(5 in old[b::4] for b in range(4))  # one of each bin was first


@tilewright.kernel
def exchanged(cell, out, value):
    tl.store(out + tl.program_id(0), tl.atomic_xchg(cell, value + tl.program_id(0)))


@MODES
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.float32, np.float64])
def test_exchange_loses_and_doubles_nothing(dtype: Any, mode: dict[str, Any]) -> None:
    cell, out = np.array([100], dtype), np.zeros(8, dtype)
    exchanged[8](cell, out, 1, **mode)
    assert sorted([*out, *cell]) == [*range(1, 9), 100]


@tilewright.kernel
def claimed(cell, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.atomic_cas(cell + at % n, 0, at + 1))


@MODES
def test_compare_and_swap_has_one_winner(mode: dict[str, Any]) -> None:
    cell, out = np.zeros(2, np.int32), np.zeros(8, np.int32)
    claimed[1](cell, out, 2, BLOCK=8, **mode)
    for b in range(2):
        assert (out[b::2] == 0).sum() == 1 and cell[b] in np.arange(1, 9)[b::2]


def test_an_atomic_on_what_nothing_has_written_is_found() -> None:
    with pytest.raises(UnwrittenReadError, match="atomic_xchg"):
        exchanged[1](np.zeros(1, np.int32), np.zeros(8, np.int32), 1, debug=True, unwritten=["cell"])


@tilewright.kernel
def float_maximum(x):
    tl.atomic_max(x, 1.0)


def test_an_atomic_of_another_type_shows_the_line() -> None:
    with pytest.raises(KernelTypeError, match="atomic_max takes i32, i64, u32, u64; got f32") as caught:
        float_maximum[1](np.zeros(1, np.float32))
    assert "tl.atomic_max(x, 1.0)" in str(caught.value) and "^^^" in str(caught.value)


@tilewright.kernel
def shapes(x, out, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    tile = tl.load(x + m * N + n)
    even, odd = tl.split(tl.reshape(tile, M, N // 2, 2))
    tl.store(out + tl.arange(0, M)[:, None] * (N // 2) + tl.arange(0, N // 2)[None, :], even - odd)
    both = tl.cat(tl.flip(tile, 0), tl.flip(tile))
    start = out + M * N // 2
    tl.store(start + tl.arange(0, 2 * M)[:, None] * N + n, both)


@MODES
@pytest.mark.parametrize("dtype", [np.float32, np.int8, np.float16])
def test_split_cat_and_flip(dtype: Any, mode: dict[str, Any]) -> None:
    for m, n in [(4, 8), (1, 32), (2, 2)]:
        x = np.random.default_rng(0).integers(-50, 50, (m, n)).astype(dtype)
        out = np.zeros(m * n // 2 + 2 * m * n, dtype)
        shapes[1](x, out, M=m, N=n, **mode)
        np.testing.assert_array_equal(out[: m * n // 2].reshape(m, -1), x[:, ::2] - x[:, 1::2])
        np.testing.assert_array_equal(
            out[m * n // 2 :].reshape(2 * m, n), np.concatenate([x[::-1], x[:, ::-1]])
        )


@tilewright.kernel
def bad_split(x):
    tl.split(tl.load(x + tl.arange(0, 4)))


@tilewright.kernel
def bad_flip(x):
    tl.flip(tl.load(x + tl.arange(0, 4)), 1)


@tilewright.kernel
def bad_cat(x):
    tl.cat(1, 2)


@pytest.mark.parametrize(
    ("kernel", "problem", "line"),
    [
        (bad_split, "needs a last axis of size 2", "tl.split(tl.load(x + tl.arange(0, 4)))"),
        (bad_flip, "axis 1 of a tile with 1 axes", "tl.flip(tl.load(x + tl.arange(0, 4)), 1)"),
        (bad_cat, "cat needs tiles, got scalars", "tl.cat(1, 2)"),
    ],
)
def test_bad_shapes_show_the_line(kernel: Any, problem: str, line: str) -> None:
    with pytest.raises(KernelShapeError, match=problem) as caught:
        kernel[1](np.zeros(4, np.float32))
    assert line in str(caught.value) and "^^^" in str(caught.value) and "try:" in str(caught.value)
