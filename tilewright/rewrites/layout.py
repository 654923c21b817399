"""layout: store every value in the axis order that minimises the time of kernels and permutes together.

    permute(conv(x, w) channels_first)        ->      conv(permute(x), permute(w)) channels_last, read in place

Every value is a stored node plus the order of its axes in storage. A permute then costs nothing: it relabels the same
storage. `layout_choices.py` lists the orders that each operator supports; `layout_assignment.py` chooses among them
with times from an oracle. A permute is emitted only if an operator or an output needs a value in an order in which it
is not stored, once per value and order. Permutes that cancel are never emitted.

Permutes of constants are folded after this pass, so that each weight is stored once, in its kernel's order.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from tilewright.graph.ir import Graph, Node, rebuild
from tilewright.graph.task import Task
from tilewright.rewrites.base import Pass
from tilewright.rewrites.layout_assignment import Assignment, Costs, assign, solve
from tilewright.rewrites.layout_choices import (
    LayoutChoice,
    folds,
    gives_channels_last,
    layout_choices_of,
    permuted,
    written,
)
from tilewright.rewrites.oracle import CostOracle, FewestBytes
from tilewright.rewrites.orders import Order, conversions, identity, named, stored
from tilewright.rewrites.partition import partition
from tilewright.rewrites.shapes import moves_nothing
from tilewright.support.trace import Event, Trace

# Limit on the number of live values summed over all steps, which determines the time of an assignment. Networks have
# thousands of steps with tens of live values; graphs with thousands of both (a sum of 20,000 inputs) keep their
# orders.
_MAX_LIVE = 20_000_000


def _live_values(graph: Graph) -> int:
    nodes = [node for node in graph.nodes() if not node.is_constant]
    last = {operand: step for step, node in enumerate(nodes) for operand in node.inputs}
    return sum(last[node] - step for step, node in enumerate(nodes) if node in last)


@dataclass(frozen=True)
class Layout(Pass):
    name = "layout"

    oracle: CostOracle = field(default_factory=FewestBytes)

    def run(self, graph: Graph) -> Graph:
        with Trace.off().span(self.name) as span:
            return self.traced(graph, span)

    def traced(self, graph: Graph, span: Event) -> Graph:
        """Use the assignment found per operator, unless channels-last everywhere is better after fusion, as it is for
        chains of convolutions. Notes count how often each operator took each choice."""
        if _live_values(graph) > _MAX_LIVE:
            return graph
        found, costs = assign(graph, self.oracle)
        best = _Conversion(graph, found, costs)
        result = best.run()
        if not all(
            choice.layout is None or gives_channels_last(node, choice)
            for node, choice in found.choices.items()
        ):
            alike = _Conversion(graph, solve(graph, costs, gives_channels_last), costs)
            last = alike.run()
            if any(_is_chain(task) for task in _tasks(last)) and self._seconds(last) < self._seconds(result):
                best, result = alike, last
        orders = Counter(
            f"{node.op}, {choice.layout or named(choice.order)}"
            for node, choice in best.assignment.choices.items()
            if node.type.rank > 2 and not folds(node)
        )
        permutes = [node for node in result.nodes() if node.op == "permute" and not folds(node)]
        span.note(orders=orders, permutes=len(permutes), detours=best.detours)
        return result

    def _seconds(self, graph: Graph) -> float:
        return sum(map(self.oracle.seconds, _tasks(graph)))


def _tasks(graph: Graph) -> list[Task]:
    """The tasks of all kernels of a graph, with constants as they will be after folding."""

    def rule(node: Node, operands: tuple[Node, ...]) -> Node | None:
        if node.is_constant or not folds(node):
            return None
        nothing = np.broadcast_to(np.zeros((), node.dtype.numpy), node.shape)
        return Node("constant", (), node.type, data=nothing)

    calls = partition(rebuild(graph, rule)).calls
    return [call.task for call in calls if call.task.output.type.size]


def _is_chain(task: Task) -> bool:
    return sum(node.op == "conv" for node in task.graph.nodes()) > 1


def permuted_bytes(graph: Graph) -> int:
    """The bytes that the graph's permutes move; those of constants are folded and do not count."""
    return sum(
        node.type.bytes
        for node in graph.nodes()
        if node.op == "permute"
        and not folds(node)
        and not moves_nothing(node.inputs[0].shape, node.attrs["axes"])
    )


@dataclass
class _Conversion:
    """One traversal of a graph, producers first, that applies the decisions."""

    graph: Graph
    assignment: Assignment
    costs: Costs
    there: dict[Node, dict[Order, Node]] = field(default_factory=dict)
    detours: int = 0  # values whose blocks were joined before they were split again

    def run(self) -> Graph:
        for node in self.graph.nodes():
            if node.is_input or node.is_constant:
                self.there[node] = {identity(node.type.rank): node}
                continue
            choice = self.assignment.choices.get(node) or self.foldable(node)
            operands = tuple(map(self.want, node.inputs, choice.operands))
            made = written(node, choice, operands)
            assert made.shape == stored(node.shape, choice.order), f"layout: {node!r} became {made!r}"
            self.there[node] = {choice.order: made}
        outputs = tuple(self.want(node, identity(node.type.rank)) for node in self.graph.outputs)
        return Graph(self.graph.inputs, outputs)

    def foldable(self, node: Node) -> LayoutChoice:
        """The layout choice for movement of a constant: the constant's own storage, if that suffices."""
        return layout_choices_of(node, [list(self.there[operand]) for operand in node.inputs], ())[0]

    def want(self, value: Node, order: Order) -> Node:
        """The node that holds `value` with its axes in `order`."""
        there = self.there[value]
        if order not in there:
            nearest = min(there, key=lambda have: self.costs.permute_seconds(value, have, order))
            there[order] = permuted(there[nearest], nearest, order, value)
            self.detours += len(conversions(value.shape, nearest, order)) > 1 and not folds(value)
        return there[order]
