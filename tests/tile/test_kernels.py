"""The ten kernels against NumPy, at sizes that are no multiples of the blocks: in debug mode, and compiled."""

from __future__ import annotations

import inspect
import math

import ml_dtypes
import numpy as np
import pytest
import torch

from tests.tile import kernels
from tests.tile.kernels import KERNELS, blocks, random

DEBUG = {"debug": True, "unwritten": ["out"]}


@pytest.fixture(params=["debug", "compiled"], autouse=True)
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEBUG, "debug", request.param == "debug")


def close(found: np.ndarray, wanted: np.ndarray, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(found.astype(np.float64), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", KERNELS)
def test_each_has_at_most_fifty_lines(name: str) -> None:
    assert len(inspect.getsource(KERNELS[name].function).splitlines()) <= 50


@pytest.mark.parametrize(("rows", "columns"), [(16, 32), (5, 37), (1, 1)])
def test_add_row(rows: int, columns: int) -> None:
    x, row, out = random(rows, columns), random(columns, seed=1), np.empty((rows, columns), np.float32)
    kernels.add_row[blocks(rows, 4), blocks(columns, 16)](x, row, out, rows, columns, BM=4, BN=16, **DEBUG)
    np.testing.assert_array_equal(out, np.maximum(x + row, 0))


@pytest.mark.parametrize("columns", [64, 50, 1])
def test_softmax(columns: int) -> None:
    x, out = random(7, columns), np.empty((7, columns), np.float32)
    kernels.softmax[(7,)](x, out, columns, columns, BLOCK=64, **DEBUG)
    weights = np.exp(x - x.max(1, keepdims=True))
    close(out, weights / weights.sum(1, keepdims=True))


@pytest.mark.parametrize("columns", [64, 75])
def test_layer_norm(columns: int) -> None:
    x, residual, out = random(5, columns), random(5, columns, seed=1), np.empty((5, columns), np.float32)
    weight, bias = random(columns, seed=2), random(columns, seed=3)
    kernels.layer_norm[(5,)](x, residual, weight, bias, out, columns, 1e-5, BLOCK=32, **DEBUG)
    both = (x + residual).astype(np.float64)
    wanted = (both - both.mean(1, keepdims=True)) / np.sqrt(both.var(1, keepdims=True) + 1e-5) * weight + bias
    close(out, wanted, 1e-4)


@pytest.mark.parametrize(("m", "n", "k"), [(32, 32, 32), (19, 45, 23)])
def test_matmul_gelu(m: int, n: int, k: int) -> None:
    a, b, bias, out = random(m, k), random(k, n, seed=1), random(n, seed=2), np.empty((m, n), np.float32)
    kernels.matmul_gelu[blocks(m, 16), blocks(n, 16)](a, b, bias, out, m, n, k, BM=16, BN=16, BK=16, **DEBUG)
    x = a.astype(np.float64) @ b + bias
    close(out, 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))), 1e-4)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_batched_matmul(dtype: type) -> None:
    a, b = random(3, 9, 21, dtype=dtype), random(3, 21, 17, seed=1, dtype=dtype)
    out = np.empty((3, 9, 17), dtype)
    kernels.batched_matmul[1, 2, 3](a, b, out, 9, 17, 21, BM=16, BN=16, BK=16, **DEBUG)
    tolerance = {2: 2e-2, 4: 1e-5}[np.dtype(dtype).itemsize]
    close(out, a.astype(np.float64) @ b.astype(np.float64), tolerance)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [32, 27])
def test_attention(length: int, causal: bool) -> None:
    q, k, v = (torch.from_numpy(random(2, length, 16, seed=seed)) for seed in range(3))
    out = torch.empty_like(q)
    kernels.attention[blocks(length, 8), 2](
        q, k, v, out, length, 0.25, D=16, BM=8, BN=16, CAUSAL=causal, **DEBUG
    )
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    close(out.numpy(), wanted.numpy())


@pytest.mark.parametrize("channels", [8, 11])
def test_conv2d(channels: int) -> None:
    x, w = random(9, 8, channels), random(3, 2, channels, 5, seed=1)
    out = np.empty((7, 7, 5), np.float32)
    kernels.conv2d[blocks(49, 16), 1](x, w, out, channels, 9, 8, 5, R=3, S=2, BP=16, BO=8, BC=8, **DEBUG)
    image, taps = torch.from_numpy(x).permute(2, 0, 1)[None], torch.from_numpy(w).permute(3, 2, 0, 1)
    close(out, torch.conv2d(image, taps)[0].permute(1, 2, 0).numpy(), 1e-4)


def test_dequant_matmul() -> None:
    a, scales = random(13, 40, dtype=np.float16), random(21, seed=2)
    w = np.random.default_rng(1).integers(-128, 128, (40, 21), np.int8)
    out = np.empty((13, 21), np.float32)
    kernels.dequant_matmul[1, 2](a, w, scales, out, 13, 21, 40, BM=16, BN=16, BK=16, **DEBUG)
    close(out, a.astype(np.float64) @ w * scales, 1e-3)


def test_grouped_matmul() -> None:
    sizes = [5, 0, 19, 8]
    ends = np.cumsum(sizes).astype(np.int32)
    a, b = random(32, 12), random(4, 12, 10, seed=1)
    out = np.empty((32, 10), np.float32)
    kernels.grouped_matmul[2, 2](a, b, out, ends, 4, 10, 12, BM=8, BN=8, BK=8, **DEBUG)
    parts = [x @ y for x, y in zip(np.split(a, ends[:-1]), b, strict=True)]
    close(out, np.concatenate(parts), 1e-5)


def test_cross_entropy() -> None:
    logits, labels = random(4, 1000), np.array([3, 999, 0, 512], np.int64)
    loss = np.empty(4, np.float32)
    kernels.cross_entropy[(4,)](logits, labels, loss, 1000, BLOCK=128, **{**DEBUG, "unwritten": ["loss"]})
    wanted = torch.nn.functional.cross_entropy(
        torch.from_numpy(logits), torch.from_numpy(labels), reduction="none"
    )
    close(loss, wanted.numpy())
