"""PyTorch's attention modules as they are written down: without fast paths, and without decisions by a mask's values.

`nn.TransformerEncoder` and `nn.TransformerDecoder` compare a mask with a causal one, to set a hint that changes no
result. A tracer cannot follow a branch on a tensor's values, so while a model is traced the hint is what the caller
says it is, and the mask is applied as it was given.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.nn.modules import transformer


def given_is_causal(mask: Any, is_causal: Any = None, size: Any = None) -> bool:
    """In the place of `_detect_is_causal_mask`, with its signature: True only if the caller says so."""
    return is_causal is True


@contextmanager
def plain_modules() -> Iterator[None]:
    """The modules so, for an export."""
    fast_path = torch.backends.mha.get_fastpath_enabled()
    detect = transformer._detect_is_causal_mask
    torch.backends.mha.set_fastpath_enabled(False)
    transformer._detect_is_causal_mask = given_is_causal
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = detect
        torch.backends.mha.set_fastpath_enabled(fast_path)


def teach_dynamo() -> None:
    """The same for Dynamo, once per process: without it a mask splits the encoder, and all of it runs in PyTorch."""
    # Another PyTorch, or done before: a mask then splits the graph, as it would without this.
    with suppress(AttributeError, TypeError, ValueError):
        torch.compiler.substitute_in_graph(transformer._detect_is_causal_mask)(given_is_causal)
