"""fold-constants: evaluate nodes that depend on no input at compile time.

    %w = constant @weight : f32[768,3072]
    %1 = permute(%w) {axes=(1, 0)}            ->      %1 = constant @weight : f32[3072,768]

Values are those of the oracle in f64, rounded once to the node's type. Large repetitions of data are left alone: a
broadcast or a `full` costs nothing inside the kernel that reads it, but megabytes as a constant. Nodes that exceed
the import budget of work or memory (`support/budget.py`) are left to the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilewright.dtypes import DType
from tilewright.graph.ir import Graph, Node, constant, rebuild
from tilewright.graph.op import Fusion, op_of
from tilewright.graph.oracle import evaluate_node, evaluation_cost
from tilewright.rewrites.base import Pass
from tilewright.support.arrays import permuted
from tilewright.support.budget import WORK_PER_ELEMENT, Budget

MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class FoldConstants(Pass):
    name = "fold-constants"

    large: int = 16 * MEBIBYTE  # a result larger than this must not be
    growth: int = 4  # more than this many times larger than its constant operands
    repeated: int = 64 * 1024  # maximum bytes of a folded repetition of data (broadcast_to, full)

    def run(self, graph: Graph) -> Graph:
        budget = Budget.of_options()
        budget.allowed_work += WORK_PER_ELEMENT * sum(n.type.size for n in graph.nodes() if n.is_constant)

        def rule(node: Node, operands: tuple[Node, ...]) -> Node | None:
            if node.is_constant or not all(operand.is_constant for operand in operands):
                return None
            if not self._worthwhile(node, operands) or not _affordable(node, budget):
                return None
            return folded(node, operands)

        return rebuild(graph, rule)

    def _worthwhile(self, node: Node, operands: tuple[Node, ...]) -> bool:
        size = node.type.bytes
        if node.op in ("broadcast_to", "full"):
            return size <= self.repeated
        return size <= self.large or size <= self.growth * sum(operand.type.bytes for operand in operands)


def _affordable(node: Node, budget: Budget) -> bool:
    """Whether the budget covers the value of `node`, which is then charged. Otherwise it is computed in every
    call."""
    if node.op == "reshape":
        return True
    operations, peak = evaluation_cost(node)
    if not budget.can_work(operations) or not budget.has_room(peak):
        return False
    budget.work(operations, str(node.source))
    budget.hold(node.type.bytes, str(node.source))
    return True


def folded(node: Node, operands: tuple[Node, ...]) -> Node:
    """The constant value of `node` for these constant operands."""
    arrays = [operand.data for operand in operands if operand.data is not None]
    name = node.name or next((operand.name for operand in operands if operand.name), "")
    return constant(_value(node, arrays), name)


def _value(node: Node, arrays: list[np.ndarray]) -> np.ndarray:
    if node.op == "permute":
        return permuted(arrays[0], node.attrs["axes"])
    if node.op == "reshape":
        return arrays[0].reshape(node.shape)  # shares the memory
    if node.op == "cast" and node.dtype is DType.F32 and node.inputs[0].dtype.is_half:
        return arrays[0].astype(np.float32)  # exact: the weights of a 16-bit model need no f64 in between
    # Movement computes nothing, so it needs no f64; for a model's weights the conversion would dominate the cost.
    moves = op_of(node.op).fusion is Fusion.INJECTIVE and node.op != "resize" and arrays
    if moves:
        return np.ascontiguousarray(op_of(node.op).oracle(node.attrs, *arrays)).reshape(node.shape)
    result = np.asarray(evaluate_node(node, arrays, precise=True))
    with np.errstate(over="ignore", invalid="ignore"):
        return np.ascontiguousarray(result.astype(node.dtype.numpy, copy=False)).reshape(node.shape)
