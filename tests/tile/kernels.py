"""Ten kernels as a user writes them, and the launch of each; the tests compare them with NumPy.

`value_of` launches other kernels."""

from __future__ import annotations

from typing import Any

import numpy as np

import tilewright
import tilewright.tile as tl


@tilewright.kernel
def add_row(x, row, out, rows, columns, BM: tl.constexpr, BN: tl.constexpr):
    """relu(x + row), the row broadcast."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = (m[:, None] < rows) & (n[None, :] < columns)
    at = m[:, None] * columns + n[None, :]
    value = tl.load(x + at, mask=inside) + tl.load(row + n, mask=n < columns)[None, :]
    tl.store(out + at, tl.maximum(value, 0.0), mask=inside)


@tilewright.kernel
def softmax(x, out, stride, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    n = tl.arange(0, BLOCK)
    value = tl.load(x + row * stride + n, mask=n < columns, other=-float("inf"))
    weight = tl.exp(value - tl.max(value, axis=0))
    tl.store(out + row * stride + n, weight / tl.sum(weight, axis=0), mask=n < columns)


@tilewright.kernel
def layer_norm(x, residual, weight, bias, out, columns, eps, BLOCK: tl.constexpr):
    """Layer norm of x + residual, in blocks along the row."""
    start = tl.program_id(0) * columns
    total, squares = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for first in range(0, columns, BLOCK):
        n = first + tl.arange(0, BLOCK)
        value = tl.load(x + start + n, n < columns, 0.0) + tl.load(residual + start + n, n < columns, 0.0)
        total += value
        squares += value * value
    mean = tl.sum(total, axis=0) / columns
    scale = tl.rsqrt(tl.sum(squares, axis=0) / columns - mean * mean + eps)
    for first in range(0, columns, BLOCK):
        n = first + tl.arange(0, BLOCK)
        inside = n < columns
        value = tl.load(x + start + n, mask=inside) + tl.load(residual + start + n, mask=inside)
        normal = (value - mean) * scale
        result = normal * tl.load(weight + n, mask=inside) + tl.load(bias + n, mask=inside)
        tl.store(out + start + n, result, mask=inside)


def gelu(x):
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@tilewright.kernel
def matmul_gelu(a, b, bias, out, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """gelu(a @ b + bias), with block pointers."""
    m, n = tl.program_id(0) * BM, tl.program_id(1) * BN
    left = tl.make_block_ptr(a, (M, K), (K, 1), (m, 0), (BM, BK), order=(1, 0))
    right = tl.make_block_ptr(b, (K, N), (N, 1), (0, n), (BK, BN), order=(1, 0))
    acc = tl.zeros((BM, BN), tl.float32)
    for _ in range(tl.cdiv(K, BK)):
        acc = tl.dot(tl.load(left, boundary_check=(0, 1)), tl.load(right, boundary_check=(0, 1)), acc)
        left = tl.advance(left, (0, BK))
        right = tl.advance(right, (BK, 0))
    columns = n + tl.arange(0, BN)
    acc += tl.load(bias + columns, mask=columns < N, other=0.0)[None, :]
    target = tl.make_block_ptr(out, (M, N), (N, 1), (m, n), (BM, BN), order=(1, 0))
    tl.store(target, gelu(acc), boundary_check=(0, 1))


@tilewright.kernel
def batched_matmul(a, b, out, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    batch = tl.program_id(2)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for first in range(0, K, BK):
        k = first + tl.arange(0, BK)
        left = a + batch * M * K + m[:, None] * K + k[None, :]
        right = b + batch * K * N + k[:, None] * N + n[None, :]
        x = tl.load(left, mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
        y = tl.load(right, mask=(k[:, None] < K) & (n[None, :] < N), other=0.0)
        acc = tl.dot(x, y, acc)
    inside = (m[:, None] < M) & (n[None, :] < N)
    tl.store(out + batch * M * N + m[:, None] * N + n[None, :], acc, mask=inside)


@tilewright.kernel
def attention(
    q, k, v, out, length, scale, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr
):
    """Flash attention forward: softmax(q @ k.T * scale) @ v for one head an instance of axis 1."""
    head = tl.program_id(1) * length * D
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.arange(0, D)
    query = tl.load(q + head + m[:, None] * D + d[None, :], mask=m[:, None] < length, other=0.0)
    best = tl.full((BM,), -1e30, tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    end = length
    if CAUSAL:  # behind its own rows, a block sees nothing
        end = tl.minimum(length, (tl.program_id(0) + 1) * BM)
    for first in range(0, end, BN):
        n = first + tl.arange(0, BN)
        at, inside = head + n[:, None] * D + d[None, :], n[:, None] < length
        score = tl.dot(query, tl.trans(tl.load(k + at, mask=inside, other=0.0))) * scale
        visible = (n < length)[None, :]
        if CAUSAL:
            visible = visible & (n[None, :] <= m[:, None])
        score = tl.where(visible, score, -1e30)
        now = tl.maximum(best, tl.max(score, axis=1))
        weight = tl.exp(score - now[:, None])
        old = tl.exp(best - now)
        total = total * old + tl.sum(weight, axis=1)
        value = tl.load(v + at, mask=inside, other=0.0)
        acc = tl.dot(weight.to(value.dtype), value, acc * old[:, None])
        best = now
    result = acc / total[:, None]
    tl.store(out + head + m[:, None] * D + d[None, :], result, mask=m[:, None] < length)


@tilewright.kernel
def conv2d(
    x,
    w,
    out,
    C,
    H,
    W,
    F,
    R: tl.constexpr,
    S: tl.constexpr,
    BP: tl.constexpr,
    BO: tl.constexpr,
    BC: tl.constexpr,
):
    """Stride 1, no padding, channels last; w is [R, S, C, F]. An implicit GEMM over pixels of one image."""
    P, Q = H - R + 1, W - S + 1
    pixel = tl.program_id(0) * BP + tl.arange(0, BP)
    o = tl.program_id(1) * BO + tl.arange(0, BO)
    row, column = pixel // Q, pixel % Q
    acc = tl.zeros((BP, BO), tl.float32)
    for r in tl.static_range(R):
        for s in tl.static_range(S):
            at = ((row + r) * W + column + s) * C
            for first in range(0, C, BC):
                c = first + tl.arange(0, BC)
                inside = (pixel[:, None] < P * Q) & (c[None, :] < C)
                data = tl.load(x + at[:, None] + c[None, :], mask=inside, other=0.0)
                weights = w + (r * S + s) * C * F + c[:, None] * F + o[None, :]
                taps = tl.load(weights, mask=(c[:, None] < C) & (o[None, :] < F), other=0.0)
                acc = tl.dot(data, taps, acc)
    inside = (pixel[:, None] < P * Q) & (o[None, :] < F)
    tl.store(out + pixel[:, None] * F + o[None, :], acc, mask=inside)


@tilewright.kernel
def dequant_matmul(a, w, scales, out, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """a @ (w * scales), w in int8 with a scale for each column."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for first in range(0, K, BK):
        k = first + tl.arange(0, BK)
        x = tl.load(a + m[:, None] * K + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
        y = tl.load(w + k[:, None] * N + n[None, :], mask=(k[:, None] < K) & (n[None, :] < N), other=0)
        acc = tl.dot(x, y.to(x.dtype), acc)
    acc *= tl.load(scales + n, mask=n < N, other=0.0)[None, :]
    tl.store(out + m[:, None] * N + n[None, :], acc, mask=(m[:, None] < M) & (n[None, :] < N))


@tilewright.kernel
def grouped_matmul(a, b, out, ends, groups, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Rows of a up to ends[g] belong to group g, and are multiplied with b[g]. Instances share the tiles of all groups."""  # noqa: E501
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    tile, seen, start = tl.program_id(0), 0, 0
    for g in range(groups):
        end = tl.load(ends + g)
        tiles = tl.cdiv(end - start, BM)
        while tile < seen + tiles:
            m = start + (tile - seen) * BM + tl.arange(0, BM)
            acc = tl.zeros((BM, BN), tl.float32)
            for first in range(0, K, BK):
                k = first + tl.arange(0, BK)
                x = tl.load(
                    a + m[:, None] * K + k[None, :], mask=(m[:, None] < end) & (k[None, :] < K), other=0.0
                )
                y = tl.load(
                    b + (g * K + k[:, None]) * N + n[None, :],
                    mask=(k[:, None] < K) & (n[None, :] < N),
                    other=0.0,
                )
                acc = tl.dot(x, y, acc)
            tl.store(out + m[:, None] * N + n[None, :], acc, mask=(m[:, None] < end) & (n[None, :] < N))
            tile += tl.num_programs(0)
        seen += tiles
        start = end


@tilewright.kernel
def cross_entropy(logits, labels, loss, classes, BLOCK: tl.constexpr):
    """log(sum(exp(row))) - row[label], the classes in blocks with a running maximum."""
    row = tl.program_id(0)
    best = tl.full((BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, classes, BLOCK):
        n = first + tl.arange(0, BLOCK)
        value = tl.load(logits + row * classes + n, mask=n < classes, other=-1e30).to(tl.float32)
        now = tl.maximum(best, value)
        total = total * tl.exp(best - now) + tl.exp(value - now)
        best = now
    top = tl.max(best, axis=0)
    everything = tl.log(tl.sum(total * tl.exp(best - top), axis=0)) + top
    target = tl.load(logits + row * classes + tl.load(labels + row)).to(tl.float32)
    tl.store(loss + row, everything - target)


KERNELS: dict[str, Any] = {
    each.__name__: each
    for each in (
        add_row, softmax, layer_norm, matmul_gelu, batched_matmul, attention, conv2d, dequant_matmul, grouped_matmul,
        cross_entropy,
    )
}  # fmt: skip


def blocks(extent: int, block: int) -> int:
    return -(-extent // block)


def random(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def value_of(kernel: Any, *args: Any, size: int = 1, dtype: Any = np.int32, **kwargs: Any) -> list[Any]:
    """What a kernel stores through its first parameter."""
    out = np.zeros(size, dtype)
    kernel[1](out, *args, **kwargs)
    return out.tolist()
