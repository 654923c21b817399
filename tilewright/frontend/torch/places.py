"""Where in the user's model an exported node comes from."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

import torch

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in [^\n]*(?:\n\s+(?P<code>[^\n]+))?')
_TORCH = os.path.dirname(torch.__file__) + os.sep


@dataclass(frozen=True)
class Place:
    """A module of the model ("encoder.layers.0") and a line of the user's code; either may be unknown."""

    module: str = ""
    file: str = ""
    line: int = 0
    code: str = ""

    @property
    def short(self) -> str:
        """For every node: the module and the line, without the code."""
        line = f"{os.path.basename(self.file)}:{self.line}" if self.file else ""
        return " ".join(part for part in (self.module, line) if part)

    @property
    def full(self) -> str:
        """For an error message."""
        parts = [f"in module {self.module}"] if self.module else []
        if self.file:
            parts.append(f"at {self.file}:{self.line}" + (f": {self.code}" if self.code else ""))
        return ", ".join(parts)


def place_of(node: Any) -> Place:
    """The place of an fx node, from what the exporter noted."""
    stack = node.meta.get("nn_module_stack") or {}
    module = list(stack.values())[-1][0] if stack else ""
    file, line, code = last_user_frame(node.meta.get("stack_trace") or "")
    return Place(_module_path(module), file, line, code)


def _module_path(path: str) -> str:
    """`L['self'].layers.0`, as some exporters write it, is `layers.0`."""
    return re.sub(r"^L\['self'\]\.?", "", path)


def last_user_frame(trace: str) -> tuple[str, int, str]:
    """(file, line, code) of the last frame of a formatted traceback that is not PyTorch's own; else of the last one."""
    frames = list(_FRAME.finditer(trace))
    if not frames:
        return "", 0, ""
    users = [frame for frame in frames if not frame["file"].startswith(_TORCH)]
    frame = (users or frames)[-1]
    return frame["file"], int(frame["line"]), (frame["code"] or "").strip()
