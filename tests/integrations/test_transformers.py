"""Models of Hugging Face's transformers, small and with random weights, through both ways in: PyTorch's outputs within
the stated error bounds. The same models at their base sizes are in `benchmarks/hf_models.py`."""

from __future__ import annotations

import pytest
import torch

import tilewright
from benchmarks.hf_models import MODELS, error, in_float64, tensors
from tilewright.integrations.torch_compile import Outcome, register

BOUND = 1e-4
SLOW = ("mobilenetv2", "segformer", "detr", "clip")  # many different kernels: -m slow


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in MODELS]
)
def test_model(name: str) -> None:
    model, call = MODELS[name].build(True)
    register()
    torch._dynamo.reset()
    outcomes: list[Outcome] = []
    with torch.no_grad():
        truth = in_float64(model, call)
        through = torch.compile(model, backend="tilewright", options={"observe": outcomes.append})
        results = {
            "torch.compile": tensors(through(**call)),
            "tilewright.compile": tensors(tilewright.compile(model, call)(**call)),
        }
    for way, got in results.items():
        for ours, exact in zip(got, truth, strict=True):
            assert ours.shape == exact.shape, way
            assert error(ours, exact) <= BOUND, way
    # One graph, all of it ours, but for results that are views of each other.
    assert [outcome.kind for outcome in outcomes] == ["split" if name == "clip" else "compiled"]
    assert all(why.startswith("a view of memory") for o in outcomes for why in o.left.values())


def test_generation_with_a_cache_that_grows() -> None:
    """GPT-2 as users run it: the cache is the framework's object, and one token longer at each step."""
    from transformers import DynamicCache

    model, _ = MODELS["gpt2"].build(True)
    register()
    torch._dynamo.reset()
    outcomes: list[Outcome] = []
    fast = torch.compile(model, backend="tilewright", options={"observe": outcomes.append})
    ids = torch.tensor([[5, 17, 42]])
    ours, theirs = DynamicCache(), DynamicCache()
    with torch.no_grad():
        token, expected = ids, ids
        for _ in range(12):
            got = fast(input_ids=token, past_key_values=ours, use_cache=True).logits[:, -1:]
            want = model(input_ids=expected, past_key_values=theirs, use_cache=True).logits[:, -1:]
            assert error(got, want) <= BOUND
            token, expected = got.argmax(-1), want.argmax(-1)
            assert torch.equal(token, expected)
    assert outcomes and len(outcomes) <= 8
    assert not [outcome for outcome in outcomes if outcome.kind == "failed"]
