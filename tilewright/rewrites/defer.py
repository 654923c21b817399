"""defer: move a clamp after a contraction to the depthwise convolution or the mean that reads it.

    [conv + add + clamp]  [pad + conv + add]        ->        [conv + add]  [clamp + pad + conv + add]

This is for machines whose libraries compute contractions without a clamp. There the clamp would be a separate kernel,
while it is almost free in front of a kernel that reads each element a few times.
"""

from __future__ import annotations

from dataclasses import replace

from tilewright.graph.ir import Graph, Node
from tilewright.graph.op import Fusion, op_of
from tilewright.graph.separable import is_depthwise
from tilewright.rewrites.fuse import Fused, Group

_DEFERRED = ("clamp",)


def deferred(graph: Graph, fused: Fused) -> Fused:
    users = graph.users()
    position = {node: number for number, node in enumerate(graph.nodes())}
    holder = {node: group for group in fused.groups for node in group.members}
    changed: dict[Group, Group] = {}
    taken: dict[Group, Node] = {}
    for group in fused.groups:
        clamp = group.output
        if group.anchor is None or clamp.op not in _DEFERRED or clamp in graph.outputs:
            continue
        below = clamp.inputs[0]
        readers = {holder.get(user) for user in users[clamp]}
        reader = readers.pop() if len(readers) == 1 else None
        if reader is None or reader in taken or not _takes(group, reader, clamp):
            continue
        if below not in group.members or len(users[below]) != 1 or clamp in fused.views.values():
            continue
        members = [node for node in group.members if node is not clamp]
        changed[group] = replace(changed.get(group, group), output=below, members=members)
        taken[reader] = clamp
    for reader, clamp in taken.items():
        now = changed.get(reader, reader)
        members = sorted([*now.members, clamp], key=position.__getitem__)
        changed[reader] = replace(now, members=members)
    groups = [changed.get(group, group) for group in fused.groups]
    return replace(fused, groups=tuple(sorted(groups, key=lambda group: position[group.output])))


def _takes(group: Group, reader: Group, clamp: Node) -> bool:
    """Whether the reader is a depthwise convolution of the clamp (perhaps padded) or a mean of it, and the clamp
    follows a contraction of another kind."""
    assert group.anchor is not None
    if reader.anchor is None or op_of(group.anchor.op).fusion is not Fusion.COMPLEX or _is_own(group.anchor):
        return False
    source = reader.anchor.inputs[0]
    if reader.anchor.op == "mean":
        return source is clamp
    return _is_own(reader.anchor) and (source is clamp or (source.op == "pad" and source.inputs[0] is clamp))


def _is_own(anchor: Node) -> bool:
    """Whether Tilewright's kernel is at least as fast as a library's."""
    return anchor.op == "conv" and is_depthwise(anchor)
