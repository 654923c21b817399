"""The tensor-level IR: a model as an immutable graph of single-result nodes.

Semantics
---------
- A `Node` applies one operator of the op table to the results of its inputs and has exactly one result, a tensor of
  static shape and known element type. A tuple result of a framework becomes several nodes.
- Nodes are pure: no state, no mutation, no aliasing. A node's value depends on its inputs and attributes only.
- There are no implicit conversions: operands of arithmetic have equal types, and `cast` converts. Shapes of
  elementwise operators broadcast as NumPy's do.
- Floats follow IEEE 754 as the framework's do: NaN and infinities propagate. Integers wrap around.
- 16-bit floats are computed in f32 and rounded when stored; between operators the rounding may be omitted unless
  numerics are strict.
- Two operators are special: `input` (a value given at each call; attribute `index`, its position) and `constant`
  (`data` holds the array). Everything else is in `graph/ops`.

Nodes are compared by identity; passes build new graphs and share what they keep.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tilewright.dtypes import DType
from tilewright.graph.provenance import UNKNOWN, Provenance

# Values are numbers, bools, strings, DTypes, None, and tuples of these.
Attrs = Mapping[str, Any]


@dataclass(frozen=True)
class TensorType:
    shape: tuple[int, ...]
    dtype: DType

    def __repr__(self) -> str:
        return f"{self.dtype.short}[{','.join(map(str, self.shape))}]"

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.size * self.dtype.bytes

    @property
    def rank(self) -> int:
        return len(self.shape)


@dataclass(frozen=True, eq=False)
class Node:
    op: str
    inputs: tuple[Node, ...]
    type: TensorType
    attrs: Attrs = field(default_factory=dict)
    data: np.ndarray | None = None  # of a constant; never written to
    name: str = ""  # a hint for display: the framework's name of the value
    source: Provenance = UNKNOWN  # its origin in the user's model

    @property
    def shape(self) -> tuple[int, ...]:
        return self.type.shape

    @property
    def dtype(self) -> DType:
        return self.type.dtype

    @property
    def is_constant(self) -> bool:
        return self.op == "constant"

    @property
    def is_input(self) -> bool:
        return self.op == "input"

    def __repr__(self) -> str:
        return f"<{self.op} {self.name or hex(id(self))}: {self.type}>"


@dataclass(frozen=True, eq=False)
class Graph:
    """A function from tensors to tensors. `inputs` are `input` nodes in the order of the call (an input may be unused);
    `outputs` may repeat a node."""

    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]

    def nodes(self) -> list[Node]:
        """Every node, producers first; inputs come first, in order."""
        return toposort(self.outputs, first=self.inputs)

    def users(self) -> dict[Node, list[Node]]:
        """For every node, the nodes that read it (once per use)."""
        users: dict[Node, list[Node]] = {node: [] for node in self.nodes()}
        for node in users:
            for operand in node.inputs:
                users[operand].append(node)
        return users


def toposort(roots: Iterable[Node], first: Iterable[Node] = ()) -> list[Node]:
    order: dict[Node, None] = dict.fromkeys(first)
    for root in roots:
        stack: list[tuple[Node, Iterator[Node]]] = [(root, iter(root.inputs))]
        while stack:
            node, operands = stack[-1]
            if node in order:
                stack.pop()
                continue
            waiting = next((operand for operand in operands if operand not in order), None)
            if waiting is None:
                order[node] = None
                stack.pop()
            else:
                stack.append((waiting, iter(waiting.inputs)))
    return list(order)


def input_node(index: int, type: TensorType, name: str = "") -> Node:
    return Node("input", (), type, {"index": index}, name=name)


def constant(data: np.ndarray, name: str = "") -> Node:
    """A constant node. The array is used without a copy if it is contiguous, and must not be written to
    afterwards."""
    data = np.asarray(data)
    if not data.flags.c_contiguous:
        data = np.ascontiguousarray(data)
    return Node("constant", (), TensorType(data.shape, DType.of(data)), data=data, name=name)


def rebuild(graph: Graph, rule: Callable[[Node, tuple[Node, ...]], Node | None]) -> Graph:
    """Build a new graph, producers first: `rule(node, new_inputs)` returns the replacement of `node`, or None to keep
    it with its new inputs. All graph passes use this loop. Inputs are never replaced."""
    new: dict[Node, Node] = {node: node for node in graph.inputs}
    for node in graph.nodes():
        if node.is_input:
            continue
        operands = tuple(new[operand] for operand in node.inputs)
        replacement = rule(node, operands)
        if replacement is None:
            same = all(a is b for a, b in zip(operands, node.inputs, strict=True))
            replacement = node if same else replace(node, inputs=operands)
        new[node] = replacement
    return Graph(graph.inputs, tuple(new[node] for node in graph.outputs))


def with_inputs(node: Node, inputs: Sequence[Node]) -> Node:
    return replace(node, inputs=tuple(inputs))
