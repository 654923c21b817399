"""The transformer of DETR (Carion et al. 2020), between the convolutional backbone and the prediction heads.

In: the backbone's feature map, projected to `width` channels and flattened to a sequence, and its position embedding.
Out: the decoder's state for each object query.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .layers import Attention, FeedForward


@dataclass(frozen=True)
class DetrConfig:
    encoder_layers: int
    decoder_layers: int = 6
    width: int = 256
    heads: int = 8
    hidden: int = 2048
    queries: int = 100
    feature_map: tuple[int, int] = (25, 42)  # an image of 800 x 1333 at stride 32


DETR_3 = DetrConfig(encoder_layers=3)
DETR_6 = DetrConfig(encoder_layers=6)
DETR_12 = DetrConfig(encoder_layers=12)


class EncoderLayer(nn.Module):
    def __init__(self, config: DetrConfig) -> None:
        super().__init__()
        self.attention = Attention(config.width, config.heads)
        self.norm1 = nn.LayerNorm(config.width)
        self.feed_forward = FeedForward(config.width, config.hidden, nn.ReLU())
        self.norm2 = nn.LayerNorm(config.width)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        placed = x + positions
        x = self.norm1(x + self.attention(placed, placed, x))
        return self.norm2(x + self.feed_forward(x))

    def residual_ends(self) -> Iterable[nn.Module]:
        return self.attention.out, self.feed_forward.contract


class DecoderLayer(nn.Module):
    def __init__(self, config: DetrConfig) -> None:
        super().__init__()
        self.self_attention = Attention(config.width, config.heads)
        self.norm1 = nn.LayerNorm(config.width)
        self.cross_attention = Attention(config.width, config.heads)
        self.norm2 = nn.LayerNorm(config.width)
        self.feed_forward = FeedForward(config.width, config.hidden, nn.ReLU())
        self.norm3 = nn.LayerNorm(config.width)

    def forward(self, x: Tensor, queries: Tensor, memory: Tensor, positions: Tensor) -> Tensor:
        placed = x + queries
        x = self.norm1(x + self.self_attention(placed, placed, x))
        x = self.norm2(x + self.cross_attention(x + queries, memory + positions, memory))
        return self.norm3(x + self.feed_forward(x))

    # No residual_ends: the decoder starts from zeros, so all it says comes from its branches, and six layers of them
    # need no damping.


class Detr(nn.Module):
    def __init__(self, config: DetrConfig) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.empty(1, config.queries, config.width))
        self.encoder = nn.ModuleList(EncoderLayer(config) for _ in range(config.encoder_layers))
        self.decoder = nn.ModuleList(DecoderLayer(config) for _ in range(config.decoder_layers))
        self.norm = nn.LayerNorm(config.width)

    def forward(self, features: Tensor, positions: Tensor) -> Tensor:
        """Both [batch, height * width, channels] -> [batch, queries, channels]"""
        memory = features
        for layer in self.encoder:
            memory = layer(memory, positions)

        queries = self.queries.expand(features.shape[0], -1, -1)
        x = torch.zeros_like(queries)
        for layer in self.decoder:
            x = layer(x, queries, memory, positions)
        return self.norm(x)

    def init_gains(self) -> Mapping[nn.Module, float]:
        # For its own parameters, the queries. Nothing else tells the decoder's tokens apart, and among tokens that are
        # alike attention has nothing to choose.
        return {self: 3.0}


def sine_positions(height: int, width: int, channels: int) -> Tensor:
    """DETR's fixed embedding, [height * width, channels]: half the channels tell the row, half the column.

    Each half alternates sines and cosines of the coordinate, which runs from 0 to 2 pi over the map, at wavelengths
    that grow geometrically by a factor of 10000 in all.
    """
    half = channels // 2
    wavelengths = 10000 ** (2 * (torch.arange(half) // 2) / half)

    def encode(size: int) -> Tensor:
        angles = torch.arange(1, size + 1)[:, None] * (2 * math.pi / size) / wavelengths
        return torch.stack([angles[:, 0::2].sin(), angles[:, 1::2].cos()], dim=2).flatten(1)

    rows = encode(height)[:, None, :].expand(height, width, half)
    columns = encode(width)[None, :, :].expand(height, width, half)
    return torch.cat([rows, columns], dim=2).flatten(0, 1)
