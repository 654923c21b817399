"""Merge task calls: helpers for rewrites of a partition."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from tilewright.graph.ir import Graph, Node, input_node
from tilewright.graph.op import apply
from tilewright.graph.task import Partition, Task, TaskCall
from tilewright.support.layers import merged


def reader_counts(partition: Partition) -> Counter[Node]:
    """How often each buffer is read. A call may read one twice, as two operands."""
    return Counter(partition.buffer_of(node) for call in partition.calls for node in call.inputs)


def with_producer(call: TaskCall, node: Node, before: TaskCall) -> TaskCall:
    """`call` merged with the computation of one of its inputs."""
    operands = [*(each for each in call.inputs if each is not node), *before.inputs]
    unique = list(dict.fromkeys(operands))
    number = {each: index for index, each in enumerate(unique)}
    inside = dict(zip(before.task.graph.inputs, before.inputs, strict=True))
    produced = _rebuilt(
        before.task.output, {body: input_node(number[x], x.type) for body, x in inside.items()}
    )
    if produced.shape != node.shape:
        produced = apply("reshape", produced, shape=node.shape)
    outer = {
        body: produced if x is node else input_node(number[x], x.type)
        for body, x in zip(call.task.graph.inputs, call.inputs, strict=True)
    }
    output = _rebuilt(call.task.output, outer)
    inputs = {found.attrs["index"]: found for found in Graph((), (output,)).nodes() if found.is_input}
    graph = Graph(tuple(inputs[index] for index in range(len(unique))), (output,))
    constants = frozenset(
        number[x]
        for each in (call, before)
        for index, x in enumerate(each.inputs)
        if index in each.task.constants and x in number
    )
    return TaskCall(
        Task(graph, constants),
        tuple(unique),
        call.output,
        call.name,
        call.variant,
        merged(before.layers, call.layers),
    )


def with_operand(task: Task, node: Node, other: Node) -> Task:
    """The task with another value instead of one of its inputs, from which that value is computed."""
    output = _rebuilt(task.output, {**{each: each for each in task.graph.inputs}, other: other, node: other})
    return Task(Graph(task.graph.inputs, (output,)), task.constants)


def _rebuilt(output: Node, known: dict[Node, Node]) -> Node:
    """The node again, with other operands."""
    made = dict(known)
    for node in Graph((), (output,)).nodes():
        if node not in made:
            made[node] = (
                node if node.is_constant else replace(node, inputs=tuple(made[x] for x in node.inputs))
            )
    return made[output]
