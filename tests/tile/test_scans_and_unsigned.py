"""Scans and reductions by a user's function, and unsigned types: in the interpreter and compiled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewright
import tilewright.tile as tl

RUNS = pytest.mark.parametrize("run", ["compiled", "interpreted"])


def launched(kernel: Any, run: str) -> Any:
    return kernel[1] if run == "compiled" else kernel.interpret[1]


def affine(a, x, b, y):
    """The linear recurrence h = a h + x, of two steps: associative, not commutative."""
    return a * b, x * b + y


@tilewright.kernel
def recurrence(a, x, out, last, M: tl.constexpr, N: tl.constexpr, AXIS: tl.constexpr, REVERSE: tl.constexpr):
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    factor, term = tl.load(a + at), tl.load(x + at)
    _, state = tl.associative_scan((factor, term), AXIS, affine, reverse=REVERSE)
    tl.store(out + at, state)
    _, final = tl.reduce((factor, term), AXIS, affine)
    tl.store(last + (tl.arange(0, M) if AXIS == 1 else tl.arange(0, N)), final)


@RUNS
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("shape", "axis"), [((8, 16), 1), ((16, 4), 0), ((4, 1), 1), ((1, 64), 1)])
def test_a_linear_recurrence(shape: tuple[int, int], axis: int, reverse: bool, run: str) -> None:
    rng = np.random.default_rng(3)
    a, x = (rng.integers(-2, 3, shape).astype(np.float32) for _ in range(2))
    out, last = np.zeros(shape, np.float32), np.zeros(shape[1 - axis], np.float32)
    launched(recurrence, run)(a, x, out, last, M=shape[0], N=shape[1], AXIS=axis, REVERSE=reverse)

    def states(a: np.ndarray, x: np.ndarray) -> np.ndarray:
        state, found = np.zeros(a.shape[0]), []
        for k in range(a.shape[1]):
            state = state * a[:, k] + x[:, k]
            found.append(state)
        return np.stack(found, 1)

    rows, terms = (a, x) if axis == 1 else (a.T, x.T)
    wanted = states(rows[:, ::-1], terms[:, ::-1])[:, ::-1] if reverse else states(rows, terms)
    np.testing.assert_array_equal(out, wanted if axis == 1 else wanted.T)
    np.testing.assert_array_equal(last, states(rows, terms)[:, -1])


@tilewright.kernel
def running(x, out, N: tl.constexpr):
    n = tl.arange(0, N)
    tl.store(out + n, tl.associative_scan(tl.load(x + n), 0, tl.maximum))
    tl.store(out + N, tl.reduce(tl.load(x + n), 0, tl.minimum))


@RUNS
@pytest.mark.parametrize("dtype", [np.float16, np.int8, np.uint16, np.uint64, np.float64])
def test_a_function_of_the_language_combines(dtype: Any, run: str) -> None:
    x = np.random.default_rng(0).integers(0, 100, 32).astype(dtype)
    out = np.zeros(33, dtype)
    launched(running, run)(x, out, N=32)
    np.testing.assert_array_equal(out, [*np.maximum.accumulate(x), x.min()])


@tilewright.kernel
def unsigned(x, y, out, real, N: tl.constexpr):
    n = tl.arange(0, N)
    a, b = tl.load(x + n), tl.load(y + n)
    tl.store(out + n, a // b)
    tl.store(out + N + n, a % b)
    tl.store(out + 2 * N + n, a >> 3)
    tl.store(out + 3 * N + n, tl.maximum(a, b))
    tl.store(out + 4 * N + n, a * b - 1)
    tl.store(out + 5 * N + n, -a)
    tl.store(out + 6 * N + n, tl.where(a < b, a, b))
    tl.store(out + 7 * N + n, tl.sort(a, 0))
    tl.store(out + 8 * N + n, a.to(tl.float64).to(a.dtype))
    tl.store(real + n, a.to(tl.float64))
    tl.store(real + N, tl.max(a).to(tl.float64) + tl.min(b).to(tl.float64))
    tl.store(real + N + 1, tl.argmax(a).to(tl.float64))


@RUNS
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
def test_numbers_beyond_the_signed_ones(dtype: Any, run: str) -> None:
    rng, n, top = np.random.default_rng(1), 16, int(np.iinfo(dtype).max)
    low = 2047 if dtype is np.uint64 else 0  # bits that a float64 does not hold
    numbers = [top, 0, top // 2 + 1, *map(int, rng.integers(0, top, n - 3, dtype=dtype))]
    x = np.array([number & ~low for number in numbers], dtype)
    y = rng.integers(1, 100, n).astype(dtype)
    out, real = np.zeros((9, n), dtype), np.zeros(n + 2)
    launched(unsigned, run)(x, y, out, real, N=n)
    one = dtype(1)
    wanted = [
        x // y,
        x % y,
        x >> dtype(3),
        np.maximum(x, y),
        x * y - one,
        -x,
        np.minimum(x, y),
        np.sort(x),
        x,
    ]
    np.testing.assert_array_equal(out, np.stack(wanted))
    np.testing.assert_array_equal(real, [*x.astype(np.float64), float(x.max()) + float(y.min()), x.argmax()])


@tilewright.kernel
def types(a, b, out):
    tl.static_print((tl.load(a) + tl.load(b)).dtype, (tl.load(a) + 1).dtype)


@pytest.mark.parametrize(
    ("a", "b", "wanted"),
    [
        (np.uint8, np.int8, "i16 u8"),
        (np.uint16, np.int16, "i32 u16"),
        (np.uint16, np.int32, "i32 u16"),
        (np.uint32, np.int8, "i64 u32"),
        (np.uint8, np.uint64, "u64 u8"),
        (np.uint64, np.float16, "f16 u64"),
        (np.uint32, np.bool_, "u32 u32"),
    ],
)
def test_the_type_that_holds_both(a: Any, b: Any, wanted: str, capsys: pytest.CaptureFixture[str]) -> None:
    types[1](np.ones(1, a), np.ones(1, b), np.ones(1, np.int32))
    assert capsys.readouterr().out.strip() == wanted
