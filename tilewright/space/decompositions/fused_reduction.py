"""A GEMM or convolution fused with a reduction of its results: one kernel, or two with a small intermediate.

    red(epilogue(a @ b), over rows or columns)  ->  partial[p, n] = red(epilogue(a @ b)[rows of part p, n])
                                                    red(partial, over p), and the rest

A part is at most as long as a tile. If one part covers everything, there is no second kernel.
"""

from __future__ import annotations

from tilewright.graph.combined import KINDS, Combined, combined_of
from tilewright.graph.ir import Node
from tilewright.graph.task import Task
from tilewright.space.decompositions.decomposed import CutVariant, Decomposed
from tilewright.space.decompositions.two_pass_reduction import in_parts
from tilewright.space.implementation import SubTask
from tilewright.space.template import Applied, GpuWork
from tilewright.space.templates.cuda.matmul_reduction import MAX, TensorMatmulReduction

NAME = "fused-reduction"
_MIN = 16  # minimum rows or columns of a part
_FILLED = 0.7  # minimum share of a tile that is used
_CUTS = 4  # number of smallest part counts that are compared


class FusedReduction:
    name = NAME

    def apply(self, work: GpuWork) -> Applied | None:
        """If one kernel does it all, this is the template's own config."""
        variants = {}
        for count, subtasks in _cuts_of(work.task):
            first, *rest = (GpuWork(subtask.task, work.machine, work.numerics) for subtask in subtasks)
            inner = TensorMatmulReduction().apply(first)
            if inner is not None and all(each.formula is not None for each in rest):
                variants[count] = CutVariant(subtasks, 0, inner)
        return Decomposed(NAME, work, variants, "parts") if variants else None


def _cuts_of(task: Task) -> list[tuple[int, tuple[SubTask, ...]]]:
    """The number of parts and the sub-tasks of each cut of the task."""
    found = _reduction_of(task)
    if found is None or found[1].producer.is_input:
        return []
    node, of = found
    if node is task.output and of.size <= MAX:
        return []
    possible = [
        count for count in range(1, of.size + 1) if of.size % count == 0 and _MIN <= of.size // count <= MAX
    ]
    well = [count for count in possible if _filled(of.size // count) >= _FILLED]
    return [(count, in_parts(task, node, of, count)) for count in (well or possible)[:_CUTS]]


def _reduction_of(task: Task) -> tuple[Node, Combined] | None:
    """The task's only reduction, if it is over rows or columns."""
    found = [node for node in task.graph.nodes() if node.op in KINDS]
    of = combined_of(found[0]) if len(found) == 1 else None
    return None if of is None else (found[0], of)


def _filled(size: int) -> float:
    tile = _MIN
    while tile < size:
        tile *= 2
    return size / tile
