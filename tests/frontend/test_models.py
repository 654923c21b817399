"""Whole models: the zoo, and models of Hugging Face."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree

from tests.frontend.checking import compare, imported, ops_of
from tests.zoo.small import SMALL_MODELS
from tilewright import zoo
from tilewright.graph.oracle import evaluate


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_zoo(name: str) -> None:
    model, inputs = zoo.build(name, small=True), zoo.example_inputs(name, small=True)
    result = imported(model, *inputs)
    outputs = evaluate(result.graph, [x.numpy() for x in inputs])
    with torch.no_grad():
        wide = [x.double() if x.is_floating_point() else x for x in inputs]
        expected = _pytree.tree_leaves(model.double()(*wide))
    for array, tensor in zip(outputs, expected, strict=True):
        wanted = tensor.numpy()
        assert np.linalg.norm(array - wanted) < 1e-5 * np.linalg.norm(wanted)
    if name.startswith(("bert", "gpt2", "vit", "detr", "setr")):
        assert {"attention", "layer_norm", "linear"} <= set(ops_of(result))


SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def text_model(kind: str, **config: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**config)).eval()
    ids = torch.randint(0, 100, (2, 7))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    return model, {"input_ids": ids, "attention_mask": mask}


TEXT_MODELS = {
    "Bert": SMALL,
    "Llama": {**SMALL, "num_key_value_heads": 2, "use_cache": False},
    "GPT2": {
        "n_embd": 32,
        "n_layer": 1,
        "n_head": 4,
        "vocab_size": 100,
        "n_positions": 64,
        "use_cache": False,
    },
    "Mistral": {**SMALL, "num_key_value_heads": 2, "use_cache": False, "sliding_window": 4},
}


@pytest.mark.parametrize("kind", TEXT_MODELS)
def test_hugging_face(kind: str) -> None:
    model, inputs = text_model(kind, **TEXT_MODELS[kind])
    compare(imported(model, **inputs), model, (), inputs)
