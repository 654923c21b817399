"""Layer names of a model, as its author wrote them, shortened for tables.

A layer's name is a path: `layer1.0.conv1` in PyTorch, `/layer1/layer1.0/conv1/Conv` in ONNX. A fused kernel computes
several layers, and two calls of one kernel compute different ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_MAX_NAMED = 5  # layers of one kernel
_SEPARATOR = re.compile(r"[./]")


def fused_name(layers: Sequence[str], most: int = _MAX_NAMED) -> str:
    """One name for the layers that a kernel computes: `layer1.0.conv1 + bn1 + relu`.

    Further layers omit the path that they share with the first. A block that contains another of the layers is
    omitted, because the inner layer says more.
    """
    named = _without_blocks(layers)
    if not named:
        return ""
    first, block = named[0], _block(named[0])
    parts = [first]
    for layer in named[1:]:
        shared = block if layer.startswith(block) else _block(layer)
        parts.append(layer.removeprefix(shared) if first.startswith(shared) else layer)
    if len(parts) > most:
        parts = [*parts[: most - 1], f"{len(parts) - most + 1} more"]
    return " + ".join(parts)


def shared_name(names: Sequence[str]) -> str:
    """One name for the calls of a kernel that computes several layers of equal shapes: the first, and the number of
    others."""
    unique = list(dict.fromkeys(filter(None, names)))
    if len(unique) < 2:
        return "".join(unique)
    return f"{unique[0]} and {len(unique) - 1} more"


def merged(*groups: Iterable[str]) -> tuple[str, ...]:
    """Each layer once, in order."""
    return tuple(dict.fromkeys(layer for group in groups for layer in group))


def _without_blocks(layers: Sequence[str]) -> list[str]:
    unique = list(dict.fromkeys(filter(None, layers)))
    return [
        layer for layer in unique if not any(other.startswith((f"{layer}.", f"{layer}/")) for other in unique)
    ]


def _block(layer: str) -> str:
    """The path of a layer's block: `layer1.0.` of `layer1.0.conv1`."""
    return layer[: -len(_SEPARATOR.split(layer)[-1]) or None] if _SEPARATOR.search(layer) else ""
