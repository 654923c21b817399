"""Operators of a captured graph that stay in PyTorch: the reason, the line of the user's code, and the work
of each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import flop_counter

from tilewright.frontend.torch.source_location import location_of

_PER_ELEMENT = 8  # operations per element of an unknown operator: a function, or a few steps of an algorithm


@dataclass(frozen=True)
class Left:
    """An operator that PyTorch runs. `flops` and `bytes` are estimates from its schema and its shapes."""

    operator: str
    reason: str
    location: str
    flops: float
    bytes: float


def left_of(nodes: Iterable[fx.Node], reasons: Mapping[str, str]) -> tuple[Left, ...]:
    """The nodes named in `reasons` that compute something; views cost nothing."""
    return tuple(
        _left(node, reasons[node.name]) for node in nodes if node.name in reasons and _computes(node)
    )


def _left(node: fx.Node, reason: str) -> Left:
    operator = str(node.target)
    moved = _bytes([*_values(node), *(value for n in node.all_input_nodes for value in _values(n))])
    why = reason.removeprefix(f"{operator}: ")
    return Left(operator, why, location_of(node).short, _flops(node), moved)


def _computes(node: fx.Node) -> bool:
    """Whether a result has its own memory."""
    if node.op != "call_function":
        return False
    owned = {_storage(value) for operand in node.all_input_nodes for value in _values(operand)}
    results = _values(node)
    return not results or any(_storage(value) not in owned for value in results)


def _values(node: fx.Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    parts = value if isinstance(value, (tuple, list)) else (value,)
    return [part for part in parts if isinstance(part, torch.Tensor)]


def _storage(value: torch.Tensor) -> int:
    return value.untyped_storage()._cdata if value.layout is torch.strided else id(value)


def _bytes(values: Iterable[torch.Tensor]) -> float:
    return float(sum(value.numel() * value.element_size() for value in values))


def _flops(node: fx.Node) -> float:
    """The FLOPs by PyTorch's own formula if it has one; n^3 for linear algebra; otherwise a few per element."""
    operands = [value for n in node.all_input_nodes for value in _values(n)]
    formula = flop_counter.flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is not None:
        try:
            args, kwargs = _concrete(node.args), _concrete(node.kwargs)
            return float(formula(*args, **kwargs, out_val=node.meta.get("val")))
        except Exception:  # a formula for other arguments: the count by elements will do
            pass
    name = str(node.target)
    if "linalg" in name or "cholesky" in name or "lu_" in name:
        matrices = [value for value in operands if value.dim() >= 2]
        return float(sum(2 * math.prod(v.shape[:-2]) * max(v.shape[-2:]) ** 3 for v in matrices))
    return float(_PER_ELEMENT * sum(value.numel() for value in [*operands, *_values(node)]))


def _concrete(value: Any) -> Any:
    return fx.node.map_aggregate(value, lambda a: a.meta.get("val") if isinstance(a, fx.Node) else a)
