"""Register containers with the exporter: plain dataclasses, Hugging Face's caches.

torch.export knows tuples, lists, dicts, namedtuples and Hugging Face's outputs. Dataclasses must be registered, and
so must the key-value cache that a Hugging Face decoder returns by default. Dataclasses among the arguments are found
before the export, those among the results while the model is traced.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from tilewright.runtime import tree

_CACHES = ("DynamicCache", "EncoderDecoderCache")
_CACHE_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer")


@contextmanager
def known_containers(model: nn.Module, arguments: Any) -> Iterator[None]:
    """Register the container classes of the arguments now, and those of the results when the model returns them."""
    _know_caches()
    _know(arguments)
    hook = model.register_forward_hook(lambda module, inputs, result: _know(result))
    try:
        yield
    finally:
        hook.remove()


def _know(value: Any) -> None:
    """Register the dataclasses in this value and its contents with the exporter. Returns None, as a hook must."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        if type(value) not in _pytree.SUPPORTED_NODES:
            torch.export.register_dataclass(type(value))
        for field in dataclasses.fields(value):
            _know(getattr(value, field.name, None))
    elif isinstance(value, Mapping):
        for item in value.values():
            _know(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            _know(item)


# -- Hugging Face's caches ------------------------------------------------------------------------------------------


def _know_caches() -> None:
    """Register the caches of transformers, if this process has imported it."""
    module = sys.modules.get("transformers.cache_utils")
    for name in _CACHE_LAYERS:
        layer = getattr(module, name, None)
        if layer is not None:
            tree.register_record(layer, _layer_fields, _layer_constructor(layer))
    for name in _CACHES:
        cache = getattr(module, name, None)
        if cache is None:
            continue
        if name == "DynamicCache":
            tree.register_record(
                cache, lambda value: {"layers": list(value.layers)}, _cache_constructor(cache)
            )
        else:
            tree.register_record(cache, _both_caches, _pair_constructor(cache))
        if cache not in _pytree.SUPPORTED_NODES:
            _pytree.register_pytree_node(
                cache,
                _flattened,
                _unflattened,
                serialized_type_name=f"{cache.__module__}.{cache.__qualname__}",
                flatten_with_keys_fn=_flattened_with_keys,
            )


def _layer_fields(layer: Any) -> dict[str, Any]:
    """The fields except type and device, which the tensors have too."""
    kept = {name: value for name, value in vars(layer).items() if name not in ("dtype", "device")}
    return {name: kept[name] for name in sorted(kept)}


def _layer_constructor(cls: Any) -> Any:
    def construct(**fields: Any) -> Any:
        layer = cls.__new__(cls)
        vars(layer).update(fields)
        keys = fields.get("keys")
        if keys is not None:
            layer.dtype, layer.device = getattr(keys, "dtype", None), getattr(keys, "device", None)
        return layer

    return construct


def _cache_constructor(cls: Any) -> Any:
    def construct(layers: list[Any]) -> Any:
        cache = cls()
        cache.layers = list(layers)
        return cache

    return construct


def _both_caches(value: Any) -> dict[str, Any]:
    return {
        "self_attention_cache": value.self_attention_cache,
        "cross_attention_cache": value.cross_attention_cache,
    }


def _pair_constructor(cls: Any) -> Any:
    def construct(self_attention_cache: Any, cross_attention_cache: Any) -> Any:
        return cls(self_attention_cache, cross_attention_cache)

    return construct


def _flattened(value: Any) -> tuple[list[Any], str]:
    leaves, spec = tree.flatten(value)
    return leaves, json.dumps(spec)


def _unflattened(leaves: Any, context: str) -> Any:
    return tree.unflatten(json.loads(context), list(leaves))


def _flattened_with_keys(value: Any) -> tuple[list[tuple[Any, Any]], str]:
    leaves, context = _flattened(value)
    return [(_pytree.SequenceKey(i), leaf) for i, leaf in enumerate(leaves)], context
