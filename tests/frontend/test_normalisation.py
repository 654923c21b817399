"""Normalisation, softmax and attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.frontend.checking import check, floats, functions, ops_of


def randomised(model: nn.Module) -> nn.Module:
    """Weights and statistics that are neither 0 nor 1, all variances positive."""
    generator = torch.Generator().manual_seed(0)
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point():
            tensor.data = torch.rand(tensor.shape, generator=generator).to(tensor.dtype) + 0.5
    return model.eval()


NORMS = {
    "batch": lambda: nn.BatchNorm2d(6),
    "batch_plain": lambda: nn.BatchNorm2d(6, affine=False),
    "batch_no_statistics": lambda: nn.BatchNorm2d(6, track_running_stats=False),
    "layer": lambda: nn.LayerNorm((4, 5)),
    "layer_last": lambda: nn.LayerNorm(5, eps=1e-3),
    "layer_plain": lambda: nn.LayerNorm(5, elementwise_affine=False),
    "layer_no_bias": lambda: nn.LayerNorm(5, bias=False),
    "group": lambda: nn.GroupNorm(3, 6),
    "group_plain": lambda: nn.GroupNorm(2, 6, affine=False),
    "instance": lambda: nn.InstanceNorm2d(6),
    "instance_affine": lambda: nn.InstanceNorm2d(6, affine=True),
    "instance_statistics": lambda: nn.InstanceNorm2d(6, track_running_stats=True),
    "rms": lambda: nn.RMSNorm(5),
    "rms_eps": lambda: nn.RMSNorm((4, 5), eps=1e-3, elementwise_affine=False),
    "local_response": lambda: nn.LocalResponseNorm(2),
}


class AllNorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleDict({name: make() for name, make in NORMS.items()})
        randomised(self)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: norm(x) for name, norm in self.norms.items()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_norms(dtype: torch.dtype) -> None:
    check(AllNorms().to(dtype), floats(2, 6, 4, 5, dtype=dtype))


def test_norms_of_other_ranks() -> None:
    check(randomised(nn.BatchNorm1d(6)), floats(3, 6))
    check(randomised(nn.BatchNorm3d(2)), floats(1, 2, 3, 2, 2))


def test_norm_in_half_precision_with_float_weights() -> None:
    model = randomised(nn.Sequential(nn.BatchNorm2d(3)))
    check(model, floats(2, 3, 4, 4, dtype=torch.bfloat16))


SOFTMAX: dict[str, Any] = {
    "softmax": lambda x: [x.softmax(-1), x.softmax(1), F.softmin(x, 0)],
    "log_softmax": lambda x: F.log_softmax(x, 1),
    "dtype": lambda x: [F.softmax(x, -1, dtype=torch.float64), F.log_softmax(x, -1, dtype=torch.float64)],
    "losses": lambda x: F.kl_div(x.log_softmax(-1), x.softmax(0), reduction="batchmean"),
}


def test_softmax() -> None:
    check(functions(SOFTMAX), floats(3, 4, 5))
    check(lambda x: F.softmax(x, -1, dtype=torch.float32), floats(3, 4, dtype=torch.float16))


def heads(*shape: int, seed: int) -> torch.Tensor:
    return floats(*shape, seed=seed)


ATTENTION: dict[str, Any] = {
    "plain": lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v),
    "scaled": lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, scale=0.2),
    "bool_mask": lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m > -1),
    "float_mask": lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
    "row_mask": lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=(m > 0)[:, :, :1]),
    "causal": lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "one_batch_of_keys": lambda q, k, v, m: F.scaled_dot_product_attention(q, k[:1], v[:1]),
    "no_heads": lambda q, k, v, m: F.scaled_dot_product_attention(q[0], k[0], v[0]),
    "grouped": lambda q, k, v, m: F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True),
}


def test_attention() -> None:
    inputs = (
        heads(2, 4, 5, 8, seed=0),
        heads(2, 4, 7, 8, seed=1),
        heads(2, 4, 7, 6, seed=2),
        heads(2, 1, 5, 7, seed=3),
    )
    result = check(functions(ATTENTION), *inputs)
    assert ops_of(result).count("attention") == len(ATTENTION)


def test_attention_modules() -> None:
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2, enable_nested_tensor=False
    ).eval()
    assert "attention" in ops_of(check(encoder, floats(2, 5, 16)))
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, 32, activation="gelu"), 1).eval()
    check(decoder, floats(5, 2, 16), floats(7, 2, 16, seed=1))
    check(nn.MultiheadAttention(16, 4).eval(), *(floats(5, 2, 16, seed=i) for i in range(3)))


def test_recurrent_modules_by_decomposition() -> None:
    torch.manual_seed(0)
    check(nn.LSTM(4, 5, 2, batch_first=True, bidirectional=True).eval(), floats(2, 3, 4))
    check(nn.GRU(4, 5).eval(), floats(3, 2, 4))
