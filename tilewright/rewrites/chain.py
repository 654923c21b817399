"""chain: a depthwise convolution and the 1x1 convolutions around it as one group, where that saves more than it costs.

    expand | depthwise | project          expand + depthwise + project, or two of the three

What is between them is not written to memory and read again. Against it stand the rows that neighbouring parts of an
image both need, which are expanded twice, and the weights, which every part reads. Two convolutions without a sum over
the channels between them (expand + depthwise) can be cut by channels instead, which computes nothing twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewright.graph.ir import Graph, Node
from tilewright.graph.op import flops_of
from tilewright.graph.separable import Separable, is_depthwise, is_pointwise, separable_of
from tilewright.graph.task import Task
from tilewright.rewrites.fuse import Fused, Group

FLOPS_PER_BYTE = (
    12.0  # arithmetic in the time in which one core writes and reads a byte beyond its own caches
)


def chained(graph: Graph, fused: Fused, task_of: Callable[[Group], Task], parts: int = 2) -> Fused:
    """The groups with chains joined, for as many `parts` of an image as are computed at once."""
    users = graph.users()
    group_of = {group.output: group for group in fused.groups}
    reader_of = {node: group for group in fused.groups for node in group.members}
    joined: dict[Group, Group] = {}

    def before(group: Group) -> Group | None:
        """The group that computes what the depthwise convolution reads; a padding by itself goes with it."""
        assert group.anchor is not None
        source = group.anchor.inputs[0]
        if source.op == "pad":
            source = source.inputs[0]
        return group_of.get(source)

    def behind(group: Group) -> Group | None:
        readers = {reader_of.get(user) for user in users[group.output]}
        return readers.pop() if len(readers) == 1 else None

    def join(groups: Sequence[Group]) -> Group | None:
        """The groups as one, if nothing between them is read elsewhere."""
        members = [node for group in groups for node in group.members]
        inside = set(members)
        for node in members:
            if node is not groups[-1].output and not all(user in inside for user in users[node]):
                return None
        if any(group.output in graph.outputs for group in groups[:-1]):
            return None
        return Group(groups[-1].output, None, members)

    for group in fused.groups:
        if group.anchor is None or not is_depthwise(group.anchor):
            continue
        pad = group_of.get(group.anchor.inputs[0])
        lone = [pad] if pad is not None and pad.members == [group.anchor.inputs[0]] else []
        first, last = before(group), behind(group)
        head = [first] if first is not None and _is_pointwise(first, joined) else []
        tail = [last] if last is not None and _is_pointwise(last, joined) else []
        best: tuple[float, Group, list[Group]] | None = None
        for groups in ([*head, *lone, group, *tail], [*head, *lone, group], [*lone, group, *tail]):
            whole = join(groups) if len(groups) > 1 else None
            chain = separable_of(task_of(whole)) if whole is not None else None
            if whole is None or chain is None:
                continue
            saved = gain(chain, parts)
            if saved > (best[0] if best else 0):
                best = (saved, whole, groups)
        if best is not None:
            joined |= dict.fromkeys(best[2], best[1])
    left = dict.fromkeys(joined.get(group, group) for group in fused.groups)
    position = {node: number for number, node in enumerate(graph.nodes())}
    return Fused(tuple(sorted(left, key=lambda group: position[group.output])), fused.views)


def _is_pointwise(group: Group, joined: dict[Group, Group]) -> bool:
    return group not in joined and group.anchor is not None and is_pointwise(group.anchor)


def gain(chain: Separable, parts: int) -> float:
    """What one kernel saves against several, in arithmetic operations; at most 0 where it saves nothing."""
    between: list[Node] = [stage.last for stage in chain.stages[:-1]]
    saved = 2.0 * sum(node.type.bytes for node in between) * FLOPS_PER_BYTE
    if chain.project is None:
        return saved
    seams = min(parts, chain.rows.outputs) - 1
    weights = sum(stage.weight.type.bytes for stage in chain.stages)
    spent = seams * weights * FLOPS_PER_BYTE
    if chain.expand is not None:
        twice = (chain.rows.reach - chain.rows.stride) / chain.rows.extent
        spent += seams * twice * flops_of(chain.expand.conv)
    return saved - spent
