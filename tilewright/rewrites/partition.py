"""partition: cut a graph into task calls, one per group of `fuse`.

A task's body is the group, with all outside values as inputs except constants of one element, which are part of the
program. Bodies contain no names of the model, so equal groups are one task.

Every output of the graph is written by a call of its own. An output that is an input, a constant, or another output
again is copied (a reshape to its own shape). One that is a view of a computed value takes that value's buffer: the
call writes the output, and the value is a view of it; only where two outputs would claim one buffer is the second
copied.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from tilewright.graph.ir import Graph, Node, input_node
from tilewright.graph.op import Fusion, apply, op_of
from tilewright.graph.provenance import UNKNOWN
from tilewright.graph.task import Partition, Rival, Task, TaskCall
from tilewright.graph.tile_operator import NAME as TILE_KERNEL
from tilewright.rewrites.chain import chained
from tilewright.rewrites.defer import deferred
from tilewright.rewrites.dynamic import cut_dynamically
from tilewright.rewrites.fuse import Fused, Group, fuse
from tilewright.rewrites.oracle import GroupCosts, MeasuredCosts
from tilewright.runtime.plan import FusionReport
from tilewright.support.layers import merged

_ANCHORS = (Fusion.COMPLEX, Fusion.REDUCTION)


PARTITIONS = ("dynamic", "greedy")


def partition(
    graph: Graph,
    chains: bool = True,
    defers: bool = False,
    prologues: bool = False,
    slices: bool = False,
    joins: bool = False,
    computes_attention: Callable[[Task], bool] | None = None,
    costs: GroupCosts | None = None,
) -> Partition:
    """The calls that compute `graph`. The partition's own graph differs from it by copies for outputs.

    - `chains`: one kernel may compute several convolutions.
    - `defers`: a clamp moves to its reader.
    - `prologues`: a product takes its producers.
    - `slices`: a contiguous slice is a view at an offset.
    - `joins`: reductions of a contraction's results are joined with it later.
    - `computes_attention`: whether a kernel computes an attention with the movement around it; otherwise that is a
      kernel of its own.
    - `costs`: choose the groups by dynamic programming over these times; None: greedily.
    """
    graph, copies, owners = _own_outputs(graph)
    fused = found = _fused(graph, copies, prologues, slices, owners, computes_attention)
    if chains:
        fused = chained(graph, fused, lambda group: make_task(group)[0])
    if defers:
        fused = deferred(graph, fused)
    if costs is None:
        return _made(graph, fused, owners, FusionReport("greedy", len(fused.groups), len(fused.groups)))
    greedy, kept = fused, {*copies, *owners}

    def cut(costs: GroupCosts, only: Collection[str] | None = None) -> Partition:
        chosen, report, rivals = cut_dynamically(
            graph, found, greedy, costs, make_task, kept=kept, cuts=defers, joins=joins, only=only
        )

        def rival() -> Rival | None:
            other = rivals()
            if other is None:
                return None
            return Rival(
                _made(graph, other, owners, report), lambda times: cut(MeasuredCosts(costs, times), times)
            )

        return replace(_made(graph, chosen, owners, report), rival=rival)

    return cut(costs)


def _fused(
    graph: Graph,
    copies: Collection[Node],
    prologues: bool,
    slices: bool,
    owners: Collection[Node],
    computes_attention: Callable[[Task], bool] | None,
) -> Fused:
    fused = fuse(graph, copies, prologues, slices, owners)
    if computes_attention is None:
        return fused
    alone = [
        group.anchor
        for group in fused.groups
        if group.anchor is not None and group.anchor.op == "attention" and len(group.members) > 1
        if not computes_attention(make_task(group)[0])
    ]
    return fuse(graph, copies, prologues, slices, owners, alone) if alone else fused


def _made(graph: Graph, fused: Fused, owners: Mapping[Node, Node], report: FusionReport) -> Partition:
    """The calls of these groups."""
    views = {view: owners.get(target, target) for view, target in fused.views.items()}
    for value, owner in owners.items():
        views.pop(owner, None)
        views[value] = owner

    layers = _Layers(graph)
    tasks: dict[str, Task] = {}
    names: dict[str, int] = {}
    calls = []
    for group in fused.groups:
        task, operands = make_task(group)
        task = tasks.setdefault(task.key, task)
        output = owners.get(group.output, group.output)
        name = _unique(output.name or group.output.name or task.label, names)
        calls.append(TaskCall(task, operands, output, name, layers=layers.of(group)))
    result = Partition(graph, tuple(calls), views, fused.offsets, report)
    result.check()
    return result


def kind_of(call: TaskCall) -> str:
    """The kind of fusion of a call, in the words of `fuse`, for traces."""
    nodes = [node for node in call.task.graph.nodes() if not node.is_input and not node.is_constant]
    anchors = [n for n, node in enumerate(nodes) if op_of(node.op).fusion in _ANCHORS]
    if not anchors:
        elementwise = any(op_of(node.op).fusion is Fusion.ELEMENTWISE for node in nodes)
        permute_seconds = any(op_of(node.op).fusion is not Fusion.ELEMENTWISE for node in nodes)
        return (
            "elementwise + movement"
            if elementwise and permute_seconds
            else "elementwise"
            if elementwise
            else "movement"
        )
    if len(anchors) > 1:
        return "chain"
    anchor = nodes[anchors[0]]
    contracts = op_of(anchor.op).fusion is Fusion.COMPLEX
    name = "attention" if anchor.op == "attention" else "contraction" if contracts else "reduction"
    before, after = nodes[: anchors[0]], nodes[anchors[0] + 1 :]
    border = bool(before) and contracts and all(node.op == "pad" for node in before)
    return " + ".join(
        [
            *(["border"] if border else ["producers"] if before else []),
            name,
            *(["consumers"] if after else []),
        ]
    )


def _unique(name: str, taken: dict[str, int]) -> str:
    """`taken`: how often each name was requested. A model may have thousands of calls of one name."""
    unique, number = name, taken.get(name, 0)
    while unique in taken:
        unique, number = f"{name}_{number}", number + 1
    taken[name] = max(number, 1)
    taken.setdefault(unique, 1)
    return unique


class _Layers:
    """The layers that a group computes, by the user's names."""

    def __init__(self, graph: Graph) -> None:
        self._users = graph.users()

    def of(self, group: Group) -> tuple[str, ...]:
        """Nodes that a rewrite added, such as a layout change, belong to the layer that reads them, or whose result
        they read."""
        own = merged(*(node.source.layers for node in group.members))
        return (
            own
            or self._nearest(group.output, lambda node: self._users[node])
            or self._nearest(group.output, lambda node: node.inputs)
        )

    def _nearest(self, node: Node, steps: Callable[[Node], Sequence[Node]]) -> tuple[str, ...]:
        while following := steps(node):
            node = following[0]
            if node.source.layers:
                return node.source.layers[:1]
        return ()


