"""merge-matmuls: merge matmuls of one operand with several weights into one matmul.

    q = x @ wq + bq                       all = x @ [wq wk wv] + [bq bk bv]
    k = x @ wk + bk              ->       q, k, v = slices of all
    v = x @ wv + bv

For machines on which one large product is faster than several small ones. It applies only if attention is the only
reader of the results: attention reads slices in place, while other readers would need copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_

import numpy as np

from tilewright.graph.ir import Graph, Node, constant, rebuild
from tilewright.graph.op import apply
from tilewright.rewrites.base import Pass


@dataclass(frozen=True)
class MergeMatmuls(Pass):
    name = "merge-matmuls"

    def run(self, graph: Graph) -> Graph:
        users = graph.users()
        outputs = frozenset(graph.outputs)
        merged: dict[Node, tuple[Sequence[_Branch], int]] = {}
        for siblings in _siblings(graph).values():
            branches = [b for node in siblings if (b := _branch(node, users, outputs)) is not None]
            biased = {branch.bias is not None for branch in branches}
            if len(branches) > 1 and len(biased) == 1:
                for number, branch in enumerate(branches):
                    merged[branch.result] = (branches, number)
        if not merged:
            return graph
        return rebuild(graph, _rule(merged))


@dataclass(frozen=True, eq=False)
class _Branch:
    """A product with its bias, if any."""

    product: Node
    bias: Node | None
    result: Node

    @property
    def weight(self) -> np.ndarray:
        data = self.product.inputs[1].data
        assert data is not None
        return data


def _siblings(graph: Graph) -> dict[tuple[Node, object], list[Node]]:
    """Products with a constant matrix, grouped by their other operand."""
    found: dict[tuple[Node, object], list[Node]] = {}
    for node in graph.nodes():
        if node.op == "matmul" and node.inputs[1].is_constant and node.inputs[1].type.rank == 2:
            found.setdefault((node.inputs[0], node.dtype), []).append(node)
    return found


def _branch(node: Node, users: Mapping[Node, Sequence[Node]], outputs: frozenset[Node]) -> _Branch | None:
    readers = users[node]
    bias, result = None, node
    if len(readers) == 1 and readers[0].op == "add":
        others = [operand for operand in readers[0].inputs if operand is not node]
        if len(others) == 1 and others[0].is_constant and others[0].shape == node.shape[-1:]:
            bias, result = others[0], readers[0]
    read = not outputs & {node, result} and _only_attention(result, users, outputs)
    return _Branch(node, bias, result) if read else None


def _only_attention(node: Node, users: Mapping[Node, Sequence[Node]], outputs: frozenset[Node]) -> bool:
    """Whether attention, through reshapes and permutes, is its only reader."""
    if node in outputs or not users[node]:
        return False
    return all(
        user.op == "attention"
        or (user.op in ("reshape", "permute") and _only_attention(user, users, outputs))
        for user in users[node]
    )


def _rule(
    merged: Mapping[Node, tuple[Sequence[_Branch], int]],
) -> Callable[[Node, tuple[Node, ...]], Node | None]:
    made: dict[int, Node] = {}

    def whole(branches: Sequence[_Branch], data: Node) -> Node:
        known = made.get(id(branches))
        if known is None:
            first = branches[0]
            weight = constant(np.concatenate([branch.weight for branch in branches], axis=1))
            source = reduce(or_, (branch.product.source for branch in branches))
            known = apply("matmul", data, weight, name=first.product.name, source=source)
            if first.bias is not None:
                biases = [b.bias.data for b in branches if b.bias is not None and b.bias.data is not None]
                both = constant(np.concatenate(biases))
                known = apply("add", known, both, name=first.result.name, source=source)
            made[id(branches)] = known
        return known

    def rule(node: Node, operands: tuple[Node, ...]) -> Node | None:
        if node not in merged:
            return None
        branches, number = merged[node]
        data = operands[0]
        if node is not branches[number].product:  # the sum: one of its operands is the original product
            product = next(o for o in operands if o.op == "matmul")
            data = product.inputs[0]
        all_of_it = whole(branches, data)
        begin = sum(branch.weight.shape[1] for branch in branches[:number])
        rank = all_of_it.type.rank
        starts, stops = [0] * rank, list(all_of_it.shape)
        starts[-1], stops[-1] = begin, begin + branches[number].weight.shape[1]
        return apply(
            "slice",
            all_of_it,
            starts=tuple(starts),
            stops=tuple(stops),
            steps=(1,) * rank,
            name=node.name,
            source=node.source,
        )

    return rule
