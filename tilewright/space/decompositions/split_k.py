"""Split-K for GEMMs with few results and a long K, on GPUs without clusters: the sum is cut into parts.

    a[m, k] @ b[k, n]  ->  partial[p, m, n] = a[m, p, k'] @ b[p, k', n]     (a batch of GEMMs, in float32)
                           sum over p of partial, and the epilogue          (a second kernel)

The parts are added in a fixed order, so the result has the same bits every time.
"""

from __future__ import annotations

from dataclasses import replace

from tilewright.dtypes import DType
from tilewright.graph.ir import Graph, Node
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.space.decompositions.decomposed import CutVariant, Decomposed
from tilewright.space.implementation import SubTask, cut_at
from tilewright.space.template import Applied, GpuWork
from tilewright.space.templates.cuda.matmul import TensorCores

NAME = "split-k"
_COUNTS = (2, 4, 8)
_SHORT = (DType.F16, DType.BF16)
_TILE = 128 * 128  # results per block; nothing is gained with as many blocks as multiprocessors
_SHORTEST = 256  # minimum length of a part


class SplitK:
    name = NAME

    def apply(self, work: GpuWork) -> Applied | None:
        anchor = _anchor(work.task.graph)
        if (
            anchor is None or work.machine.clusters
        ):  # blocks of a cluster add up their parts without a second kernel
            return None
        k = anchor.inputs[0].shape[-1]
        if anchor.type.size > _TILE * work.machine.sms:
            return None
        variants = {}
        for count in _COUNTS:
            if k % (8 * count) == 0 and k >= count * _SHORTEST:
                subtasks = in_parts(work.task, anchor, count)
                inner = TensorCores().apply(GpuWork(subtasks[0].task, work.machine, work.numerics))
                if inner is not None:
                    variants[count] = CutVariant(subtasks, 0, inner)
        return Decomposed(NAME, work, variants, "count") if variants else None


def in_parts(task: Task, anchor: Node, count: int) -> tuple[SubTask, SubTask]:
    partial, total = _cut(anchor, count)
    made: dict[Node, Node] = {anchor: total}
    for node in task.graph.nodes():
        if node not in made:
            made[node] = replace(node, inputs=tuple(made[x] for x in node.inputs)) if node.inputs else node
    return cut_at(task, Graph(task.graph.inputs, (made[task.output],)), partial)


def _anchor(graph: Graph) -> Node | None:
    """The only contraction, if it is a GEMM of two matrices among the task's inputs."""
    found = [n for n in graph.nodes() if n.op in ("matmul", "linear", "conv", "attention")]
    if len(found) != 1 or found[0].op not in ("matmul", "linear") or len(found[0].inputs) != 2:
        return None
    (anchor,) = found
    data, weight = anchor.inputs
    plain = data.is_input and weight.is_input and weight.type.rank == 2 and anchor.dtype in _SHORT
    return anchor if plain and data.dtype is weight.dtype is anchor.dtype else None


def _cut(anchor: Node, count: int) -> tuple[Node, Node]:
    """Return (the partial products, their sum as the anchor's result)."""
    data, weight = (apply("cast", x, dtype=DType.F32) for x in anchor.inputs)
    k = data.shape[-1]
    rows = data.type.size // k
    left = apply("permute", apply("reshape", data, shape=(rows, count, k // count)), axes=(1, 0, 2))
    if anchor.op == "linear":
        n = weight.shape[0]
        right = apply("permute", apply("reshape", weight, shape=(n, count, k // count)), axes=(1, 2, 0))
    else:
        right = apply("reshape", weight, shape=(count, k // count, weight.shape[1]))
    partial = apply("matmul", left, right)
    total = apply("cast", apply("sum", partial, axes=(0,), keepdims=False), dtype=anchor.dtype)
    return partial, apply("reshape", total, shape=anchor.shape)
