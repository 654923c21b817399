"""The implementation of a task: one kernel, or several parts that run in sequence.

A part is one of Tilewright's kernels (a loop Program, or a tensor-core kernel described as data), a tile kernel, or a
library call.
On a CPU an implementation has one part. On a GPU a library call may have kernels around it, and a decomposition such
as split-K has two.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from tilewright.errors import InternalError
from tilewright.graph.ir import Graph, Node, input_node
from tilewright.graph.task import Task
from tilewright.loops.gemmini.kernel import GemminiKernel
from tilewright.loops.gpu.attention import TensorAttention
from tilewright.loops.gpu.chain import TensorChain
from tilewright.loops.gpu.tensor import TensorGemm
from tilewright.loops.ir import Program
from tilewright.loops.verify import verify_program
from tilewright.runtime.packing import Packing
from tilewright.runtime.plan import VendorCall
from tilewright.space.tile_operator import TileCall

# The input of code generation.
Kernel: TypeAlias = Program | TensorGemm | TensorAttention | TensorChain | TileCall | GemminiKernel


@dataclass(frozen=True, eq=False)
class Part:
    """One kernel or one library call. `operands` and `result` are nodes of the graph that the task was cut in.

    `packings`: how a call's operands are stored; operands beyond its end are stored unchanged.
    """

    task: Task
    operands: tuple[Node, ...]
    result: Node
    body: Kernel | VendorCall
    packings: tuple[Packing | None, ...] = ()

    @property
    def call(self) -> VendorCall | None:
        return self.body if isinstance(self.body, VendorCall) else None


@dataclass(frozen=True, eq=False)
class Implementation:
    """The parts that compute a task; the last one computes its result. `inputs` are the task's inputs as nodes of the
    cut graph."""

    inputs: tuple[Node, ...]
    parts: tuple[Part, ...]

    @classmethod
    def single(cls, task: Task, body: Kernel) -> Implementation:
        return cls(task.graph.inputs, (Part(task, task.graph.inputs, task.output, body),))

    @property
    def uses_library(self) -> bool:
        return any(part.call is not None for part in self.parts)

    @property
    def program(self) -> Program:
        """The program, for an implementation that is one loop program."""
        if len(self.parts) != 1 or not isinstance(self.parts[0].body, Program):
            raise InternalError("this implementation is more than one loop program")
        return self.parts[0].body

    def verify(self) -> None:
        for part in self.parts:
            if isinstance(part.body, Program):
                verify_program(part.body)


@dataclass(frozen=True, eq=False)
class SubTask:
    """A part whose implementation is not chosen yet."""

    task: Task
    operands: tuple[Node, ...]
    result: Node

    def by(self, body: Kernel | VendorCall, packings: tuple[Packing | None, ...] = ()) -> Part:
        return Part(self.task, self.operands, self.result, body, packings)


def cut(
    graph: Graph, constants: Collection[Node], parts: Sequence[tuple[Collection[Node], Node]]
) -> list[SubTask]:
    """Cut a graph into sub-tasks: which nodes each computes, and which of them other sub-tasks read."""
    order = graph.nodes()
    return [
        _subtask([node for node in order if node in members], result, constants) for members, result in parts
    ]


def cut_at(task: Task, graph: Graph, value: Node) -> tuple[SubTask, SubTask]:
    """Cut a task, given as `graph`, in two: the nodes that compute `value`, and the rest."""
    constants = [graph.inputs[number] for number in task.constants]
    computed = [node for node in graph.nodes() if not (node.is_input or node.is_constant)]
    before = set(Graph(graph.inputs, (value,)).nodes())
    first = [node for node in computed if node in before]
    rest = [node for node in computed if node not in before]
    before_subtask, rest_subtask = cut(graph, constants, [(first, value), (rest, graph.outputs[0])])
    return before_subtask, rest_subtask


def _subtask(members: Sequence[Node], result: Node, constants: Collection[Node]) -> SubTask:
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
    return SubTask(Task(graph, kept), tuple(operands), result)
