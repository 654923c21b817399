"""PyTorch's own attention modules under torch.compile: in eval mode they are one operator each, and compile whole."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.frontend.checking import floats
from tilewright.integrations import torch_compile
from tilewright.integrations.torch_compile import RegionOutcome, TilewrightWarning, register

BATCH, LENGTH, WIDTH = 2, 6, 16


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    register()
    torch._dynamo.reset()
    torch_compile._warned.clear()
    torch_compile._told.clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*nested", category=UserWarning)
        warnings.simplefilter("error", TilewrightWarning)
        yield
    torch._dynamo.reset()


def padding() -> torch.Tensor:
    mask = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    mask[1, 4:] = True
    return mask


def square() -> torch.Tensor:
    mask = floats(LENGTH, LENGTH) > 0.5
    return mask.fill_diagonal_(False)


def check(model: nn.Module, *arguments: Any, visible: Any = ..., **keywords: Any) -> None:
    """One graph, one region, nothing left, and PyTorch's values where `visible`."""
    outcomes: list[RegionOutcome] = []
    fast = torch.compile(model, backend="tilewright", options={"observe": outcomes.append})
    with torch.no_grad():
        got, expected = fast(*arguments, **keywords), model(*arguments, **keywords)
    if isinstance(expected, tuple):
        got, expected = got[0], expected[0]
    torch.testing.assert_close(got[visible], expected[visible], rtol=1e-4, atol=1e-5)
    assert [(outcome.kind, outcome.regions, dict(outcome.left)) for outcome in outcomes] == [
        ("compiled", 1, {})
    ]


def encoder(**options: Any) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 24, batch_first=options.pop("batch_first", True), **options)
    return nn.TransformerEncoder(layer, 1).eval()


@pytest.mark.parametrize(
    "masks",
    [
        {},
        {"src_key_padding_mask": padding()},
        {"mask": square()},
        {"mask": square(), "src_key_padding_mask": padding()},
        {"mask": nn.Transformer.generate_square_subsequent_mask(LENGTH), "is_causal": True},
    ],
    ids=["none", "padding", "square", "both", "causal"],
)
def test_encoder_with_masks(masks: dict[str, Any]) -> None:
    # PyTorch's own eval mode leaves zeros at padded positions where it can (nested tensors): those are not compared.
    visible = ~padding() if "src_key_padding_mask" in masks else ...
    check(encoder(), floats(BATCH, LENGTH, WIDTH), visible=visible, **masks)


def test_a_query_that_sees_nothing_is_nan() -> None:
    """As PyTorch's operator has it, and in no other row of its sequence."""
    mask = square()
    mask[2] = True
    model, x = encoder(), floats(BATCH, LENGTH, WIDTH)
    with torch.no_grad():
        assert model(x, mask=mask).isnan().any(-1).sum() == BATCH
        fast = torch.compile(model, backend="tilewright")
        torch.testing.assert_close(
            fast(x, mask=mask), model(x, mask=mask), rtol=1e-4, atol=1e-5, equal_nan=True
        )


@pytest.mark.parametrize(
    "options",
    [
        {"norm_first": True, "activation": "gelu"},
        {"batch_first": False},
        {"activation": nn.functional.silu},
        {"bias": False},
    ],
    ids=["norm first, gelu", "batch second", "silu", "no bias"],
)
def test_encoders(options: dict[str, Any]) -> None:
    check(encoder(**options), floats(BATCH, LENGTH, WIDTH))


def test_a_decoder_with_a_mask() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(WIDTH, 4, 24, batch_first=True)
    model = nn.TransformerDecoder(layer, 1).eval()
    check(model, floats(BATCH, LENGTH, WIDTH), floats(BATCH, 3, WIDTH), tgt_mask=square())


@pytest.mark.parametrize("need_weights", [True, False])
def test_multi_head_attention(need_weights: bool) -> None:
    torch.manual_seed(0)
    model, x = nn.MultiheadAttention(WIDTH, 4, batch_first=True).eval(), floats(BATCH, LENGTH, WIDTH)
    check(model, x, x, x, need_weights=need_weights, key_padding_mask=padding())
