"""The units of a graph that no partition cuts further, and the groups of units that one kernel may compute.

Units are what `fuse` puts in one group, cut where another group could be better:

    [conv + add + relu]      ->   [conv + add]  [relu]           if the reader of the result may take the relu instead
    [mul + add + softmax]    ->   [mul + add]  [softmax]         the producers of a reduction

A group is a set of units with one output: all others are read only inside it. `RULES` says which groups are not worth
asking for; of the rest, a group is legal if the cost oracle knows a candidate that computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tilewright.graph.combined import KINDS
from tilewright.graph.ir import Graph, Node
from tilewright.graph.op import Fusion, op_of
from tilewright.graph.separable import is_depthwise
from tilewright.graph.tile_operator import NAME as TILE_KERNEL
from tilewright.rewrites.expansion import MAX_DEPTH, MAX_PARTS, expansion_of
from tilewright.rewrites.fuse import MAX_NODES, OVERLAPPING, Fused, Group, fusion_of

MAX_UNITS = 8  # of a group
MAX_CONTRACTIONS = 3  # of a group
MAX_REDUCTIONS = 2
MAX_GROUPS = 48  # with one output
_IN_ORDER = ("reshape", "broadcast_to", "pad")  # movement that keeps neighbours together


@dataclass(frozen=True, eq=False)
class Unit:
    """Nodes that always share a kernel. Others read only `output`. `read_by` are the units that read it, possibly
    through views (`through`); `in_memory`: it must be in memory, as an output of the graph or because it is read at an
    offset."""

    number: int
    members: tuple[Node, ...]
    output: Node
    read_by: frozenset[int]
    in_memory: bool
    through: tuple[Node, ...]

    @property
    def readers(self) -> frozenset[int] | None:
        """The units that a group with this one must contain; None if no larger group may."""
        return None if self.in_memory else self.read_by

    @cached_property
    def contractions(self) -> int:
        return sum(fusion_of(node) is Fusion.COMPLEX for node in self.members)

    @cached_property
    def reductions(self) -> int:
        return sum(fusion_of(node) is Fusion.REDUCTION for node in self.members)

    @cached_property
    def is_alone(self) -> bool:
        """Whether it is never fused with another unit."""
        ops = {node.op for node in self.members}
        opaque = any(op_of(op).fusion is Fusion.OPAQUE for op in ops)
        return opaque or bool(ops & {"concat", TILE_KERNEL}) or not self.output.type.size


def _may_share(units: Sequence[Unit]) -> bool:
    return len(units) == 1 or not any(unit.is_alone for unit in units)


def _reads_in_order(units: Sequence[Unit]) -> bool:
    """Whether no contraction gathers its operand. A separate movement is faster, for a reason that predictions do not
    model. A permute of the result that the model returns is no such movement: only the order of the stores differs."""
    if len(units) == 1 or not any(unit.contractions for unit in units):
        return True
    inner = units[:-1] if _returns_permuted(units[-1]) else units
    moves = [node.op for unit in inner if not unit.contractions for node in unit.members]
    return not any(op_of(op).fusion is Fusion.INJECTIVE and op not in _IN_ORDER for op in moves)


def _returns_permuted(unit: Unit) -> bool:
    """Whether it only permutes, into memory of its own."""
    return unit.in_memory and all(node.op == "permute" for node in unit.members)


def _pads_no_sum(units: Sequence[Unit]) -> bool:
    """Whether no result of a contraction or reduction is padded: its operands would be read out of bounds at the
    border."""
    summed: set[Node] = set()
    for node in members_of(units):
        if fusion_of(node) in (Fusion.COMPLEX, Fusion.REDUCTION) or not summed.isdisjoint(node.inputs):
            summed.add(node)
        if node.op == "pad" and node in summed:
            return False
    return True


def _is_writable(units: Sequence[Unit]) -> bool:
    """Whether the formula is small enough, as `expansion.py` counts it. A contraction's result counts as one value."""
    sizes: dict[Node, tuple[int, int]] = {}
    for node in members_of(units):
        own = expansion_of(node)
        parts, depth = own.parts, own.depth
        for operand, read in zip(node.inputs, own.reads, strict=True):
            if operand in sizes:
                parts += read.times * read.indices * sizes[operand][0]
                depth = max(depth, read.depth + sizes[operand][1])
        if parts > MAX_PARTS or depth > MAX_DEPTH:
            return False
        sizes[node] = (parts, depth)
    return True


def members_of(units: Sequence[Unit]) -> list[Node]:
    """The nodes of a group, producers first, with the views between its units."""
    found: list[Node] = []
    for position, unit in enumerate(units):
        found += unit.members
        if position < len(units) - 1:  # the last is the output
            found += unit.through
    return found


@dataclass(frozen=True)
class Rule:
    """A limit on groups. A group beyond it is not considered, nor is any larger one."""

    name: str
    holds: Callable[[Sequence[Unit]], bool]


