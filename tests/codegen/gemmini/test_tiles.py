"""Kernels of the tile language on the simulated accelerator, against the tile interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewright
import tilewright.tile as tl
from tilewright.codegen.gemmini.tiles.executor import launch
from tilewright.errors import AcceleratorMatchError, KernelArgumentError, OptionError, PipelineError

SMALL = "gemmini:dim=4,scratchpad=8192,accumulator=8192"


@tilewright.kernel
def layer(x, w, bias, out, M, N, K, scale, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    row, col = tl.program_id(0) * BM, tl.program_id(1) * BN
    left = tl.make_block_ptr(x, (M, K), (K, 1), (row, 0), (BM, BK), (1, 0))
    right = tl.make_block_ptr(w, (K, N), (N, 1), (0, col), (BK, BN), (1, 0))
    start = tl.make_block_ptr(bias, (M, N), (0, 1), (row, col), (BM, BN), (1, 0))
    sums = tl.load(start, boundary_check=(0, 1))
    for _ in range(0, K, BK):
        a = tl.load(left, boundary_check=(0, 1))
        b = tl.load(right, boundary_check=(0, 1))
        sums = tl.dot(a, b, sums)
        left = tl.advance(left, (0, BK))
        right = tl.advance(right, (BK, 0))
    scaled = tl.round(tl.maximum(sums, 0).to(tl.float32) * scale)
    result = tl.minimum(tl.maximum(scaled, -128.0), 127.0).to(tl.int8)
    to = tl.make_block_ptr(out, (M, N), (N, 1), (row, col), (BM, BN), (1, 0))
    tl.store(to, result, boundary_check=(0, 1))


@tilewright.kernel
def product(x, w, out, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """By pointers, with the program instances along one axis of the grid."""
    across = tl.cdiv(N, BN)
    rows = tl.program_id(0) // across * BM + tl.arange(0, BM)
    cols = tl.program_id(0) % across * BN + tl.arange(0, BN)
    depth = tl.arange(0, BK)
    a_at = x + rows[:, None] * K + depth[None, :]
    b_at = w + depth[:, None] * N + cols[None, :]
    sums = tl.zeros((BM, BN), tl.int32)
    for k in range(0, K, BK):
        a = tl.load(a_at, mask=(rows[:, None] < M) & (depth[None, :] + k < K), other=0)
        b = tl.load(b_at, mask=(depth[:, None] + k < K) & (cols[None, :] < N), other=0)
        sums = tl.dot(a, b, sums)
        a_at += BK
        b_at += BK * N
    tl.store(out + rows[:, None] * N + cols[None, :], sums, mask=(rows[:, None] < M) & (cols[None, :] < N))


def operands(m: int, n: int, k: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return (
        rng.integers(-128, 128, (m, k)).astype(np.int8),
        rng.integers(-128, 128, (k, n)).astype(np.int8),
        rng.integers(-(2**20), 2**20, n).astype(np.int32),
    )


def grid_of(m: int, n: int, bm: int, bn: int) -> tuple[int, int]:
    return -(-m // bm), -(-n // bn)


sizes = st.integers(1, 20)
blocks = st.sampled_from([4, 8, 16])


@settings(max_examples=15, deadline=None)
@given(sizes, sizes, sizes, blocks, blocks, blocks, st.sampled_from([0.003, 1.0, 2.0**-9]))
def test_a_layer_is_that_of_the_interpreter(
    m: int, n: int, k: int, bm: int, bn: int, bk: int, scale: float
) -> None:
    x, w, bias = operands(m, n, k, seed=m * n + k)
    expected, found = np.zeros((m, n), np.int8), np.zeros((m, n), np.int8)
    settings_of = {"BM": bm, "BN": bn, "BK": bk}
    layer.interpret[grid_of(m, n, bm, bn)](x, w, bias, expected, m, n, k, scale, **settings_of)
    run = layer[grid_of(m, n, bm, bn)]
    run(x, w, bias, found, m, n, k, scale, **settings_of, options={"target": SMALL})
    np.testing.assert_array_equal(found, expected)


@settings(max_examples=12, deadline=None)
@given(sizes, sizes, sizes, blocks, blocks, blocks)
def test_pointers_with_masks_and_sums_of_32_bits(m: int, n: int, k: int, bm: int, bn: int, bk: int) -> None:
    x, w, _ = operands(m, n, k)
    found = np.zeros((m, n), np.int32)
    across, down = grid_of(m, n, bm, bn)
    product[across * down](x, w, found, m, n, k, BM=bm, BN=bn, BK=bk, options={"target": SMALL})
    np.testing.assert_array_equal(found, x.astype(np.int32) @ w.astype(np.int32))


def test_the_pipelining_pass_gives_tiles_their_two_buffers() -> None:
    m = n = 32
    x, w, bias = operands(m, n, 256)
    out = np.zeros((m, n), np.int8)
    arguments = (grid_of(m, n, 16, 16), x, w, bias, out, m, n, 256, 0.003)
    one, two = (
        launch(layer, *arguments, BM=16, BN=16, BK=32, target=SMALL, stages=stages) for stages in (1, 2)
    )
    assert (one.stages, two.stages) == (1, 2)
    assert one.cycles.busy == two.cycles.busy
    assert two.cycles.total < 0.85 * one.cycles.total
    assert two.cycles.share("execute") > 0.9


@pytest.mark.parametrize("block", [1, 2])
def test_tiles_of_one_row_or_column(block: int) -> None:
    """An axis of one element leaves no trace in the loops."""
    x, w, _ = operands(3, 3, 5)
    found = np.zeros((3, 3), np.int32)
    across, down = grid_of(3, 3, block, block)
    product[across * down](x, w, found, 3, 3, 5, BM=block, BN=block, BK=2, options={"target": SMALL})
    np.testing.assert_array_equal(found, x.astype(np.int32) @ w.astype(np.int32))


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_stages_do_not_change_results(stages: int) -> None:
    x, w, bias = operands(20, 20, 70)
    found, expected = np.zeros((20, 20), np.int8), np.zeros((20, 20), np.int8)
    arguments = (20, 20, 70, 0.003)
    layer.interpret[2, 2](x, w, bias, expected, *arguments, BM=16, BN=16, BK=16)
    options = {"target": SMALL, "stages": stages}
    layer[2, 2](x, w, bias, found, *arguments, BM=16, BN=16, BK=16, options=options)
    np.testing.assert_array_equal(found, expected)


def test_what_cannot_be_pipelined_has_one_buffer() -> None:
    """One step along K, of one instance: there is nothing to load ahead."""
    x, w, bias = operands(8, 8, 8)
    out = np.zeros((8, 8), np.int8)
    arguments = (layer, 1, x, w, bias, out, 8, 8, 8, 0.01)
    assert (found := launch(*arguments, BM=8, BN=8, BK=8, target=SMALL)).stages == 1
    assert "no sequential loop" in found.reason
    with pytest.raises(PipelineError, match="no sequential loop"):
        launch(*arguments, BM=8, BN=8, BK=8, target=SMALL, stages=2)


def test_two_stages_that_do_not_fit() -> None:
    x, w, bias = operands(16, 16, 128)
    out = np.zeros((16, 16), np.int8)
    arguments = (layer, 1, x, w, bias, out, 16, 16, 128, 0.01)
    target = "gemmini:dim=4,scratchpad=1024,accumulator=1024"
    found = launch(*arguments, BM=16, BN=16, BK=32, target=target)
    assert found.stages == 1 and "2 stages take 512 rows" in found.reason


def test_a_store_touches_nothing_else() -> None:
    """Columns beside the stored ones, in the same rows, are as they were."""
    x, w, _ = operands(8, 6, 8)
    wide = np.full((8, 10), 77, np.int8)

    @tilewright.kernel
    def part(x, w, out, BLOCK: tl.constexpr):
        left = tl.make_block_ptr(x, (8, 8), (8, 1), (0, 0), (8, 8), (1, 0))
        right = tl.make_block_ptr(w, (8, 6), (6, 1), (0, 0), (8, BLOCK), (1, 0))
        sums = tl.dot(tl.load(left), tl.load(right, boundary_check=(1,)))
        clamped = tl.minimum(tl.maximum(tl.round(sums.to(tl.float32) * 0.01), -128.0), 127.0)
        to = tl.make_block_ptr(out, (8, 6), (10, 1), (0, 0), (8, BLOCK), (1, 0))
        tl.store(to, clamped.to(tl.int8), boundary_check=(1,))

    part[1](x, w, wide, BLOCK=8, options={"target": SMALL})
    expected = np.clip(np.rint((x.astype(np.int32) @ w).astype(np.float32) * np.float32(0.01)), -128, 127)
    np.testing.assert_array_equal(wide[:, :6], expected.astype(np.int8))
    assert (wide[:, 6:] == 77).all()


# -- errors: each at the user's line ----------------------------------------------------------------------------------


@tilewright.kernel
def small(x, w, out, scale, KIND: tl.constexpr):
    at = tl.arange(0, 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    a, b = tl.load(x + at), tl.load(w + at)
    if KIND == "transposed":
        b = tl.trans(b)
    if KIND == "strided":
        b = tl.load(w + tl.trans(at))
    if KIND == "computed":
        a = a + b
    sums = tl.dot(a, b)
    if KIND == "exp":
        sums = tl.exp(sums.to(tl.float32)).to(tl.int32)
    if KIND == "reduced":
        sums = sums + tl.sum(sums, axis=0)[None, :]
    if KIND == "unrounded":
        tl.store(out + at, (sums.to(tl.float32) * scale).to(tl.int8))
    elif KIND == "unclamped":
        tl.store(out + at, tl.round(sums.to(tl.float32) * scale).to(tl.int8))
    else:
        clamped = tl.minimum(tl.maximum(tl.round(sums.to(tl.float32) * scale), -128.0), 127.0)
        tl.store(out + at, clamped.to(tl.int8))


@pytest.mark.parametrize(
    ("kind", "said", "line"),
    [
        ("transposed", "one of these is transposed", "tl.dot(a, b)"),
        ("strided", "rows whose elements lie behind each other", "tl.load(w + tl.trans(at))"),
        ("computed", "computes nothing before it multiplies", "tl.dot(a, b)"),
        ("exp", "this value is another", "tl.store"),
        ("reduced", "no instruction for `reduce`", "tl.sum(sums, axis=0)"),
        ("unrounded", "this value is another", "tl.store"),
        ("unclamped", "this value is another", "tl.store"),
    ],
)
def test_what_no_instruction_computes(kind: str, said: str, line: str) -> None:
    x, w, _ = operands(8, 8, 8)
    with pytest.raises(AcceleratorMatchError) as caught:
        small[1](x, w, np.zeros((8, 8), np.int8), 0.01, KIND=kind, options={"target": SMALL})
    assert said in str(caught.value)
    assert caught.value.where is not None and line in caught.value.where.text


def test_other_types() -> None:
    x = np.zeros((8, 8), np.float32)
    with pytest.raises(AcceleratorMatchError, match="loads int8 and int32, and `x` has float32"):
        small[1](x, x.copy(), np.zeros((8, 8), np.int8), 0.01, KIND="", options={"target": SMALL})


def test_tiles_that_do_not_fit() -> None:
    x, w, bias = operands(64, 64, 64)
    with pytest.raises(AcceleratorMatchError, match="rows of the accumulator, which has 32") as caught:
        layer[1, 1](
            x,
            w,
            bias,
            np.zeros((64, 64), np.int8),
            *(64, 64, 64, 0.01),
            BM=64,
            BN=64,
            BK=8,
            options={"target": "gemmini:dim=4,accumulator=512"},
        )
    assert caught.value.where is not None and "tl.load(start" in caught.value.where.text


def test_a_scale_that_the_store_does_not_have() -> None:
    x, w, _ = operands(8, 8, 8)
    with pytest.raises(AcceleratorMatchError, match="a scale must be 0 or a normal"):
        small[1](x, w, np.zeros((8, 8), np.int8), 1e-40, KIND="", options={"target": SMALL})


def test_options() -> None:
    x, w, _ = operands(8, 8, 8)
    out = np.zeros((8, 8), np.int8)

    def run(**options: Any) -> None:
        small[1](x, w, out, 0.01, KIND="", options=options)

    with pytest.raises(OptionError, match="has no option 'warps'"):
        run(target="gemmini", warps=4)
    with pytest.raises(OptionError, match="stages must be 1 or more"):
        run(target="gemmini", stages=0)
    with pytest.raises(KernelArgumentError, match="target must be one of gemmini"):
        run(target="gemini")
    with pytest.raises(KernelArgumentError, match="must not overlap"):
        small[1](x, w, x, 0.01, KIND="", options={"target": "gemmini"})
    with pytest.raises(OptionError, match="depends on the grid"):
        small.compiled(x, w, out, 0.01, KIND="", options={"target": "gemmini"})
