"""Tile kernels as operators of a graph: an operator whose meaning is a reference graph, and whose kernel is data.

`tile_kernel(operator, kernel, reference)`: `reference` is the text of a graph of its inputs, which says what it
computes; its type rule, its oracle and its lowering are those of that graph. `kernel` describes the launch of a tile
kernel that computes the same (`space/tile_operator.py`). A target that cannot run it inlines the reference.
"""

from __future__ import annotations

from functools import lru_cache

from tilewright.errors import TypeRuleError
from tilewright.graph.ir import Graph, Node, rebuild
from tilewright.graph.op import apply
from tilewright.graph.text import parse_graph

NAME = "tile_kernel"


@lru_cache(maxsize=256)
def reference_graph(text: str) -> Graph:
    graph = parse_graph(text, {})
    if len(graph.outputs) != 1:
        raise TypeRuleError(f"the reference of a tile kernel has {len(graph.outputs)} results instead of one")
    return graph


def inlined_node(node: Node, operands: tuple[Node, ...]) -> Node:
    """The reference of a `tile_kernel`, applied to operands."""
    reference = reference_graph(node.attrs["reference"])
    values: dict[Node, Node] = dict(zip(reference.inputs, operands, strict=True))
    for each in reference.nodes():
        if each in values:
            continue
        if each.is_constant:
            values[each] = each
        else:
            inputs = (values[operand] for operand in each.inputs)
            values[each] = apply(each.op, *inputs, name=each.name, source=node.source, **each.attrs)
    return values[reference.outputs[0]]


def inlined(graph: Graph) -> Graph:
    """The graph with references in place of tile kernels."""
    if not has_tile_kernels(graph):
        return graph
    return rebuild(graph, lambda node, operands: inlined_node(node, operands) if node.op == NAME else None)


def has_tile_kernels(graph: Graph) -> bool:
    return any(node.op == NAME for node in graph.nodes())
