"""The dynamic programming against all cuts of small graphs."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from tilewright.rewrites.endings import Group, TooManyStates, cheapest_cut


def random_units(random: Random, count: int) -> list[set[int]]:
    """The readers of each unit: later ones. Only the last may have none."""
    readers: list[set[int]] = []
    for number in range(count - 1):
        later = range(number + 1, count)
        readers.append(set(random.sample(later, min(len(later), random.choice((1, 1, 1, 2))))))
    return [*readers, set()]


def legal_groups(readers: list[set[int]], outputs: set[int]) -> Iterator[frozenset[int]]:
    """Every set of units with one output: all others are read inside only."""
    count = len(readers)
    for bits in range(1, 1 << count):
        group = frozenset(n for n in range(count) if bits >> n & 1)
        seen = [n for n in group if n in outputs or not readers[n] <= group]
        if seen == [max(group)] or (not seen and max(group) == count - 1):
            yield group


def all_cuts(left: frozenset[int], groups: list[frozenset[int]]) -> Iterator[list[frozenset[int]]]:
    if not left:
        yield []
        return
    first = min(left)
    for group in groups:
        if first in group and group <= left:
            for rest in all_cuts(left - group, groups):
                yield [group, *rest]


@pytest.mark.parametrize("seed", range(60))
def test_the_cheapest_of_all_cuts(seed: int) -> None:
    random = Random(seed)
    count = random.randint(1, 7)
    readers = random_units(random, count)
    outputs = {n for n in range(count - 1) if random.random() < 0.1} | {count - 1}
    seconds = {group: random.random() * len(group) ** 0.5 for group in legal_groups(readers, outputs)}
    options: dict[int, list[Group]] = {number: [] for number in range(count)}
    for group, each in seconds.items():
        options[max(group)].append(Group(sum(1 << n for n in group), each))
    found = cheapest_cut(count, options)
    least = min(sum(seconds[g] for g in cut) for cut in all_cuts(frozenset(range(count)), list(seconds)))
    assert found.seconds == pytest.approx(least)
    assert sum(group.units for group in found.groups) == (1 << count) - 1  # each unit once
    # In the order in which they are computed: what a group reads comes before it.
    done = 0
    for group in found.groups:
        members = [n for n in range(count) if group.units >> n & 1]
        operands = [n for n in range(count) if readers[n] & set(members) and n not in members]
        assert all(done >> n & 1 for n in operands)
        done |= group.units


def test_a_graph_that_is_too_wide_is_refused() -> None:
    options = {n: [Group(1 << n, 1.0), *([Group(3 << n - 1, 1.0)] if n else [])] for n in range(20)}
    with pytest.raises(TooManyStates):
        cheapest_cut(20, options, max_states=5)


def test_no_units() -> None:
    assert cheapest_cut(0, {}).groups == ()
