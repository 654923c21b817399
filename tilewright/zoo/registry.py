"""Finds, configures and builds the models of the catalog."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import bert, detr, gpt2, mobilenet, repvgg, resnet, retinanet, setr, unet, vgg, vit
from .catalog import CATALOG, names
from .init import initialise

Inputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Entry:
    """A model of the zoo. `config` is a frozen dataclass that also holds the size of example inputs."""

    name: str
    model: Callable[[Any], nn.Module]
    config: Any
    small: Mapping[str, Any]  # fields of `config` to change for a model that runs in milliseconds
    inputs: Callable[[Any, int, torch.Generator], Inputs] = field(repr=False)

    @property
    def description(self) -> str:
        return CATALOG[self.name].description

    @property
    def paper(self) -> str:
        return CATALOG[self.name].paper

    def configure(self, small: bool, overrides: Mapping[str, Any]) -> Any:
        known = [f.name for f in fields(self.config)]
        if unknown := sorted(set(overrides) - set(known)):
            raise UnknownOptionError(self.name, unknown, known)
        changes = {**self.small, **overrides} if small else overrides
        return replace(self.config, **changes)


class UnknownModelError(LookupError):
    def __init__(self, name: str, known: list[str]) -> None:
        near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
        remedy = f"did you mean {' or '.join(near)}?" if near else f"the models are {', '.join(known)}"
        super().__init__(f"the zoo has no model {name!r}; {remedy}")


class UnknownOptionError(TypeError):
    def __init__(self, name: str, unknown: list[str], known: list[str]) -> None:
        super().__init__(
            f"{name} has no option {', '.join(unknown)}; its options are small, {', '.join(known)}"
        )


def entry(name: str) -> Entry:
    if name not in ENTRIES:
        raise UnknownModelError(name, names())
    return ENTRIES[name]


def build(
    name: str,
    *,
    seed: int = 0,
    small: bool = False,
    state_dict: Mapping[str, Tensor] | None = None,
    **overrides: Any,
) -> nn.Module:
    """The model in eval mode, with random weights (see `init.py`) or those of `state_dict`, which must be complete.

    `small` gives a reduced configuration of the same architecture; `overrides` change single fields of the
    configuration. Give the same ones to `example_inputs`.
    """
    found = entry(name)
    config = found.configure(small, overrides)
    # On the meta device PyTorch's own initialisation, several seconds for the large models, costs nothing.
    with torch.device("meta"):
        model = found.model(config)
    model.to_empty(device="cpu")
    if state_dict is None:
        initialise(model, seed)
    else:
        model.load_state_dict(state_dict)
    return model.eval()


def example_inputs(
    name: str, batch: int = 1, seed: int = 1, *, small: bool = False, **overrides: Any
) -> Inputs:
    """Random inputs of the model's canonical size, to be called as `model(*inputs)`."""
    found = entry(name)
    config = found.configure(small, overrides)
    return found.inputs(config, batch, torch.Generator().manual_seed(seed))


def _image(config: Any, batch: int, generator: torch.Generator) -> Inputs:
    """Blurred shapes and fine noise. Noise alone would look the same for every seed once a classifier has pooled it."""
    channels, size = getattr(config, "channels", 3), config.image_size
    shapes = torch.randn(batch, channels, 4, 4, generator=generator)
    noise = torch.randn(batch, channels, size, size, generator=generator)
    return (F.interpolate(shapes, size=(size, size), mode="bilinear") + 0.5 * noise,)


def _token_ids(config: Any, batch: int, generator: torch.Generator) -> Inputs:
    return (torch.randint(config.vocabulary, (batch, config.tokens), generator=generator),)


def _feature_sequence(config: detr.DetrConfig, batch: int, generator: torch.Generator) -> Inputs:
    height, width = config.feature_map
    features = torch.randn(batch, height * width, config.width, generator=generator)
    positions = detr.sine_positions(height, width, config.width).repeat(batch, 1, 1)
    return features, positions


_SMALL_RESNET = {"width": 16, "layers": (2, 2, 1, 1), "classes": 10, "image_size": 64}
_SMALL_REPVGG = {"blocks": (1, 2, 2), "widths": (16, 16, 32), "classes": 10, "image_size": 32}
_SMALL_BERT = {"layers": 2, "width": 64, "heads": 2, "vocabulary": 100, "positions": 32, "tokens": 16}
_SMALL_VIT = {"layers": 2, "width": 64, "heads": 2, "classes": 10}
_SMALL_DETR = {
    "encoder_layers": 2,
    "decoder_layers": 2,
    "width": 32,
    "heads": 2,
    "hidden": 64,
    "queries": 10,
    "feature_map": (5, 7),
}
_SMALL_SETR = {"layers": 2, "width": 64, "heads": 2, "decoder_width": 16, "classes": 10, "image_size": 64}

