"""Launches of the ten kernels at small sizes, with what NumPy says: for the emulator, and for a card."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from tests.codegen.cuda.tiles.emulated import Launch
from tests.tile import kernels
from tests.tile.kernels import blocks, random
from tilewright.tile.kernel import _facts


@dataclass(frozen=True)
class Case:
    name: str
    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    result: str
    wanted: np.ndarray
    tolerance: float = 1e-5
    warps: int = 4

    def launch(self, stages: int = 1) -> Launch:
        bound = self.kernel._bind(self.arguments, self.constants)
        found = self.kernel._arguments(bound)
        program = self.kernel.program(*self.arguments, **self.constants)
        x, y, z = (*self.grid, 1, 1)[:3]
        values = {param.name: bound[param.name] for param in program.params}
        return Launch(program, values, (x, y, z), _facts(found, True), self.warps, stages)

    def check(self, found: np.ndarray) -> None:
        np.testing.assert_allclose(
            found.astype(np.float64),
            self.wanted.astype(np.float64),
            rtol=self.tolerance,
            atol=self.tolerance,
            err_msg=self.name,
        )


def _softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(weights / weights.sum(-1, keepdims=True))


def _add_row(rows: int, columns: int, warps: int) -> Case:
    x, row = random(rows, columns), random(columns, seed=1)
    out = np.empty((rows, columns), np.float32)
    grid = (blocks(rows, 4), blocks(columns, 64))
    wanted = np.maximum(x + row, 0)
    constants = {"BM": 4, "BN": 64}
    return Case(
        f"add_row-{rows}x{columns}",
        kernels.add_row,
        grid,
        (x, row, out, rows, columns),
        constants,
        "out",
        wanted,
        warps=warps,
    )


def _softmax_case(columns: int, block: int, warps: int) -> Case:
    x, out = random(3, columns), np.empty((3, columns), np.float32)
    return Case(
        f"softmax-{columns}",
        kernels.softmax,
        (3,),
        (x, out, columns, columns),
        {"BLOCK": block},
        "out",
        _softmax(x),
        warps=warps,
    )


def _layer_norm() -> Case:
    columns = 300
    x, residual, out = random(3, columns), random(3, columns, seed=1), np.empty((3, columns), np.float32)
    weight, bias = random(columns, seed=2), random(columns, seed=3)
    both = (x + residual).astype(np.float64)
    wanted = (both - both.mean(1, keepdims=True)) / np.sqrt(both.var(1, keepdims=True) + 1e-5) * weight + bias
    arguments = (x, residual, weight, bias, out, columns, 1e-5)
    return Case("layer_norm", kernels.layer_norm, (3,), arguments, {"BLOCK": 128}, "out", wanted, 1e-4)


def matmul_case(m: int, n: int, k: int, dtype: Any, blocked: tuple[int, int, int], warps: int) -> Case:
    a, b = random(m, k, dtype=dtype), random(k, n, seed=1, dtype=dtype)
    bias, out = random(n, seed=2), np.empty((m, n), np.float32)
    x = a.astype(np.float64) @ b.astype(np.float64) + bias
    wanted = 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    bm, bn, bk = blocked
    return Case(
        f"matmul_gelu-{m}x{n}x{k}-{np.dtype(dtype).name}",
        kernels.matmul_gelu,
        (blocks(m, bm), blocks(n, bn)),
        (a, b, bias, out, m, n, k),
        {"BM": bm, "BN": bn, "BK": bk},
        "out",
        wanted,
        1e-3,
        warps,
    )


def _batched(dtype: Any, warps: int) -> Case:
    a, b = random(2, 40, 48, dtype=dtype), random(2, 48, 24, seed=1, dtype=dtype)
    out = np.empty((2, 40, 24), dtype)
    wanted = a.astype(np.float64) @ b.astype(np.float64)
    tolerance = 2e-2 if np.dtype(dtype).itemsize == 2 else 1e-5
    arguments = (a, b, out, 40, 24, 48)
    constants = {"BM": 32, "BN": 16, "BK": 32}
    name = f"batched_matmul-{np.dtype(dtype).name}"
    return Case(
        name, kernels.batched_matmul, (2, 2, 2), arguments, constants, "out", wanted, tolerance, warps
    )


def _attention(dtype: Any, length: int, block: int, causal: bool, warps: int) -> Case:
    q, k, v = (random(2, length, 16, seed=seed, dtype=dtype) for seed in range(3))
    out = np.empty_like(q)
    score = 0.25 * q.astype(np.float64) @ np.swapaxes(k.astype(np.float64), 1, 2)
    if causal:
        score = np.where(np.tril(np.ones((length, length), np.bool_)), score, -np.inf)
    wanted = _softmax(score) @ v.astype(np.float64)
    tolerance = 5e-3 if np.dtype(dtype).itemsize == 2 else 1e-5
    constants = {"D": 16, "BM": block, "BN": 16, "CAUSAL": causal}
    name = f"attention-{np.dtype(dtype).name}-{block}-{'causal' if causal else 'full'}"
    grid, arguments = (blocks(length, block), 2), (q, k, v, out, length, 0.25)
    return Case(name, kernels.attention, grid, arguments, constants, "out", wanted, tolerance, warps)


def _conv2d(dtype: Any, pixels: int = 32) -> Case:
    x, w = random(9, 8, 24, dtype=dtype), random(3, 2, 24, 10, seed=1, dtype=dtype)
    out = np.empty((7, 7, 10), np.float32)
    wanted = np.zeros((7, 7, 10))
    for r in range(3):
        for s in range(2):
            wanted += x[r : r + 7, s : s + 7].astype(np.float64) @ w[r, s].astype(np.float64)
    arguments = (x, w, out, 24, 9, 8, 10)
    constants = {"R": 3, "S": 2, "BP": 32, "BO": 16, "BC": 16}
    name = f"conv2d-{np.dtype(dtype).name}-{pixels}"
    constants["BP"] = pixels
    return Case(name, kernels.conv2d, (blocks(49, pixels), 1), arguments, constants, "out", wanted, 1e-3)


def dequant_case(m: int = 13, n: int = 24, k: int = 48, blocked: tuple[int, int, int] = (16, 16, 32)) -> Case:
    a, scales = random(m, k, dtype=np.float16), random(n, seed=2)
    w = np.random.default_rng(1).integers(-128, 128, (k, n), np.int8)
    out = np.empty((m, n), np.float32)
    wanted = a.astype(np.float64) @ w * scales
    bm, bn, bk = blocked
    arguments, constants = (a, w, scales, out, m, n, k), {"BM": bm, "BN": bn, "BK": bk}
    grid = blocks(m, bm), blocks(n, bn)
    return Case(
        f"dequant_matmul-{m}", kernels.dequant_matmul, grid, arguments, constants, "out", wanted, 1e-3
    )


def _grouped(dtype: Any) -> Case:
    ends = np.cumsum([5, 0, 19, 8]).astype(np.int32)
    a, b = random(32, 32, dtype=dtype), random(4, 32, 20, seed=1, dtype=dtype)
    out = np.empty((32, 20), np.float32)
    parts = [
        x.astype(np.float64) @ y.astype(np.float64) for x, y in zip(np.split(a, ends[:-1]), b, strict=True)
    ]
    arguments, constants = (a, b, out, ends, 4, 20, 32), {"BM": 16, "BN": 16, "BK": 16}
    wanted = np.concatenate(parts)
    name = f"grouped_matmul-{np.dtype(dtype).name}"
    return Case(name, kernels.grouped_matmul, (2, 2), arguments, constants, "out", wanted, 1e-3)


def _cross_entropy() -> Case:
    logits, labels = random(3, 1000), np.array([3, 999, 512], np.int64)
    loss = np.empty(3, np.float32)
    wide = logits.astype(np.float64)
    wanted = np.log(np.exp(wide).sum(1)) - wide[np.arange(3), labels]
    arguments = (logits, labels, loss, 1000)
    return Case("cross_entropy", kernels.cross_entropy, (3,), arguments, {"BLOCK": 256}, "loss", wanted)


MAKERS: tuple[Callable[[], Case], ...] = (
    lambda: _add_row(9, 128, 4),
    lambda: _add_row(5, 37, 1),
    lambda: _softmax_case(256, 256, 4),
    lambda: _softmax_case(50, 64, 2),
    _layer_norm,
    lambda: matmul_case(64, 64, 64, np.float16, (32, 32, 32), 4),
    lambda: matmul_case(19, 45, 23, np.float32, (16, 32, 16), 2),
    lambda: _batched(np.float16, 4),
    lambda: _batched(ml_dtypes.bfloat16, 2),
    lambda: _attention(np.float16, 40, 32, True, 2),
    lambda: _attention(np.float32, 27, 16, False, 4),
    lambda: _conv2d(np.float16),
    dequant_case,
    lambda: _grouped(np.float16),
    _cross_entropy,
    # By warpgroups: two of them over rows, rows of 256 and of 64 bytes, two over columns, from registers, computed.
    lambda: matmul_case(150, 144, 96, np.float16, (128, 128, 64), 8),
    lambda: matmul_case(70, 40, 152, ml_dtypes.bfloat16, (64, 32, 128), 4),
    lambda: matmul_case(64, 136, 40, np.float16, (64, 128, 16), 8),
    lambda: _attention(np.float16, 100, 64, True, 4),
    lambda: dequant_case(70, 80, 96, (64, 64, 32)),
    lambda: _conv2d(np.float16, 64),
)
