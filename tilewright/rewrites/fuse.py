"""fuse: decide which nodes share a kernel. Every group has one output, and the default program can compute it.

1. A contraction takes the elementwise nodes after it that have its shape, as long as the intermediate values are read
nowhere else: they are applied to its result in registers. A convolution takes the zero padding before it (channels
first only if its weight is constant; a byte convolution with any padding value). With `prologues`, a product of
16-bit floats also takes elementwise nodes before its first operand, and their broadcasts. 2. A reduction takes
elementwise nodes after it in the same way, and cheap producers before it: it reads its operand up to three times, so
producers are computed three times. Overlapping windows (pooling) take only the conversion of 16-bit floats, and a
group norm takes no permute of the contiguous axis. 3. Attention takes the movement that splits its operands into
heads, and the permute that joins them again, as strides of its kernel. 4. The rest is elementwise work and movement.
A producer is fused into its consumer if all its readers are there, and if it is cheap or not computed more often than
it has elements. A concat is never fused. 5. A reshape is a view of its operand, no kernel at all, unless the operand
is fused through it. With `slices`, so is a contiguous slice, at an offset: its reader is the same task at every
offset, so the steps of an unrolled recurrence share one kernel. 6. No group grows beyond the limits of
`expansion.py`: if its formula would be too large or too deep, the value that would exceed the limit gets its own
kernel.

Groups have one output, and their other members are read only inside. So groups cannot depend on each other
cyclically: a path from a group's output back into it would be a cycle of nodes.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from tilewright.dtypes import DType
from tilewright.graph.attention import ABSORBED, merges_heads
from tilewright.graph.ir import Graph, Node
from tilewright.graph.op import Fusion, op_of
from tilewright.graph.ops.contractions import BYTES
from tilewright.graph.ops.layouts import spatial_axes
from tilewright.rewrites.expansion import MAX_DEPTH, MAX_PARTS, NOWHERE, Written, expansion_of
from tilewright.te.scalars import EXPENSIVE_CALLS

# Elementwise operators that cost many times an addition: expensive functions, operators lowered to one, and
# remainders. All others are cheap.
EXPENSIVE_OPERATORS = EXPENSIVE_CALLS | frozenset(
    [
        *("exp2", "log2", "tan", "reciprocal", "rsqrt"),
        *("sigmoid", "silu", "softplus", "gelu", "elu", "mish"),
        *("floordiv", "mod", "fmod"),
    ]
)
POOLS = frozenset(["max_pool", "avg_pool", "adaptive_max_pool", "adaptive_avg_pool"])
# Reductions that read each element for several results: a fused producer would be computed several times.
OVERLAPPING = POOLS | frozenset(
    [
        *("cumsum", "cumprod", "cummax", "cummin", "argsort"),
    ]
)

MIN_CHANNELS = 4  # of a group, for a kernel that computes them in vector lanes
MAX_NODES = 64  # in a group: larger kernels compile slowly and spill
MAX_RECOMPUTED = 8  # maximum cheap nodes of a group that are computed more often than they have elements
MANY_SLICES = 8  # minimum slices of one value to assume a recurrence, not the halves of a gate
TOLERANCE = 1.25  # computing up to this many times the number of elements does not count as recomputing


@dataclass(eq=False)
class Group:
    """Nodes that one kernel computes. `anchor` is the contraction or reduction, if there is one; others read
    `output`."""

    output: Node
    anchor: Node | None = None
    members: list[Node] = field(default_factory=list)
    evaluations: dict[Node, float] = field(
        default_factory=dict
    )  # how often each member except the anchor is computed
    recomputed: int = 0
    # How each member appears in the output's formula, and the size of that formula.
    written: dict[Node, Written] = field(default_factory=dict)
    parts: int = 0

    def expand(self, node: Node, written: Written) -> None:
        self.written[node] = written
        self.parts += written.times * written.indices * expansion_of(node).parts


@dataclass(frozen=True)
class Fused:
    groups: tuple[Group, ...]  # sorted by their outputs
    views: dict[Node, Node]  # reshape or slice -> the node in memory that holds its elements
    offsets: dict[Node, int] = field(default_factory=dict)  # byte offsets of slices and of their views


def fuse(
    graph: Graph,
    materialised: Collection[Node] = (),
    prologues: bool = False,
    slices: bool = False,
    written: Collection[Node] = (),
    alone: Collection[Node] = (),
) -> Fused:
    """The groups and views of a graph.

    Nodes in `materialised` get their own kernel even if they are reshapes (copies); so does every output that is not
    a reshape. No node in `written` is a view. `prologues`: contractions take producers; whether one kernel computes
    the whole group is decided later. `slices`: kernels can read at any offset, so a slice may be a view.
    Attentions in `alone` take no movement.
    """
    return _Fusion(
        graph, frozenset(materialised), prologues, slices, frozenset(written), frozenset(alone)
    ).run()


def fusion_of(node: Node) -> Fusion | None:
    return None if node.is_input or node.is_constant else op_of(node.op).fusion


class _Fusion:
    def __init__(
        self,
        graph: Graph,
        materialised: frozenset[Node],
        prologues: bool,
        slices: bool,
        written: frozenset[Node],
        alone: frozenset[Node],
    ) -> None:
        self.nodes = graph.nodes()
        self.users = graph.users()
        self.position = {node: position for position, node in enumerate(self.nodes)}
        self.outputs = frozenset(graph.outputs)
        self.materialised = materialised
        self.prologues = prologues
        self.slices = slices
        self.alone = alone
        self.kept = self.outputs | materialised | written
        self.group_of: dict[Node, Group] = {}
        self.views: dict[Node, Node] = {}
        self.parts: dict[Node, int] = {}  # the number of contiguous slices of a value

    def run(self) -> Fused:
        # Contractions first: if both a contraction and a reduction could take an addition, it is cheaper in the
        # contraction.
        for kind in (Fusion.COMPLEX, Fusion.REDUCTION):
            for node in reversed(self.nodes):
                if fusion_of(node) is kind:
                    self.start_anchored(node)
        for node in reversed(self.nodes):
            if fusion_of(node) is not None and node not in self.group_of:
                self.assign(node)
        groups = dict.fromkeys(self.group_of[node] for node in self.nodes if node in self.group_of)
        for group in groups:
            group.members.sort(key=self.position.__getitem__)
        ordered = sorted(groups, key=lambda group: self.position[group.output])
        targets: dict[Node, Node] = {}
        offsets: dict[Node, int] = {}
        for view in self.nodes:  # a view comes after its target
            if view in self.views:
                target, offset = self.views[view], part_of(view) or 0
                targets[view] = targets.get(target, target)
                offset = offset * view.dtype.bytes + offsets.get(target, 0)
                if targets[view].type.bytes != view.type.bytes:
                    offsets[view] = offset
        return Fused(tuple(ordered), targets, offsets)

    # -- epilogues

    def start_anchored(self, anchor: Node) -> None:
        members = self.epilogue(anchor)
        group = Group(members[-1], anchor, members)
        for node in reversed(members):
            group.expand(node, self.written(node, group) if node is not group.output else Written(1, 0))
            self.group_of[node] = group

    def epilogue(self, anchor: Node) -> list[Node]:
        """The anchor and the longest chain of elementwise nodes after it, of which only the last is read outside."""
        if anchor.op == "attention":
            readers = self.users[anchor] if anchor not in self.outputs | self.alone else []
            return [anchor, *readers] if len(readers) == 1 and merges_heads(readers[0]) else [anchor]
        taken, best = [anchor], 1
        inside = {anchor}
        sizes = {anchor: (expansion_of(anchor).parts, expansion_of(anchor).depth)}
        waiting = [self.position[user] for user in set(self.users[anchor])]
        heapq.heapify(waiting)
        while waiting and len(taken) < MAX_NODES:
            node = self.nodes[heapq.heappop(waiting)]
            if node in inside:
                continue
            joins = (
                fusion_of(node) is Fusion.ELEMENTWISE
                and node.shape == anchor.shape
                and node not in self.group_of
            )
            if not joins:
                break  # its operand is read outside, so nothing after it can be fused
            sizes[node] = parts, depth = _size_after(node, sizes)
            if parts > MAX_PARTS or depth > MAX_DEPTH:
                break
            taken.append(node)
            inside.add(node)
            for user in self.users[node]:
                if user not in inside:
                    heapq.heappush(waiting, self.position[user])
            if all(self.read_only_in(member, inside) for member in taken[:-1]):
                best = len(taken)
        return taken[:best]

    def read_only_in(self, node: Node, inside: Collection[Node]) -> bool:
        return node not in self.outputs and all(user in inside for user in self.users[node])

    # -- elementwise work and movement

    def assign(self, node: Node) -> None:
        if node.op == "reshape" and node not in self.materialised:
            group = self.group_through(node)
            if group is None:
                self.views[node] = node.inputs[0]
                return
            self.join(node, group)
            return
        if self.is_view(node):
            self.views[node] = node.inputs[0]
            return
        group = self.group_of_readers(node)
        if group is not None and self.may_join(node, group):
            self.join(node, group)
            return
        self.group_of[node] = group = Group(node, None, [node], {node: float(node.type.size)})
        group.expand(node, Written(1, 0))

    def is_view(self, node: Node) -> bool:
        """Whether a slice is read in place: one of many, or one that would be copied, of a value that is in memory
        anyway."""
        if not self.slices or node.op != "slice" or node in self.kept or part_of(node) is None:
            return False
        whole = node.inputs[0]
        if whole not in self.parts:
            self.parts[whole] = sum(part_of(user) is not None for user in self.users[whole])
        while whole.op == "reshape":
            whole = whole.inputs[0]
        if whole.is_constant or (whole.op == "slice" and _base(whole).is_constant):
            return False
        if self.parts[node.inputs[0]] >= MANY_SLICES:
            return True
        in_memory = whole.is_input or whole in self.outputs or whole in self.group_of
        group = self.group_of_readers(node)
        return in_memory and (group is None or not self.may_join(node, group))

    def group_of_readers(self, node: Node) -> Group | None:
        """The only group that has all readers of `node`."""
        if node in self.outputs or node in self.materialised or not self.users[node]:
            return None
        groups = {self.group_of.get(user) for user in self.users[node]}
        return groups.pop() if len(groups) == 1 else None

    def group_through(self, node: Node) -> Group | None:
        """The group into which a reshape is fused together with its operand; None if it is a view."""
        group, operand = self.group_of_readers(node), node.inputs[0]
        if group is None or not self.may_join(node, group):
            return None
        free = (
            operand not in self.outputs and operand not in self.group_of and operand not in self.materialised
        )
        if not free or fusion_of(operand) is None or operand.op == "reshape" or len(self.users[operand]) != 1:
            return None
        evaluations = self.evaluations(node, group)
        return group if self.allowed(operand, group, evaluations) else None

    def may_join(self, node: Node, group: Group) -> bool:
        if not self.readable(node, group):
            return False
        return self.allowed(node, group, self.evaluations(node, group))

    def readable(self, node: Node, group: Group) -> bool:
        """Whether the readers of `node` in `group` can take it as a formula instead of from memory."""
        if group.anchor is not None and group.anchor.op == "attention":
            return node.op in ABSORBED and group.anchor not in self.alone
        if group.anchor is not None:
            if fusion_of(group.anchor) is Fusion.COMPLEX:
                border = set(self.users[node]) == {group.anchor} and _pads(node, group.anchor)
                return border or (self.prologues and self.is_before(node, group))
            if fusion_of(group.anchor) is not Fusion.REDUCTION or group.anchor.op in OVERLAPPING:
                return group.anchor.op in POOLS and set(self.users[node]) == {group.anchor} and _widens(node)
            if group.anchor.op == "group_norm" and _moves_last_axis(node):
                return False
            for user in self.users[node]:
                if user is group.anchor:
                    # Parameters of a norm stay in memory: only the reduced operand may be a formula.
                    if any(operand is node for operand in user.inputs[1:]):
                        return False
                elif user not in group.evaluations:  # after the anchor
                    return False
        return all(
            user.op != "concat" and fusion_of(user) is not Fusion.OPAQUE and not _interpolates(user)
            for user in self.users[node]
        )

    def is_before(self, node: Node, group: Group) -> bool:
        """Whether it is part of the elementwise computation of the group's first product operand."""
        anchor = group.anchor
        assert anchor is not None
        elementwise = fusion_of(node) is Fusion.ELEMENTWISE
        if node.op == "reshape":  # on its own it is a view, which costs nothing
            elementwise = fusion_of(node.inputs[0]) is Fusion.ELEMENTWISE
        if not _takes_prologue(anchor) or not (elementwise or node.op == "broadcast_to"):
            return False
        return all(
            user in group.evaluations or (user is anchor and all(x is not node for x in user.inputs[1:]))
            for user in self.users[node]
        )

    def allowed(self, node: Node, group: Group, evaluations: float) -> bool:
        """Whether this node may be a formula that is computed `evaluations` times."""
        if fusion_of(node) not in (Fusion.ELEMENTWISE, Fusion.INJECTIVE) or node.op == "concat":
            return False
        if len(group.members) >= MAX_NODES:
            return False
        here, own = self.written(node, group), expansion_of(node)
        parts = group.parts + here.times * here.indices * own.parts
        if parts > MAX_PARTS or here.depth + own.depth > MAX_DEPTH:
            return False
        if evaluations <= TOLERANCE * node.type.size:
            return True
        return (
            node.op not in EXPENSIVE_OPERATORS
            and not _interpolates(node)
            and group.recomputed < MAX_RECOMPUTED
        )

    def evaluations(self, node: Node, group: Group) -> float:
        """How often `node` would be computed as a part of `group`."""
        total = 0.0
        for user in set(self.users[node]):
            if user is group.anchor:
                once = user.op == "attention" or fusion_of(user) is Fusion.COMPLEX
                total += node.type.size if once else 3.0 * node.type.size
            elif user.op == "pad":  # padding elements read nothing
                total += group.evaluations[user] * node.type.size / max(user.type.size, 1)
            elif fusion_of(user) is Fusion.ELEMENTWISE and total:
                total = max(total, group.evaluations[user])  # readers of one element share its value
            else:
                total += group.evaluations[user]
        return total

    def written(self, node: Node, group: Group) -> Written:
        """How `node` would appear in the formula of `group`."""
        found = NOWHERE
        for user in dict.fromkeys(self.users[node]):
            # A reader that is not in the group yet is a reshape that would join it together with `node`.
            reader = group.written.get(user) or self.written(user, group)
            for operand, read in zip(user.inputs, expansion_of(user).reads, strict=True):
                if operand is node:
                    found = found.plus(read.within(reader))
        return found

    def join(self, node: Node, group: Group) -> None:
        evaluations = self.evaluations(node, group)
        group.expand(node, self.written(node, group))
        group.members.append(node)
        group.evaluations[node] = evaluations
        group.recomputed += evaluations > TOLERANCE * node.type.size
        self.group_of[node] = group