ENTRIES: dict[str, Entry] = {
    e.name: e
    for e in (
        Entry(
            name="resnet18",
            model=resnet.ResNet,
            config=resnet.RESNET18,
            small=_SMALL_RESNET,
            inputs=_image,
        ),
        Entry(
            name="resnet50",
            model=resnet.ResNet,
            config=resnet.RESNET50,
            small=_SMALL_RESNET,
            inputs=_image,
        ),
        Entry(
            name="vgg16",
            model=vgg.Vgg,
            config=vgg.VGG16,
            small={"stages": ((8,), (16,), (32, 32)), "hidden": 64, "classes": 10, "image_size": 32},
            inputs=_image,
        ),
        Entry(
            name="repvgg-a0",
            model=repvgg.RepVgg,
            config=repvgg.REPVGG_A0,
            small=_SMALL_REPVGG,
            inputs=_image,
        ),
        Entry(
            name="repvgg-a0-branches",
            model=repvgg.RepVgg,
            config=repvgg.REPVGG_A0_BRANCHES,
            small=_SMALL_REPVGG,
            inputs=_image,
        ),
        Entry(
            name="mobilenetv2",
            model=mobilenet.MobileNetV2,
            config=mobilenet.MOBILENET_V2,
            small={
                "stages": ((1, 8, 1, 1), (4, 16, 2, 2), (4, 24, 2, 2)),
                "stem": 16,
                "head": 64,
                "classes": 10,
                "image_size": 32,
            },
            inputs=_image,
        ),
        Entry(
            name="bert-tiny",
            model=bert.Bert,
            config=bert.BERT_TINY,
            small=_SMALL_BERT,
            inputs=_token_ids,
        ),
        Entry(
            name="bert-base",
            model=bert.Bert,
            config=bert.BERT_BASE,
            small=_SMALL_BERT,
            inputs=_token_ids,
        ),
        Entry(
            name="bert-large",
            model=bert.Bert,
            config=bert.BERT_LARGE,
            small=_SMALL_BERT,
            inputs=_token_ids,
        ),
        Entry(
            name="gpt2",
            model=gpt2.Gpt2,
            config=gpt2.GPT2,
            small=_SMALL_BERT,
            inputs=_token_ids,
        ),
        Entry(
            name="vit-b16",
            model=vit.Vit,
            config=vit.VIT_B16,
            small={**_SMALL_VIT, "image_size": 64},
            inputs=_image,
        ),
        Entry(
            name="vit-l16",
            model=vit.Vit,
            config=vit.VIT_L16,
            small={**_SMALL_VIT, "image_size": 64},
            inputs=_image,
        ),
        Entry(
            name="vit-h14",
            model=vit.Vit,
            config=vit.VIT_H14,
            small={**_SMALL_VIT, "image_size": 56},
            inputs=_image,
        ),
        *(
            Entry(
                name=f"detr-{config.encoder_layers}",
                model=detr.Detr,
                config=config,
                small=_SMALL_DETR,
                inputs=_feature_sequence,
            )
            for config in (detr.DETR_3, detr.DETR_6, detr.DETR_12)
        ),
        Entry(
            name="setr-naive-base",
            model=setr.Setr,
            config=setr.SETR_NAIVE_BASE,
            small=_SMALL_SETR,
            inputs=_image,
        ),
        Entry(
            name="setr-naive",
            model=setr.Setr,
            config=setr.SETR_NAIVE,
            small=_SMALL_SETR,
            inputs=_image,
        ),
        Entry(
            name="setr-pup",
            model=setr.Setr,
            config=setr.SETR_PUP,
            small=_SMALL_SETR,
            inputs=_image,
        ),
        Entry(
            name="unet",
            model=unet.Unet,
            config=unet.UNET,
            small={"width": 8, "depth": 2, "image_size": 32},
            inputs=_image,
        ),
        Entry(
            name="retinanet",
            model=retinanet.RetinaNet,
            config=retinanet.RETINANET,
            small={
                "backbone": replace(resnet.RESNET50, width=8, layers=(2, 1, 1, 1)),
                "width": 32,
                "head_layers": 2,
                "anchors": 3,
                "classes": 5,
                "image_size": 192,
            },
            inputs=_image,
        ),
    )
}
