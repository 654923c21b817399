"""A part of a graph as a graph of its own, and the time of its kernels: how rewrites compare before and after."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from tilewright.graph.ir import Graph, Node, input_node
from tilewright.graph.task import Partition
from tilewright.rewrites.oracle import CostOracle

GAIN = 0.03  # a rewrite must be predicted to save more than this share of the time


@dataclass(frozen=True)
class Judge:
    """Compares graphs by the predicted time of their kernels. `cut`: how the target cuts a graph into tasks."""

    oracle: CostOracle
    cut: Callable[[Graph], Partition]

    def seconds(self, graph: Graph) -> float:
        calls = self.cut(graph).calls
        return sum(self.oracle.seconds(call.task) + self.oracle.kernel_seconds() for call in calls)

    def prefers(self, after: Graph, before: Graph) -> bool:
        return self.seconds(after) < (1.0 - GAIN) * self.seconds(before)


def part_of_graph(
    graph: Graph, nodes: Collection[Node], users: Mapping[Node, list[Node]]
) -> tuple[Graph, dict[Node, Node]]:
    """`nodes` as a graph, and the node in it for each of them and of what they read. What they read from outside is an
    input, unless it is constant; what is read outside is an output."""
    inside = set(nodes)
    made: dict[Node, Node] = {}
    inputs: list[Node] = []

    def operand(node: Node) -> Node:
        if node not in made:
            if node.is_constant:
                made[node] = node
            else:
                made[node] = input_node(len(inputs), node.type)
                inputs.append(made[node])
        return made[node]

    ordered = [node for node in users if node in inside]
    for node in ordered:
        made[node] = replace(node, inputs=tuple(map(operand, node.inputs)))
    outputs = [node for node in ordered if node in graph.outputs or any(u not in inside for u in users[node])]
    return Graph(tuple(inputs), tuple(made[node] for node in outputs)), made
