"""The fallback for operators without a converter: PyTorch's own decompositions, for those operators only."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.export import ExportedProgram, default_decompositions


def decomposed(program: ExportedProgram, operators: Iterable[Any]) -> ExportedProgram | None:
    """The program with these operators decomposed; None if PyTorch has no decomposition for any."""
    table: dict[Any, Callable[..., Any]] = {}
    for operator in operators:
        rule = _decomposition(operator)
        if rule is not None:
            table[operator] = rule
    if not table:
        return None
    try:
        return retraced(program, table)
    except (
        Exception
    ):  # whatever a decomposition raises, the operator stays unsupported and is reported as such
        return None


def retraced(program: ExportedProgram, table: Mapping[Any, Callable[..., Any]]) -> ExportedProgram:
    """Retrace the program: in-place operators are removed, those of `table` decomposed, composites kept whole."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return program.run_decompositions(dict(table))


def _decomposition(operator: Any) -> Callable[..., Any] | None:
    if not isinstance(operator, torch._ops.OpOverload):
        return None
    for table in (default_decompositions(), torch._decomp.decomposition_table):
        if operator in table:
            rule: Callable[..., Any] = table[operator]
            return rule
    if operator.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        decompose: Callable[..., Any] = operator.decompose
        return decompose
    return None


def origin_of(node: Any) -> str:
    """The node of the original program from which this one was decomposed, by name."""
    sources = node.meta.get("from_node") or []
    name = str(node.name)
    while sources:
        name = str(sources[-1].name)
        sources = getattr(sources[-1], "from_node", None) or []
    return name