def part_of(node: Node) -> int | None:
    """The offset of a contiguous slice within its operand, in elements."""
    if node.op != "slice" or not node.type.size:
        return None
    whole, offset, inner, dense = node.inputs[0], 0, 1, True
    starts, steps = node.attrs["starts"], node.attrs["steps"]
    for axis in reversed(range(node.type.rank)):
        if node.shape[axis] > 1 and (not dense or steps[axis] != 1):
            return None
        dense = dense and node.shape[axis] == whole.shape[axis]
        offset += starts[axis] * inner
        inner *= whole.shape[axis]
    return offset


def _base(node: Node) -> Node:
    while node.op in ("reshape", "slice"):
        node = node.inputs[0]
    return node


def _widens(node: Node) -> bool:
    """Whether it widens 16-bit floats while they are read: one instruction, whereas f32 would be twice the bytes."""
    return node.op == "cast" and node.dtype is DType.F32 and node.inputs[0].dtype.is_half


def _size_after(node: Node, sizes: Mapping[Node, tuple[int, int]]) -> tuple[int, int]:
    """(size, depth) of a node's formula, given the `sizes` of its operands in the group."""
    own = expansion_of(node)
    parts, depth = own.parts, own.depth
    for operand, read in zip(node.inputs, own.reads, strict=True):
        if operand in sizes:
            parts, depth = parts + read.times * sizes[operand][0], max(depth, read.depth + sizes[operand][1])
    return parts, depth


