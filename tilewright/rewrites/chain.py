"""chain: fuse a depthwise convolution with the 1x1 convolutions around it, if that saves more than it costs.

    expand | depthwise | project          expand + depthwise + project, or two of the three

The intermediate images are not written to memory and read again. The cost is that rows shared by neighbouring parts
of an image are expanded twice, and that every part reads the weights. Expand + depthwise, with no sum over the
channels in between, can be split by channels instead, which computes nothing twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tilewright.graph.ir import Graph, Node
from tilewright.graph.op import flops_of
from tilewright.graph.separable import Separable, is_depthwise, is_pointwise, separable_of
from tilewright.graph.task import Task
from tilewright.rewrites.fuse import Fused, Group

FLOPS_PER_BYTE = 12.0  # operations in the time of writing and reading a byte beyond a core's own caches


def chained(graph: Graph, fused: Fused, task_of: Callable[[Group], Task], parts: int = 2) -> Fused:
    """The groups with chains merged, for an image that is computed in `parts` concurrent parts."""
    groups = _Groups(graph, fused)
    joined: dict[Group, Group] = {}
    for group in fused.groups:
        if group.anchor is None or not is_depthwise(group.anchor):
            continue
        pad = groups.lone_pad(group)
        head = [g for g in groups.before(group) if g not in joined]
        tail = [g for g in groups.after(group) if g not in joined]
        best: tuple[float, Group, list[Group]] | None = None
        for candidate in ([*head, *pad, group, *tail], [*head, *pad, group], [*pad, group, *tail]):
            whole = groups.join(candidate)
            chain = separable_of(task_of(whole)) if whole is not None else None
            if whole is None or chain is None:
                continue
            saved = gain(chain, parts)
            if saved > (best[0] if best else 0.0):
                best = (saved, whole, candidate)
        if best is not None:
            joined |= dict.fromkeys(best[2], best[1])
    left = dict.fromkeys(joined.get(group, group) for group in fused.groups)
    return replace(fused, groups=tuple(sorted(left, key=lambda group: groups.position[group.output])))


class _Groups:
    """The neighbourhood of a group."""

    def __init__(self, graph: Graph, fused: Fused) -> None:
        self.users = graph.users()
        self.position = {node: number for number, node in enumerate(self.users)}
        self.outputs = frozenset(graph.outputs)
        self.writer = {group.output: group for group in fused.groups}
        self.holder = {node: group for group in fused.groups for node in group.members}

    def lone_pad(self, group: Group) -> list[Group]:
        """The group that only pads the input of the convolution of `group`, if there is one."""
        assert group.anchor is not None
        source = group.anchor.inputs[0]
        found = self.writer.get(source)
        return [found] if found is not None and source.op == "pad" and found.members == [source] else []

    def before(self, group: Group) -> list[Group]:
        """The group of the 1x1 convolution that the depthwise one reads, if there is one."""
        assert group.anchor is not None
        source = group.anchor.inputs[0]
        found = self.writer.get(source.inputs[0] if source.op == "pad" else source)
        return [found] if found is not None and _is_pointwise(found) else []

    def after(self, group: Group) -> list[Group]:
        """The group of the 1x1 convolution that is the only reader of the depthwise one, if there is one."""
        readers = {self.holder.get(user) for user in self.users[group.output]}
        return [g for g in readers if g is not None and len(readers) == 1 and _is_pointwise(g)]

    def join(self, groups: Sequence[Group]) -> Group | None:
        """Merge several groups, if nothing between them is read elsewhere."""
        members = [node for group in groups for node in group.members]
        inside, output = set(members), groups[-1].output
        hidden = [node for node in members if node is not output]
        seen = any(node in self.outputs or not inside.issuperset(self.users[node]) for node in hidden)
        return None if seen or len(groups) == 1 else Group(output, None, members)


def _is_pointwise(group: Group) -> bool:
    return group.anchor is not None and is_pointwise(group.anchor)


def gain(chain: Separable, parts: int) -> float:
    """The saving of one kernel over several, in arithmetic operations; not positive if it saves nothing."""
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
