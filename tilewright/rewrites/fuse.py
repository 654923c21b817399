"""fuse: which nodes share a kernel. Every group has one output, and the code generator's default program can run it.

1. A contraction takes the elementwise nodes behind it that have its shape, as long as what is between them is read
   nowhere else: they are applied to its result in registers. A convolution takes the border of zeros before it,
   with channels first one whose weight is known, and one of bytes any border. Where `prologues` says so, a product of
   16-bit floats takes elementwise nodes before its first operand too, and what is spread for them.
2. A reduction takes elementwise nodes behind it in the same way, and cheap producers before it: it reads its operand up
   to three times, so what is fused before it is computed three times. Windows that overlap take none but the conversion
   of 16-bit floats (pooling), and a group norm no permute of the contiguous axis.
3. Attention takes in the movement that splits its operands into heads, and the permute that joins them again: to its
   kernel they are strides.
4. What is left is elementwise work and movement. A producer goes into its consumer where all its readers are there, and
   where that does not compute it more often than it has elements, or it is cheap. A concat stands alone.
5. A reshape is a view of its operand, no kernel at all, unless the operand is fused through it. So is, where `slices`
   says so, a slice whose elements lie side by side, at an offset: what reads it is the same task at every offset, and
   the steps of a recurrence that was written out are one kernel.
6. No group grows beyond what `expansion.py` allows: where its formula would be too large or too deep, the value that
   would have made it so is computed by a kernel of its own.

Groups with one output, whose other members are read only inside, cannot wait for each other: a path from one group's
output back into it would be a cycle of nodes.
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

# Elementwise operators that cost many times an addition: functions that do, what is lowered to one of these, and
# remainders. Everything else elementwise is cheap.
EXPENSIVE_OPERATORS = EXPENSIVE_CALLS | frozenset(
    [
        *("exp2", "log2", "tan", "reciprocal", "rsqrt"),
        *("sigmoid", "silu", "softplus", "gelu", "elu", "mish"),
        *("floordiv", "mod", "fmod"),
    ]
)
POOLS = frozenset(["max_pool", "avg_pool", "adaptive_max_pool", "adaptive_avg_pool"])
# Reductions that read each element for several results: a fused producer would be computed as many times.
OVERLAPPING = POOLS | frozenset(
    [
        *("cumsum", "cumprod", "cummax", "cummin", "argsort"),
    ]
)

MIN_CHANNELS = 4  # of a group, that a kernel computes in the lanes of a vector
MAX_NODES = 64  # in a group: kernels of more compile slowly and spill
MAX_RECOMPUTED = 8  # cheap nodes of a group that are computed more often than they have elements
MANY_SLICES = 8  # of one value: the steps of a recurrence, more likely than the halves of a gate
TOLERANCE = 1.25  # computing this much more than there are elements does not count as recomputing


@dataclass(eq=False)
class Group:
    """Nodes that one kernel computes. `anchor` is the contraction or reduction, if there is one; `output` is the node
    that others read."""

    output: Node
    anchor: Node | None = None
    members: list[Node] = field(default_factory=list)
    evaluations: dict[Node, float] = field(
        default_factory=dict
    )  # how often each member that is no anchor is computed
    recomputed: int = 0
    # How each member is written in the formula of the output, and the size of that formula.
    written: dict[Node, Written] = field(default_factory=dict)
    parts: int = 0

    def expand(self, node: Node, written: Written) -> None:
        self.written[node] = written
        self.parts += written.times * written.indices * expansion_of(node).parts


@dataclass(frozen=True)
class Fused:
    groups: tuple[Group, ...]  # in the order of their outputs
    views: dict[Node, Node]  # reshape or slice -> the node in memory whose elements it has
    offsets: dict[Node, int] = field(default_factory=dict)  # of slices and what views them, in bytes


def fuse(
    graph: Graph,
    materialised: Collection[Node] = (),
    prologues: bool = False,
    slices: bool = False,
    written: Collection[Node] = (),
) -> Fused:
    """The groups and views of a graph. Nodes in `materialised` are computed by a kernel of their own even where they
    are reshapes (copies); so is every output that is no reshape, and no node in `written` is a view. `prologues`: a
    contraction takes what is before it; it is left to who computes the group whether all of it is one kernel.
    `slices`: a kernel reads at any offset, so that a slice may be a view."""
    return _Fusion(graph, frozenset(materialised), prologues, slices, frozenset(written)).run()


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
    ) -> None:
        self.nodes = graph.nodes()
        self.users = graph.users()
        self.position = {node: position for position, node in enumerate(self.nodes)}
        self.outputs = frozenset(graph.outputs)
        self.materialised = materialised
        self.prologues = prologues
        self.slices = slices
        self.kept = self.outputs | materialised | written
        self.group_of: dict[Node, Group] = {}
        self.views: dict[Node, Node] = {}
        self.parts: dict[Node, int] = {}  # how many contiguous slices a value has

    def run(self) -> Fused:
        # Contractions first: where both a contraction and a reduction could take an addition, it is cheaper there.
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
        for view in self.nodes:  # what it views comes before it
            if view in self.views:
                target, offset = self.views[view], part_of(view) or 0
                targets[view] = targets.get(target, target)
                offset = offset * view.dtype.bytes + offsets.get(target, 0)
                if targets[view].type.bytes != view.type.bytes:
                    offsets[view] = offset
        return Fused(tuple(ordered), targets, offsets)

    # -- behind an anchor

    def start_anchored(self, anchor: Node) -> None:
        members = self.epilogue(anchor)
        group = Group(members[-1], anchor, members)
        for node in reversed(members):
            group.expand(node, self.written(node, group) if node is not group.output else Written(1, 0))
            self.group_of[node] = group

    def epilogue(self, anchor: Node) -> list[Node]:
        """The anchor and the longest run of elementwise nodes behind it, in order, of which only the last is read
        outside."""
        if anchor.op == "attention":
            readers = self.users[anchor] if anchor not in self.outputs else []
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
                break  # whatever it reads is read outside: nothing behind that can be taken
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
        """Whether a slice is read where it lies: one of many, or one that would be copied, of a value that is in memory
        in any case."""
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
        """The one group that has all readers of `node`."""
        if node in self.outputs or node in self.materialised or not self.users[node]:
            return None
        groups = {self.group_of.get(user) for user in self.users[node]}
        return groups.pop() if len(groups) == 1 else None

    def group_through(self, node: Node) -> Group | None:
        """The group into which a reshape goes together with its operand; None where it is a view."""
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
        """Whether the readers of `node` in `group` may have it as a formula instead of in memory."""
        if group.anchor is not None and group.anchor.op == "attention":
            return node.op in ABSORBED
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
                    # Parameters of a norm stay in memory: only what is reduced may be a formula.
                    if any(operand is node for operand in user.inputs[1:]):
                        return False
                elif user not in group.evaluations:  # behind the anchor
                    return False
        return all(
            user.op != "concat" and fusion_of(user) is not Fusion.OPAQUE and not _interpolates(user)
            for user in self.users[node]
        )

    def is_before(self, node: Node, group: Group) -> bool:
        """Whether it is a part of what computes the first operand of the group's product, element by element."""
        anchor = group.anchor
        assert anchor is not None
        elementwise = fusion_of(node) is Fusion.ELEMENTWISE
        if node.op == "reshape":  # alone it is a view, which costs nothing
            elementwise = fusion_of(node.inputs[0]) is Fusion.ELEMENTWISE
        if not _takes_prologue(anchor) or not (elementwise or node.op == "broadcast_to"):
            return False
        return all(
            user in group.evaluations or (user is anchor and all(x is not node for x in user.inputs[1:]))
            for user in self.users[node]
        )

    def allowed(self, node: Node, group: Group, evaluations: float) -> bool:
        """Whether a formula that is computed `evaluations` times may be this node."""
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
            elif user.op == "pad":  # the padding reads nothing
                total += group.evaluations[user] * node.type.size / max(user.type.size, 1)
            elif fusion_of(user) is Fusion.ELEMENTWISE and total:
                total = max(total, group.evaluations[user])  # readers of one element share its value
            else:
                total += group.evaluations[user]
        return total

    def written(self, node: Node, group: Group) -> Written:
        """How `node` would be written in the formula of `group`."""
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
    """Where the elements of a slice begin within its operand if they lie side by side there, in elements."""
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
    """Whether it converts 16-bit floats as they are read: an instruction, where f32 would be twice the bytes."""
    return node.op == "cast" and node.dtype is DType.F32 and node.inputs[0].dtype.is_half


