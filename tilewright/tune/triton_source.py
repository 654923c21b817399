"""A kernel of Triton read as a tile kernel, so that what it does can be counted.

Triton's language and the tile language have the same functions under the same names. Where a kernel uses only what both
have, its tile program has the loops, loads and dots that Triton compiles; it is counted and never run. A kernel that
uses more cannot be read, and its configs are distinguished by their knobs and grid alone.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import tilewright.tile as tile
from tilewright.errors import TilewrightError
from tilewright.tile.kernel import Kernel

_TRITON = ("triton", "triton.language")


def read_as_tile_kernel(function: Callable[..., Any]) -> Kernel | None:
    """None where its source cannot be read."""
    try:
        return Kernel(_translated(function, {}))
    except TilewrightError:
        return None


def _translated(function: Any, known: dict[int, Any]) -> Any:
    """The function with Triton's names bound to those of the tile language, in what it calls as well."""
    names: dict[str, Any] = dict(function.__globals__)
    made = types.FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    made.__kwdefaults__ = function.__kwdefaults__
    known[id(function)] = made
    for name in function.__code__.co_names:
        if name in names:
            names[name] = _value(names[name], known)
    return made


def _value(value: Any, known: dict[int, Any]) -> Any:
    if isinstance(value, types.ModuleType):
        return tile if value.__name__ in _TRITON else value
    inner = getattr(value, "fn", None)
    if isinstance(inner, types.FunctionType):  # of @triton.jit
        return known[id(inner)] if id(inner) in known else _translated(inner, known)
    owner, name = getattr(value, "__module__", None) or "", getattr(value, "__name__", "")
    if owner.startswith("triton") and name and hasattr(tile, name):
        return getattr(tile, name)
    if type(value).__module__.startswith("triton") and hasattr(value, "value"):  # a constexpr
        return value.value
    return value
