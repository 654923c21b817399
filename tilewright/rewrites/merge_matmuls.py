"""merge-matmuls: merge matmuls of one operand with several weights into one matmul (horizontal fusion).

    q = x @ wq + bq                       all = x @ [wq wk wv] + [bq bk bv]
    k = x @ wk + bk              ->       q, k, v = slices of all
    v = x @ wv + bv

One large product reads its operand once and starts one kernel. Attention reads slices in place; other readers fuse
them or need copies, and an epilogue may get a kernel of its own. So the matmuls are merged where the kernels of both
forms, up to the next contraction or reduction, are predicted to be faster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_

import numpy as np

from tilewright.graph.ir import Graph, Node, constant, rebuild
from tilewright.graph.op import Fusion, apply, op_of
from tilewright.rewrites.base import Pass
from tilewright.rewrites.local import Judge, part_of_graph

_MAX_NODES = 48  # of the neighbourhood that is compared

_Merged = Mapping[Node, tuple[Sequence["_Branch"], int]]


@dataclass(frozen=True)
class MergeMatmuls(Pass):
    """`judge` None: merge all whose only reader is attention."""

    name = "merge-matmuls"

    judge: Judge | None = None

    def run(self, graph: Graph) -> Graph:
        users = graph.users()
        outputs = frozenset(graph.outputs)
        merged: dict[Node, tuple[Sequence[_Branch], int]] = {}
        for siblings in _siblings(graph).values():
            for every in _mergeable([_branch(node, users, outputs) for node in siblings]):
                of_attention = [b for b in every if _only_attention(b.result, users, outputs)]
                for branches in (every, of_attention) if len(of_attention) < len(every) else (every,):
                    if len(branches) > 1 and self._is_faster(graph, branches, users, outputs):
                        merged |= {branch.result: (branches, n) for n, branch in enumerate(branches)}
                        break
        return rebuild(graph, _rule(merged)) if merged else graph

    def _is_faster(
        self,
        graph: Graph,
        branches: Sequence[_Branch],
        users: Mapping[Node, list[Node]],
        outputs: frozenset[Node],
    ) -> bool:
        if self.judge is None:
            return all(_only_attention(branch.result, users, outputs) for branch in branches)
        around = _neighbourhood(branches, users)
        if len(around) > _MAX_NODES:
            return False
        before, made = part_of_graph(graph, around, users)
        inner = [
            _Branch(made[b.product], b.bias, made[b.result], made[b.product].inputs[1]) for b in branches
        ]
        after = rebuild(before, _rule({branch.result: (inner, n) for n, branch in enumerate(inner)}))
        return self.judge.prefers(after, before)


@dataclass(frozen=True, eq=False)
class _Branch:
    """A product with its bias, if any."""

    product: Node
    bias: Node | None
    result: Node
    weights: Node

    @property
    def weight(self) -> np.ndarray:
        data = self.weights.data
        assert data is not None
        return data


def _siblings(graph: Graph) -> dict[tuple[Node, object], list[Node]]:
    """Products with a constant matrix, grouped by their other operand."""
    found: dict[tuple[Node, object], list[Node]] = {}
    for node in graph.nodes():
        if node.op == "matmul" and node.inputs[1].is_constant and node.inputs[1].type.rank == 2:
            found.setdefault((node.inputs[0], node.dtype), []).append(node)
    return {key: nodes for key, nodes in found.items() if len(nodes) > 1}


def _mergeable(branches: Sequence[_Branch]) -> list[list[_Branch]]:
    """Those with a bias, and those without."""
    sorted_out = [[b for b in branches if (b.bias is not None) is biased] for biased in (True, False)]
    return [same for same in sorted_out if len(same) > 1]


def _branch(node: Node, users: Mapping[Node, Sequence[Node]], outputs: frozenset[Node]) -> _Branch:
    readers = users[node]
    bias, result = None, node
    if len(readers) == 1 and readers[0].op == "add" and node not in outputs:
        others = [operand for operand in readers[0].inputs if operand is not node]
        if len(others) == 1 and others[0].is_constant and others[0].shape == node.shape[-1:]:
            bias, result = others[0], readers[0]
    return _Branch(node, bias, result, node.inputs[1])


def _only_attention(node: Node, users: Mapping[Node, Sequence[Node]], outputs: frozenset[Node]) -> bool:
    """Whether attention, through reshapes and permutes, is its only reader."""
    if node in outputs or not users[node]:
        return False
    return all(
        user.op == "attention"
        or (user.op in ("reshape", "permute") and _only_attention(user, users, outputs))
        for user in users[node]
    )


def _neighbourhood(branches: Sequence[_Branch], users: Mapping[Node, Sequence[Node]]) -> list[Node]:
    """The branches, the elementwise work and movement after them, and the attention that reads it."""
    found: dict[Node, None] = {}
    for branch in branches:
        found |= dict.fromkeys([branch.product, branch.result])
    waiting = [branch.result for branch in branches]
    while waiting and len(found) <= _MAX_NODES:
        for user in users[waiting.pop()]:
            kind = op_of(user.op).fusion
            moves = kind in (Fusion.ELEMENTWISE, Fusion.INJECTIVE) and user.op != "concat"
            if user not in found and (moves or user.op == "attention"):
                found[user] = None
                if user.op != "attention":
                    waiting.append(user)
    return list(found)


def _rule(merged: _Merged) -> Callable[[Node, tuple[Node, ...]], Node | None]:
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
