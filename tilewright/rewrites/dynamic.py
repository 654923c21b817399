"""dynamic: choose the groups of a partition by dynamic programming, with times from the cost oracle.

`units.py` says which groups there may be, `endings.py` finds the cheapest cut, and here groups get their times. Most
groups need none: a group's time is first estimated as the sum of its units' times minus the most traffic and launches
that it can save. Only groups that the cheapest cut by these estimates contains are priced, until the cheapest cut has
no estimate left. Groups that are equal as tasks, as in repeated blocks, are priced once.

The greedy partition is one of the cuts, so the result is never predicted to be slower. Since predictions have errors,
a group that greedy fusion does not make must be predicted to be faster by a margin, unless its time was measured.
Where the predicted difference is within the margin, tuning measures both: the `rival` decides these groups the other
way. After that, a run that measures nothing takes only groups that tuning has decided on, if these cover the graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations

from msgspec import structs

from tilewright.errors import InternalError
from tilewright.graph.ir import Graph, Node
from tilewright.graph.task import Task
from tilewright.rewrites import endings
from tilewright.rewrites.fuse import Fused, Group
from tilewright.rewrites.oracle import ExplainsRefusals, GroupCosts, Price
from tilewright.rewrites.units import Unit, Units, chained
from tilewright.runtime.plan import FusionReport, GroupReport, PartReport, RefusedGroup
from tilewright.support.layers import merged

MARGIN = 0.05  # a predicted gain below this share of a group's time does not count
MAX_UNITS = 3_000  # of a graph; beyond this, greedy fusion
MAX_REFUSED = 32  # distinct chains whose refusal is explained
MAX_LARGER = 20_000  # groups of several units
_UNMEASURED = 1e3  # seconds that outweigh all measured times of a model
MAX_ASKED = 64  # distinct groups of several units that are priced; the rest are skipped

Rivals = Callable[[], "Fused | None"]
MakeTask = Callable[[Group], tuple[Task, tuple[Node, ...]]]


def cut_dynamically(
    graph: Graph,
    fused: Fused,
    greedy: Fused,
    costs: GroupCosts,
    make_task: MakeTask,
    *,
    kept: Collection[Node] = (),
    cuts: bool = False,
    joins: bool = False,
    only: Collection[str] | None = None,
    max_states: int = endings.MAX_STATES,
) -> tuple[Fused, FusionReport, Rivals]:
    """The groups of the cheapest cut, how they were chosen, and a function that finds the groups of the rival.

    - `fused`, `greedy`: the groups of `fuse`, and those of the greedy partition, which merges or moves some of them.
    - `kept`: nodes that have memory of their own. `cuts`: whether an epilogue may become a kernel of its own.
      `joins`: whether reductions may later be fused into the contractions before them, once both are measured.
    - `only`: the keys of the tasks that groups may be; None: any.
    """
    units = Units(graph, fused, greedy, kept, cuts, joins)
    if len(units.all) > MAX_UNITS:
        return greedy, _fallback(greedy, f"{len(units.all)} units, more than {MAX_UNITS}"), _no_rival
    search = _Search(units, fused, greedy, costs, make_task, only)
    if search.is_settled:
        alone = [each for each in search.single if each.is_greedy]
        return greedy, search.report(alone, greedy), _no_rival
    try:
        chosen = search.run(max_states)
    except endings.TooManyStates:
        return greedy, _fallback(greedy, f"more than {max_states} states"), _no_rival
    except endings.NoCut:  # a group that tuning has decided on is refused now
        return greedy, _fallback(greedy, "the allowed groups do not cover the graph"), _no_rival

    def rival() -> Fused | None:
        other = search.rival(chosen, max_states)
        return None if other is None else _made(search, fused, other)

    return _made(search, fused, chosen), search.report(chosen, greedy), rival


def _no_rival() -> None:
    return None


def _made(search: _Search, fused: Fused, chosen: Sequence[_Option]) -> Fused:
    groups = [search.group(option) for option in chosen]
    inside = {node for group in groups for node in group.members}
    groups.sort(key=lambda group: search.units.position[group.output])
    views = {view: target for view, target in fused.views.items() if view not in inside}
    return replace(
        fused,
        groups=tuple(groups),
        views=views,
        offsets={view: offset for view, offset in fused.offsets.items() if view in views},
    )


def _fallback(greedy: Fused, why: str) -> FusionReport:
    count = len(greedy.groups)
    return FusionReport("greedy", count, count, note=f"greedy fusion instead of dynamic programming: {why}")


@dataclass(eq=False)
class _Option:
    """A group that the partition may have. `seconds` is an estimate until `price` is known."""

    units: tuple[Unit, ...]
    is_greedy: bool
    signature: object
    seconds: float = 0.0
    price: Price | None = None
    is_legal: bool = True

    @property
    def bits(self) -> int:
        return sum(1 << unit.number for unit in self.units)


class _Search:
    """The options of each unit as output, with their times."""

    def __init__(
        self,
        units: Units,
        fused: Fused,
        greedy: Fused,
        costs: GroupCosts,
        make_task: MakeTask,
        only: Collection[str] | None,
    ) -> None:
        self.units, self._costs, self._make_task = units, costs, make_task
        self._anchors = {
            node: group.anchor for group in fused.groups if group.anchor is not None for node in group.members
        }
        self._tasks: dict[object, Task] = {}
        self._prices: dict[object, Price | None] = {}
        self._refused: dict[object, RefusedGroup] = {}
        self._explained: set[frozenset[int] | None] = {
            None
        }  # chains that are groups, or whose refusal is known
        self._notes: dict[str, None] = {}
        self._decided: dict[_Option, bool] = {}  # if only these are legal: whether each was measured
        self.states = self.asked = 0
        self.single = [_Option((unit,), False, self._signature((unit,))) for unit in units.all]
        self.greedy = self._of_greedy(greedy)
        for option in self.greedy:
            numbers = (unit.number for unit in option.units if unit.contractions or unit.reductions)
            self._explained.update(map(frozenset, combinations(numbers, 2)))
        taken = {option.bits for option in (*self.single, *self.greedy)}
        self.larger = []
        for unit in units.all:
            for group in units.groups(unit):
                if sum(1 << each.number for each in group) in taken:
                    continue
                signature = self._signature(group)
                if self._is_legal(signature, group):
                    self.larger.append(_Option(group, False, signature))
                    self._explained.add(chained(group))
                else:
                    self._refuse(group)
        for chain in units.refused:
            self._refuse(chain.units, chain.reason)
        if only is not None:
            for option in self._options:
                option.is_legal = self._task_of(option).key in only

    def _of_greedy(self, greedy: Fused) -> list[_Option]:
        """The greedy groups. Groups of one unit are marked among the single ones."""
        found = []
        for group in greedy.groups:
            units = self.units.group_of(group.members)
            if units is None:
                raise InternalError(f"the group of {group.output!r} is not made of whole units")
            if len(units) == 1:
                self.single[units[0].number].is_greedy = True
            else:
                found.append(_Option(units, True, self._signature(units)))
        return found

    @property
    def _options(self) -> list[_Option]:
        return [*self.single, *self.greedy, *self.larger]

    @property
    def is_settled(self) -> bool:
        """Whether there is nothing to choose."""
        return not self.larger and not self.greedy

    # -- tasks and times

    def _signature(self, units: Sequence[Unit]) -> object:
        """A key that is equal for groups that are equal as tasks, computed without building the task of every group."""
        inside = {node: number for number, unit in enumerate(units) for node in (unit.output, *unit.through)}
        outside: dict[Node, int] = {}
        found = []
        for unit in units:
            task, operands = self._unit_task(unit)
            read = tuple(
                inside.get(operand, ~outside.setdefault(operand, len(outside))) for operand in operands
            )
            found.append((task.key, read))
        return tuple(found)

    def _unit_task(self, unit: Unit) -> tuple[Task, tuple[Node, ...]]:
        if unit.number not in self._of_unit:
            self._of_unit[unit.number] = self._make_task(self.units.as_group((unit,), self._anchors))
        return self._of_unit[unit.number]

    @cached_property
    def _of_unit(self) -> dict[int, tuple[Task, tuple[Node, ...]]]:
        return {}

    def _task(self, signature: object, units: Sequence[Unit]) -> Task:
        if signature not in self._tasks:
            self._tasks[signature] = self._make_task(self.units.as_group(units, self._anchors))[0]
        return self._tasks[signature]

    def _task_of(self, option: _Option) -> Task:
        return self._task(option.signature, option.units)

    def _is_legal(self, signature: object, units: Sequence[Unit]) -> bool:
        if len(self.larger) >= MAX_LARGER:
            self._notes[f"more than {MAX_LARGER} larger groups; others are not used"] = None
            return False
        if signature not in self._legal:
            self._legal[signature] = self._costs.can_compute(self._task(signature, units))
        return self._legal[signature]

    @cached_property
    def _legal(self) -> dict[object, bool]:
        return {}

    def _refuse(self, units: Sequence[Unit], reason: str | None = None) -> None:
        """Remember why a chain has no kernel; without a `reason`, the cost oracle may know one. The smallest group that
        contains both parts of the chain is enough, and of chains with the same `reason` the first."""
        pair = chained(units)
        if pair in self._explained:
            return
        self._explained.add(pair)
        signature = reason or self._signature(units)
        if signature in self._refused:
            found = self._refused[signature]
            self._refused[signature] = structs.replace(found, calls=found.calls + 1)
        elif len(self._refused) >= MAX_REFUSED:
            self._notes[f"only {MAX_REFUSED} of the chains without a kernel are explained"] = None
        else:
            tasks = [self._unit_task(unit)[0] for unit in units]
            if reason is None:
                reason = self._explanation(signature, units)
            label = "+".join(task.label for task in tasks)
            self._refused[signature] = RefusedGroup(label, _shape(tasks[-1]), reason, layers=_layers(units))

    def _explanation(self, signature: object, units: Sequence[Unit]) -> str:
        found = None
        if isinstance(self._costs, ExplainsRefusals):
            found = self._costs.refusal(self._task(signature, units))
        return found or "no template computes both in one kernel"

    def _ask(self, option: _Option) -> None:
        if option.signature not in self._prices:
            self._prices[option.signature] = self._costs.price(self._task_of(option))
        option.price = self._prices[option.signature]
        if option.price is None:
            # Without a time there is nothing to compare: it is used where greedy fusion made it, or tuning kept it, and
            # nowhere else.
            option.is_legal &= option.is_greedy or option in self._decided
            option.seconds = 0.0
            if option.is_greedy:
                self._notes["some groups have no time and stay as greedy fusion makes them"] = None
            return
        is_sure = option.is_greedy or option.price.measured
        option.seconds = option.price.seconds * (1.0 if is_sure else 1.0 + MARGIN)
        if not self._decided.get(option, True):
            option.seconds += _UNMEASURED * len(option.units)

    # -- search

    def run(self, max_states: int) -> list[_Option]:
        """The options of the cheapest cut, after pricing each one that matters for it."""
        several = [*self.greedy, *self.larger]
        self._costs.prepare([self._task_of(option) for option in self._options])
        self._keep_decided(max_states)
        doubtful = {unit.number for option in several for unit in option.units}
        for number in sorted(doubtful):
            self._ask(self.single[number])
        for option in several:
            option.seconds = self._estimate(option)
        asked = {option for option in self.larger if option in self._decided}
        for option in (*self.greedy, *asked):
            self._ask(option)
        while True:
            chosen = self._cheapest(max_states)
            unknown = [
                each for each in chosen if len(each.units) > 1 and each not in asked and not each.is_greedy
            ]
            if not unknown:
                return chosen
            for option in unknown:
                if option.signature not in self._prices and self.asked >= MAX_ASKED:
                    self._notes[f"priced {MAX_ASKED} larger groups; the rest were skipped"] = None
                    option.is_legal = False
                    continue
                self.asked += option.signature not in self._prices
                self._ask(option)
                asked.add(option)

    def _keep_decided(self, max_states: int) -> None:
        """Make all other groups illegal if those that tuning has decided on cover the graph. Otherwise a prediction
        could undo a measured choice."""
        decided = self._costs.decided()
        kept = {
            option: decided[task]
            for option in self._options
            if option.is_legal and (task := self._task_of(option)) in decided
        }
        if len({unit for option in kept for unit in option.units}) < len(self.single):
            return
        try:
            self._cheapest(max_states, lambda option: 0.0 if option in kept else math.inf)
        except endings.NoCut:
            return
        self._decided = kept
        for option in self._options:
            option.is_legal = option in kept

    def _estimate(self, option: _Option) -> float:
        """The time of a group if it saves all traffic and launches between its units; infinite if the time of a
        unit is not known, because a group cannot be compared then."""
        total = 0.0
        for position, unit in enumerate(option.units):
            price = self.single[unit.number].price
            if price is None:
                return math.inf
            total += price.seconds
            if position < len(option.units) - 1:
                total -= self._costs.traffic_seconds(2 * unit.output.type.bytes)
        return max(total, 0.0)

    def rival(self, chosen: Sequence[_Option], max_states: int) -> list[_Option] | None:
        """The cheapest cut that decides all near-ties the other way; None if there is none."""
        taken, owner = set(chosen), _owners(chosen)
        for option in self.larger:
            if option.price is None and option.is_legal and self._may_tie(option, owner):
                self.asked += option.signature not in self._prices
                self._ask(option)
        unsure = {option for option in (*self.greedy, *self.larger) if self._is_near_tie(option, owner)}
        if not unsure:
            return None

        def wanted(option: _Option) -> float:
            if option in unsure:
                return math.inf if option in taken else 0.0
            return math.inf if len(option.units) > 1 and option.price is None else option.seconds

        try:
            found = self._cheapest(max_states, wanted)
        except (endings.TooManyStates, endings.NoCut):  # no other cut, if tuning has decided on these groups
            return None
        return None if set(found) == taken else found

    def _may_tie(self, option: _Option, owner: Mapping[Unit, _Option]) -> bool:
        """Whether a group that was only estimated, at its best, could be a near-tie."""
        if self.asked >= MAX_ASKED or not math.isfinite(option.seconds):
            return False
        parts, rest = self._alternative(option, owner)
        least = option.seconds + sum(map(_plain, rest))
        return least < (1.0 + MARGIN) * sum(map(_plain, parts))

    def _is_near_tie(self, option: _Option, owner: Mapping[Unit, _Option]) -> bool:
        """Whether errors of the predictions may decide between a group and its alternative."""
        parts, rest = self._alternative(option, owner)
        prices = [each.price for each in (option, *parts, *rest)]
        if not option.is_legal or None in prices or all(price and price.measured for price in prices):
            return False
        separate = sum(map(_plain, parts))
        return abs(separate - sum(map(_plain, (option, *rest)))) < MARGIN * separate

    def _alternative(
        self, option: _Option, owner: Mapping[Unit, _Option]
    ) -> tuple[list[_Option], list[_Option]]:
        """The kernels that a group is compared with: one for each of its units if it is in use, otherwise those in use;
        and kernels for what these compute besides the group."""
        if owner[option.units[-1]] is option:
            return [self.single[unit.number] for unit in option.units], []
        parts = list(dict.fromkeys(owner[unit] for unit in option.units))
        besides = (unit for part in parts for unit in part.units if unit not in option.units)
        return parts, [self.single[unit.number] for unit in besides]

    def _cheapest(
        self, max_states: int, seconds: Callable[[_Option], float] = lambda option: option.seconds
    ) -> list[_Option]:
        groups: dict[int, list[endings.Group]] = {number: [] for number in range(len(self.single))}
        options: dict[int, _Option] = {}
        for option in self._options:
            if option.is_legal and math.isfinite(cost := seconds(option)):
                bits = option.bits
                options[bits] = option
                groups[option.units[-1].number].append(endings.Group(bits, cost))
        cut = endings.cheapest_cut(len(self.single), groups, max_states)
        self.states = cut.states
        return [options[group.units] for group in cut.groups]

    # -- results

    def group(self, option: _Option) -> Group:
        return self.units.as_group(option.units, self._anchors)

    def report(self, chosen: Sequence[_Option], greedy: Fused) -> FusionReport:
        covered = [option for option in (*self.single, *self.greedy) if option.is_greedy]
        compared = {unit for option in (*self.greedy, *self.larger) for unit in option.units}
        taken, owner = {option.bits for option in chosen}, _owners(chosen)
        seconds = sum((_plain(option) for option in chosen if compared.issuperset(option.units)), 0.0)
        baseline = sum((_plain(option) for option in covered if compared.issuperset(option.units)), 0.0)
        rows: dict[tuple[str, bool], GroupReport] = {}
        for option in (*self.greedy, *self.larger):
            if option.price is None:
                continue
            task = self._task_of(option)
            used = option.bits in taken
            known = rows.get((task.key, used))
            parts, rest = self._alternative(option, owner)
            rows[task.key, used] = GroupReport(
                task.label,
                _shape(task),
                used,
                option.is_greedy,
                option.price.seconds,
                sum(_plain(self.single[unit.number]) for unit in option.units),
                option.price.measured,
                1 if known is None else known.calls + 1,
                _layers(option.units),
                self._parts(parts),
                self._parts(rest),
                MARGIN,
            )
        return FusionReport(
            "dynamic",
            len(chosen),
            len(greedy.groups),
            sum(not option.is_greedy for option in chosen),
            seconds,
            baseline,
            self.states,
            len(self._prices),
            "; ".join([*([self.units.note] if self.units.note else []), *self._notes]),
            tuple(rows.values()),
            tuple(self._refused.values()),
        )

    def _parts(self, options: Sequence[_Option]) -> tuple[PartReport, ...]:
        """What each of these costs; nothing if that is not known of all."""
        found = []
        for option in options:
            if option.price is None:
                return ()
            label = self._task_of(option).label
            found.append(PartReport(label, option.price.seconds, option.price.measured))
        return tuple(found)


def _owners(chosen: Sequence[_Option]) -> dict[Unit, _Option]:
    return {unit: option for option in chosen for unit in option.units}


def _plain(option: _Option) -> float:
    """The time without the margin."""
    return 0.0 if option.price is None else option.price.seconds


def _layers(units: Sequence[Unit]) -> tuple[str, ...]:
    """The layers of the user's model that these compute."""
    return merged(*(node.source.layers for unit in units for node in unit.members))


def _shape(task: Task) -> str:
    return repr(task.output.type)
