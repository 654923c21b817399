"""The common part of library calls: the epilogues that a library supports, and the kernels around its call."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tilewright.dtypes import DType
from tilewright.graph.ir import Graph, Node
from tilewright.graph.task import Task
from tilewright.hw.gpu import GpuMachine
from tilewright.numerics import may_round_to_tf32
from tilewright.runtime.packing import Packing
from tilewright.runtime.plan import VendorCall, View
from tilewright.space.implementation import Implementation, SubTask, cut
from tilewright.space.libraries.strides import strides_of
from tilewright.space.template import Applied, GpuWork
from tilewright.space.templates.cuda.default import Default
from tilewright.space.templates.default import DEFAULT
from tilewright.space.terms import Counted, Roofline

FLOATS = (DType.F16, DType.BF16, DType.F32)
SHORT = (DType.F16, DType.BF16)
_ACTIVATIONS = {"relu": "relu", "gelu": "gelu"}


@dataclass(frozen=True)
class Epilogue:
    """A chain of nodes after a contraction that a library may compute with it."""

    nodes: tuple[Node, ...] = ()
    bias: Node | None = None
    added: Node | None = None
    activation: str = ""


def epilogues(graph: Graph, anchor: Node, numerics: str) -> Iterator[Epilogue]:
    """All epilogues, from the empty one to the longest."""
    users = graph.users()
    found = Epilogue()
    last = anchor
    while True:
        yield found
        readers = users[last]
        if last in graph.outputs or len(readers) != 1 or found.activation:
            return
        following = _with(found, anchor, last, readers[0], numerics)
        if following is None:
            return
        found, last = following, readers[0]


def _with(found: Epilogue, anchor: Node, last: Node, node: Node, numerics: str) -> Epilogue | None:
    nodes = (*found.nodes, node)
    if node.op in _ACTIVATIONS and node.shape == anchor.shape:
        # The library's GELU is the tanh approximation; for 16-bit floats, rounding is coarser than the difference.
        exact = node.op == "gelu" and node.attrs["approximate"] == "none"
        if exact and (numerics == "strict" or node.dtype not in SHORT):
            return None
        return replace(found, nodes=nodes, activation=_ACTIVATIONS[node.op])
    if node.op != "add" or node.shape != anchor.shape or node.dtype is not anchor.dtype:
        return None
    others = [operand for operand in node.inputs if operand is not last]
    if len(others) != 1 or not others[0].is_input:
        return None
    (other,) = others
    if found.bias is None and other.shape[-1:] == anchor.shape[-1:] and other.type.size == anchor.shape[-1]:
        return replace(found, nodes=nodes, bias=other)
    if found.added is None and other.shape == anchor.shape:
        return replace(found, nodes=nodes, added=other)
    return None


def rounded(anchor: Node, numerics: str) -> dict[str, bool]:
    """The library option that allows rounding float32 operands before multiplying."""
    return {"rounded": True} if may_round_to_tf32(numerics) and anchor.dtype is DType.F32 else {}


def anchor_of(graph: Graph, *ops: str) -> Node | None:
    """The only contraction of a graph, if it is one of these operators."""
    found = [node for node in graph.nodes() if node.op in ("matmul", "linear", "conv", "attention")]
    return found[0] if len(found) == 1 and found[0].op in ops else None


def is_for_library(task: Task) -> bool:
    return task.output.dtype in FLOATS and bool(task.output.type.size)


def computed(graph: Graph) -> tuple[Node, ...]:
    return tuple(node for node in graph.nodes() if not (node.is_input or node.is_constant))


def view(shape: tuple[int, ...], strides: tuple[int, ...] | None = None) -> View:
    return View(0, shape, strides_of(shape) if strides is None else strides)


@dataclass(frozen=True)
class Around:
    """A graph cut around its contraction. The library computes `taken`, which includes the anchor; Tilewright's
    kernels compute `before` and the rest."""

    work: GpuWork
    graph: Graph
    taken: tuple[Node, ...]
    before: tuple[Node, ...] = ()

    @cached_property
    def _subtasks(self) -> tuple[list[SubTask], int]:
        """The sub-tasks in order, and the index of the library's."""
        graph = self.graph
        constants = [graph.inputs[number] for number in self.work.task.constants]
        rest = [n for n in computed(graph) if n not in self.taken and n not in self.before]
        parts: list[tuple[tuple[Node, ...], Node]] = []
        if self.before:
            parts.append((self.before, self.before[-1]))
        parts.append((self.taken, self.taken[-1]))
        if rest:
            parts.append((tuple(rest), graph.outputs[0]))
        return cut(graph, constants, parts), len(self.before[:1])

    @property
    def is_possible(self) -> bool:
        """Whether there are kernels for what is around the call."""
        return len(self._kernels) == len(self._subtasks[0]) - 1

    @cached_property
    def _kernels(self) -> dict[int, Applied]:
        """The implementations of the sub-tasks around the call, by index."""
        subtasks, called = self._subtasks
        found = {
            number: Default().apply(GpuWork(subtask.task, self.work.machine, self.work.numerics))
            for number, subtask in enumerate(subtasks)
            if number != called
        }
        return {number: applied for number, applied in found.items() if applied is not None}

    def implementation(
        self, function: str, operands: dict[Node, View], packings: dict[Node, Packing], **call: Any
    ) -> Implementation:
        """`operands`: the views that the library's function takes, in its order (their `argument` is set here)."""
        subtasks, called = self._subtasks
        parts = []
        for number, subtask in enumerate(subtasks):
            if number != called:
                body = self._kernels[number].program(DEFAULT)
                assert not isinstance(body, Implementation)
                parts.append(subtask.by(body))
                continue
            views = tuple(
                View(subtask.operands.index(node), each.shape, each.strides, each.offset)
                for node, each in operands.items()
            )
            packed = tuple(packings.get(node) for node in subtask.operands)
            parts.append(subtask.by(VendorCall(function, views, **call), packed))
        return Implementation(self.graph.inputs, tuple(parts))

    def terms(self, unit: str, busy: float = 1.0) -> Counted:
        """The cost of the call at the library's rate, plus the kernels around it."""
        subtasks, called = self._subtasks
        counted: list[Counted] = []
        for number, subtask in enumerate(subtasks):
            if number == called:
                counted.append(Roofline(subtask.task.flops, subtask.task.bytes, unit, busy, is_call=True))
            elif (terms := self._kernels[number].terms(DEFAULT)) is not None:
                counted.append(terms)
        return tuple(counted)


# Rows and columns of a block of a library's GEMM or convolution, and its speed for large problems.
_TILES = ((128, 128, 1.0), (128, 64, 0.8), (64, 64, 0.5))
_FILL = 128  # steps along K that cost as much as the start and end of a block
_MIN_SPLIT = 512  # minimum steps along K in one part of split-K


def busy_share(machine: GpuMachine, batch: int, m: int, n: int, k: int, splits: bool) -> float:
    """The share of the machine that a library's GEMM keeps busy, with its best tile size. `splits`: it may
    split K."""

    def share(rows: int, columns: int) -> float:
        blocks = batch * math.ceil(m / rows) * math.ceil(n / columns)
        if splits:
            blocks *= max(1, min(machine.sms // max(1, blocks), k // _MIN_SPLIT))
        return blocks / (math.ceil(blocks / machine.sms) * machine.sms)

    return k / (k + _FILL) * max(speed * share(rows, columns) for rows, columns, speed in _TILES)


def unit_of(anchor: Node, numerics: str) -> str:
    if anchor.dtype in SHORT:
        return "tensor16"
    return "tf32" if may_round_to_tf32(numerics) else "scalar"
