"""expand: replace each call by the calls of its chosen implementation's parts.

    [conv + add + clamp]   ->   [permute]  [conv: a library's]  [add + clamp]

Movement that is the only reader of other movement is then merged with it: for example, a copy before a library call
and the permute of the model's input before that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from tilewright.graph.ir import Node
from tilewright.graph.provenance import UNKNOWN
from tilewright.graph.task import Partition, Task, TaskCall
from tilewright.rewrites.calls import reader_counts, with_producer

_MOVEMENT = ("permute", "reshape", "pad", "slice")


class Part(Protocol):
    """A part of a task's implementation, as far as the graph is concerned."""

    @property
    def task(self) -> Task: ...

    @property
    def operands(self) -> tuple[Node, ...]: ...

    @property
    def result(self) -> Node: ...


class Parted(Protocol):
    """A task's implementation. `inputs` and the operands and results of its parts are nodes of one graph."""

    @property
    def inputs(self) -> tuple[Node, ...]: ...

    @property
    def parts(self) -> Sequence[Part]: ...


@dataclass(frozen=True)
class Expanded:
    """A partition whose calls are one kernel or library call each. By call key: `parts`, what computes it, and
    `owner`, the key of the task it belongs to; merged movement is in `joined` instead, as a task to be computed."""

    partition: Partition
    parts: Mapping[str, Part]
    joined: Mapping[str, Task]
    owner: Mapping[str, str]


def expand(partition: Partition, chosen: Mapping[str, Parted], names: Mapping[str, str]) -> Expanded:
    """`chosen`: by task key. `names`: the name of the chosen candidate, since a part may belong to several
    candidates."""
    calls: list[TaskCall] = []
    parts: dict[str, Part] = {}
    owner: dict[str, str] = {}
    for call in partition.calls:
        if not call.output.type.size:
            calls.append(call)
            continue
        parted = chosen[call.task.key]
        if len(parted.parts) == 1 and parted.parts[0].task == call.task:
            parts.setdefault(call.key, parted.parts[0])
            owner.setdefault(call.key, call.task.key)
            calls.append(call)
            continue
        values = dict(zip(parted.inputs, call.inputs, strict=True))
        for number, part in enumerate(parted.parts):
            last = number == len(parted.parts) - 1
            output = call.output if last else replace(part.result, name="", source=UNKNOWN)
            values[part.result] = output
            name = call.name if last else f"{call.name}.{number}"
            inputs = tuple(values[node] for node in part.operands)
            made = TaskCall(part.task, inputs, output, name, names[call.task.key], call.layers)
            parts.setdefault(made.key, part)
            owner.setdefault(made.key, call.task.key)
            calls.append(made)
    whole = replace(partition, calls=tuple(calls))
    return _with_joined_movement(whole, parts, owner)


def _with_joined_movement(partition: Partition, parts: Mapping[str, Part], owner: dict[str, str]) -> Expanded:
    """Movement is merged only if one of the two is a part of an expanded task; what fusion kept separate stays
    separate."""
    readers = reader_counts(partition)
    calls: list[TaskCall] = []
    writer: dict[Node, TaskCall] = {}
    joined: dict[str, Task] = {}
    for call in partition.calls:
        made = call
        if _is_movement(call):
            for node in call.inputs:
                buffer = partition.buffer_of(node)
                before = writer.get(buffer)
                alone = readers[buffer] == 1 and buffer not in partition.graph.outputs
                fragments = before is not None and (call.variant or before.variant)
                if before is not None and fragments and alone and _is_movement(before):
                    made = with_producer(made, node, before)
                    calls.remove(before)
            if made is not call:
                joined[made.key] = made.task
                owner.setdefault(made.key, owner[call.key])
        calls.append(made)
        writer[made.output] = made
    result = replace(partition, calls=tuple(calls))
    result.check()
    kept = {call.key for call in calls}
    return Expanded(
        result,
        {key: part for key, part in parts.items() if key in kept and key not in joined},
        {key: task for key, task in joined.items() if key in kept},
        owner,
    )


def _is_movement(call: TaskCall) -> bool:
    nodes = [node for node in call.task.graph.nodes() if not (node.is_input or node.is_constant)]
    return bool(nodes) and all(node.op in _MOVEMENT for node in nodes)
