"""The registry of converters: functions that express an ONNX operator by graph operators.

    @converter("Gemm", since=7)
    def gemm(ctx: Context, a: Node, b: Node, c: Node | None = None, *, alpha: float = 1.0, ...) -> Node: ...

Inputs come by position, None where an optional one is left out; attributes by keyword, with the standard's defaults.
An attribute that the converter does not have is unsupported: nothing is ignored. Of several converters, the one with
the highest `since` up to the model's opset is used. The result is one value, or a tuple with one entry per result; an
`Absent` marks one that cannot be computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from tilewright.frontend.builder import Unsupported

Converter = Callable[..., Any]

_F = TypeVar("_F", bound=Converter)
_TABLE: dict[tuple[str, str], list[tuple[int, Converter]]] = {}

# Names of the standard's domain; they are synonyms.
STANDARD = ("", "ai.onnx")


class NotStatic(Unsupported):
    """A value must be known at import, but depends on the call."""


class FallBack(Exception):
    """Raised by a converter to use the standard's own function definition of the operator."""


def converter(*names: str, since: int = 1, domain: str = "") -> Callable[[_F], _F]:
    """Register a function as the converter of the operators called `names`, from opset `since` on."""

    def add(function: _F) -> _F:
        for name in names:
            versions = _TABLE.setdefault((domain, name), [])
            assert all(version != since for version, _ in versions), f"two converters for {name} {since}"
            versions.append((since, function))
            versions.sort(key=lambda entry: entry[0])
        return function

    return add


def refuse(reason: str, *names: str, domain: str = "") -> None:
    """Register operators as known but unsupported, for this reason."""

    @converter(*names, domain=domain)
    def convert(*arguments: Any, **keywords: Any) -> Any:
        raise Unsupported(reason)

    convert.refuses = True  # type: ignore[attr-defined]


def find(domain: str, name: str, opset: int) -> Converter | None:
    versions = table().get(("" if domain in STANDARD else domain, name), [])
    fitting = [function for since, function in versions if since <= opset]
    return fitting[-1] if fitting else None


@functools.cache
def table() -> dict[tuple[str, str], list[tuple[int, Converter]]]:
    """Every converter by domain and operator, each with the opset from which it applies."""
    from tilewright.frontend.onnx import (  # noqa: F401  (fill the table)
        op_attention,
        op_contraction,
        op_control,
        op_creation,
        op_elementwise,
        op_image,
        op_indexing,
        op_microsoft,
        op_movement,
        op_normalisation,
        op_quantised,
        op_recurrent,
        op_reduction,
        op_refused,
        op_sampling,
        op_sequence,
        op_signal,
        op_training,
        op_window,
    )

    return _TABLE
