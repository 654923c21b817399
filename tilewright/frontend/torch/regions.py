"""Cut a captured program around the operators that stay with PyTorch.

A region is a set of nodes that is imported and compiled as one. What must not get lost by the cut:

- Weights are constants of the regions that use them, as in a program that is imported whole. What is computed only from
  constants (a transposed weight, a range of numbers) is copied into each region that reads it.
- A view that PyTorch makes for the caller is copied if a region reads it too, so that it is no boundary.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from torch import fx, nn
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner, Partition
from torch.fx.passes.operator_support import OperatorSupportBase
from torch.fx.passes.utils.fuser_utils import fuse_by_partitions

from tilewright.frontend.builder import Unsupported
from tilewright.frontend.torch.captured import (
    Captured,
    is_dense,
    lifted_tensors,
    storage_of,
    user_inputs,
    view_chain,
)
from tilewright.frontend.torch.left import Left, left_of
from tilewright.frontend.torch.program import unsupported_nodes
from tilewright.frontend.torch.types import tensor_type

_MAX_CUTS = 6  # rounds of moving views out of regions


@dataclass(frozen=True)
class Cut:
    """A program cut into regions (submodules of `module`, by name) and operators that stay with PyTorch."""

    module: fx.GraphModule
    regions: tuple[str, ...]
    left: Mapping[str, str]  # node that stays with PyTorch -> why
    work: tuple[Left, ...]  # those of them that compute something
    constants: Mapping[str, torch.Tensor]  # inputs of `module` that are constants of its regions

    def constants_of(self, region: str) -> dict[int, torch.Tensor]:
        """The region's inputs that are constants, by position."""
        operands = self._call(region).args
        found = {
            i: self.constants[operand.name]
            for i, operand in enumerate(operands)
            if isinstance(operand, fx.Node) and operand.op == "placeholder" and operand.name in self.constants
        }
        return found if len(found) < len(operands) else {}  # a model without inputs has no device

    def replace(self, region: str, by: nn.Module, inputs: Sequence[int]) -> None:
        """Call `by` in place of the region, with these of the region's inputs."""
        call = self._call(region)
        call.args = tuple(call.args[i] for i in inputs)
        self.module.set_submodule(region, by)

    def finished(self) -> tuple[fx.GraphModule, tuple[int, ...]]:
        """The module without the inputs that nothing reads, and the positions of those that it still takes."""
        kept: list[int] = []
        placeholders = [node for node in self.module.graph.nodes if node.op == "placeholder"]
        for position, node in enumerate(placeholders):
            if node.users:
                kept.append(position)
            else:
                self.module.graph.erase_node(node)
        self.module.recompile()
        return self.module, tuple(kept)

    def _call(self, region: str) -> fx.Node:
        return next(n for n in self.module.graph.nodes if n.op == "call_module" and n.target == region)


def cut(captured: Captured, frozen: Mapping[int, torch.Tensor]) -> Cut:
    """`frozen`: inputs of the program that are constants, by position; those that it writes are not."""
    program = captured.program
    left = unsupported_nodes(program)
    reasons = dict.fromkeys(captured.torch_side, "a view of memory that the caller sees") | left
    module = fx.GraphModule(program.graph_module, program.graph_module.graph)
    for node in [n for n in module.graph.nodes if str(n.target).startswith("aten._assert_tensor_metadata")]:
        module.graph.erase_node(node)  # what it asserts is what this program was exported for
    names = user_inputs(program)
    lifted = {name: t for name, t in lifted_tensors(program).items() if isinstance(t, torch.Tensor)}
    constants = lifted | {names[i]: t for i, t in frozen.items() if i not in captured.writes}
    partitions = _partitions(module, captured.torch_side, left.keys(), constants.keys())
    inside = {node.name for p in partitions for node in p.nodes}
    outside = {
        node.name: reasons.get(node.name, "stands alone")
        for node in module.graph.nodes
        if node.op == "call_function" and node.name not in inside and node.target is not operator.getitem
    }
    work = left_of(module.graph.nodes, outside)
    before = {name for name, _ in module.named_children()}
    fused = fuse_by_partitions(module, [p.nodes for p in partitions], prefix="tilewright_")
    regions = tuple(name for name, _ in fused.named_children() if name not in before)
    return Cut(fused, regions, outside, work, constants)


