"""RetinaNet (Lin et al. 2017): ResNet-50, feature pyramid, classification and box heads; no box decoding.

An image in; out, for each of the five pyramid levels from fine to coarse, the class logits and the box offsets of every
anchor. Level P6 is computed from P5, as in torchvision, not from C5 as in the paper.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .init import UNRECTIFIED
from .resnet import RESNET50, ResNetConfig, ResNetTrunk


@dataclass(frozen=True)
class RetinaNetConfig:
    backbone: ResNetConfig = RESNET50
    width: int = 256
    head_layers: int = 4
    anchors: int = 9  # 3 scales x 3 aspect ratios at each position
    classes: int = 91  # COCO
    image_size: int = 512


RETINANET = RetinaNetConfig()


class FeaturePyramid(nn.Module):
    """C3, C4, C5 -> P3, ..., P7, all of the same width: coarse levels are upsampled and added to finer ones."""

    def __init__(self, inputs: list[int], width: int) -> None:
        super().__init__()
        self.lateral = nn.ModuleList(nn.Conv2d(channels, width, 1) for channels in inputs)
        self.smooth = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in inputs)
        self.p6 = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.p7 = nn.Conv2d(width, width, 3, stride=2, padding=1)

    def forward(self, c3: Tensor, c4: Tensor, c5: Tensor) -> list[Tensor]:
        m3, m4, m5 = (lateral(c) for lateral, c in zip(self.lateral, (c3, c4, c5), strict=True))
        m4 = m4 + F.interpolate(m5, size=m4.shape[-2:], mode="nearest")
        m3 = m3 + F.interpolate(m4, size=m3.shape[-2:], mode="nearest")
        p3, p4, p5 = (smooth(m) for smooth, m in zip(self.smooth, (m3, m4, m5), strict=True))
        p6 = self.p6(p5)
        p7 = self.p7(torch.relu(p6))
        return [p3, p4, p5, p6, p7]

    def init_gains(self) -> Mapping[nn.Module, float]:
        return dict.fromkeys(self.smooth, UNRECTIFIED)


class Head(nn.Module):
    """A small convolutional network applied to every level: [batch, width, h, w] -> [batch, h * w * anchors, values]"""

    def __init__(self, config: RetinaNetConfig, values: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(config.head_layers):
            layers += [nn.Conv2d(config.width, config.width, 3, padding=1), nn.ReLU()]
        layers.append(nn.Conv2d(config.width, config.anchors * values, 3, padding=1))
        self.values = values
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        # The channels are (anchor, value); they move behind the positions before both are flattened.
        return self.layers(x).permute(0, 2, 3, 1).reshape(x.shape[0], -1, self.values)

    def init_gains(self) -> Mapping[nn.Module, float]:
        return {self.layers[0]: UNRECTIFIED}


class RetinaNet(nn.Module):
    def __init__(self, config: RetinaNetConfig) -> None:
        super().__init__()
        self.backbone = ResNetTrunk(config.backbone)
        channels = config.backbone.width * self.backbone.block.expansion
        self.pyramid = FeaturePyramid([2 * channels, 4 * channels, 8 * channels], config.width)
        self.classify = Head(config, config.classes)
        self.locate = Head(config, 4)

    def forward(self, image: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        _, c3, c4, c5 = self.backbone(image)
        levels = self.pyramid(c3, c4, c5)
        return [self.classify(level) for level in levels], [self.locate(level) for level in levels]
