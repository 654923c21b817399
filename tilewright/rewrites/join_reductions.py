"""join-reductions: merge a GEMM or convolution with the reduction of its results into one task.

    [conv + add + relu]  [mean]   ->   [conv + add + relu + mean]

Fusion keeps the two separate, since only some kernels can do both. The pair is an alternative task with its own
candidates, and is used if it is faster than the two separate tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from tilewright.graph.combined import KINDS, combined_of
from tilewright.graph.ir import Node
from tilewright.graph.op import Fusion, op_of
from tilewright.graph.task import Partition, Task, TaskCall
from tilewright.rewrites.calls import reader_counts, with_producer

# Decides whether a product and the reduction after it should be one call, the third argument.
_Join = Callable[[TaskCall, TaskCall, TaskCall], bool]


@dataclass(frozen=True)
class Alternative:
    """Two tasks that one could replace, and how often."""

    joined: Task
    separate: tuple[Task, Task]
    calls: int = 1


def alternatives(partitions: Sequence[Partition]) -> dict[str, Alternative]:
    """The pairs that could be joined, by the key of the joined task."""
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
    """The partition with those pairs joined whose joined task's key is in `wanted`."""
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
    """The value that a call reads only to reduce its rows or columns."""
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
