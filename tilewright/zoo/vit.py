"""Vision Transformer (Dosovitskiy et al. 2021): an image in, class logits out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .layers import PreNormBlock


@dataclass(frozen=True)
class VitConfig:
    layers: int
    width: int
    heads: int
    patch: int
    classes: int = 1000
    image_size: int = 224

    @property
    def patches(self) -> int:
        return (self.image_size // self.patch) ** 2


VIT_B16 = VitConfig(layers=12, width=768, heads=12, patch=16)
VIT_L16 = VitConfig(layers=24, width=1024, heads=16, patch=16)
VIT_H14 = VitConfig(layers=32, width=1280, heads=16, patch=14)

EPS = 1e-6


def encoder_block(width: int, heads: int) -> PreNormBlock:
    return PreNormBlock(width, heads, 4 * width, nn.GELU(), EPS)


class PatchEmbedding(nn.Module):
    """[batch, 3, height, width] -> [batch, patches, channels]: each patch is projected by itself."""

    def __init__(self, width: int, patch: int) -> None:
        super().__init__()
        self.projection = nn.Conv2d(3, width, patch, stride=patch)

    def forward(self, image: Tensor) -> Tensor:
        return self.projection(image).flatten(2).transpose(1, 2)


class Vit(nn.Module):
    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.patches = PatchEmbedding(config.width, config.patch)
        self.class_token = nn.Parameter(torch.empty(1, 1, config.width))
        self.positions = nn.Parameter(torch.empty(1, config.patches + 1, config.width))
        self.blocks = nn.ModuleList(encoder_block(config.width, config.heads) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, EPS)
        self.head = nn.Linear(config.width, config.classes)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])
