"""The registry of converters: functions that express an ATen operator by graph operators.

    @converter("aten.add.Tensor", "aten.add.Scalar")
    def add(ctx: Context, a: Operand, b: Operand, alpha: Number = 1) -> Node: ...

A converter takes the arguments of the operator's schema by the same names, tensors as nodes and numbers as they are.
Arguments that only say where or how a result is stored (device, layout, ...) are dropped before it is called. It
returns one node, or a tuple for an operator with several results; an entry that cannot be computed is an `Absent`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tilewright.frontend.builder import Absent, Unsupported
from tilewright.graph.ir import Node

Converter = Callable[..., Any]

_F = TypeVar("_F", bound=Converter)
_TABLE: dict[str, Converter] = {}

# Keyword arguments that affect neither the values nor the type of a result.
STORAGE_ARGUMENTS = frozenset({"device", "layout", "pin_memory", "memory_format", "non_blocking"})


class Inexpressible(Unsupported):
    """Unsupported, and no decomposition into simpler operators could help."""


Result = Node | Sequence[Node | Absent]


def refuse(reason: str, *names: str) -> None:
    """Register operators as known but unsupported, for this reason."""

    @converter(*names)
    def convert(*arguments: Any, **keywords: Any) -> Node:
        raise Inexpressible(reason)


def converter(*names: str) -> Callable[[_F], _F]:
    """Register a function as the converter of the operators called `names` ("aten.add.Tensor")."""

    def add(function: _F) -> _F:
        for name in names:
            assert name not in _TABLE, f"two converters for {name}"
            _TABLE[name] = function
        return function

    return add


def register_converter(name: str, function: Converter) -> None:
    """Registers the converter of a user's operator ("mylib.op.default"), in place of an earlier one."""
    table()[name] = function


def table() -> dict[str, Converter]:
    """Every converter by the operator's name."""
    from tilewright.frontend.torch import (  # noqa: F401  (fill the table)
        aten_contraction,
        aten_creation,
        aten_einsum,
        aten_elementwise,
        aten_formula,
        aten_fused_layers,
        aten_indexing,
        aten_movement,
        aten_normalisation,
        aten_ordering,
        aten_reduction,
        aten_scatter,
        aten_window,
    )

    return _TABLE
