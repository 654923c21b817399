"""Splits of tables into those to learn from and those to be judged on, without near copies on both sides.

Two tasks are near if they have the same operators and sizes within a factor of two of each other, whatever the machine.
A cluster of near tasks is held out as a whole; or all tasks of an operator's family are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

import numpy as np

from tilewright.dataset.tables import Table

_NEAR = 1.0  # factor of two in each of these


def clusters(tables: Sequence[Table]) -> list[int]:
    """The index of each table's cluster. Tables that are near each other, directly or through others, are one
    cluster."""
    sizes = [_sizes(table) for table in tables]
    numbers = list(range(len(tables)))

    def root(at: int) -> int:
        while numbers[at] != at:
            at = numbers[at]
        return at

    for a in range(len(tables)):
        for b in range(a):
            if tables[a].family == tables[b].family and np.abs(sizes[a] - sizes[b]).max() < _NEAR:
                numbers[root(a)] = root(b)
    return [root(at) for at in range(len(tables))]


def _sizes(table: Table) -> np.ndarray:
    task = table.tokens.task[0]  # its logarithms of operations, bytes, and results, and of what a result sums
    return np.array([math.log2(1 + table.flops), *task[11:15]])


def folds(tables: Sequence[Table], count: int, seed: int = 0) -> list[list[int]]:
    """The tables held out in each fold: whole clusters, evenly distributed."""
    by_cluster: dict[int, list[int]] = {}
    for at, cluster in enumerate(clusters(tables)):
        by_cluster.setdefault(cluster, []).append(at)
    groups = sorted(by_cluster.values(), key=lambda group: (-len(group), group))
    Random(seed).shuffle(groups)
    groups.sort(key=len, reverse=True)
    found: list[list[int]] = [[] for _ in range(count)]
    for group in groups:
        min(found, key=len).extend(group)
    return [sorted(each) for each in found]


def families(tables: Sequence[Table]) -> dict[str, list[int]]:
    """The tables held out if an operator's family is."""
    found: dict[str, list[int]] = {}
    for at, table in enumerate(tables):
        found.setdefault(table.family, []).append(at)
    return found
