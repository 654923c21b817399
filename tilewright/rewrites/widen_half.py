"""widen-half: compute models of 16-bit floats in f32, from their inputs to their outputs.

    %w = constant @weight : f16[768,768]                 %w = constant @weight : f16[768,768]
    %1 = linear(%x, %w) : f16[8,768]          ->         %1 = linear(cast(%x), cast(%w)) : f32[8,768]
    %2 = relu(%1) : f16[8,768]                           %2 = relu(%1) : f32[8,768]
    return %2                                            return cast(%2) : f16[8,768]

For processors that compute 16-bit floats by converting them to f32 anyway. Converted once, weights (by
fold-constants) and intermediate results can use every f32 kernel; converted at each read, they took up to three times
as long. Inputs and outputs keep their types. Values are rounded when they are stored in 16 bits and, if numerics are
strict, at every operator, as in a framework.

Operators that are bound by reading 16-bit data stay unchanged, because f32 would double the bytes: movement of inputs
and constants (an embedding table), a matmul with a few rows, attention over keys and values that are inputs (a
cache).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from tilewright.dtypes import DType
from tilewright.graph.ir import Graph, Node
from tilewright.graph.op import Fusion, apply, op_of
from tilewright.graph.tile_operator import NAME as TILE_KERNEL
from tilewright.rewrites.base import Pass

FEW_ROWS = 4  # rows of a matmul up to which it takes as long as reading its weight

# Their results are elements of an operand, up to the sign, so rounding changes nothing.
_EXACT = frozenset(
    [
        *("relu", "neg", "abs", "select", "maximum", "minimum"),
        *("amax", "amin", "max_pool", "adaptive_max_pool", "cummax", "cummin"),
    ]
)


@dataclass(frozen=True)
class WidenHalf(Pass):
    name = "widen-half"

    rounds: bool = False  # round every operator's result to its type in the model

    def run(self, graph: Graph) -> Graph:
        if not any(node.dtype.is_half for node in graph.nodes()):
            return graph
        values = _Values(self.rounds)
        for node in graph.nodes():
            values.convert(node)
        return Graph(graph.inputs, tuple(map(values.output, graph.outputs)))


@dataclass
class _Values:
    """The values of a graph in the new one. Those of 16-bit types exist in 16 bits, in f32, or both."""

    rounds: bool
    stored: dict[Node, Node] = field(default_factory=dict)  # in the model's type
    wide: dict[Node, Node] = field(default_factory=dict)  # 16-bit types: in f32
    moved: set[Node] = field(default_factory=set)  # inputs of 16-bit types and movement of them

    def output(self, node: Node) -> Node:
        """The value in its own type."""
        if node not in self.stored:
            self.stored[node] = apply("cast", self.wide[node], dtype=node.dtype, source=node.source)
        return self.stored[node]

    def computed(self, node: Node) -> Node:
        """The value in the type that it is computed in."""
        if not node.dtype.is_half:
            return self.stored[node]
        if node not in self.wide:
            self.wide[node] = apply("cast", self.stored[node], dtype=DType.F32, source=node.source)
        return self.wide[node]

    def convert(self, node: Node) -> None:
        if node.is_input or node.is_constant:
            self.stored[node] = node
            if node.is_input and node.dtype.is_half:
                self.moved.add(node)
        elif node.op == "cast":
            self.convert_cast(node)
        elif self.stays(node):
            self.stored[node] = self.applied(node, *map(self.output, node.inputs))
            if node.dtype.is_half and any(operand in self.moved for operand in node.inputs):
                self.moved.add(node)
            if node.op == "pad":
                # Padding has the type of its convolution.
                self.wide[node] = self.applied(node, *map(self.computed, node.inputs))
        else:
            self.keep(node, self.applied(node, *map(self.computed, node.inputs)))

    def convert_cast(self, node: Node) -> None:
        """A conversion to or from 16 bits is free if the value already exists in that type; a conversion to 16 bits
        rounds."""
        (operand,) = node.inputs
        if node.dtype is DType.F32 and operand.dtype.is_half:
            self.stored[node] = self.computed(operand)
        elif node.dtype.is_half and operand.dtype.compute is DType.F32:
            self.keep(node, self.computed(operand))
        elif node.dtype.is_half and not self.rounds:
            widened = apply("cast", self.stored[operand], dtype=DType.F32, name=node.name, source=node.source)
            self.keep(node, widened)
        else:
            self.stored[node] = self.applied(node, self.computed(operand))

    def keep(self, node: Node, result: Node) -> None:
        """`result`: the value of `node` in the type that it is computed in."""
        if not node.dtype.is_half:
            self.stored[node] = result
        elif self.rounds and not self.is_exact(node):
            self.stored[node] = apply("cast", result, dtype=node.dtype, source=node.source)
        else:
            self.wide[node] = result

    def applied(self, node: Node, *operands: Node) -> Node:
        if all(a is b for a, b in zip(operands, node.inputs, strict=True)):
            return node
        return apply(node.op, *operands, name=node.name, source=node.source, **node.attrs)

    # -- what stays in 16 bits

    def stays(self, node: Node) -> bool:
        if node.op == TILE_KERNEL or not any(value.dtype.is_half for value in (node, *node.inputs)):
            return True
        operands = [operand for operand in node.inputs if operand.dtype.is_half]
        if _moves(node):
            # If some operands are inputs, such as a cache and its new entries, all are rounded.
            return all(map(self.is_stored, operands)) or any(operand in self.moved for operand in operands)
        if node.op == "attention":
            return all(operand in self.moved for operand in node.inputs[1:3])
        if node.op in ("matmul", "linear"):
            weight = node.inputs[1]
            return self.is_stored(weight) and _rows(node) <= FEW_ROWS
        return False

    def is_stored(self, node: Node) -> bool:
        return node in self.stored

    def is_exact(self, node: Node) -> bool:
        """Whether its value, for rounded operands, needs no rounding."""
        return node.op in _EXACT or (_moves(node) and not (node.op == "pad" and node.attrs["value"]))


def _moves(node: Node) -> bool:
    """Whether its elements are elements of its operands, or constants."""
    if node.op in ("put", "put_along"):
        return bool(node.attrs["combine"] == "set")
    return op_of(node.op).fusion is Fusion.INJECTIVE and node.op != "resize"


def _rows(node: Node) -> int:
    """How many rows use each element of a matmul's right operand."""
    data, weight = node.inputs[:2]
    stacks = math.prod(weight.shape[:-2])
    return math.prod(data.shape[:-1]) // max(1, stacks if node.op == "matmul" else 1)
