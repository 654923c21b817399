"""BERT (Devlin et al. 2019): the encoder, token ids in, last hidden state out; no pooler."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .layers import Attention, FeedForward


@dataclass(frozen=True)
class BertConfig:
    layers: int
    width: int
    heads: int
    vocabulary: int = 30522
    positions: int = 512
    tokens: int = 128  # the length of example inputs

    @property
    def hidden(self) -> int:
        return 4 * self.width


BERT_TINY = BertConfig(layers=2, width=128, heads=2)
BERT_BASE = BertConfig(layers=12, width=768, heads=12)
BERT_LARGE = BertConfig(layers=24, width=1024, heads=16)

EPS = 1e-12


class Embeddings(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.word = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.positions, config.width)
        self.token_type = nn.Embedding(2, config.width)
        self.norm = nn.LayerNorm(config.width, EPS)

    def forward(self, ids: Tensor, token_types: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        return self.norm(self.word(ids) + self.token_type(token_types) + self.position(positions))


class EncoderLayer(nn.Module):
    """Attention, add, norm; feed-forward, add, norm."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention = Attention(config.width, config.heads)
        self.norm1 = nn.LayerNorm(config.width, EPS)
        self.feed_forward = FeedForward(config.width, config.hidden, nn.GELU())
        self.norm2 = nn.LayerNorm(config.width, EPS)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = self.norm1(x + self.attention(x, x, x, mask))
        return self.norm2(x + self.feed_forward(x))

    def residual_ends(self) -> Iterable[nn.Module]:
        return self.attention.out, self.feed_forward.contract


class Bert(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.layers))

    def forward(
        self, ids: Tensor, attention_mask: Tensor | None = None, token_types: Tensor | None = None
    ) -> Tensor:
        """`ids` is [batch, tokens]; so is `attention_mask`, which is 0 or False at padding."""
        if token_types is None:
            token_types = torch.zeros_like(ids)
        mask = None if attention_mask is None else attention_mask[:, None, None, :].bool()
        x = self.embeddings(ids, token_types)
        for layer in self.layers:
            x = layer(x, mask)
        return x
