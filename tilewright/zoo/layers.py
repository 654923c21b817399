"""Layers that the transformers share: attention, the feed-forward network and the pre-norm block."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch.nn.functional as F
from torch import Tensor, nn

# Queries and keys of deviation sqrt(2) give attention scores of deviation 2: softmax then picks a few tokens, as in a
# trained model. With scores of deviation 1 or less it averages over all of them, and hides a wrong score.
SHARP = math.sqrt(2)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[batch, tokens, heads * d] -> [batch, heads, tokens, d]"""
    batch, tokens, width = x.shape
    return x.view(batch, tokens, heads, width // heads).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """[batch, heads, tokens, d] -> [batch, tokens, heads * d]"""
    return x.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """Multi-head attention with a projection each for queries, keys and values (BERT, DETR)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        q = split_heads(self.query(query), self.heads)
        k = split_heads(self.key(key), self.heads)
        v = split_heads(self.value(value), self.heads)
        return self.out(merge_heads(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)))

    def init_gains(self) -> Mapping[nn.Module, float]:
        return {self.query: SHARP, self.key: SHARP, self.value: SHARP}


class SelfAttention(nn.Module):
    """Multi-head self-attention with one fused projection for queries, keys and values (GPT-2, ViT)."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(part, self.heads) for part in self.qkv(x).chunk(3, dim=-1))
        return self.out(merge_heads(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)))

    def init_gains(self) -> Mapping[nn.Module, float]:
        return {self.qkv: SHARP}


class FeedForward(nn.Module):
    def __init__(self, width: int, hidden: int, activation: nn.Module) -> None:
        super().__init__()
        self.expand = nn.Linear(width, hidden)
        self.activation = activation
        self.contract = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.contract(self.activation(self.expand(x)))


class PreNormBlock(nn.Module):
    """Norm, attention, add; norm, feed-forward, add (GPT-2, ViT)."""

    def __init__(
        self, width: int, heads: int, hidden: int, activation: nn.Module, eps: float, causal: bool = False
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps)
        self.attention = SelfAttention(width, heads, causal)
        self.norm2 = nn.LayerNorm(width, eps)
        self.feed_forward = FeedForward(width, hidden, activation)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))

    def residual_ends(self) -> Iterable[nn.Module]:
        return self.attention.out, self.feed_forward.contract
