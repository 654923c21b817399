"""GPT-2 (Radford et al. 2019): token ids in, last hidden state out, or next-token logits with `lm_head`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import PreNormBlock


@dataclass(frozen=True)
class Gpt2Config:
    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50257
    positions: int = 1024
    lm_head: bool = False
    tokens: int = 128  # the length of example inputs


GPT2 = Gpt2Config()

EPS = 1e-5


class Gpt2(nn.Module):
    def __init__(self, config: Gpt2Config) -> None:
        super().__init__()
        self.lm_head = config.lm_head
        self.word = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.positions, config.width)
        self.blocks = nn.ModuleList(
            PreNormBlock(
                config.width, config.heads, 4 * config.width, nn.GELU(approximate="tanh"), EPS, causal=True
            )
            for _ in range(config.layers)
        )
        self.norm = nn.LayerNorm(config.width, EPS)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.word(ids) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        # The head is the embedding table again; used directly, it cannot come untied.
        return F.linear(x, self.word.weight) if self.lm_head else x
