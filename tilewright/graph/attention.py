"""Attention as one kernel: which applications of the operator it can compute, and which data movement around them it
includes. Rewrites keep such a node whole, and the template that computes it uses the same predicates."""

from __future__ import annotations

from tilewright.dtypes import DType
from tilewright.graph.ir import Graph, Node

# Movement that only changes how an operand is indexed.
ABSORBED = frozenset(["permute", "reshape", "slice", "broadcast_to"])
_WIDEST = 512  # maximum width of a head: a block of queries and one of results must fit in a core's own cache


def fits_one_kernel(node: Node) -> bool:
    """Whether a tiled kernel can compute this attention: it is not empty, in f32, and its heads have a common
    size."""
    query, key, value = node.inputs[:3]
    extents = (*query.shape[-2:], *key.shape[-2:], *value.shape[-2:], node.type.size)
    widest = max(query.shape[-1], value.shape[-1])
    return node.dtype.compute is DType.F32 and min(extents) > 0 and widest <= _WIDEST


def merges_heads(node: Node) -> bool:
    """Whether the movement after an attention keeps rows of the result whole: [B, H, T, E] -> [B, T, H, E]."""
    return node.op == "permute" and bool(node.attrs["axes"][-1] == node.type.rank - 1)


def attention_in(graph: Graph) -> Node | None:
    """The attention of a graph that consists only of it and of movement that its kernel includes."""
    nodes = [node for node in graph.nodes() if not node.is_input]
    found = [node for node in nodes if node.op == "attention"]
    if len(found) != 1 or not fits_one_kernel(found[0]):
        return None
    (attention,) = found
    after: list[Node] = []
    node = graph.outputs[0]
    while node is not attention:
        if node.op != "reshape" and not merges_heads(node):
            return None
        after.append(node)
        node = node.inputs[0]
    others = [node for node in nodes if node is not attention and node not in after]
    return attention if all(node.op in ABSORBED or node.is_constant for node in others) else None
