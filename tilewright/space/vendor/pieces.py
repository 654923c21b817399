"""A task cut into pieces that run one after another, each a kernel of ours or a call of a library."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from tilewright.graph.ir import Graph, Node, input_node
from tilewright.graph.task import Partition, Task, TaskCall
from tilewright.runtime.packing import Packing
from tilewright.runtime.plan import VendorCall
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


@dataclass(frozen=True, eq=False)
class Way:
    """One way to compute a task."""

    name: str
    inputs: tuple[Node, ...]  # the task's, in the graph that was cut
    pieces: tuple[Piece, ...]  # the last gives the task's result

    @property
    def is_ours(self) -> bool:
        return all(piece.call is None for piece in self.pieces)


OURS = "ours"


def ours(task: Task) -> Way:
    """All of it as one kernel of ours."""
    inputs = task.graph.inputs
    return Way(OURS, inputs, (Piece(task, inputs, task.output),))


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
            pieces.setdefault(made.key, piece)
            calls.append(made)
    result = Partition(partition.graph, tuple(calls), partition.views)
    result.check()
    return result, pieces
