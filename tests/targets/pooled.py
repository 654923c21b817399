"""Models in which a reduction stands behind a convolution, for tests of what is joined."""

from __future__ import annotations

import torch
from torch import nn

from tilewright import frontend
from tilewright.frontend import ImportedModel
from tilewright.graph.task import Partition
from tilewright.rewrites.oracle import FewestBytes
from tilewright.rewrites.pipeline import Abilities, run_pipeline


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(64, 256, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.conv(x)).mean((2, 3))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(64, 256, 1), nn.Linear(256, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.conv(x)).mean((2, 3)))


class Highest(Head):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.conv(x)).mean((2, 3)).amax(1)


class Groups(Head):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.relu(self.conv(x)).permute(0, 2, 3, 1).unflatten(3, (4, 64)).amax(4))


def imported(model: nn.Module, size: int = 7) -> ImportedModel:
    """Of float16, for four images of so many rows and columns."""
    return frontend.import_model(model.half().eval(), (torch.randn(4, 64, size, size).half(),))


def partitioned(model: nn.Module, size: int = 7) -> Partition:
    """With channels last throughout, as a model has it whose neighbours want it so: what the layout pass expects of a
    single convolution depends on predicted times."""
    abilities = Abilities(chains=False, half=True, prologues=True, splits_reductions=False)
    return run_pipeline(imported(model, size).graph, oracle=FewestBytes(), abilities=abilities)
