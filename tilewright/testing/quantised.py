"""Models of 8-bit integers, made of float ones: what accelerators for such integers are tried with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tilewright import frontend
from tilewright.frontend import ImportedModel
from tilewright.rewrites.quantise import quantise
from tilewright.runtime import tree
from tilewright.runtime.arguments import as_arguments


def quantised(model: Any, samples: Sequence[Any]) -> ImportedModel:
    """A model with 8-bit convolutions and linear layers, for `tilewright.compile`.

    `samples`: example inputs, each as `compile` takes them. Scales are taken from the values that they lead to.
    """
    imported = frontend.import_model(frontend.opened(model), samples[0])
    arrays = [
        [_array(leaf) for leaf in tree.flatten_like(imported.input_tree, as_arguments(sample))]
        for sample in samples
    ]
    return replace(imported, graph=quantise(imported.graph, arrays))


def _array(leaf: Any) -> Any:
    return leaf.detach().numpy() if hasattr(leaf, "detach") else leaf