def _takes_prologue(anchor: Node) -> bool:
    """Whether it has a kernel that computes its first operand on the fly."""
    if anchor.op not in ("matmul", "linear", "conv") or not anchor.dtype.is_half:
        return False
    return anchor.op != "conv" or (anchor.attrs["groups"] == 1 and anchor.attrs["layout"] == "channels_last")


def _pads(node: Node, anchor: Node) -> bool:
    """Whether `node` is the padding of a convolution: zeros, or bytes. Padding costs the kernel nothing, and it
    copies what it reads often."""
    if anchor.op != "conv" or anchor.inputs[0] is not node or node.op != "pad" or any(node.attrs["interior"]):
        return False
    if anchor.attrs["layout"] == "channels_first" and not _stages_planes(anchor):
        return False
    if node.attrs["value"] and node.dtype not in BYTES:
        return False
    low, high = node.attrs["low"], node.attrs["high"]
    image = spatial_axes(node.type.rank, anchor.attrs["layout"])
    within_image = not any(low[axis] or high[axis] for axis in range(node.type.rank) if axis not in image)
    return within_image and min(*low, *high) >= 0


def _stages_planes(conv: Node) -> bool:
    """Whether there is a kernel for a channels-first convolution that copies its input including the padding."""
    groups, weight = conv.attrs["groups"], conv.inputs[1]
    depthwise = groups == conv.inputs[0].shape[1] == conv.shape[1]
    many = conv.shape[1] // groups >= MIN_CHANNELS
    return conv.type.rank == 4 and conv.dtype.is_float and weight.is_constant and (depthwise or many)


def _moves_last_axis(node: Node) -> bool:
    """Whether neighbours in its operand are not neighbours in its result. A norm over several axes, with its repeated
    passes, would gather them one by one each time."""
    return node.op == "permute" and node.attrs["axes"][-1] != node.type.rank - 1


def _interpolates(node: Node) -> bool:
    """Whether it reads several elements for one."""
    return node.op == "resize" and node.attrs["mode"] != "nearest"
