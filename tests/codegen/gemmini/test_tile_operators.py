"""Tile kernels as operators of a model whose target is the accelerator."""

from __future__ import annotations

import pytest
import torch

import tilewright
import tilewright.tile as tl

SMALL = "gemmini:dim=4,scratchpad=8192,accumulator=8192"


@tilewright.kernel
def scaled_matmul(x, w, out, M, N, K, BLOCK: tl.constexpr, CLAMPED: tl.constexpr):
    rows = tl.program_id(0) * BLOCK
    cols = tl.program_id(1) * BLOCK
    left = tl.make_block_ptr(x, (M, K), (K, 1), (rows, 0), (BLOCK, BLOCK), (1, 0))
    right = tl.make_block_ptr(w, (K, N), (N, 1), (0, cols), (BLOCK, BLOCK), (1, 0))
    sums = tl.zeros((BLOCK, BLOCK), tl.int32)
    for _ in range(0, K, BLOCK):
        sums = tl.dot(tl.load(left, boundary_check=(0, 1)), tl.load(right, boundary_check=(0, 1)), sums)
        left = tl.advance(left, (0, BLOCK))
        right = tl.advance(right, (BLOCK, 0))
    result = tl.round(sums.to(tl.float32) * 0.01)
    if CLAMPED:
        result = tl.minimum(tl.maximum(result, -128.0), 127.0)
    else:
        result = tl.minimum(tl.maximum(result, -100.0), 100.0)
    to = tl.make_block_ptr(out, (M, N), (N, 1), (rows, cols), (BLOCK, BLOCK), (1, 0))
    tl.store(to, result.to(tl.int8), boundary_check=(0, 1))


def reference(x: torch.Tensor, w: torch.Tensor, limit: float) -> torch.Tensor:
    sums = x.to(torch.int32) @ w.to(torch.int32)
    return (
        (sums.to(torch.float32) * 0.01).round().clamp(-128 if limit > 100 else -limit, limit).to(torch.int8)
    )


def shape(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], w.shape[1])


@tilewright.op("gemmini_tests::clamped", shape=shape, reference=lambda x, w: reference(x, w, 127.0))
def clamped(x, w, out):
    (m, k), n = x.shape, w.shape[1]
    scaled_matmul[tl.cdiv(m, 8), tl.cdiv(n, 8)](x, w, out, m, n, k, BLOCK=8, CLAMPED=True)


@tilewright.op("gemmini_tests::narrow", shape=shape, reference=lambda x, w: reference(x, w, 100.0))
def narrow(x, w, out):
    (m, k), n = x.shape, w.shape[1]
    scaled_matmul[tl.cdiv(m, 8), tl.cdiv(n, 8)](x, w, out, m, n, k, BLOCK=8, CLAMPED=False)


class Net(torch.nn.Module):
    def __init__(self, operator) -> None:
        super().__init__()
        self.operator = operator

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return self.operator(x, w).to(torch.float32) * 2


@pytest.mark.parametrize(("operator", "is_taken"), [(clamped, True), (narrow, False)])
def test_an_operator_of_a_model(operator, is_taken: bool) -> None:
    """The accelerator runs it where its instructions compute exactly that, otherwise the host does."""
    torch.manual_seed(0)
    x, w = (torch.randint(-128, 128, shape, dtype=torch.int8) for shape in ((20, 30), (30, 12)))
    found = tilewright.compile(Net(operator).eval(), (x, w), target=SMALL)
    torch.testing.assert_close(found(x, w), Net(operator)(x, w), rtol=0, atol=0)
    kernels = list(found.executor.accelerated.values())
    assert len(kernels) == int(is_taken)
    if is_taken:
        assert "2 buffers" in kernels[0].header.decisions and kernels[0].header.cycles > 0
