"""Chains: tasks with several contractions and norms, of which each reads the one before it.

    y = relu(x @ a); z = relu(y @ b)          two stages: relu(x @ a), and relu(y @ b)
    y = layer_norm(x); z = gelu(y @ b)        two stages: layer_norm(x), and gelu(y @ b)

A *stage* is a contraction or a norm with the padding before it and the elementwise work around it; its result is all
that the next stage reads of it. `chain_of` splits a task into its stages, or says why it is not a chain. Which chains
a kernel computes, and with which part of the intermediate results on chip, is up to templates.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from tilewright.graph.ir import Node
from tilewright.graph.op import Fusion, op_of
from tilewright.graph.task import Task

CONTRACTIONS = ("matmul", "linear", "conv")
NORMS = (
    "layer_norm",
    "rms_norm",
    "softmax",
    "log_softmax",
)  # of rows: each result has the shape of its operand
_MOVED = ("reshape", "pad")  # between two stages: a part of the second


@dataclass(frozen=True)
class Refused:
    """Why a task is not computed in some way, as a clause for people: "the intermediate result is read twice"."""

    reason: str


@dataclass(frozen=True, eq=False)
class ChainStage:
    """One contraction or norm and what belongs to it, in the order of the graph."""

    anchor: Node
    members: tuple[Node, ...]
    result: Node

    @property
    def is_norm(self) -> bool:
        return self.anchor.op in NORMS


@dataclass(frozen=True, eq=False)
class Chain:
    task: Task
    stages: tuple[ChainStage, ...]

    @property
    def between(self) -> tuple[Node, ...]:
        """The intermediate results."""
        return tuple(stage.result for stage in self.stages[:-1])

    @property
    def has_norm(self) -> bool:
        return any(stage.is_norm for stage in self.stages)


def chain_of(task: Task) -> Chain | Refused:
    """Split a task into stages; Refused if it is not a chain with a contraction."""
    nodes = [node for node in task.graph.nodes() if not node.is_input and not node.is_constant]
    anchors = [node for node in nodes if node.op in CONTRACTIONS or node.op in NORMS]
    for node in nodes:
        if node not in anchors and op_of(node.op).fusion not in (Fusion.ELEMENTWISE, Fusion.INJECTIVE):
            return Refused(f"{node.op} is not a GEMM, a convolution, a norm of rows or elementwise")
    if len(anchors) < 2 or all(anchor.op in NORMS for anchor in anchors):
        return Refused("it has fewer than two contractions, and none with a norm")
    level = _levels(nodes, anchors)
    for number, anchor in enumerate(anchors):
        if any(level.get(operand, -1) >= 0 for operand in anchor.inputs[1:]):
            return Refused(f"the weight of {_named(anchor, number)} is computed in the chain")
        if level.get(anchor.inputs[0], -1) != number - 1:
            before = "norm" if number and anchors[number - 1].op in NORMS else "contraction"
            return Refused(f"{_named(anchor, number)} does not read the {before} before it")
    results = []
    for anchor in anchors[1:]:
        node = anchor.inputs[0]
        while node.op in _MOVED:
            node = node.inputs[0]
        results.append(node)
    results.append(task.output)
    stage = _stages(nodes, anchors, level, results)
    for node in nodes:
        for operand in node.inputs:
            if operand not in stage or stage[operand] == stage[node]:
                continue
            if operand is not results[stage[operand]] or stage[node] != stage[operand] + 1:
                return Refused(
                    f"the result of {_named(anchors[stage[operand]], stage[operand])} is read twice"
                )
            if not _leads_to(node, anchors[stage[node]]):
                return Refused(
                    f"the result of {_named(anchors[stage[operand]], stage[operand])} is read twice"
                )
    found = tuple(
        ChainStage(anchor, tuple(node for node in nodes if stage[node] == number), result)
        for number, (anchor, result) in enumerate(zip(anchors, results, strict=True))
    )
    for one, _ in pairwise(found):
        if one.result not in one.members:
            return Refused(f"{_named(one.anchor, 0)} has no result of its own")
    return Chain(task, found)


def _named(anchor: Node, number: int) -> str:
    return f"{anchor.op} {number + 1}"


def _levels(nodes: list[Node], anchors: list[Node]) -> dict[Node, int]:
    """The last contraction or norm that each node depends on; -1: none."""
    number = {anchor: n for n, anchor in enumerate(anchors)}
    level: dict[Node, int] = {}
    for node in nodes:
        before = max((level.get(operand, -1) for operand in node.inputs), default=-1)
        level[node] = number.get(node, before)
    return level


def _stages(
    nodes: list[Node], anchors: list[Node], level: dict[Node, int], results: list[Node]
) -> dict[Node, int]:
    """The stage of each node: that of the anchor it depends on; of the movement before an anchor, and of what depends
    on none, that of the reader."""
    stage = dict(level)
    for number, anchor in enumerate(anchors):
        node = anchor.inputs[0]
        while number and node is not results[number - 1]:
            stage[node] = number
            node = node.inputs[0]
    readers: dict[Node, list[Node]] = {}
    for node in nodes:
        for operand in node.inputs:
            readers.setdefault(operand, []).append(node)
    for node in reversed(nodes):
        if stage[node] < 0:
            stage[node] = min((stage[reader] for reader in readers.get(node, [])), default=0)
    return stage


def _leads_to(node: Node, anchor: Node) -> bool:
    """Whether it is the anchor, or movement before it."""
    at = anchor
    while at is not node:
        if at is not anchor and at.op not in _MOVED:
            return False
        at = at.inputs[0]
        if at.is_input or at.is_constant:
            return False
    return True