def _partitions(
    module: fx.GraphModule, views: Set[str], unsupported: Set[str], constants: Set[str]
) -> list[Partition]:
    """The nodes of each region, all but `unsupported` ones and these views. Copies nodes that several regions need."""
    views = set(views) - unsupported
    for _ in range(_MAX_CUTS):
        _copy_views(module.graph, views, views | unsupported)
        support = _Support(views | unsupported)
        steady = _constant_expressions(module.graph, constants, support)
        partitioner = CapabilityBasedPartitioner(module, support, allows_single_node_partition=True)
        partitions = partitioner.propose_partitions()
        _copy_constants(module.graph, partitions, steady)
        partitions = [p for p in partitions if _computes(p.nodes)]
        gaps = {
            name
            for p in partitions
            for node in _escaping(p)
            if not is_dense(node)
            for name in view_chain(node)
        }
        if not gaps - views - unsupported:
            break
        views |= gaps - unsupported
    return [p for p in partitions if all(is_dense(node) for node in _escaping(p))]


def _copy_views(graph: fx.Graph, views: Set[str], outside: Set[str]) -> None:
    """Give the readers in regions their own copies of `views`, which PyTorch makes."""
    for node in reversed(list(graph.nodes)):  # a copy is itself a reader of what it views
        if node.name not in views or (node.target is not operator.getitem and _own_memory(node)):
            continue
        readers = [user for user in node.users if user.op == "call_function" and user.name not in outside]
        if readers:
            with graph.inserting_after(node):
                copy = graph.node_copy(node)
            for reader in readers:
                reader.replace_input_with(node, copy)


def _constant_expressions(graph: fx.Graph, constants: Set[str], support: _Support) -> list[fx.Node]:
    """The operators of regions that depend on no input of a call, in the graph's order."""
    steady = {node for node in graph.nodes if node.op == "placeholder" and node.name in constants}
    found: list[fx.Node] = []
    for node in graph.nodes:
        if support.is_node_supported({}, node) and steady.issuperset(node.all_input_nodes):
            steady.add(node)
            found.append(node)
    return found


def _copy_constants(graph: fx.Graph, partitions: Sequence[Partition], steady: Sequence[fx.Node]) -> None:
    """Copy constant expressions into each partition that reads them from elsewhere, and drop unread ones."""
    for partition in partitions:
        needed: set[fx.Node] = set()
        waiting = list(partition.nodes)
        known = set(steady)
        while waiting:
            read = {n for n in waiting.pop().all_input_nodes if n in known and n not in partition.nodes}
            waiting += read - needed
            needed |= read
        copies: dict[fx.Node, fx.Node] = {}
        for node in [node for node in steady if node in needed]:
            with graph.inserting_after(node):
                copies[node] = graph.node_copy(node, lambda n, made=copies: made.get(n, n))
        for node, copy in copies.items():
            for reader in [user for user in node.users if user in partition.nodes]:
                reader.replace_input_with(node, copy)
        for copy in copies.values():
            partition.add_node(copy)
    for node in reversed(steady):
        if not node.users:
            for partition in partitions:
                partition.nodes.pop(node, None)
            graph.erase_node(node)


class _Support(OperatorSupportBase):
    def __init__(self, stays: Set[str]) -> None:
        super().__init__()
        self._stays = stays

    def is_node_supported(self, submodules: Mapping[str, nn.Module], node: fx.Node) -> bool:
        if node.op != "call_function" or node.name in self._stays:
            return False
        if node.target is operator.getitem:
            return isinstance(node.args[0], fx.Node) and self.is_node_supported(submodules, node.args[0])
        if not isinstance(node.target, torch._ops.OpOverload):
            return False
        return all(map(_has_type, (node, *node.all_input_nodes)))


def _has_type(node: fx.Node) -> bool:
    value = node.meta.get("val")
    parts = value if isinstance(value, (tuple, list)) else (value,)
    if not parts or not all(isinstance(part, torch.Tensor) for part in parts):
        return False
    try:
        for part in parts:
            tensor_type(part)
    except Unsupported:
        return False
    return True


def _escaping(partition: Partition) -> list[fx.Node]:
    inside = set(partition.nodes)
    return [node for node in inside if any(user not in inside for user in node.users)]


def _computes(nodes: Iterable[fx.Node]) -> bool:
    """Whether there is anything to compute: views alone are left to PyTorch, where they are free."""
    return any(_own_memory(node) for node in nodes if node.target is not operator.getitem)


def _own_memory(node: fx.Node) -> bool:
    """Whether some result of the node has its own memory."""
    value = node.meta.get("val")
    parts = value if isinstance(value, (tuple, list)) else (value,)
    owned = {storage_of(operand) for operand in node.all_input_nodes}
    return any(
        isinstance(part, torch.Tensor) and part.untyped_storage()._cdata not in owned for part in parts
    )
