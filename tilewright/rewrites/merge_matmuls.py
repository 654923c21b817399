"""merge-matmuls: merge matmuls, or convolutions, of one operand into one (horizontal fusion).

    q = x @ wq + bq                       all = x @ [wq wk wv] + [bq bk bv]
    k = x @ wk + bk              ->       q, k, v = slices of all
    v = x @ wv + bv

    a = relu(conv(x, wa) + ba)            both = relu(conv(x, [wa wb]) + [ba bb])
    b = relu(conv(x, wb) + bb)     ->     a, b = slices of both

One large product reads its operand once and starts one kernel. Convolutions need the same window, 1x1 or larger, and
an activation is merged where all have the same. Attention reads slices in place; other readers fuse
them or need copies, and an epilogue may get a kernel of its own. So the matmuls are merged where the kernels of both
forms, up to the next contraction or reduction, are predicted to be faster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_

import numpy as np

from tilewright.graph.ir import Graph, Node, constant, rebuild
from tilewright.graph.op import Fusion, apply, op_of
from tilewright.graph.ops.layouts import LAST
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
        inner = [replace(branch, members=tuple(made[node] for node in branch.members)) for branch in branches]
        after = rebuild(before, _rule({branch.result: (inner, n) for n, branch in enumerate(inner)}))
        return self.judge.prefers(after, before)


@dataclass(frozen=True, eq=False)
class _Branch:
    """A product with its bias and activation, if any: the nodes from the product to the result."""

    members: tuple[Node, ...]
    bias: Node | None
    activation: Node | None

    @property
    def product(self) -> Node:
        return self.members[0]

    @property
    def result(self) -> Node:
        return self.members[-1]

    @property
    def weight(self) -> np.ndarray:
        data = self.product.inputs[1].data
        assert data is not None
        return data

    @property
    def form(self) -> object:
        """Branches of equal form can be merged."""
        after = self.activation
        return self.bias is not None, None if after is None else (after.op, repr(after.attrs))


def _siblings(graph: Graph) -> dict[tuple[Node, object], list[Node]]:
    """Products with constant weights, grouped by their other operand and their form."""
    found: dict[tuple[Node, object], list[Node]] = {}
    for node in graph.nodes():
        if node.op not in ("matmul", "conv") or not node.inputs[1].is_constant:
            continue
        weight = node.inputs[1]
        if node.op == "matmul" and weight.type.rank == 2:
            found.setdefault((node.inputs[0], node.dtype), []).append(node)
        elif (
            node.op == "conv"
            and node.attrs["groups"] == 1
            and node.attrs["layout"] in (LAST, "channels_first")
        ):
            window = [size for axis, size in enumerate(weight.shape) if axis not in _channel_axes(node)]
            found.setdefault((node.inputs[0], (node.dtype, repr((window, node.attrs)))), []).append(node)
    return {key: nodes for key, nodes in found.items() if len(nodes) > 1}


def _channel_axes(conv: Node) -> tuple[int, int]:
    """The axes of output and input channels in a convolution's weight."""
    rank = conv.inputs[1].type.rank
    return (rank - 1, rank - 2) if conv.attrs["layout"] == LAST else (0, 1)


def _axes(product: Node) -> tuple[int, int]:
    """The axis of the columns, or output channels, in the weight and in the result."""
    if product.op == "matmul":
        return 1, product.type.rank - 1
    return _channel_axes(product)[0], product.type.rank - 1 if product.attrs["layout"] == LAST else 1


def _mergeable(branches: Sequence[_Branch]) -> list[list[_Branch]]:
    """Those of equal form: with a bias or without, and with the same activation."""
    forms: dict[object, list[_Branch]] = {}
    for branch in branches:
        forms.setdefault(branch.form, []).append(branch)
    return [same for same in forms.values() if len(same) > 1]


def _branch(node: Node, users: Mapping[Node, Sequence[Node]], outputs: frozenset[Node]) -> _Branch:
    members, bias, activation = [node], None, None

    def next_one() -> Node | None:
        """The only reader of the last node."""
        readers = users[members[-1]]
        return readers[0] if len(readers) == 1 and members[-1] not in outputs else None

    reader, axis = next_one(), _axes(node)[1]
    if reader is not None and reader.op == "add":
        others = [operand for operand in reader.inputs if operand is not node]
        wanted = (node.shape[axis], *(1,) * (node.type.rank - 1 - axis))
        if len(others) == 1 and others[0].is_constant and others[0].shape == wanted:
            members.append(reader)
            bias, reader = others[0], next_one()
    if reader is not None and len(reader.inputs) == 1 and op_of(reader.op).fusion is Fusion.ELEMENTWISE:
        members.append(reader)
        activation = reader
    return _Branch(tuple(members), bias, activation)


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
        found |= dict.fromkeys(branch.members)
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
            axis, _ = _axes(first.product)
            weight = constant(np.concatenate([branch.weight for branch in branches], axis=axis))
            source = reduce(or_, (node.source for branch in branches for node in branch.members))
            op, attrs = first.product.op, first.product.attrs
            known = apply(op, data, weight, name=first.product.name, source=source, **attrs)
            if first.bias is not None:
                biases = [b.bias.data for b in branches if b.bias is not None and b.bias.data is not None]
                both = constant(np.concatenate(biases))
                known = apply("add", known, both, name=first.members[1].name, source=source)
            if first.activation is not None:
                op, attrs = first.activation.op, first.activation.attrs
                known = apply(op, known, name=first.result.name, source=source, **attrs)
            made[id(branches)] = known
        return known

    def rule(node: Node, operands: tuple[Node, ...]) -> Node | None:
        if node not in merged:
            return None
        branches, number = merged[node]
        for _ in branches[number].members[1:]:  # back from the result to the product
            operands = next(operand for operand in operands if not operand.is_constant).inputs
        all_of_it = whole(branches, operands[0])
        _, axis = _axes(branches[number].product)
        begin = sum(branch.product.shape[axis] for branch in branches[:number])
        rank = all_of_it.type.rank
        starts, stops = [0] * rank, list(all_of_it.shape)
        starts[axis], stops[axis] = begin, begin + branches[number].product.shape[axis]
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
