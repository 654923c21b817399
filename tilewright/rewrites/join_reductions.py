"""join-reductions: a GEMM or convolution and the reduction of its results, as one task.

    [conv + add + relu]  [mean]   ->   [conv + add + relu + mean]

Fusion leaves the two apart, since only some kernels can do both. The pair is an alternative: a task of its own, with
candidates of its own, and joined where it is faster than the two apart.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from tilewright.graph.combined import KINDS, combined_of
from tilewright.graph.ir import Node
from tilewright.graph.op import Fusion, op_of
from tilewright.graph.task import Partition, Task, TaskCall
from tilewright.rewrites.calls import reader_counts, with_producer

# Whether a product and the reduction behind it should be one call, which is the third.
_Join = Callable[[TaskCall, TaskCall, TaskCall], bool]


@dataclass(frozen=True)
class Alternative:
    """Two tasks that one could compute, and how often that is so."""

    joined: Task
    separate: tuple[Task, Task]
    calls: int = 1


def alternatives(partitions: Sequence[Partition]) -> dict[str, Alternative]:
    """The pairs that could be joined, by key of the task that they would be."""
    found: dict[str, Alternative] = {}

    def note(before: TaskCall, call: TaskCall, whole: TaskCall) -> bool:
        known = found.get(whole.task.key)
        count = 1 if known is None else known.calls + 1
        found[whole.task.key] = Alternative(whole.task, (before.task, call.task), count)
        return False

    for partition in partitions:
        _walked(partition, note)
    return found


def join_reductions(partition: Partition, wanted: Collection[str]) -> Partition:
    """The partition with those pairs joined whose task's key is one of `wanted`."""
    if not wanted:
        return partition
    return _walked(partition, lambda before, call, whole: whole.task.key in wanted)


def _walked(partition: Partition, join: _Join) -> Partition:
    readers = reader_counts(partition)
    calls: list[TaskCall] = []
    writer: dict[Node, TaskCall] = {}
    for call in partition.calls:
        made, reduced = call, _reduced(call)
        if reduced is not None:
            buffer = partition.buffer_of(reduced)
            before = writer.get(buffer)
            alone = readers[buffer] == 1 and buffer not in partition.graph.outputs
            if before is not None and alone and _is_product(before):
                whole = with_producer(call, reduced, before)
                if join(before, call, whole):
                    calls.remove(before)
                    made = whole
        calls.append(made)
        writer[made.output] = made
    result = replace(partition, calls=tuple(calls))
    result.check()
    return result


def _reduced(call: TaskCall) -> Node | None:
    """What a call reads to combine its rows or columns, and for nothing else."""
    graph = call.task.graph
    found = [node for node in graph.nodes() if node.op in KINDS]
    if len(found) != 1 or not found[0].inputs[0].is_input or combined_of(found[0]) is None:
        return None
    source = found[0].inputs[0]
    return call.inputs[source.attrs["index"]] if len(graph.users()[source]) == 1 else None


def _is_product(call: TaskCall) -> bool:
    """Whether it has a contraction and no reduction."""
    nodes = [node for node in call.task.graph.nodes() if not (node.is_input or node.is_constant)]
    kinds = {op_of(node.op).fusion for node in nodes if node.op != "attention"}
    return Fusion.COMPLEX in kinds and Fusion.REDUCTION not in kinds
