"""The cheapest way to cut a graph of units into groups, by dynamic programming over its endings.

A state is the set of units that no group computes yet. It starts as all units, and each transition removes a group.
Units are numbered in topological order, and the group to remove is always one that computes the last unit left.
All readers of that unit are gone, so it is the group's output, and a group has one output that others read: what is
left is again closed under taking operands. Hence groups of a state depend only on its last unit, and equal states,
reached in different ways, continue in the same way: only the cheapest is kept.

    best[left] = min over groups with the last unit of `left` as output of   seconds(group) + best[left - group]

This is the recurrence of Algorithm 1 in the GTCO thesis (Bai, 2023), with groups of any size instead of pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MAX_STATES = 20_000


@dataclass(frozen=True)
class Group:
    """A set of units, as bits, and the seconds of one kernel for all of them."""

    units: int
    seconds: float


class TooManyStates(Exception):
    """The graph is too wide."""


class NoCut(Exception):
    """The groups do not cover the graph."""


@dataclass(frozen=True)
class Cut:
    """The `groups` of the cheapest cut, in order of computation, and the number of visited `states`."""

    seconds: float
    groups: tuple[Group, ...]
    states: int


def cheapest_cut(count: int, groups: Mapping[int, Sequence[Group]], max_states: int = MAX_STATES) -> Cut:
    """The cheapest cut of `count` units. `groups`: those that end in each unit. Raises TooManyStates and
    NoCut."""
    whole = (1 << count) - 1
    best: dict[int, tuple[float, Group | None, int]] = {whole: (0.0, None, 0)}
    waiting: list[list[int]] = [[] for _ in range(count + 1)]
    waiting[count].append(whole)
    for last in range(count, 0, -1):
        for left in waiting[last]:
            before = best[left][0]
            for group in groups[last - 1]:
                rest = left & ~group.units
                seconds = before + group.seconds
                known = best.get(rest)
                if known is None:
                    if len(best) >= max_states:
                        raise TooManyStates
                    waiting[rest.bit_length()].append(rest)
                if known is None or seconds < known[0]:
                    best[rest] = (seconds, group, left)
    if 0 not in best:
        raise NoCut
    chosen: list[Group] = []
    step = best[0]
    while step[1] is not None:
        chosen.append(step[1])
        step = best[step[2]]
    return Cut(best[0][0], tuple(chosen), len(best))
