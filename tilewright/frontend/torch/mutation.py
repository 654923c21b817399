"""Functionalise in-place operators: writes of a program to its own values become new values.

An exported program may still hold operators such as `relu_`. Most write into a whole value that nothing else views;
they are converted as the operator without the underscore, and every name of that value is pointed at the result. More
complex cases (a write through a slice, a value with views) are left to PyTorch's own functionalisation, which
retraces the program. Only writes to the model's buffers and inputs remain, and those are errors.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.export import ExportedProgram

from tilewright.errors import MutationError
from tilewright.frontend.torch.decompose import retraced

# Operators marked as writing that leave every value unchanged.
_HARMLESS = {"aten.detach_.default", "aten.requires_grad_.default"}
# Operators that return their operand itself, though their schema does not say so.
_PASSING = {"aten.dropout.default", "aten.feature_dropout.default", "aten.alpha_dropout.default"}


def writes(node: Any) -> bool:
    """Whether an fx node changes one of its operands."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or str(target) in _HARMLESS:
        return False
    return bool(target._schema.is_mutable)


def functional_name(name: str) -> str:
    """aten.relu_.default -> aten.relu.default; also for operators whose write has no effect."""
    namespace, operator, overload = name.split(".")
    return f"{namespace}.{operator.removesuffix('_')}.{overload}"


class Aliases:
    """Which nodes of a graph are the same tensor, and whether every write can be followed by renaming.

    Nodes are taken in order. A write is simple if it is to one tensor that is not a view, that has no view yet and that
    the program made itself; views made later see the new value anyway.
    """

    def __init__(self, nodes: Iterable[Any]) -> None:
        self.all_simple = True
        self._tensor: dict[Any, int] = {}
        self._nodes: dict[int, list[Any]] = {}
        self._shared: set[int] = set()  # tensors that are views, have views, or come from outside
        self._storages: dict[int, int] = {}
        for node in nodes:
            if writes(node) and not self._is_simple(node):
                self.all_simple = False
            self._add(node)

    def same(self, node: Any) -> list[Any]:
        """The nodes that represent exactly the tensor of `node`."""
        return self._nodes[self._tensor[node]]

    def _is_simple(self, node: Any) -> bool:
        arguments = node.target._schema.arguments
        written = [a for a in arguments if a.alias_info is not None and a.alias_info.is_write]
        first = node.args[0] if node.args else None
        return len(written) == 1 and first in self._tensor and self._tensor[first] not in self._shared

    def _add(self, node: Any) -> None:
        value = node.meta.get("val")
        operand: Any = next((a for a in node.args if isinstance(a, torch.fx.Node)), None)
        is_same = operand in self._tensor and (
            writes(node)
            or str(node.target) in _HARMLESS | _PASSING
            or _same_tensor(operand.meta.get("val"), value)
        )
        tensor = self._tensor[operand] if is_same else len(self._nodes)
        self._tensor[node] = tensor
        self._nodes.setdefault(tensor, []).append(node)
        if node.op != "call_function":
            self._shared.add(tensor)
        if not is_same and _may_be_view(node):
            self._shared.update([tensor, *(self._tensor[a] for a in node.all_input_nodes)])
        for part in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(part, torch.Tensor):
                owner = self._storages.setdefault(part.untyped_storage()._cdata, tensor)
                if owner != tensor:
                    self._shared.update((owner, tensor))


def _same_tensor(a: Any, b: Any) -> bool:
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return False
    return (
        a.untyped_storage()._cdata == b.untyped_storage()._cdata
        and a.dtype == b.dtype
        and a.shape == b.shape
        and a.stride() == b.stride()
        and a.storage_offset() == b.storage_offset()
    )


def _may_be_view(node: Any) -> bool:
    if node.op != "call_function":
        return False
    if not isinstance(node.target, torch._ops.OpOverload):
        return True  # an item of several results, or an operator of operators: not known
    return any(result.alias_info is not None for result in node.target._schema.returns)


def functionalised(program: ExportedProgram, *, outside: bool = False) -> ExportedProgram:
    """The program as a function: at most simple writes in its main graph, and no region with autocast on, whose casts
    would be implicit. Raises MutationError if it writes to its buffers or inputs; with `outside`, writes to its
    inputs are allowed, and are its first outputs (`graph_signature.user_inputs_to_mutate`)."""
    check_signature(program, outside=outside)
    graphs = [m.graph for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]
    writing = [graph for graph in graphs if any(writes(node) for node in graph.nodes)]
    simple = all(graph is program.graph and Aliases(graph.nodes).all_simple for graph in writing)
    if simple and not any(_switches_autocast_on(node) for graph in graphs for node in graph.nodes):
        return program
    program = retraced(program, {})
    check_signature(program, outside=outside)
    return program


def _switches_autocast_on(node: Any) -> bool:
    return str(node.target) == "wrap_with_autocast" and bool(node.args[2])


def check_signature(program: ExportedProgram, *, outside: bool = False) -> None:
    signature = program.graph_signature
    names = [f"buffer {name}" for name in signature.buffers_to_mutate.values()]
    names += [f"parameter {name}" for name in getattr(signature, "parameters_to_mutate", {}).values()]
    names += [] if outside else [f"input {name}" for name in signature.user_inputs_to_mutate.values()]
    if names:
        raise MutationError(f"the model writes to its {', its '.join(names)}")
