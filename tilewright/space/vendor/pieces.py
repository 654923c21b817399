"""A task cut into pieces that run one after another, each a kernel of ours or a call of a library."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from tilewright.graph.ir import Graph, Node, input_node
from tilewright.graph.op import apply
from tilewright.graph.task import Partition, Task, TaskCall
from tilewright.runtime.packing import Packing
from tilewright.runtime.plan import PREDICTED, Origin, VendorCall
from tilewright.space.space import Config


@dataclass(frozen=True, eq=False)
class Piece:
    """`operands` and `result` are nodes of the graph that was cut."""

    task: Task
    operands: tuple[Node, ...]
    result: Node
    call: VendorCall | None = None  # None: a kernel of ours,
    config: Config | None = None  # of a template; None: the default program
    packings: tuple[
        Packing | None, ...
    ] = ()  # of a call: how its operands are stored; beyond the end: as they are
    origin: Origin = PREDICTED  # of the choice of the way that it is a part of


@dataclass(frozen=True, eq=False)
class Way:
    """One way to compute a task; `config` tells it from the others, and is what is remembered of it."""

    config: Config
    inputs: tuple[Node, ...]  # the task's, in the graph that was cut
    pieces: tuple[Piece, ...]  # the last gives the task's result
    origin: Origin = PREDICTED  # where the choice of it came from

    @property
    def is_ours(self) -> bool:
        return all(piece.call is None for piece in self.pieces)

    @property
    def name(self) -> str:
        return str(self.config) if self.config.values else self.config.template


DEFAULT = Config("default", ())


def ours(task: Task, config: Config = DEFAULT) -> Way:
    """All of it as one kernel of ours."""
    inputs = task.graph.inputs
    made = Piece(task, inputs, task.output, config=None if config == DEFAULT else config)
    return Way(config, inputs, (made,))


def cut(
    graph: Graph, constants: Collection[Node], parts: Sequence[tuple[Collection[Node], Node]]
) -> list[Piece]:
    """The pieces of a graph: of each, which nodes it computes, and which of them the others read."""
    order = graph.nodes()
    pieces = []
    for members, result in parts:
        task, operands = _task([node for node in order if node in members], result, constants)
        pieces.append(Piece(task, operands, result))
    return pieces


def _task(
    members: Sequence[Node], result: Node, constants: Collection[Node]
) -> tuple[Task, tuple[Node, ...]]:
    operands: list[Node] = []
    inside: dict[Node, Node] = {}

    def operand(node: Node) -> Node:
        if node not in inside:
            if node.is_constant:
                inside[node] = node
            else:
                inside[node] = input_node(len(operands), node.type)
                operands.append(node)
        return inside[node]

    for node in members:
        inside[node] = replace(node, inputs=tuple(map(operand, node.inputs)))
    kept = frozenset(number for number, node in enumerate(operands) if node in constants)
    graph = Graph(tuple(inside[node] for node in operands), (inside[result],))
    return Task(graph, kept), tuple(operands)


def refined(partition: Partition, ways: dict[str, Way]) -> tuple[Partition, dict[str, Piece]]:
    """The partition with each call as the calls of its pieces, and the piece behind each of their keys."""
    calls: list[TaskCall] = []
    pieces: dict[str, Piece] = {}
    for call in partition.calls:
        if not call.output.type.size:
            calls.append(call)
            continue
        way = ways[call.task.key]
        values = dict(zip(way.inputs, call.inputs, strict=True))
        for number, piece in enumerate(way.pieces):
            last = number == len(way.pieces) - 1
            output = call.output if last else replace(piece.result, name="", source="")
            values[piece.result] = output
            name = call.name if last else f"{call.name}.{number}"
            inputs = tuple(values[node] for node in piece.operands)
            made = TaskCall(piece.task, inputs, output, name, way.name)
            pieces.setdefault(made.key, replace(piece, origin=way.origin))
            calls.append(made)
    result = _joined(Partition(partition.graph, tuple(calls), partition.views), pieces)
    result.check()
    return result, {call.key: pieces[call.key] for call in result.calls if call.key in pieces}


# -- what is left between libraries -----------------------------------------------------------------------------------


def _joined(partition: Partition, pieces: dict[str, Piece]) -> Partition:
    """Movement that alone reads other movement is one kernel with it: what stands before a library's call, and the
    permute of the model's input before that."""
    readers: dict[Node, int] = {}
    for call in partition.calls:
        for node in {partition.buffer_of(node) for node in call.inputs}:
            readers[node] = readers.get(node, 0) + 1
    calls: list[TaskCall] = []
    writer: dict[Node, TaskCall] = {}
    for call in partition.calls:
        made = call
        if _is_movement(call, pieces):
            for node in call.inputs:
                buffer = partition.buffer_of(node)
                before = writer.get(buffer)
                alone = readers[buffer] == 1 and buffer not in partition.graph.outputs
                if before is not None and alone and _is_movement(before, pieces):
                    made = with_producer(made, node, before)
                    calls.remove(before)
            if made is not call:
                pieces[made.key] = Piece(
                    made.task, made.task.graph.inputs, made.task.output, origin=Origin("default")
                )
        calls.append(made)
        writer[made.output] = made
    return Partition(partition.graph, tuple(calls), partition.views)


def _is_movement(call: TaskCall, pieces: dict[str, Piece]) -> bool:
    piece = pieces.get(call.key)
    if piece is None or piece.call is not None or piece.config is not None:
        return False
    nodes = [node for node in call.task.graph.nodes() if not node.is_input]
    return all(node.op in ("permute", "reshape", "pad", "slice") for node in nodes)


def with_producer(call: TaskCall, node: Node, before: TaskCall) -> TaskCall:
    """`call` with what computes one of its inputs taken in."""
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
    return TaskCall(Task(graph, constants), tuple(unique), call.output, call.name, call.way)


def _rebuilt(output: Node, known: dict[Node, Node]) -> Node:
    """The node again, of other operands."""
    made = dict(known)
    for node in Graph((), (output,)).nodes():
        if node not in made:
            made[node] = (
                node if node.is_constant else replace(node, inputs=tuple(made[x] for x in node.inputs))
            )
    return made[output]
