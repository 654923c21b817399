"""How much work a function does, counted: the same on a slow machine, a busy one and under another load."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType


def python_calls(function: Callable[[], object]) -> int:
    """Calls of Python functions. What is remembered from earlier calls is not counted: call it once before."""
    count = 0

    def profile(_frame: FrameType, event: str, _arg: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count
