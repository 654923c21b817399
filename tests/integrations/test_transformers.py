"""Models of Hugging Face's transformers, small and with random weights, through both ways in: PyTorch's outputs within
the stated error bounds. The same models at their base sizes are in `benchmarks/hf_models.py`."""

from __future__ import annotations

import warnings

import pytest
import torch

import tilewright
from benchmarks.hf_models import MODELS, error, in_float64, tensors
from tilewright.errors import TilewrightWarning
from tilewright.integrations.torch_compile import RegionOutcome, register

BOUND = 1e-4
SLOW = ("mobilenetv2", "segformer", "detr", "clip")  # many different kernels: -m slow


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in MODELS]
)
def test_model(name: str) -> None:
    model, call = MODELS[name].build(True)
    register()
    torch._dynamo.reset()
    outcomes: list[RegionOutcome] = []
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
    # One graph, all of it compiled, but for results that are views of each other.
    assert [outcome.kind for outcome in outcomes] == ["split" if name == "clip" else "compiled"]
    assert all(why.startswith("a view of memory") for o in outcomes for why in o.left.values())


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_compiles_nothing_at_the_second_call(cache: str) -> None:
    """`generate` as users call it. With a dynamic cache every step has a length of its own: most run in PyTorch. With a
    static one there are two graphs, for the prompt and for a step, and both are compiled."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    tokens = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32, n_positions=32, **tokens)
    model, ids = GPT2LMHeadModel(config).eval(), torch.tensor([[5, 17, 4]])
    outcomes: list[RegionOutcome] = []

    def generated() -> torch.Tensor:
        with torch.no_grad():
            return model.generate(ids, max_new_tokens=8, do_sample=False, cache_implementation=cache)

    expected = generated()
    register()
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend="tilewright", options={"observe": outcomes.append})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", TilewrightWarning)
        assert torch.equal(generated(), expected)
    told = [str(each.message) for each in caught if isinstance(each.message, TilewrightWarning)]
    compilations = len(outcomes)
    assert {outcome.kind for outcome in outcomes} == {"compiled"}
    if cache == "static":
        assert compilations == 2 and not told
    else:
        assert compilations <= 2 + 4 and len(told) == 1 and 'cache_implementation="static"' in told[0]
    for _ in range(2):
        assert torch.equal(generated(), expected)
        assert len(outcomes) == compilations