def _size_after(node: Node, sizes: Mapping[Node, tuple[int, int]]) -> tuple[int, int]:
    """(parts, depth) of the formula of a node, of which those that it reads in its group have `sizes`."""
    own = expansion_of(node)
    parts, depth = own.parts, own.depth
    for operand, read in zip(node.inputs, own.reads, strict=True):
        if operand in sizes:
            parts, depth = parts + read.times * sizes[operand][0], max(depth, read.depth + sizes[operand][1])
    return parts, depth


def _takes_prologue(anchor: Node) -> bool:
    """Whether there is a kernel for it that computes its first operand on the way."""
    if anchor.op not in ("matmul", "linear", "conv") or not anchor.dtype.is_half:
        return False
    return anchor.op != "conv" or (anchor.attrs["groups"] == 1 and anchor.attrs["layout"] == "channels_last")


def _pads(node: Node, anchor: Node) -> bool:
    """Whether `node` is the border of a convolution: of zeros, or of bytes. What the kernel reads there costs nothing,
    and it copies what it reads often."""
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
    """Whether there is a kernel for a channels-first convolution that copies what it reads, border and all."""
    groups, weight = conv.attrs["groups"], conv.inputs[1]
    depthwise = groups == conv.inputs[0].shape[1] == conv.shape[1]
    many = conv.shape[1] // groups >= MIN_CHANNELS
    return conv.type.rank == 4 and conv.dtype.is_float and weight.is_constant and (depthwise or many)


def _moves_last_axis(node: Node) -> bool:
    """Whether neighbours in what it reads are no neighbours in its result: a norm over several axes, which passes over
    them again and again, would gather them one by one each time."""
    return node.op == "permute" and node.attrs["axes"][-1] != node.type.rank - 1


def _interpolates(node: Node) -> bool:
    """Whether it reads several elements for one."""
    return node.op == "resize" and node.attrs["mode"] != "nearest"
