"""The partition by dynamic programming on described GPUs: chains are groups if a candidate computes them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import tilewright
from tilewright.errors import OptionError
from tilewright.frontend import import_model
from tilewright.graph.task import Partition
from tilewright.hw.gpu import H200
from tilewright.support.trace import Trace
from tilewright.targets.cuda import CudaTarget
from tilewright.targets.options import CompileOptions
from tilewright.targets.target import Cutting


def cut(model: nn.Module, x: torch.Tensor, partition: str = "dynamic") -> Partition:
    imported = import_model(model.half().eval(), (x.half(),))
    target = CudaTarget(replace(H200, libraries=("cublaslt", "torch")))
    return target.partition(imported, "fast", Trace.off(), cutting=Cutting(partition))


def feed_forward(width: int, wide: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, wide), nn.ReLU(), nn.Linear(wide, width))


def test_two_narrow_gemms_are_one_kernel() -> None:
    x = torch.zeros(16384, 64)
    model = feed_forward(64, 128)
    assert [call.task.label for call in cut(model, x).calls] == ["matmul+add+relu+matmul+add"]
    assert [call.task.label for call in cut(model, x, "greedy").calls] == ["matmul+add+relu", "matmul+add"]


def test_two_wide_gemms_are_two() -> None:
    found = cut(feed_forward(768, 3072), torch.zeros(512, 768))
    assert [call.task.label for call in found.calls] == ["matmul+add+relu", "matmul+add"]


def test_the_report_is_in_the_trace() -> None:
    trace = Trace()
    imported = import_model(feed_forward(64, 128).half().eval(), (torch.zeros(16384, 64).half(),))
    CudaTarget(H200).partition(imported, "fast", trace)
    (event,) = (event for event in trace.events if event.name == "rewrites.partition")
    assert event.notes["fusion"]["changed"] == 1
    assert event.notes["fusion"]["seconds"] < event.notes["fusion"]["greedy_seconds"]


def test_another_partition_is_refused() -> None:
    with pytest.raises(OptionError, match="partition must be one of 'dynamic', 'greedy', got 'magic'"):
        CompileOptions(partition="magic").check()


def test_a_padded_norm_is_two_kernels_on_a_cpu() -> None:
    """A transposed convolution pads its operand; a norm in the same kernel would read rows beyond its input's."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(4)
            self.up = nn.ConvTranspose2d(
                4, 16, 3, stride=2, padding=1, output_padding=1, groups=4, bias=False
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.up(self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))

    model, x = Model().eval(), torch.randn(1, 4, 1, 9)
    fast = tilewright.compile(model, (x,))
    torch.testing.assert_close(fast(x), model(x), atol=1e-5, rtol=1e-5)
