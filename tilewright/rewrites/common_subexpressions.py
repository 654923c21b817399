"""common-subexpressions: merge nodes with the same operator and operands.

    %1 = exp(%x)
    %2 = exp(%x)
    %3 = add(%1, %2)          ->      %3 = add(%1, %1)

Constants are merged if they hold the same bytes; large ones, which would be slow to compare, if they are the same
array (tied weights share one array).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from tilewright.graph.ir import Graph, Node, rebuild
from tilewright.graph.text import print_attr
from tilewright.rewrites.base import Pass


@dataclass(frozen=True)
class CommonSubexpressions(Pass):
    name = "common-subexpressions"

    compared: int = 4096  # maximum bytes of constants that are compared by content

    def run(self, graph: Graph) -> Graph:
        found: dict[Hashable, Node] = {}

        def rule(node: Node, operands: tuple[Node, ...]) -> Node | None:
            key = self._key(node, operands)
            first = found.get(key)
            if first is not None:
                return first
            if all(a is b for a, b in zip(operands, node.inputs, strict=True)):
                kept = node
            else:
                kept = Node(node.op, operands, node.type, node.attrs, node.data, node.name, node.source)
            found[key] = kept
            return kept

        return rebuild(graph, rule)

    def _key(self, node: Node, operands: tuple[Node, ...]) -> Hashable:
        if node.data is not None:
            if node.type.bytes <= self.compared:
                return ("constant", node.type, node.data.tobytes())
            return ("constant", node.type, node.data.__array_interface__["data"][0])
        # Printed attributes distinguish 1 from True and 0.0 from -0.0, which hash alike, and give equal NaNs one key.
        attrs = tuple((key, print_attr(node.attrs[key])) for key in sorted(node.attrs))
        return (node.op, attrs, operands)
