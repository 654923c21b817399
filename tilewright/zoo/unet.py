"""U-Net (Ronneberger et al. 2015), with padded convolutions and batch norm, as it is used today.

An image in, segmentation logits of the same size out. Sides must be multiples of 2 ** depth.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class UnetConfig:
    width: int = 64
    depth: int = 4
    channels: int = 3
    classes: int = 2
    image_size: int = 256


UNET = UnetConfig()


class DoubleConv(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
        )


class Up(nn.Module):
    """Double the resolution and halve the channels, then join the encoder's map of that resolution."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.conv = DoubleConv(2 * width, width)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.conv(torch.cat([skip, self.up(x)], dim=1))


class Unet(nn.Module):
    def __init__(self, config: UnetConfig) -> None:
        super().__init__()
        widths = [config.width * 2**level for level in range(config.depth + 1)]
        self.stem = DoubleConv(config.channels, widths[0])
        self.pool = nn.MaxPool2d(2)
        self.down = nn.ModuleList(DoubleConv(width, 2 * width) for width in widths[:-1])
        self.up = nn.ModuleList(Up(width) for width in reversed(widths[:-1]))
        self.classify = nn.Conv2d(config.width, config.classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        skips = []
        for down in self.down:
            skips.append(x)
            x = down(self.pool(x))
        for up in self.up:
            x = up(x, skips.pop())
        return self.classify(x)
