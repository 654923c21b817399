"""Dataclasses and Hugging Face's caches among the arguments and the results: known to the exporter without asking."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tilewright
from tests.frontend.checking import check, floats
from tilewright.errors import ExportError
from tilewright.runtime import tree


@dataclasses.dataclass
class Pair:
    a: torch.Tensor
    b: list[torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Result:
    y: torch.Tensor
    count: int
    maybe: torch.Tensor | None = None


class Nested(nn.Module):
    def forward(self, pair: Pair) -> dict[str, Any]:
        total = pair.a + pair.b[0]
        return {"one": Result(total, 3), "many": [Result(total * 2, 1, pair.a - 1)]}


def test_dataclasses() -> None:
    model, pair = Nested().eval(), Pair(floats(3), [floats(3, seed=1)])
    check(model, pair)
    fast = tilewright.compile(model, (pair,))
    result = fast(pair)
    assert isinstance(result["one"], Result) and result["one"].maybe is None and result["one"].count == 3
    assert torch.equal(result["many"][0].maybe, pair.a - 1)


def tiny_gpt2() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config).eval()


def test_a_decoder_returns_its_cache(tmp_path: Path) -> None:
    """Without a word about `use_cache`; and the cache goes into the next step."""
    from transformers import DynamicCache

    model, ids, token = tiny_gpt2(), torch.tensor([[1, 2, 3]]), torch.tensor([[4]])
    with torch.no_grad():
        expected = model(ids)
    fast = tilewright.compile(model, (ids,))
    got = fast(ids)
    torch.testing.assert_close(got.logits, expected.logits, rtol=1e-4, atol=1e-5)
    cache = got.past_key_values
    assert type(cache) is DynamicCache and cache.get_seq_length() == 3
    for ours, theirs in zip(cache.layers, expected.past_key_values.layers, strict=True):
        assert type(ours) is type(theirs) and set(vars(ours)) == set(vars(theirs))
        torch.testing.assert_close(ours.keys, theirs.keys, rtol=1e-4, atol=1e-5)

    step = tilewright.compile(model, {"input_ids": token, "past_key_values": cache})
    after = step(input_ids=token, past_key_values=cache)
    with torch.no_grad():
        wanted = model(token, past_key_values=expected.past_key_values)
    torch.testing.assert_close(after.logits, wanted.logits, rtol=1e-4, atol=1e-5)
    assert after.past_key_values.get_seq_length() == 4
    assert cache.get_seq_length() == 3  # a compiled model writes to no argument

    fast.save(tmp_path / "gpt2.tw")
    assert type(tilewright.load(tmp_path / "gpt2.tw")(ids).past_key_values) is DynamicCache


def test_a_cache_that_is_not_known_names_the_way_out() -> None:
    class OddCache:
        pass

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x + 1, OddCache()

    with pytest.raises(ExportError, match=r"(?s)OddCache.*use_cache=False"):
        tilewright.compile(Model().eval(), (floats(2),))


def test_records_of_other_classes() -> None:
    class Point:
        def __init__(self, x: Any, y: Any) -> None:
            self.x, self.y = x, y

    tree.register_record(Point, lambda point: {"x": point.x, "y": point.y}, Point)
    leaves, spec = tree.flatten([Point("a", 1)])
    assert leaves == [] and spec["items"][0]["kind"] == "record"
    leaves, spec = tree.flatten(Point(floats(1), 1))
    assert tree.flatten_like(spec, Point(leaves[0], 1)) == leaves
    assert type(tree.unflatten(spec, leaves)) is Point
