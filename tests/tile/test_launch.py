"""Warm launches: the second launch runs the code for its own arguments, and refuses what the first would."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import tilewright
import tilewright.tile as tl
from tilewright.errors import KernelArgumentError

FACTOR = 2


@tilewright.kernel
def scale(x, out, n, by, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) * by * FACTOR, mask=at < n)


@tilewright.kernel
def shift(x, out, n, BLOCK: tl.constexpr):
    """The whole of x is read before any of it is written where they overlap."""
    at = tl.arange(0, BLOCK)
    first = tl.load(x + at, mask=at < n)
    second = tl.load(x + at + 1, mask=at < n)
    tl.store(out + at, first, mask=at < n)
    tl.store(out + at + n, second, mask=at < n)


def launched(x: Any, out: Any, n: int, by: float, block: int) -> None:
    scale[(-(-n // block),)](x, out, n, by, BLOCK=block)


@pytest.fixture
def warm() -> np.ndarray:
    x = np.arange(40, dtype=np.float32)
    for _ in range(2):
        launched(x, np.empty_like(x), 40, 1.5, 16)
    return x


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.float16])
def test_another_type_of_elements_gets_its_own_code(warm: np.ndarray, dtype: type) -> None:
    x = warm.astype(dtype)
    for _ in range(3):
        out = np.empty_like(x)
        launched(x, out, 40, 1.5, 16)
        np.testing.assert_array_equal(out, (x.astype(np.float64) * 3).astype(dtype))


def test_arrays_and_tensors_and_other_numbers(warm: np.ndarray) -> None:
    for by, block in [(1.5, 16), (3, 8), (True, 32), (2**40, 16), (1.5, 16)]:
        for x in (warm, torch.from_numpy(warm)):
            out = np.empty_like(warm) if isinstance(x, np.ndarray) else torch.empty_like(x)
            launched(x, out, 40, by, block)
            np.testing.assert_allclose(np.asarray(out), warm.astype(np.float64) * by * 2, rtol=1e-6)


def test_a_global_that_changes_is_seen(warm: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "FACTOR", 5)
    out = np.empty_like(warm)
    launched(warm, out, 40, 1.0, 16)
    np.testing.assert_array_equal(out, warm * 5)


def test_tensors_that_overlap_get_code_of_their_own() -> None:
    for _ in range(2):
        apart = np.zeros(32, np.float32)
        shift[(1,)](np.arange(17, dtype=np.float32), apart, 16, BLOCK=16)
        memory = np.arange(32, dtype=np.float32)
        shift[(1,)](memory[:17], memory, 16, BLOCK=16)
        np.testing.assert_array_equal(memory, apart)


def test_strides_and_defaults_take_the_long_way(warm: np.ndarray) -> None:
    wide = np.arange(80, dtype=np.float32)
    out = np.empty(40, np.float32)
    launched(wide[::2], out, 40, 1.0, 16)  # a pointer to its first element: the kernel knows no strides
    np.testing.assert_array_equal(out, wide[:40] * 2)


def test_grids_of_every_form(warm: np.ndarray) -> None:
    for grid in ((3,), 3, [3], (3, 1, 1), np.int64(3), lambda meta: tl.cdiv(meta["n"], meta["BLOCK"])):
        out = np.empty_like(warm)
        scale[grid](warm, out, 40, 1.0, BLOCK=16)
        np.testing.assert_array_equal(out, warm * 2)
    out = np.full_like(warm, 7)
    scale[(0,)](warm, out, 40, 1.0, BLOCK=16)
    np.testing.assert_array_equal(out, 7)


def test_a_warm_kernel_still_refuses_bad_launches(warm: np.ndarray) -> None:
    fixed = np.empty_like(warm)
    fixed.flags.writeable = False
    with pytest.raises(KernelArgumentError, match="read-only"):
        launched(warm, fixed, 40, 1.5, 16)
    with pytest.raises(KernelArgumentError, match="no parameter"):
        scale[(3,)](warm, np.empty_like(warm), 40, 1.5, BLOCK=16, BLOCKS=1)
    with pytest.raises(KernelArgumentError, match="grid"):
        scale[(1, 1, 1, 1)](warm, np.empty_like(warm), 40, 1.5, BLOCK=16)
    with pytest.raises(KernelArgumentError, match="needs"):
        scale[(3,)](warm, np.empty_like(warm), 40, 1.5)
    with pytest.raises(KernelArgumentError, match="hashable"):
        scale[(3,)](warm, np.empty_like(warm), 40, 1.5, BLOCK=16, options={"threads": []})


@tilewright.kernel
def copy_number(out, number, LITERAL: tl.constexpr):
    tl.store(out, number)
    tl.store(out + 1, tl.load(out) * 0.0 + LITERAL)


@pytest.mark.filterwarnings("error")
def test_a_number_beyond_f32_is_infinite() -> None:
    limit = float(np.finfo(np.float32).max)
    for number in [1.0, 1e40, -1e40, limit, limit * (1 + 2**-30), float("inf"), 1e40]:
        with np.errstate(over="ignore"):
            expected = np.float32(number)
        for launch in (copy_number[1], copy_number.interpret[1]):
            out = np.zeros(2, np.float32)
            launch(out, number, number)
            assert out[0] == expected
            assert out[1] == expected if np.isfinite(expected) else np.isnan(out[1])


def test_what_a_kernel_remembers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright.tile.launch._MAX_KNOWN", 3)

    @tilewright.kernel
    def constant(out, VALUE: tl.constexpr):
        tl.store(out, VALUE)

    for value in (*range(8), 7, 0):
        out = np.zeros(1, np.int32)
        constant[1](out, VALUE=value)
        assert out[0] == value
    assert max(map(len, (constant._compiled, constant._launchables, constant._warm._known))) <= 3
