"""ResNet (He et al. 2016), in the form everyone uses: the stride sits in the 3x3 convolution ("v1.5").

Parameter names are torchvision's, so that its state dicts load.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class ResNetConfig:
    layers: tuple[int, int, int, int]
    bottleneck: bool
    width: int = 64
    classes: int = 1000
    image_size: int = 224


RESNET18 = ResNetConfig(layers=(2, 2, 2, 2), bottleneck=False)
RESNET50 = ResNetConfig(layers=(3, 4, 6, 3), bottleneck=True)


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


def projection(inputs: int, outputs: int, stride: int) -> nn.Module | None:
    """The shortcut of a block: a 1x1 convolution where the shape changes, else nothing."""
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


class BasicBlock(nn.Module):
    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = conv(inputs, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = conv(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = projection(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        y = torch.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return torch.relu(y + shortcut)

    def residual_ends(self) -> Iterable[nn.Module]:
        return (self.bn2,)


class Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = conv(inputs, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = conv(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = conv(width, outputs, 1)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample = projection(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        y = torch.relu(self.bn1(self.conv1(x)))
        y = torch.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return torch.relu(y + shortcut)

    def residual_ends(self) -> Iterable[nn.Module]:
        return (self.bn3,)


class ResNetTrunk(nn.Module):
    """The convolutional part: an image in, the feature maps of the four stages out."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        width = config.width
        self.block = Bottleneck if config.bottleneck else BasicBlock
        self.conv1 = conv(3, width, 7, stride=2)
        self.bn1 = nn.BatchNorm2d(width)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        one, two, three, four = config.layers
        self.layer1 = self.stage(width, width, one, stride=1)
        self.layer2 = self.stage(width * self.block.expansion, 2 * width, two, stride=2)
        self.layer3 = self.stage(2 * width * self.block.expansion, 4 * width, three, stride=2)
        self.layer4 = self.stage(4 * width * self.block.expansion, 8 * width, four, stride=2)

    def stage(self, inputs: int, width: int, blocks: int, stride: int) -> nn.Sequential:
        first = self.block(inputs, width, stride)
        rest = [self.block(width * self.block.expansion, width, stride=1) for _ in range(blocks - 1)]
        return nn.Sequential(first, *rest)

    def features(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x = self.maxpool(torch.relu(self.bn1(self.conv1(x))))
        c2 = self.layer1(x)
        c3 = self.layer2(c2)
        c4 = self.layer3(c3)
        c5 = self.layer4(c4)
        return c2, c3, c4, c5

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.features(x)


class ResNet(ResNetTrunk):
    """The classifier: an image in, class logits out."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__(config)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8 * config.width * self.block.expansion, config.classes)

    def forward(self, x: Tensor) -> Tensor:
        *_, c5 = self.features(x)
        return self.fc(self.avgpool(c5).flatten(1))
