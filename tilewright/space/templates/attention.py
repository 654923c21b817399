"""The operands of an attention as loads from a task's inputs, through the data movement around the operator.

All attention templates start from this.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property

from tilewright import te
from tilewright.dtypes import DType
from tilewright.graph.ir import Graph, Node
from tilewright.graph.lower import lower_graph
from tilewright.graph.ops.common import broadcast_indices
from tilewright.graph.ops.movement import reshape_indices
from tilewright.loops.ir import Buffer
from tilewright.te.index import coefficient, flat_index

LOG2_E = math.log2(math.e)
_LARGE = 1e38


class Operands:
    """The elements of q, k, v and the mask as loads from the task's inputs, and the index of each result. These
    formulas contain all data movement around the operator."""

    def __init__(self, graph: Graph, node: Node) -> None:
        self.node, self.graph = node, graph
        self.inputs = tuple(Buffer(f"x{n}", x.dtype, x.type.size) for n, x in enumerate(graph.inputs))
        self.output = Buffer("out", node.dtype, node.type.size)
        *lead, self.queries, self.values = node.shape
        self.keys, self.width = node.inputs[1].shape[-2:]
        self.lead = tuple(te.Var(f"b{n}", extent) for n, extent in enumerate(lead))
        self.half = node.dtype.is_half
        self.causal: bool = node.attrs["causal"]
        self.scale: float = node.attrs["scale"]

    @property
    def heads(self) -> int:
        return math.prod(var.extent for var in self.lead)

    def query(self, row: te.Expr, column: te.Expr) -> te.Expr:
        return self._matrix(0, row, column)

    def key(self, row: te.Expr, column: te.Expr) -> te.Expr:
        return self._matrix(1, row, column)

    def value(self, row: te.Expr, column: te.Expr) -> te.Expr:
        return self._matrix(2, row, column)

    @property
    def queries_are_rows(self) -> bool:
        """Whether the elements of a query are contiguous."""
        column = te.Var("d", self.width)
        (load,) = te.loads(self.query(te.Var("row", self.queries), column))
        return coefficient(load.indices[0], column) == 1

    @property
    def values_are_dense(self) -> bool:
        """Whether the values of consecutive keys are contiguous."""
        key, column = te.Var("key", self.keys), te.Var("e", self.values)
        (load,) = te.loads(self.value(key, column))
        (index,) = load.indices
        return coefficient(index, key) == self.values and coefficient(index, column) == 1

    @property
    def masked(self) -> bool:
        return len(self.node.inputs) == 4

    @property
    def mask_is_by_row(self) -> bool:
        """Whether queries of one head have different masks."""
        shape = self.node.inputs[3].shape if self.masked else ()
        return len(shape) > 1 and shape[-2] > 1

    def mask(self, score: te.Expr, row: te.Expr, key: te.Expr) -> te.Expr:
        """Apply the mask, but not causality, to the score."""
        if not self.masked:
            return score
        mask = self.node.inputs[3]
        full = (*(var.extent for var in self.lead), self.queries, self.keys)
        value = self._element(mask, broadcast_indices((*self.lead, row, key), mask.shape, full))
        if mask.dtype is DType.BOOL:
            return te.select(value, score, -math.inf)
        added = _wide(value)
        if mask.dtype is DType.F16:
            return score + added * te.const(LOG2_E, DType.F32)
        # If a mask is the lowest finite number, the product would be infinite. A query whose keys are all masked (and
        # weighted equally) would then look like one without any keys.
        small = te.call("lt", te.call("abs", added), te.const(_LARGE, DType.F32))
        return score + te.select(small, added * te.const(LOG2_E, DType.F32), added)

    def position(self, row: te.Expr, column: te.Expr) -> te.Expr:
        """The index of a query's result in the output."""
        chain: list[Node] = []
        node = self.graph.outputs[0]
        while node is not self.node:
            chain.append(node)
            node = node.inputs[0]
        indices: tuple[te.Expr, ...] = (*self.lead, row, column)
        for node in reversed(chain):
            if node.op == "permute":
                indices = tuple(indices[axis] for axis in node.attrs["axes"])
            else:
                indices = reshape_indices(indices, node.shape, node.inputs[0].shape)
        return flat_index(indices, self.graph.outputs[0].shape)

    def _matrix(self, number: int, row: te.Expr, column: te.Expr) -> te.Expr:
        operand = self.node.inputs[number]
        full = tuple(var.extent for var in self.lead)
        lead = broadcast_indices(self.lead, operand.shape[:-2], full)
        return _wide(self._element(operand, (*lead, row, column)))

    def _element(self, operand: Node, indices: Sequence[te.Expr]) -> te.Expr:
        tensor, inputs = self._lowered[operand]
        return _read(tensor, indices, dict(zip(inputs, self.inputs, strict=True)))

    @cached_property
    def _lowered(self) -> dict[Node, tuple[te.Tensor, list[te.Tensor]]]:
        return {x: lower_graph(Graph(self.graph.inputs, (x,))) for x in self.node.inputs}


def _read(tensor: te.Source, indices: Sequence[te.Expr], buffers: Mapping[te.Tensor, Buffer]) -> te.Expr:
    """An element of a tensor that only moves elements of others, as a load from a buffer."""
    if not isinstance(tensor, te.Compute):
        assert isinstance(tensor, te.Tensor)
        return te.Load(buffers[tensor], (flat_index(indices, tensor.shape),))
    body = te.substitute(tensor.body, dict(zip(tensor.axes, indices, strict=True)))

    def rule(node: te.Expr) -> te.Expr | None:
        return _read(node.source, node.indices, buffers) if isinstance(node, te.Load) else None

    return te.rewrite(body, rule)


def _wide(value: te.Expr) -> te.Expr:
    """A moved element as f32, without conversions to and from a storage type."""
    while isinstance(value, te.Cast):
        value = value.value
    return te.cast(value, DType.F32)
