"""Tasks: the subgraphs that a graph is cut into, each computed by one kernel and tuned as one unit.

A `Task` is a small graph that is independent of the model around it, so equal parts of a model, or of two models, are
one task with one `key`. A `TaskCall` is a task applied in a graph, and a `Partition` is a whole graph cut into calls.

A buffer holds the row-major bytes of a tensor. A call's `output` node therefore may have another shape than the
task's own result, as long as the number of elements is the same (a reshape costs nothing), and so may its inputs'
buffers: `Partition.views` says which nodes share the buffer of another, whole or a part of it that begins at an
offset.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from tilewright.errors import InternalError
from tilewright.graph.attention import ABSORBED
from tilewright.graph.ir import Graph, Node
from tilewright.graph.op import flops_of
from tilewright.graph.text import print_graph
from tilewright.runtime.plan import FusionReport
from tilewright.support.fingerprint import fingerprint

_LABEL_OPS = 6


@dataclass(frozen=True, eq=False)
class Task:
    """A fused subgraph with exactly one output. Every value from outside, including constants of more than one
    element, is one of its inputs. `constants` are the indices of inputs that are the same in every call; a kernel may
    have them stored in its own order. Tasks are compared by `key`."""

    graph: Graph
    constants: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if len(self.graph.outputs) != 1:
            raise InternalError(f"a task has one output, not {len(self.graph.outputs)}")

    @property
    def output(self) -> Node:
        return self.graph.outputs[0]

    @cached_property
    def text(self) -> str:
        """The text form with canonical names: equal for equal computations."""
        return print_graph(self.graph, names=False)

    @cached_property
    def key(self) -> str:
        return fingerprint("task", 1, self.text, *sorted(self.constants))

    @cached_property
    def label(self) -> str:
        """The operators in order: `conv+add+relu`."""
        nodes = [node for node in self.graph.nodes() if not node.is_input and not node.is_constant]
        ops = [node.attrs["operator"] if node.op == "tile_kernel" else node.op for node in nodes]
        if "attention" in ops:  # the movement around it is free
            ops = [op for op in ops if op not in ABSORBED]
        more = [f"{len(ops) - _LABEL_OPS} more"] if len(ops) > _LABEL_OPS else []
        return "+".join(ops[:_LABEL_OPS] + more)

    @cached_property
    def flops(self) -> int:
        return sum(flops_of(node) for node in self.graph.nodes())

    @cached_property
    def bytes(self) -> int:
        """The minimum bytes to move: each input once, the output once. Of an input that is only sliced or indexed,
        only the part that is read."""
        users = self.graph.users()
        total = self.output.type.bytes
        for node in self.graph.inputs:
            reads = sum(
                user.type.bytes if _reads_part(user, node) else node.type.bytes for user in users[node]
            )
            total += min(reads, node.type.bytes)
        return total

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Task) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return f"<task {self.label} {self.key[:8]}: {self.output.type}>"


def _reads_part(user: Node, operand: Node) -> bool:
    return user.op == "slice" or (user.op in ("take", "take_along") and user.inputs[0] is operand)


@dataclass(frozen=True, eq=False)
class TaskCall:
    """A task applied to nodes of a graph. `output` is the node whose buffer the call writes.

    `way`: the implementation for this call, if a model computes one task in several ways.
    """

    task: Task
    inputs: tuple[Node, ...]  # the graph's inputs, constants, outputs of calls, or views of these
    output: Node
    name: str
    variant: str = ""
    layers: tuple[str, ...] = ()  # layers of the user's model that it computes

    @property
    def key(self) -> str:
        """The key of the kernel that computes it."""
        return f"{self.task.key} {self.variant}" if self.variant else self.task.key

    def __repr__(self) -> str:
        return f"<call {self.name}: {self.task.label}>"


@dataclass(frozen=True)
class Rival:
    """Another cut of a graph that is predicted to take about the same time: both are worth measuring. `settle` returns
    the cheapest cut into tasks with these measured seconds, by key."""

    partition: Partition
    settle: Callable[[Mapping[str, float]], Partition]


@dataclass(frozen=True, eq=False)
class Partition:
    """A graph cut into calls, in a valid execution order.

    `views` maps a node that no call computes to the node whose buffer it shares: both hold the same bytes, in tensors
    of different shapes, or the view is a part of the bytes, from `offsets` on. The target is never itself a view.
    Every output of the graph is written by a call of its own.
    """

    graph: Graph
    calls: tuple[TaskCall, ...]
    views: Mapping[Node, Node] = field(default_factory=dict)
    offsets: Mapping[Node, int] = field(
        default_factory=dict
    )  # byte offsets of views that are smaller than their target
    fusion: FusionReport | None = None  # how it was chosen
    rival: Callable[[], Rival | None] = lambda: None  # finds the one to be measured as well, if there is one

    def buffer_of(self, node: Node) -> Node:
        """The node whose buffer holds the value of `node`."""
        return self.views.get(node, node)

    def tasks(self) -> dict[str, tuple[Task, int]]:
        """Every task once, by key, with the number of calls, in the order of first use."""
        result: dict[str, tuple[Task, int]] = {}
        for call in self.calls:
            task, count = result.get(call.task.key, (call.task, 0))
            result[call.task.key] = (task, count + 1)
        return result

    @property
    def flops(self) -> int:
        return sum(call.task.flops for call in self.calls)

    def check(self) -> None:
        """Raise InternalError unless every value is available when it is read and every output is written by its own
        call."""
        ready: set[Node] = {node for node in self.graph.nodes() if node.is_input or node.is_constant}
        written: set[Node] = set()
        for view, target in self.views.items():
            rest = target.type.bytes - view.type.bytes
            fits = 0 <= self.offsets[view] <= rest if view in self.offsets else not rest
            if target in self.views or not fits:
                raise InternalError(f"{view!r} cannot be a view of {target!r}")
        for call in self.calls:
            bodies = [node.type for node in call.task.graph.inputs]
            if bodies != [node.type for node in call.inputs]:
                raise InternalError(f"{call!r} has inputs {call.inputs} for a task that takes {bodies}")
            for node in call.inputs:
                if self.buffer_of(node) not in ready:
                    raise InternalError(f"{call!r} reads {node!r} before it is computed")
            if call.output in written or call.output in self.views:
                raise InternalError(f"{call!r} writes {call.output!r}, which has another writer")
            if call.output.type.bytes != call.task.output.type.bytes:
                raise InternalError(f"{call!r} writes {call.task.output.type!r} as {call.output!r}")
            written.add(call.output)
            ready.add(call.output)
        if len(set(self.graph.outputs)) != len(self.graph.outputs):
            raise InternalError("two outputs of the graph are one node")
        for node in self.graph.outputs:
            if node not in written:
                raise InternalError(f"output {node!r} is not written by a call of its own")
