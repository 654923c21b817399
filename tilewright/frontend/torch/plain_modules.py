"""Trace PyTorch's attention modules without fast paths, and without decisions based on a mask's values.

`nn.TransformerEncoder` and `nn.TransformerDecoder` compare a mask with a causal one, to set a hint that changes no
result. A tracer cannot follow a branch on a tensor's values, so while a model is traced the hint is what the caller
says it is, and the mask is applied as it was given.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import torch
from torch.nn.modules import transformer


def given_is_causal(mask: Any, is_causal: Any = None, size: Any = None) -> bool:
    """Replaces `_detect_is_causal_mask`, with its signature: True only if the caller says so."""
    return is_causal is True


class _Plain:
    """A reference-counted patch: the first of several exports changes the modules, and the last one restores them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before: tuple[bool, Any] = (True, None)

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = torch.backends.mha.get_fastpath_enabled(), transformer._detect_is_causal_mask
                torch.backends.mha.set_fastpath_enabled(False)
                transformer._detect_is_causal_mask = given_is_causal
            self._inside += 1

    def __exit__(self, *raised: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                fast_path, transformer._detect_is_causal_mask = self._before
                torch.backends.mha.set_fastpath_enabled(fast_path)


plain_modules = _Plain()  # used as `with plain_modules:` around an export


def teach_dynamo() -> None:
    """The same for Dynamo, once per process: otherwise a mask splits the encoder, and all of it runs in PyTorch."""
    # Another PyTorch version, or already done: a mask then splits the graph.
    with suppress(AttributeError, TypeError, ValueError):
        torch.compiler.substitute_in_graph(transformer._detect_is_causal_mask)(given_is_causal)
