"""PyTorch's operators for whole attention layers, written out: every kind of mask, norm order and activation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import transformer

from tests.frontend.checking import check, floats, functions, imported, ops_of
from tests.frontend.test_normalisation import randomised
from tilewright.frontend.torch.plain_modules import given_is_causal, plain_modules

BATCH, LENGTH, WIDTH, HEADS = 2, 5, 8, 2


def layer(
    norm_first: bool, activation: str, dtype: torch.dtype = torch.float32
) -> nn.TransformerEncoderLayer:
    made = nn.TransformerEncoderLayer(
        WIDTH, HEADS, 12, norm_first=norm_first, activation=activation, batch_first=True
    )
    return randomised(made).to(dtype)


def layer_call(layer: nn.TransformerEncoderLayer, x: Any, mask: Any = None, kind: int | None = None) -> Any:
    attention = layer.self_attn
    return torch._transformer_encoder_layer_fwd(
        *(x, attention.embed_dim, attention.num_heads, attention.in_proj_weight, attention.in_proj_bias),
        *(attention.out_proj.weight, attention.out_proj.bias),
        *(layer.activation_relu_or_gelu == 2, layer.norm_first, layer.norm1.eps),
        *(layer.norm1.weight, layer.norm1.bias, layer.norm2.weight, layer.norm2.bias),
        *(layer.linear1.weight, layer.linear1.bias, layer.linear2.weight, layer.linear2.bias),
        *(mask, kind),
    )


def attention_call(module: nn.MultiheadAttention, q: Any, k: Any, v: Any, *rest: Any) -> Any:
    weights = (module.in_proj_weight, module.in_proj_bias, module.out_proj.weight, module.out_proj.bias)
    return torch._native_multi_head_attention(q, k, v, WIDTH, HEADS, *weights, *rest)


def masks() -> dict[str, tuple[torch.Tensor | None, int | None]]:
    """By name: the mask and its type. In the one called `blind`, a query sees nothing."""
    padded = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    padded[1, 3:] = True
    square = floats(LENGTH, LENGTH) > 0.7
    square.fill_diagonal_(False)
    blind = square.clone()
    blind[2] = True
    everything = (square | padded[:, None, None, :]).expand(BATCH, HEADS, LENGTH, LENGTH).contiguous()
    return {
        "none": (None, None),
        "square": (square, 0),
        "padded": (padded, 1),
        "padded, float": (torch.zeros(BATCH, LENGTH).masked_fill(padded, float("-inf")), 1),
        "all": (everything, 2),
        "all, not only zero and infinity": (everything * -0.5, 2),
        "blind": (blind, 0),
    }


class Layers(nn.Module):
    """A layer with every mask."""

    def __init__(self, layer: nn.TransformerEncoderLayer) -> None:
        super().__init__()
        self.layer = layer
        self.masks = masks()
        self.eval()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: layer_call(self.layer, x, *mask) for name, mask in self.masks.items()}


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm_first", [False, True])
def test_encoder_layers(norm_first: bool, activation: str) -> None:
    result = check(Layers(layer(norm_first, activation)), floats(BATCH, LENGTH, WIDTH))
    assert ops_of(result).count("attention") == len(masks())


def test_an_encoder_layer_in_half_precision() -> None:
    check(Layers(layer(True, "gelu", torch.bfloat16)), floats(BATCH, LENGTH, WIDTH, dtype=torch.bfloat16))


def test_an_encoder_layer_of_nothing() -> None:
    module = layer(False, "relu")
    imported(lambda x: layer_call(module, x), floats(0, LENGTH, WIDTH))


def test_native_attention() -> None:
    module = randomised(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True))
    kinds = masks()
    x, y = floats(BATCH, LENGTH, WIDTH), floats(BATCH, LENGTH, WIDTH, seed=1)
    calls: dict[str, Any] = {}
    for name, (mask, kind) in kinds.items():
        calls[name] = lambda x, y, mask=mask, kind=kind: attention_call(
            module, x, x, x, mask, True, True, kind
        )
        calls[f"{name}, per head"] = lambda x, y, mask=mask, kind=kind: attention_call(
            module, x, x, x, mask, True, False, kind
        )
        calls[f"{name}, no weights"] = lambda x, y, mask=mask, kind=kind: attention_call(
            module, x, x, x, mask, False, True, kind
        )[0]
    calls["other keys"] = lambda x, y: attention_call(module, x, y, y)
    calls["other keys and values"] = lambda x, y: attention_call(module, x, y, x + y)
    check(functions(calls), x, y)


def test_parts_of_the_fast_path() -> None:
    kinds = masks()

    def parts(x: torch.Tensor, scores: torch.Tensor, bias: torch.Tensor) -> list[Any]:
        return [
            torch._transform_bias_rescale_qkv(x, bias, HEADS),
            torch._masked_softmax(scores, kinds["square"][0], 3, 0),
            torch._masked_softmax(scores, kinds["padded"][0], 3, 1),
            torch._masked_softmax(scores, kinds["all"][0], 3, 2),
            torch._addmm_activation(bias, x[0], x[0].mT @ x[1], use_gelu=True),
            torch._addmm_activation(bias, x[0], x[0].mT @ x[1], use_gelu=False),
        ]

    scores = floats(BATCH, HEADS, LENGTH, LENGTH)
    check(parts, floats(BATCH, LENGTH, 3 * WIDTH), scores, floats(3 * WIDTH))


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_a_mask_of_unknown_values_is_traced(kind: str) -> None:
    """The modules compare it with a causal mask, which no tracer can follow."""
    x, mask = floats(BATCH, LENGTH, WIDTH), masks()["square"][0]
    if kind == "encoder":
        encoder = nn.TransformerEncoder(layer(True, "relu"), 2, enable_nested_tensor=False).eval()
        result = check(encoder, x, mask=mask)
    else:
        decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, HEADS, 12, batch_first=True), 1)
        result = check(decoder.eval(), x, floats(BATCH, 3, WIDTH), tgt_mask=mask)
    assert "attention" in ops_of(result)


def test_exports_that_overlap_leave_the_modules_as_they_were() -> None:
    detect, fast = transformer._detect_is_causal_mask, torch.backends.mha.get_fastpath_enabled()
    plain_modules.__enter__()
    plain_modules.__enter__()
    plain_modules.__exit__()
    assert transformer._detect_is_causal_mask is given_is_causal
    assert not torch.backends.mha.get_fastpath_enabled()
    plain_modules.__exit__()
    assert transformer._detect_is_causal_mask is detect
    assert torch.backends.mha.get_fastpath_enabled() is fast
