"""The models are the published ones: parameter counts, agreement with independent implementations, exportability."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tests.zoo.small import SMALL_MODELS
from tilewright import zoo
from tilewright.zoo import bert, detr, init, layers, repvgg

PARAMETERS = {
    # torchvision's models of these names
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "vgg16": 138_357_544,
    "mobilenetv2": 3_504_872,
    "vit-b16": 86_567_656,
    "vit-l16": 304_326_632,
    "vit-h14": 632_045_800,
    "retinanet": 34_014_999 + 53_120,  # theirs counts no batch norm of the backbone: it is frozen
    # the paper: 8.31 and 9.11 million
    "repvgg-a0": 8_309_384,
    "repvgg-a0-branches": 9_108_968,
    # the published checkpoints, less their poolers
    "bert-tiny": 4_385_920 - (128 * 128 + 128),
    "bert-base": 109_482_240 - (768 * 768 + 768),
    "bert-large": 335_141_888 - (1024 * 1024 + 1024),
    "gpt2": 124_439_808,
    # the published DETR less backbone, input projection, class head and box head; 1315072 per encoder layer
    "detr-3": 41_524_768 - 23_454_912 - 524_544 - 23_644 - 132_612 - 3 * 1_315_072,
    "detr-6": 41_524_768 - 23_454_912 - 524_544 - 23_644 - 132_612,
    "detr-12": 41_524_768 - 23_454_912 - 524_544 - 23_644 - 132_612 + 6 * 1_315_072,
    # ViT without class token and head, 32 * 32 positions, decoder; the paper, with other positions and classes, has
    # 87.69, 305.67 and 310.57 million
    "setr-naive-base": 86_668_694,
    "setr-naive": 304_448_662,
    "setr-pup": 308_316_822,
    # the usual PyTorch U-Net (milesial's, transposed convolutions) with two classes
    "unet": 31_037_698,
}


@pytest.mark.parametrize("name", zoo.names())
def test_parameter_count(name: str) -> None:
    entry = zoo.entry(name)
    with torch.device("meta"):
        model = entry.model(entry.config)
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_exports(name: str) -> None:
    model = zoo.build(name, small=True)
    inputs = zoo.example_inputs(name, small=True)
    exported = torch.export.export(model, inputs).module()
    with torch.no_grad():
        for a, b in zip(tree_leaves(exported(*inputs)), tree_leaves(model(*inputs)), strict=True):
            torch.testing.assert_close(a, b)


def test_repvgg_reparameterized_equals_branches() -> None:
    branches = zoo.build("repvgg-a0-branches", small=True)
    (image,) = zoo.example_inputs("repvgg-a0-branches", small=True, batch=2)
    deployed = branches.reparameterize()
    assert not any(isinstance(module, nn.BatchNorm2d) for module in deployed.modules())
    with torch.no_grad():
        torch.testing.assert_close(deployed(image), branches(image), rtol=1e-4, atol=1e-5)

    # It is the registry's deployed model: the state dict fits.
    zoo.build("repvgg-a0", small=True, state_dict=deployed.state_dict())
    assert isinstance(deployed, repvgg.RepVgg) and deployed.reparameterize() is deployed


def test_gpt2_is_causal() -> None:
    model = zoo.build("gpt2", small=True)
    (ids,) = zoo.example_inputs("gpt2", small=True)
    changed = ids.clone()
    changed[0, 10] = (ids[0, 10] + 1) % 100
    with torch.no_grad():
        before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert ((before[:, 10:] - after[:, 10:]).abs().amax(dim=2) > 1e-3).all()


def test_gpt2_language_model_head() -> None:
    (ids,) = zoo.example_inputs("gpt2", small=True, batch=2)
    with torch.no_grad():
        assert zoo.build("gpt2", small=True, lm_head=True)(ids).shape == (2, 16, 100)


def test_bert_ignores_masked_tokens() -> None:
    model = zoo.build("bert-base", small=True)
    (ids,) = zoo.example_inputs("bert-base", small=True, batch=2)
    mask = torch.ones_like(ids)
    mask[:, 12:] = 0
    with torch.no_grad():
        torch.testing.assert_close(model(ids, mask)[:, :12], model(ids[:, :12]))


def test_retinanet_levels() -> None:
    (image,) = zoo.example_inputs("retinanet", small=True, batch=2)
    with torch.no_grad():
        logits, boxes = zoo.build("retinanet", small=True)(image)
    positions = [24**2, 12**2, 6**2, 3**2, 2**2]
    assert [tuple(level.shape) for level in logits] == [(2, 3 * count, 5) for count in positions]
    assert [tuple(level.shape) for level in boxes] == [(2, 3 * count, 4) for count in positions]


def copy_attention(theirs: nn.MultiheadAttention, ours: layers.Attention | layers.SelfAttention) -> None:
    projections = [ours.qkv] if isinstance(ours, layers.SelfAttention) else [ours.query, ours.key, ours.value]
    theirs.in_proj_weight.copy_(torch.cat([projection.weight for projection in projections]))
    theirs.in_proj_bias.copy_(torch.cat([projection.bias for projection in projections]))
    theirs.out_proj.load_state_dict(ours.out.state_dict())


def copy_feed_forward(theirs: nn.Module, ours: layers.FeedForward) -> None:
    theirs.linear1.load_state_dict(ours.expand.state_dict())
    theirs.linear2.load_state_dict(ours.contract.state_dict())


@pytest.mark.parametrize("family", ["bert", "detr", "vit", "gpt2"])
@torch.no_grad()
def test_encoder_layers_agree_with_pytorch(family: str) -> None:
    x = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0))
    causal: Tensor | None = None
    if family == "bert":
        ours = bert.EncoderLayer(bert.BertConfig(layers=1, width=32, heads=4))
        theirs = nn.TransformerEncoderLayer(
            32, 4, 128, activation="gelu", layer_norm_eps=1e-12, batch_first=True
        )
        init.initialise(ours, seed=0)
        output = ours(x, None)
    elif family == "detr":
        ours = detr.EncoderLayer(detr.DetrConfig(encoder_layers=1, width=32, heads=4, hidden=128))
        theirs = nn.TransformerEncoderLayer(32, 4, 128, activation="relu", batch_first=True)
        init.initialise(ours, seed=0)
        output = ours(x, torch.zeros_like(x))
    else:
        # Not the module nn.GELU(approximate="tanh"): PyTorch's encoder layer would silently use the exact GELU for it.
        approximate, is_causal = ("tanh", True) if family == "gpt2" else ("none", False)
        activation = functools.partial(F.gelu, approximate=approximate)
        ours = layers.PreNormBlock(32, 4, 128, nn.GELU(approximate), eps=1e-5, causal=is_causal)
        theirs = nn.TransformerEncoderLayer(
            32, 4, 128, activation=activation, batch_first=True, norm_first=True
        )
        init.initialise(ours, seed=0)
        output = ours(x)
        causal = nn.Transformer.generate_square_subsequent_mask(9) if is_causal else None

    copy_attention(theirs.self_attn, ours.attention)
    copy_feed_forward(theirs, ours.feed_forward)
    theirs.norm1.load_state_dict(ours.norm1.state_dict())
    theirs.norm2.load_state_dict(ours.norm2.state_dict())
    torch.testing.assert_close(output, theirs.eval()(x, src_mask=causal), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_detr_decoder_layer_agrees_with_pytorch() -> None:
    generator = torch.Generator().manual_seed(0)
    x, memory = (torch.randn(2, tokens, 32, generator=generator) for tokens in (5, 9))
    ours = detr.DecoderLayer(detr.DetrConfig(encoder_layers=1, width=32, heads=4, hidden=128))
    init.initialise(ours, seed=0)
    theirs = nn.TransformerDecoderLayer(32, 4, 128, activation="relu", batch_first=True).eval()
    copy_attention(theirs.self_attn, ours.self_attention)
    copy_attention(theirs.multihead_attn, ours.cross_attention)
    copy_feed_forward(theirs, ours.feed_forward)
    for name in ("norm1", "norm2", "norm3"):
        getattr(theirs, name).load_state_dict(getattr(ours, name).state_dict())
    output = ours(x, torch.zeros_like(x), memory, torch.zeros_like(memory))
    torch.testing.assert_close(output, theirs(x, memory), rtol=1e-4, atol=1e-5)
