"""The origin of an exported node in the user's model."""

from __future__ import annotations

import os
import re
from collections.abc import Set
from dataclasses import dataclass, replace
from typing import Any

import torch

from tilewright.graph.provenance import Provenance

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in [^\n]*(?:\n\s+(?P<code>[^\n]+))?')
_TORCH = os.path.dirname(torch.__file__) + os.sep
# Operators that only move data, or do nothing, which a layer's author would not name.
_UNNAMED = frozenset(
    (
        "alias", "chunk", "clone", "contiguous", "detach", "dropout", "expand", "expand_as", "flatten", "getitem",
        "permute", "reshape", "select", "slice", "split", "split_with_sizes", "squeeze", "t", "to", "to_copy",
        "transpose", "type_as", "unbind", "unflatten", "unsqueeze", "view", "view_as",
    )
)  # fmt: skip


@dataclass(frozen=True)
class SourceLocation:
    """A module of the model ("encoder.layers.0") and a line of the user's code; either may be unknown.

    `layer`: the module's path; for a function called in a block of layers, the block's path with the function's name.
    """

    module: str = ""
    file: str = ""
    line: int = 0
    code: str = ""
    layer: str = ""

    @property
    def provenance(self) -> Provenance:
        """The location without the code, kept for every node."""
        layer = self.layer or self.module
        return Provenance((layer,) if layer else (), self._line)

    @property
    def _line(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}" if self.file else ""

    @property
    def short(self) -> str:
        """The module and the line, without the code."""
        return " ".join(part for part in (self.module, self._line) if part)

    @property
    def full(self) -> str:
        """The location for an error message."""
        parts = [f"in module {self.module}"] if self.module else []
        if self.file:
            parts.append(f"at {self.file}:{self.line}" + (f": {self.code}" if self.code else ""))
        return ", ".join(parts)


def location_of(node: Any) -> SourceLocation:
    """The origin of an fx node, from the exporter's metadata."""
    stack = node.meta.get("nn_module_stack") or {}
    module = list(stack.values())[-1][0] if stack else ""
    file, line, code = last_user_frame(node.meta.get("stack_trace") or "")
    return SourceLocation(_module_path(module), file, line, code)


def indices_of(graph: Any) -> dict[str, SourceLocation]:
    """The origin of every node of an exported graph, by the node's name, with its layer."""
    positions = {node.name: location_of(node) for node in graph.nodes}
    blocks = {""}  # modules with layers inside
    for position in positions.values():
        parts = position.module.split(".")
        blocks.update(".".join(parts[:count]) for count in range(1, len(parts)))
    return {
        node.name: replace(position, layer=_layer(position.module, blocks, node))
        for node, position in zip(graph.nodes, positions.values(), strict=True)
    }


def _layer(module: str, blocks: Set[str], node: Any) -> str:
    namespace, _, name = str(node.target).partition(".")  # such as aten.add.Tensor
    function = (name or namespace).partition(".")[0].strip("_")
    if (
        node.op != "call_function"
        or module not in blocks
        or function in _UNNAMED
        or not function.isidentifier()
    ):
        return module
    return f"{module}.{function}" if module else function


def _module_path(path: str) -> str:
    """`L['self'].layers.0`, as some exporters write it, is `layers.0`; so is `layers.0@1`, its second call."""
    path = re.sub(r"@\d+(?=\.|$)", "", path)
    path = re.sub(r"\._modules\['([^']+)'\]", r".\1", path)
    return re.sub(r"^L\['self'\]\.?", "", path)


def last_user_frame(trace: str) -> tuple[str, int, str]:
    """(file, line, code) of the last frame of a formatted traceback that is not PyTorch's own; else of the last one."""
    frames = list(_FRAME.finditer(trace))
    if not frames:
        return "", 0, ""
    users = [frame for frame in frames if not frame["file"].startswith(_TORCH)]
    frame = (users or frames)[-1]
    return frame["file"], int(frame["line"]), (frame["code"] or "").strip()