RULES = (
    Rule("at most 8 units", lambda units: len(units) <= MAX_UNITS),
    Rule("no concatenation, tile kernel or operator without a formula", _may_share),
    Rule("no permute or gather with a contraction", _reads_in_order),
    Rule("no padding of a contraction's or reduction's result", _pads_no_sum),
    Rule(
        "at most 3 contractions",
        lambda units: sum(unit.contractions for unit in units) <= MAX_CONTRACTIONS,
    ),
    Rule(
        "at most 2 reductions",
        lambda units: sum(unit.reductions for unit in units) <= MAX_REDUCTIONS,
    ),
    Rule(
        "at most 64 nodes",
        lambda units: sum(len(unit.members) + len(unit.through) for unit in units) <= MAX_NODES,
    ),
    Rule("a formula within the limits of expansion.py", _is_writable),
)


def refused(units: Sequence[Unit]) -> str | None:
    """The name of the first rule that the group breaks, or None."""
    return next((rule.name for rule in RULES if not rule.holds(units)), None)


def chained(units: Sequence[Unit]) -> frozenset[int] | None:
    """The numbers of the two units that make this group a chain: two with contractions, or one with a contraction and
    one with a reduction. None if it is no such chain."""
    contractions = [unit for unit in units if unit.contractions]
    reductions = [unit for unit in units if unit.reductions and not unit.contractions]
    pair = contractions if len(contractions) == 2 else [*contractions, *reductions]
    is_chain = len(pair) == 2 and contractions and all(unit.contractions <= 1 for unit in contractions)
    return frozenset(unit.number for unit in pair) if is_chain else None


@dataclass(frozen=True)
class RefusedChain:
    """A chain that is not a group, and why."""

    units: tuple[Unit, ...]
    reason: str


class Units:
    """All units of a graph, producers first, and the groups that they may form."""

    def __init__(
        self,
        graph: Graph,
        fused: Fused,
        greedy: Fused,
        kept: Collection[Node],
        cuts: bool = False,
        joins: bool = False,
    ) -> None:
        """`fused`: the groups of `fuse`. `greedy`: those of the baseline; each is a union of units. `kept`: nodes that
        need memory of their own. `cuts`: whether an epilogue may become a kernel of its own. `joins`: whether a
        reduction may later be fused into the contraction before it, once both are measured (`join_reductions.py`)."""
        self.note = ""  # which groups are not considered, and why
        self.refused: list[RefusedChain] = []  # found by `groups`
        self._joins = joins
        self._users = graph.users()
        self._views, self._offsets = fused.views, fused.offsets
        self.position = {node: number for number, node in enumerate(self._users)}
        self._kept = frozenset(graph.outputs) | frozenset(kept)
        baseline = {node: number for number, group in enumerate(greedy.groups) for node in group.members}
        holder = {node: group for group in fused.groups for node in group.members}
        made = [
            part
            for group in fused.groups
            for part in _cut(group, baseline, self._users, cuts and self._is_wanted(group, holder))
        ]
        made.sort(key=lambda members: self.position[members[-1]])
        self._holder = {node: number for number, members in enumerate(made) for node in members}
        self.all = [self._unit(number, members) for number, members in enumerate(made)]

    def _is_wanted(self, group: Group, holder: Mapping[Node, Group]) -> bool:
        """Whether the only reader of a group could compute the end of its epilogue: a reduction or a depthwise
        convolution. A library call followed by a kernel for the epilogue is a candidate of the whole group and needs no
        cut."""
        readers: set[Group] = set()
        waiting = [group.output]
        while waiting:
            for user in self._users[waiting.pop()]:
                if user in self._views and user not in self._offsets and user not in self._kept:
                    waiting.append(user)
                elif user in holder:
                    readers.add(holder[user])
                else:
                    return False
        anchor = next(iter(readers)).anchor if len(readers) == 1 else None
        if anchor is None or group.output in self._kept:
            return False
        return is_depthwise(anchor) or (
            fusion_of(anchor) is Fusion.REDUCTION and anchor.op not in OVERLAPPING
        )

    def _unit(self, number: int, members: Sequence[Node]) -> Unit:
        output = members[-1]
        readers: set[int] = set()
        through: dict[Node, None] = {}
        in_memory = output in self._kept
        waiting = [output]
        while waiting:
            node = waiting.pop()
            for user in self._users[node]:
                if user in self._views:
                    if user in self._offsets or user in self._kept:
                        in_memory = True
                    elif user not in through:
                        through[user] = None
                        waiting.append(user)
                elif self._holder[user] != number:
                    readers.add(self._holder[user])
        ordered = tuple(sorted(through, key=self.position.__getitem__))
        return Unit(number, tuple(members), output, frozenset(readers), in_memory, ordered)

    def group_of(self, nodes: Collection[Node]) -> tuple[Unit, ...] | None:
        """The units that consist of exactly these nodes, and views between them; None if they are not whole units."""
        numbers = sorted({self._holder[node] for node in nodes if node in self._holder})
        units = tuple(self.all[number] for number in numbers)
        whole = {node for unit in units for node in unit.members}
        return units if whole == {node for node in nodes if node in self._holder} else None

    def groups(self, output: Unit) -> Iterator[tuple[Unit, ...]]:
        """The groups with this output that break no rule, the smallest first."""
        first = frozenset([output.number])
        seen = {first}
        waiting = [first]
        outside: dict[int, frozenset[int]] = {}  # units that others read too, with the group that reads them
        for numbers in waiting:
            units = tuple(self.all[number] for number in sorted(numbers))
            if len(units) > 1 and not (self._joins and _is_joined_later(units)):
                yield units
            for number in self._operands(numbers):
                readers = self.all[number].readers
                if readers is None or not readers <= numbers:
                    outside.setdefault(number, numbers)
                    continue
                more = numbers | {number}
                if more in seen:
                    continue
                if len(seen) > MAX_GROUPS:
                    self.note = (
                        f"more than {MAX_GROUPS} groups with one output; the larger ones are not considered"
                    )
                    continue
                seen.add(more)
                rule = refused([self.all[each] for each in sorted(more)])
                if rule is None:
                    waiting.append(more)
                else:
                    self._refuse(more, f"fusion rule: {rule}")
        inside = frozenset[int]().union(*waiting)
        for number, numbers in outside.items():
            if number not in inside:
                is_kept = self.all[number].output in self._kept
                why = "an output of the model" if is_kept else "read by other kernels too"
                self._refuse(numbers | {number}, f"the result between them is {why}")

    def _refuse(self, numbers: frozenset[int], reason: str) -> None:
        units = tuple(self.all[number] for number in sorted(numbers))
        if chained(units) is not None:
            self.refused.append(RefusedChain(units, reason))

    def _operands(self, numbers: frozenset[int]) -> list[int]:
        """The units that a group reads."""
        found: dict[int, None] = {}
        for number in sorted(numbers):
            for operand in self.operands_of[number]:
                if operand not in numbers:
                    found[operand] = None
        return list(found)

    @cached_property
    def operands_of(self) -> list[tuple[int, ...]]:
        found: list[list[int]] = [[] for _ in self.all]
        for unit in self.all:
            for reader in sorted(unit.read_by):
                found[reader].append(unit.number)
        return [tuple(each) for each in found]

    def as_group(self, units: Sequence[Unit], anchors: Mapping[Node, Node]) -> Group:
        """The group that one kernel computes. `anchors`: the anchor of each node's original group."""
        members = members_of(units)
        inside = set(members)
        found = list(
            dict.fromkeys(a for node in members if (a := anchors.get(node)) is not None and a in inside)
        )
        members.sort(key=self.position.__getitem__)
        return Group(units[-1].output, found[0] if len(found) == 1 else None, members)