# -- outputs ------------------------------------------------------------------------------------------------------


def _own_outputs(graph: Graph) -> tuple[Graph, set[Node], dict[Node, Node]]:
    """The graph with copies for outputs that need them; those copies; and for each computed value whose only reader
    is a reshape that is an output, that output."""
    outputs: list[Node] = []
    copies: set[Node] = set()
    owners: dict[Node, Node] = {}
    bases = {_base(node): node for node in reversed(graph.outputs)}
    for node in graph.outputs:
        base = _base(node)
        computed = not base.is_input and not base.is_constant
        if computed and node is base and node not in outputs:
            outputs.append(node)
        elif computed and node is bases[base] and base not in graph.outputs and node not in outputs:
            outputs.append(node)
            owners[base] = node
        else:
            copy = apply("reshape", node, shape=node.shape, name=node.name, source=node.source)
            outputs.append(copy)
            copies.add(copy)
    return Graph(graph.inputs, tuple(outputs)), copies, owners


def _base(node: Node) -> Node:
    """The node whose bytes a node shares."""
    while node.op == "reshape":
        node = node.inputs[0]
    return node


# -- bodies -------------------------------------------------------------------------------------------------------


def make_task(group: Group) -> tuple[Task, tuple[Node, ...]]:
    """The task that computes a group, and the nodes that it is applied to."""
    operands: list[Node] = []
    inside: dict[Node, Node] = {}
    counts: dict[str, int] = {}
    has_kernel = any(node.op == TILE_KERNEL for node in group.members)  # which takes all operands in memory

    def operand(node: Node) -> Node:
        if node not in inside:
            if node.is_constant and node.type.size == 1 and not has_kernel:
                inside[node] = replace(node, name="", source=UNKNOWN)
            else:
                inside[node] = input_node(len(operands), node.type)
                operands.append(node)
        return inside[node]

    for node in group.members:
        inputs = tuple(map(operand, node.inputs))
        inside[node] = replace(node, inputs=inputs, name=_numbered(node.op, counts), source=UNKNOWN)
    body = Graph(_inputs(inside.values()), (inside[group.output],))
    constants = frozenset(index for index, node in enumerate(operands) if node.is_constant)
    return Task(body, constants), tuple(operands)


def _numbered(op: str, counts: dict[str, int]) -> str:
    counts[op] = counts.get(op, 0) + 1
    return op if counts[op] == 1 else f"{op}_{counts[op]}"


def _inputs(nodes: Iterable[Node]) -> tuple[Node, ...]:
    return tuple(node for node in nodes if node.is_input)
