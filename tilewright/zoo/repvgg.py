"""RepVGG (Ding et al. 2021): trained with three branches per block, deployed as a plain stack of 3x3 convolutions.

`RepVgg.reparameterize()` turns the first form into the second, with equal outputs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class RepVggConfig:
    blocks: tuple[int, ...] = (1, 2, 4, 14, 1)
    widths: tuple[int, ...] = (48, 48, 96, 192, 1280)
    deployed: bool = True
    classes: int = 1000
    image_size: int = 224


REPVGG_A0 = RepVggConfig()
REPVGG_A0_BRANCHES = RepVggConfig(deployed=False)


class BranchedBlock(nn.Module):
    """The training form: relu(bn(conv3x3(x)) + bn(conv1x1(x)) + bn(x)), the last where the shape allows it."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv3 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.bn0 = nn.BatchNorm2d(outputs) if inputs == outputs and stride == 1 else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn3(self.conv3(x)) + self.bn1(self.conv1(x))
        if self.bn0 is not None:
            y = y + self.bn0(x)
        return torch.relu(y)

    def init_gains(self) -> Mapping[nn.Module, float]:
        branches = [bn for bn in (self.bn3, self.bn1, self.bn0) if bn is not None]
        return {bn: 1 / math.sqrt(len(branches)) for bn in branches}

    def reparameterize(self) -> DeployedBlock:
        """
        relu(bn3(conv3(x)) + bn1(conv1(x)) + bn0(x))  ->  relu(conv(x))

        In inference each branch is a 3x3 convolution with a bias (a 1x1 kernel is a 3x3 one with a border of zeros,
        the identity a 1x1 one), and convolutions of the same input add up.
        """
        weight, bias = fold_batch_norm(self.conv3.weight, self.bn3)
        for kernel, bn in ((self.conv1.weight, self.bn1), (self.identity_kernel(), self.bn0)):
            if bn is not None:
                branch_weight, branch_bias = fold_batch_norm(F.pad(kernel, (1, 1, 1, 1)), bn)
                weight, bias = weight + branch_weight, bias + branch_bias
        deployed = DeployedBlock(self.conv3.in_channels, self.conv3.out_channels, self.conv3.stride[0])
        deployed.to(weight)
        deployed.conv.load_state_dict({"weight": weight, "bias": bias})
        return deployed

    def identity_kernel(self) -> Tensor:
        eye = torch.eye(self.conv3.out_channels, self.conv3.in_channels)
        return eye.to(self.conv3.weight)[:, :, None, None]


class DeployedBlock(nn.Module):
    """The inference form: relu(conv3x3(x))."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, stride, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.conv(x))


def fold_batch_norm(weight: Tensor, bn: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """Weight and bias of the convolution that equals a bias-free convolution followed by `bn` in inference."""
    assert bn.running_mean is not None and bn.running_var is not None
    factor = bn.weight / torch.sqrt(bn.running_var + bn.eps)
    return weight * factor[:, None, None, None], bn.bias - bn.running_mean * factor


class RepVgg(nn.Module):
    def __init__(self, config: RepVggConfig) -> None:
        super().__init__()
        self.config = config
        block = DeployedBlock if config.deployed else BranchedBlock
        layers: list[nn.Module] = []
        channels = 3
        for width, count in zip(config.widths, config.blocks, strict=True):
            for index in range(count):
                layers.append(block(channels, width, stride=2 if index == 0 else 1))
                channels = width
        self.blocks = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(channels, config.classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.pool(self.blocks(x)).flatten(1))

    @torch.no_grad()
    def reparameterize(self) -> RepVgg:
        """The same model in deployed form, in eval mode; this one is left as it is."""
        if self.config.deployed:
            return self
        with torch.device("meta"):  # every parameter is replaced below
            deployed = RepVgg(replace(self.config, deployed=True))
        deployed.blocks = nn.Sequential(*(block.reparameterize() for block in self.blocks))
        deployed.classifier = copy.deepcopy(self.classifier)
        return deployed.eval()
