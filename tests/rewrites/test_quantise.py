"""quantise: near the float graph, in integers where it says so."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from tilewright.dtypes import DType
from tilewright.frontend import import_model
from tilewright.graph.oracle import evaluate
from tilewright.rewrites.quantise import quantise


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.second, self.shortcut = nn.Conv2d(6, 8, 3, padding=1), nn.Conv2d(4, 8, 1)
        self.dense = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(torch.relu(self.norm(self.first(x)))) + self.shortcut(x)
        pooled = nn.functional.max_pool2d(torch.relu(y), 2)
        return self.dense(pooled.mean((2, 3)))


def test_a_block_with_everything() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4, 8, 8)
    block = Block().eval()
    graph = import_model(block, (x,)).graph
    found = quantise(graph, [(x.numpy(),)])
    contractions = [node for node in found.nodes() if node.op in ("conv", "matmul", "linear")]
    assert [node.op for node in contractions].count("conv") == 3 and len(contractions) == 4
    assert all(operand.dtype is DType.I8 for node in contractions for operand in node.inputs)
    pool = next(node for node in found.nodes() if node.op == "max_pool")
    assert pool.dtype is DType.I8, "bytes are pooled as bytes"
    (result,) = evaluate(found, [x.numpy()])
    expected = block(x).detach().numpy()
    assert np.abs(result - expected).max() < 0.05 * np.abs(expected).max()


def test_scales_cover_all_samples() -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 3, 1).eval()
    small, large = torch.randn(1, 2, 4, 4), 10 * torch.randn(1, 2, 4, 4)
    graph = import_model(conv, (small,)).graph
    errors = []
    for samples in ([small], [small, large]):
        found = quantise(graph, [(sample.numpy(),) for sample in samples])
        (result,) = evaluate(found, [large.numpy()])
        errors.append(np.abs(result - conv(large).detach().numpy()).max())
    assert errors[1] < 0.1 * errors[0], "the first saturates"


def test_what_has_no_constant_weights_stays_as_it_is() -> None:
    class Product(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.softmax(x @ x.transpose(0, 1), -1)

    x = torch.randn(4, 4)
    found = quantise(import_model(Product().eval(), (x,)).graph, [(x.numpy(),)])
    assert all(node.dtype is DType.F32 for node in found.nodes())
