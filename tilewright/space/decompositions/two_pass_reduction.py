"""Two-pass reductions of many rows to few results, with contiguous rows.

    red(x, over rows)  ->  partial[p, n] = red(x[rows of part p, n])     (a thread for a few neighbours, in float32)
                           red(partial, over p), and the epilogue

The parts are combined in a fixed order, so the result has the same bits every time.
"""

from __future__ import annotations

from tilewright.dtypes import DType
from tilewright.graph.combined import KINDS, Combined, combined_of
from tilewright.graph.ir import Node, rebuild
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.hw.gpu import GpuMachine
from tilewright.space.decompositions.decomposed import CutVariant, Decomposed
from tilewright.space.implementation import SubTask, cut_at
from tilewright.space.sketches.cuda.block_reduction import BlockReduction
from tilewright.space.template import Applied, GpuWork
from tilewright.space.templates.cuda.default import Default

NAME = "two-pass-reduction"
_NEIGHBOURS = 8  # results per thread
_BUSY = 1_024  # threads per multiprocessor
_NEARLY_ENOUGH = 8  # number of parts below which a second kernel is not worth it
_MIN_ROWS, _MAX_PARTS = 32, 2_048  # minimum rows of a part; maximum parts of a reduction
_COUNTS = 5  # part counts tried around the one that fills the GPU


class TwoPassReduction:
    name = NAME

    def apply(self, work: GpuWork) -> Applied | None:
        found = _reduction(work.task)
        if found is None:
            return None
        variants = {}
        for count in _counts(found[1], work.machine):
            subtasks = in_parts(work.task, *found, count)
            first, rest = (GpuWork(subtask.task, work.machine, work.numerics) for subtask in subtasks)
            inner = BlockReduction().apply(rest) or Default().apply(rest)
            if first.formula is not None and inner is not None:
                variants[count] = CutVariant(subtasks, 1, inner)
        if len({variant.inner.space.template for variant in variants.values()}) > 1:
            # The knobs of one template only: the default program has none, and could not be distinguished.
            variants = {n: v for n, v in variants.items() if v.inner.space.template == BlockReduction.name}
        return Decomposed(NAME, work, variants, "count") if variants else None


def _counts(rows: Combined, machine: GpuMachine) -> list[int]:
    """Part counts that keep a GPU busy, the best first; none if the reduction does so without splitting."""
    wanted = _BUSY * machine.sms * _NEIGHBOURS / (rows.parts * rows.other_size)
    if wanted <= _NEARLY_ENOUGH or rows.other_size % _NEIGHBOURS:
        return []
    most = min(_MAX_PARTS, rows.size // _MIN_ROWS)
    possible = [count for count in range(2, most + 1) if rows.size % count == 0]
    return sorted(sorted(possible, key=lambda count: max(count / wanted, wanted / count))[:_COUNTS])


def _reduction(task: Task) -> tuple[Node, Combined] | None:
    """The only reduction of the task's inputs, if it is over rows."""
    graph = task.graph
    found = [node for node in graph.nodes() if node.op in KINDS]
    if len(found) != 1 or len(graph.inputs) != 1 or not found[0].inputs[0].is_input:
        return None
    rows = combined_of(found[0])
    if rows is None or rows.along or len(graph.users()[graph.inputs[0]]) > 1:
        return None
    return found[0], rows


def in_parts(task: Task, node: Node, of: Combined, count: int) -> tuple[SubTask, SubTask]:
    """red(x)  ->  red of (red of each part, in float32)."""
    partial: list[Node] = []

    def rule(each: Node, operands: tuple[Node, ...]) -> Node | None:
        if each is not node:
            return None
        wide = apply("cast", operands[0], dtype=DType.F32)
        parts = (count, of.size // count)
        shape = (of.other_size * of.parts, *parts) if of.along else (of.parts, *parts, of.other_size)
        partial.append(apply(node.op, apply("reshape", wide, shape=shape), axes=(2,), keepdims=False))
        total = apply(node.op, partial[0], axes=(1,), keepdims=False)
        return apply("reshape", apply("cast", total, dtype=node.dtype), shape=node.shape)

    graph = rebuild(task.graph, rule)
    return cut_at(task, graph, partial[0])
