"""What the generator of tile kernels does for speed gives the results that the slow way gives."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilewright
import tilewright.tile as tl
from tests.tile.kernels import batched_matmul
from tilewright.codegen.llvm.tiles.emit import emit_tile_program
from tilewright.dtypes import DType
from tilewright.errors import KernelError
from tilewright.hw import CpuMachine, host
from tilewright.tile.executors import Facts


@tilewright.kernel
def exponential(x, out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.exp(tl.load(x + at)))


def test_exp_gives_the_same_bits_in_vectors_and_alone() -> None:
    special = [
        0.0,
        -0.0,
        np.inf,
        -np.inf,
        np.nan,
        88.7,
        88.73,
        89.5,
        -87.3,
        -87.4,
        -100.0,
        -103.9,
        -104.0,
        1e30,
        -1e30,
    ]
    rng = np.random.default_rng(0)
    values = np.concatenate([special, rng.uniform(-104, 89, 2000), rng.normal(0, 1e-3, 33)]).astype(
        np.float32
    )
    x = values[: len(values) // 64 * 64]
    wide, alone = np.empty_like(x), np.empty_like(x)
    exponential[len(x) // 64](x, wide, BLOCK=64)
    exponential[len(x)](x, alone, BLOCK=1)
    np.testing.assert_array_equal(wide.view(np.int32)[~np.isnan(x)], alone.view(np.int32)[~np.isnan(x)])
    assert np.isnan(wide[np.isnan(x)]).all()
    wanted = np.exp(x.astype(np.float64))
    normal = (wanted > 2.0**-126) & (wanted < 3e38)
    assert np.max(np.abs(wide[normal] / wanted[normal] - 1)) < 2**-23


@tilewright.kernel
def divided(x, y, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at) / tl.load(y))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_division_by_one_number_holds_over_the_whole_range(dtype: Any) -> None:
    info = np.finfo(dtype)
    rng = np.random.default_rng(0)
    powers = np.concatenate([[0.0, -0.0, np.inf, -np.inf, np.nan, info.max, info.tiny, info.tiny / 4, 1.0, 3.0],
                             2.0 ** rng.uniform(np.log2(info.tiny), np.log2(info.max), 54)]).astype(dtype)  # fmt: skip
    for by in powers:
        out = np.empty_like(powers)
        divided[1](powers, np.array([by], dtype), out, BLOCK=64)
        with np.errstate(all="ignore"):
            wanted = powers / by
        normal = np.isfinite(wanted) & (np.abs(wanted) >= info.tiny)
        np.testing.assert_allclose(out[normal], wanted[normal], rtol=2 * info.eps)
        np.testing.assert_allclose(out[~normal], wanted[~normal], rtol=0, atol=4 * info.smallest_subnormal)


@tilewright.kernel
def transposed_dot(x, y, out, D: tl.constexpr, N: tl.constexpr):
    d, n = tl.arange(0, D), tl.arange(0, N)
    left = tl.load(x + n[:, None] * D + d[None, :])
    right = tl.load(y + n[:, None] * D + d[None, :])
    tl.store(out + n[:, None] * N + n[None, :], tl.dot(left, tl.trans(right)))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize(("n", "d"), [(16, 16), (64, 16), (16, 64), (32, 128), (4, 8)])
def test_transposes_of_every_shape(dtype: Any, n: int, d: int) -> None:
    rng = np.random.default_rng(n)
    x, y = (rng.integers(-4, 5, (n, d)).astype(dtype) for _ in range(2))
    out = np.empty((n, n), np.float64 if dtype is np.float64 else np.float32)
    transposed_dot[1](x, y, out, D=d, N=n)
    np.testing.assert_array_equal(out, x.astype(np.float64) @ y.T.astype(np.float64))


@tilewright.kernel
def reduced(x, out, M: tl.constexpr, N: tl.constexpr, AXIS: tl.constexpr, KIND: tl.constexpr):
    value = tl.load(x + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :])
    if KIND == "sum":
        found = tl.sum(value, axis=AXIS)
    elif KIND == "max":
        found = tl.max(value, axis=AXIS)
    else:
        found = tl.min(value, axis=AXIS)
    tl.store(out + tl.arange(0, N if AXIS == 0 else M), found)


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.int8, np.uint8, np.int64])
@pytest.mark.parametrize("kind", ["sum", "max", "min"])
def test_reductions_with_several_accumulators(dtype: Any, kind: str) -> None:
    rng = np.random.default_rng(0)
    for (m, n), axis in [((4, 512), 1), ((512, 4), 0), ((2, 16), 1), ((16, 64), 0), ((1, 2), 1)]:
        x = rng.integers(-100 if np.dtype(dtype).kind != "u" else 0, 100, (m, n)).astype(dtype)
        if kind != "sum":
            x = np.where(x < 0, x, x + np.asarray(20, dtype)).astype(dtype)
        into = np.int32 if kind == "sum" and np.dtype(dtype).itemsize < 4 else dtype
        out = np.empty(n if axis == 0 else m, into)
        reduced[1](x, out, M=m, N=n, AXIS=axis, KIND=kind)
        np.testing.assert_array_equal(out, getattr(np, kind)(x.astype(into), axis=axis))
    if np.dtype(dtype).kind == "f":
        x[0, 1] = np.nan
        reduced[1](x, out, M=m, N=n, AXIS=axis, KIND=kind)
        assert np.isnan(out[0])


@tilewright.kernel
def doubled(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) * 2.0, mask=at < n)


def test_large_results_are_stored_non_temporally_and_small_ones_are_not() -> None:
    count = host().caches.last // 4 + 1000
    x = np.arange(count, dtype=np.float32)
    for shift in (0, 1):  # the second is not aligned to vectors
        memory = np.zeros(count + 1, np.float32)
        out = memory[shift : shift + count]
        doubled[-(-count // 1024)](x, out, count - 3, BLOCK=1024)
        np.testing.assert_array_equal(out[:-3], x[:-3] * 2)
        np.testing.assert_array_equal(out[-3:], 0)
    if "avx" in host().features or "avx512f" in host().features:
        assert "movnt" in doubled.compiled(x, memory, count, BLOCK=1024)


@tilewright.kernel
def reads_what_it_writes(x, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    before = tl.load(x + at)
    top = tl.max(before, axis=0)
    tl.store(out + at, before - top)
    tl.store(out + at + n, before * 2.0)  # what was loaded, not what is there now


def test_a_load_is_not_repeated_behind_a_store_that_may_change_it() -> None:
    x = np.arange(256, dtype=np.float32)
    memory = np.concatenate([x, x])
    reads_what_it_writes[1](memory, memory, 256, BLOCK=256)
    np.testing.assert_array_equal(memory, np.concatenate([x - 255, x * 2]))
    out = np.empty(512, np.float32)
    reads_what_it_writes[1](x, out, 256, BLOCK=256)
    np.testing.assert_array_equal(out, memory)


@tilewright.kernel
def into_itself(x, out, N: tl.constexpr, LEFT: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    value, other = tl.load(x + at), tl.load(x + at) + 1.0
    if LEFT:
        result = tl.dot(value, other, value)
    else:
        result = tl.dot(other, value, value)
    tl.store(out + at, result)


@pytest.mark.parametrize("left", [True, False])
def test_an_operand_of_dot_may_be_its_accumulator(left: bool) -> None:
    x = np.random.default_rng(0).integers(-4, 5, (32, 32)).astype(np.float32)
    out = np.empty_like(x)
    into_itself[1](x, out, N=32, LEFT=left)
    np.testing.assert_array_equal(out, x + (x @ (x + 1) if left else (x + 1) @ x))


def test_the_next_operands_of_dot_are_prefetched() -> None:
    x = np.zeros((64, 64), np.float32)
    text = batched_matmul.compiled(x, x.copy(), x.copy(), 64, 64, 64, BM=32, BN=32, BK=32)
    if "avx" in host().features or "avx512f" in host().features:
        assert "prefetcht1" in text


@tilewright.kernel
def huge(x, out, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    value = tl.load(x + at)
    tl.store(out + at, tl.dot(value, value + 1.0))


def test_tiles_that_do_not_fit_on_the_stack_show_the_line() -> None:
    x = np.zeros((1024, 1024), np.float32)
    with pytest.raises(KernelError, match="needs 4194304 bytes of stack, more than 1048576") as caught:
        huge[1](x, np.zeros_like(x), N=1024)
    where = caught.value.where
    assert where is not None and where.text.strip() in (
        "value = tl.load(x + at)",
        "tl.store(out + at, tl.dot(value, value + 1.0))",
    )
    assert "^" in str(caught.value) and "smaller blocks" in str(caught.value)


@tilewright.kernel
def shifted(x, out, N: tl.constexpr, AXIS: tl.constexpr, PUT: tl.constexpr):
    """exp(x - m) / sum(exp(x - m)), the maxima and the sums along any axis of each other."""
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    value = tl.load(x + at)
    most = tl.max(value, axis=AXIS)
    weight = tl.exp(value - tl.expand_dims(most, PUT))
    tl.store(out + at, weight / tl.expand_dims(tl.sum(weight, axis=AXIS), PUT))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("put", [0, 1])
def test_a_maximum_of_other_elements_bounds_nothing(axis: int, put: int) -> None:
    """In a square the maxima of rows have the shape of those of columns: exponents may be positive, sums small."""
    n = 32
    x = np.random.default_rng(0).standard_normal((n, n)).astype(np.float32)
    x[3], x[5, 7] = x[3] - 60, np.nan
    x[9], x[11, 2] = -np.inf, np.inf
    found, wanted = np.empty_like(x), np.empty_like(x)
    shifted[1](x, found, N=n, AXIS=axis, PUT=put)
    shifted.interpret[1](x, wanted, N=n, AXIS=axis, PUT=put)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-37)


@tilewright.kernel
def multiplied(a, b, out, depth, N: tl.constexpr):
    m = tl.arange(0, N)
    acc = tl.zeros((N, N), tl.float32)
    for first in range(0, depth, N):
        k = first + tl.arange(0, N)
        acc = tl.dot(
            tl.load(a + m[:, None] * depth + k[None, :]), tl.load(b + k[:, None] * N + m[None, :]), acc
        )
    tl.store(out + m[:, None] * N + m[None, :], acc)


def test_each_line_is_prefetched_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    counts = []
    for line in (64, 128):
        monkeypatch.setattr(CpuMachine, "line_bytes", property(lambda self, line=line: line))
        x = np.zeros((96, 96), np.float32)
        text = multiplied.compiled(x, x.copy(), x.copy(), 96, N=32)
        counts.append(text.count("prefetcht1"))
    if host().vector_bytes >= 32:
        assert counts[0] == 2 * counts[1] > 0


@tilewright.kernel
def bounded(x, y, out, rows, columns, first, M: tl.constexpr, N: tl.constexpr):
    """Bounds along both axes, in masks and beside them, on a tile that starts at `first` of a row."""
    m, n = tl.arange(0, M)[:, None], first + tl.arange(0, N)[None, :]
    inside = (m < rows) & (n < columns)
    value = tl.load(x + m * columns + n, mask=inside & (n >= 0), other=1.0)
    row = tl.load(y + n, mask=(n <= columns - 1) & (n >= 0), other=2.0)
    value = tl.where(n < columns - 5, value, -value) * row
    total = tl.sum(value, axis=1)[:, None] + tl.max(value, axis=1)[:, None]
    tl.store(out + m * columns + n, value + total, mask=inside & (n >= 0))


@tilewright.kernel
def bounded_row(x, out, columns, first, N: tl.constexpr):
    n = first + tl.arange(0, N)
    value = tl.load(x + n, mask=(n < columns) & (n >= 0), other=-1.0)
    tl.store(out + n, value * tl.sum(value, axis=0), mask=(n < columns) & (n >= 0))


@pytest.mark.parametrize("columns", [0, 1, 7, 16, 63, 64, 65, 160, 200, 255, 256, 300])
@pytest.mark.parametrize("first", [0, 3, -9, 250, 2**31 - 100])
def test_loops_in_parts_do_what_masks_say(columns: int, first: int) -> None:
    rng = np.random.default_rng(columns)
    for rows in (0, 2, 4):
        x, y = (rng.standard_normal(size).astype(np.float32) for size in (4 * columns + 1, columns + 1))
        outs = [np.zeros(4 * columns + 1, np.float32) for _ in range(4)]
        bounded[1](x, y, outs[0], rows, columns, first, M=4, N=256)
        bounded.interpret[1](x, y, outs[1], rows, columns, first, M=4, N=256)
        np.testing.assert_allclose(outs[0], outs[1], rtol=1e-5, atol=1e-4)
        for size in (64, 512):
            bounded_row[1](x, outs[2], columns, first, N=size)
            bounded_row.interpret[1](x, outs[3], columns, first, N=size)
            np.testing.assert_allclose(outs[2], outs[3], rtol=1e-5, atol=1e-4)


@tilewright.kernel
def wrapping(out, big, n, FORM: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    if FORM == "sum":
        index = big + at
    elif FORM == "narrowed":
        index = (at.to(tl.int64) + big).to(tl.int32)
    else:
        index = at.to(tl.int16 if FORM == "int16" else tl.int8 if FORM == "int8" else tl.int1).to(tl.int32)
    tl.store(out + at, 1.0, mask=index < n)


@pytest.mark.parametrize("form", ["sum", "narrowed", "int16", "int8", "int1"])
def test_indices_that_wrap_around_are_masked_as_they_are(form: str) -> None:
    """A bound may hold again behind the element where an index wraps around."""
    for size in (64, 512):
        for big, n in ((2**31 - 20, 2**31 - 10), (2**31 - 300, 2**31 - 10), (2**31 - 20, 10), (0, 100)):
            found, wanted = np.zeros((2, size), np.float32)
            wrapping[1](found, big, n, FORM=form, N=size)
            wrapping.interpret[1](wanted, big, n, FORM=form, N=size)
            np.testing.assert_array_equal(found, wanted)


@tilewright.kernel
def summed_across(x, out, AXIS: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    value = tl.load(x + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :])
    most = tl.max(value, axis=AXIS)
    weight = tl.exp(value - (most[None, :] if AXIS == 0 else most[:, None]))
    tl.store(out + tl.arange(0, M if AXIS == 0 else N), tl.sum(weight, axis=1 - AXIS))


@pytest.mark.parametrize("axis", [0, 1])
def test_nan_reaches_sums_across_the_axis_of_the_maximum(axis: int) -> None:
    x = np.random.default_rng(0).standard_normal((16, 64)).astype(np.float32)
    x[3, 5] = np.nan
    found, wanted = np.zeros((2, 16 if axis == 0 else 64), np.float32)
    summed_across[1](x, found, AXIS=axis, M=16, N=64)
    summed_across.interpret[1](x, wanted, AXIS=axis, M=16, N=64)
    assert np.isnan(wanted).all() and np.isnan(found).all()


@tilewright.kernel
def softmax_and_maximum(x, out, top, columns, KEEPS: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.arange(0, BLOCK)
    value = tl.load(x + n, mask=n < columns, other=-float("inf"))
    most = tl.max(value, axis=0)
    weight = tl.exp(value - most)
    tl.store(out + n, weight / tl.sum(weight, axis=0), mask=n < columns)
    if KEEPS:
        tl.store(top, most)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("columns", [20, 128, 300])
def test_nan_reaches_a_whole_row_of_a_softmax(keeps: bool, columns: int) -> None:
    """The maximum of a softmax may ignore NaN, unless it is used for something else."""
    rng = np.random.default_rng(0)
    block = 1 << (columns - 1).bit_length()
    for special in (
        [np.nan],
        [np.inf],
        [np.nan, np.inf],
        [-np.inf],
        [-np.inf] * columns,
        [np.nan] * columns,
        [],
    ):
        x = rng.standard_normal(columns).astype(np.float32)
        x[rng.permutation(columns)[: len(special)]] = special
        found, wanted = np.zeros((2, columns), np.float32)
        tops = np.zeros((2, 1), np.float32)
        softmax_and_maximum[1](x, found, tops[0], columns, KEEPS=keeps, BLOCK=block)
        softmax_and_maximum.interpret[1](x, wanted, tops[1], columns, KEEPS=keeps, BLOCK=block)
        np.testing.assert_allclose(found, wanted, rtol=2e-6)
        np.testing.assert_array_equal(*tops)


def test_whole_vectors_have_no_masks() -> None:
    x = np.zeros(4000, np.float32)
    program = softmax_and_maximum.program(x, x.copy(), x[:1].copy(), 4000, KEEPS=False, BLOCK=4096)
    text = str(emit_tile_program(program, Facts(disjoint=True), host(), "softmax"))
    vector = rf"<{host().lanes(DType.F32)} x float>"
    for masked, plain in [
        ("load", rf"load {vector}, ptr .*, align 4\b"),
        ("store", rf"store {vector} .*, align 4\b"),
    ]:
        assert f"llvm.masked.{masked}" in text and re.search(plain, text)
