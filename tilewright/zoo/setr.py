"""SETR (Zheng et al. 2021): a ViT encoder with a convolutional decoder; an image in, segmentation logits out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .vit import EPS, PatchEmbedding, encoder_block


@dataclass(frozen=True)
class SetrConfig:
    layers: int
    width: int
    heads: int
    progressive: bool  # the PUP decoder, else the naive one
    decoder_width: int = 256
    patch: int = 16
    classes: int = 150  # ADE20K, the dataset that the paper crops to 512 x 512
    image_size: int = 512


SETR_NAIVE_BASE = SetrConfig(layers=12, width=768, heads=12, progressive=False)
SETR_NAIVE = SetrConfig(layers=24, width=1024, heads=16, progressive=False)
SETR_PUP = SetrConfig(layers=24, width=1024, heads=16, progressive=True)


def upsample(x: Tensor, factor: int) -> Tensor:
    return F.interpolate(x, scale_factor=factor, mode="bilinear", align_corners=False)


class ConvBnRelu(nn.Sequential):
    def __init__(self, inputs: int, outputs: int, kernel: int) -> None:
        convolution = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
        super().__init__(convolution, nn.BatchNorm2d(outputs), nn.ReLU())


class NaiveDecoder(nn.Module):
    """Two 1x1 convolutions, then one upsampling to the size of the image."""

    def __init__(self, config: SetrConfig) -> None:
        super().__init__()
        self.factor = config.patch
        self.hidden = ConvBnRelu(config.width, config.decoder_width, 1)
        self.classify = nn.Conv2d(config.decoder_width, config.classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        return upsample(self.classify(self.hidden(x)), self.factor)


class ProgressiveDecoder(nn.Module):
    """Progressive upsampling: 3x3 convolutions, each followed by doubling the resolution, until it is the image's."""

    def __init__(self, config: SetrConfig) -> None:
        super().__init__()
        steps = config.patch.bit_length() - 1
        widths = [config.width] + [config.decoder_width] * steps
        self.steps = nn.ModuleList(ConvBnRelu(widths[i], widths[i + 1], 3) for i in range(steps))
        self.classify = nn.Conv2d(config.decoder_width, config.classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        *steps, last = self.steps
        for step in steps:
            x = upsample(step(x), 2)
        # Classifying before the last doubling gives the same as after it (both are linear), at a quarter of the work.
        return upsample(self.classify(last(x)), 2)


class Setr(nn.Module):
    def __init__(self, config: SetrConfig) -> None:
        super().__init__()
        self.side = config.image_size // config.patch
        self.patches = PatchEmbedding(config.width, config.patch)
        self.positions = nn.Parameter(torch.empty(1, self.side**2, config.width))
        self.blocks = nn.ModuleList(encoder_block(config.width, config.heads) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, EPS)
        self.decoder = ProgressiveDecoder(config) if config.progressive else NaiveDecoder(config)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image) + self.positions
        for block in self.blocks:
            x = block(x)
        feature_map = self.norm(x).transpose(1, 2).unflatten(2, (self.side, self.side))
        return self.decoder(feature_map)
