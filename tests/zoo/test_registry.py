"""Finding, configuring and building models by name."""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_leaves

from tests.zoo.small import SMALL_MODELS
from tilewright import zoo


def test_names_are_unique_and_described() -> None:
    assert {"resnet50", "bert-base", "vit-b16", "detr-6", "setr-pup", "repvgg-a0", "mobilenetv2"} <= set(
        zoo.names()
    )
    for name in zoo.names():
        entry = zoo.entry(name)
        assert entry.name == name
        assert entry.description and entry.paper


def test_unknown_name_suggests_near_ones() -> None:
    with pytest.raises(zoo.UnknownModelError, match=r"did you mean .*resnet50"):
        zoo.build("ResNet-50")


def test_unknown_name_without_near_ones_lists_all() -> None:
    with pytest.raises(zoo.UnknownModelError, match=r"resnet18, .*, retinanet"):
        zoo.example_inputs("?")


def test_unknown_option_lists_the_known() -> None:
    with pytest.raises(zoo.UnknownOptionError, match=r"no option depth; .*width.*heads"):
        zoo.build("gpt2", depth=3)


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_same_seed_same_weights_and_inputs(name: str) -> None:
    first, again, other = (zoo.build(name, small=True, seed=seed).state_dict() for seed in (7, 7, 8))
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not all(torch.equal(first[key], other[key]) for key in first)

    # An unset corner of a large tensor would most likely hold something absurd.
    assert all(tensor.abs().max() < 10 for tensor in first.values())

    first_inputs, again_inputs = (zoo.example_inputs(name, small=True, seed=7) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first_inputs, again_inputs, strict=True))


def test_building_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    zoo.build("resnet18", small=True)
    zoo.example_inputs("resnet18", small=True)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_state_dict_round_trip(name: str) -> None:
    inputs = zoo.example_inputs(name, small=True)
    original = zoo.build(name, small=True, seed=3)
    copy = zoo.build(name, small=True, state_dict=original.state_dict())
    assert not original.training and not copy.training
    with torch.no_grad():
        for a, b in zip(tree_leaves(original(*inputs)), tree_leaves(copy(*inputs)), strict=True):
            assert torch.equal(a, b)


def test_incomplete_state_dict_is_refused() -> None:
    with pytest.raises(RuntimeError, match="Missing key"):
        zoo.build("unet", small=True, state_dict={})


def test_overrides_reach_model_and_inputs() -> None:
    (image,) = zoo.example_inputs("setr-naive", small=True, image_size=96, batch=2)
    model = zoo.build("setr-naive", small=True, image_size=96, classes=4)
    with torch.no_grad():
        assert model(image).shape == (2, 4, 96, 96)


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("resnet50", [(2, 3, 224, 224)]),
        ("bert-large", [(2, 128)]),
        ("gpt2", [(2, 128)]),
        ("detr-12", [(2, 1050, 256), (2, 1050, 256)]),
        ("setr-pup", [(2, 3, 512, 512)]),
        ("unet", [(2, 3, 256, 256)]),
        ("retinanet", [(2, 3, 512, 512)]),
    ],
)
def test_canonical_input_sizes(name: str, shapes: list[tuple[int, ...]]) -> None:
    assert [tuple(tensor.shape) for tensor in zoo.example_inputs(name, batch=2)] == shapes


@pytest.mark.parametrize("name", zoo.names())
def test_the_catalog_says_what_the_models_are(name: str) -> None:
    entry, card = zoo.entry(name), zoo.CATALOG[name]
    with torch.device("meta"):
        model = entry.model(entry.config)
    assert card.parameters == sum(parameter.numel() for parameter in model.parameters())
    short = {torch.float32: "f32", torch.int64: "i64"}
    inputs = zoo.example_inputs(name)
    assert card.inputs == tuple(f"{short[x.dtype]}[{','.join(map(str, x.shape))}]" for x in inputs)


def test_the_catalog_and_the_registry_have_the_same_models() -> None:
    from tilewright.zoo import registry

    assert list(registry.ENTRIES) == list(zoo.CATALOG) == zoo.names()


def test_small_models_that_are_left_out_are_one_of_the_others() -> None:
    left_out = [name for name in zoo.names() if name not in SMALL_MODELS]
    assert left_out == ["bert-base", "bert-large", "vit-l16", "detr-6", "detr-12", "setr-naive"]
    for one, other in (("bert-tiny", "bert-large"), ("setr-naive-base", "setr-naive")):
        weights, same = (zoo.build(name, small=True, seed=5).state_dict() for name in (one, other))
        assert weights.keys() == same.keys() and all(torch.equal(weights[key], same[key]) for key in weights)
        inputs, again = (zoo.example_inputs(name, small=True, seed=6) for name in (one, other))
        assert all(torch.equal(a, b) for a, b in zip(inputs, again, strict=True))