def _is_joined_later(units: Sequence[Unit]) -> bool:
    reduces = any(node.op in KINDS for unit in units for node in unit.members)
    return reduces and any(unit.contractions for unit in units)


def _cut(
    group: Group, baseline: Mapping[Node, int], users: Mapping[Node, Sequence[Node]], cuts: bool
) -> Iterator[list[Node]]:
    """The units of a group, each with one output. A cut that would create two outputs is omitted."""
    members = group.members
    marks = [baseline.get(node, -1) for node in members]
    cut_at: set[int] = set()
    anchor = None if group.anchor is None else members.index(group.anchor)
    for position in range(1, len(members)):
        differs = len(set(marks[:position]) & set(marks[position:])) == 0 and len(set(marks)) > 1
        producers = (
            anchor is not None and position == anchor and fusion_of(members[anchor]) is Fusion.REDUCTION
        )
        epilogue = (
            cuts
            and anchor is not None
            and position > anchor
            and fusion_of(members[anchor]) is Fusion.COMPLEX
            and members[anchor].op != "attention"
            and not _is_bias(members[position], members[anchor])
        )
        if differs or producers or epilogue:
            cut_at.add(position)
    begin = 0
    for position in [*sorted(cut_at), len(members)]:
        part = members[begin:position]
        if position < len(members) and not _has_one_output(part, set(members[begin:]), users):
            continue
        yield part
        begin = position


def _has_one_output(
    part: Sequence[Node], among: Collection[Node], users: Mapping[Node, Sequence[Node]]
) -> bool:
    """Whether a part of a group has one output: only its last node is read outside the part, and the rest of the group
    reads it."""
    inside = set(part)
    hidden = part[:-1]
    if any(not inside.issuperset(users[node]) for node in hidden):
        return False
    return any(user in among and user not in inside for user in users[part[-1]])


def _is_bias(node: Node, anchor: Node) -> bool:
    """Whether it adds a constant vector: every kernel of a contraction can do that at no cost."""
    if node.op != "add" or anchor not in node.inputs:
        return False
    return all(operand is anchor or operand.is_constant for operand in node.inputs)
