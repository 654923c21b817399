"""MobileNetV2 (Sandler et al. 2018), width 1.0.

Parameter names are torchvision's, so that its state dicts load.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from .init import UNRECTIFIED


@dataclass(frozen=True)
class MobileNetConfig:
    # Each stage: expansion, channels, blocks, stride of its first block (table 2 of the paper).
    stages: tuple[tuple[int, int, int, int], ...] = (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )
    stem: int = 32
    head: int = 1280
    classes: int = 1000
    image_size: int = 224


MOBILENET_V2 = MobileNetConfig()


def conv_bn_relu6(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU6())


class InvertedResidual(nn.Module):
    """Expand (1x1), filter each channel (3x3), project (1x1, no activation); add the input if the shapes agree."""

    def __init__(self, inputs: int, outputs: int, expansion: int, stride: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        self.expands = expansion != 1
        self.adds = stride == 1 and inputs == outputs
        self.conv = nn.Sequential(
            *([conv_bn_relu6(inputs, hidden, 1)] if self.expands else []),
            conv_bn_relu6(hidden, hidden, 3, stride, groups=hidden),
            nn.Conv2d(hidden, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.adds else self.conv(x)

    def residual_ends(self) -> Iterable[nn.Module]:
        return (self.conv[-1],) if self.adds else ()

    def init_gains(self) -> Mapping[nn.Module, float]:
        # The expansion reads the linear output of the block before it: nothing was rectified away.
        return {self.conv[0][0]: UNRECTIFIED} if self.expands else {}


class MobileNetV2(nn.Module):
    def __init__(self, config: MobileNetConfig) -> None:
        super().__init__()
        layers: list[nn.Module] = [conv_bn_relu6(3, config.stem, 3, stride=2)]
        channels = config.stem
        for expansion, width, blocks, stride in config.stages:
            for index in range(blocks):
                layers.append(InvertedResidual(channels, width, expansion, stride if index == 0 else 1))
                channels = width
        layers.append(conv_bn_relu6(channels, config.head, 1))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(config.head, config.classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean((2, 3)))
