"""Evolutionary search on the cost model, as in Ansor.

A population of random configs and the best measured ones goes through generations of mutation and crossover. A batch
is the best configs of all generations, plus a few random ones. Crossover takes whole groups of related knobs from
each parent, as Ansor's takes whole nodes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

import numpy as np

from tilewright.search.searcher import Search, diverse, scores
from tilewright.space.space import Config

POPULATION = 128
FROM_MEASURED = 0.2  # share of the first generation
GENERATIONS = 5
MUTATED = 0.85  # share of a generation; the others have two parents
RANDOM_SHARE = 0.05
_LIVED = 4  # candidates per wanted config, from which a diverse selection is made


class Evolution(Search):
    def propose(self, count: int) -> Iterable[Config]:
        fresh = [pair for pair in self._evolved() if pair[0] not in self.history.taken]
        ordered = heapq.nlargest(_LIVED * count, fresh, key=lambda pair: pair[1])
        return [config for config in diverse(ordered, count) if self.rng.random() >= RANDOM_SHARE]

    def _evolved(self) -> list[tuple[Config, float]]:
        """Return all configs of all generations, with scores."""
        measured = self.history.best(int(FROM_MEASURED * POPULATION))
        drawn = self.candidates.sample(self.rng, POPULATION - len(measured))
        population = list(dict.fromkeys((*measured, *drawn)))
        lived: dict[Config, float] = {}
        for _ in range(GENERATIONS):
            found = scores(self.model, population)
            lived.update(zip(population, map(float, found), strict=True))
            population = self._children(population, found)
        lived.update(zip(population, map(float, scores(self.model, population)), strict=True))
        return list(lived.items())

    def _children(self, population: list[Config], found: np.ndarray) -> list[Config]:
        """Make the next generation. Parents are drawn in proportion to their predicted speed."""
        speeds = np.exp(found - found.max()).tolist()
        children = []
        for _ in range(POPULATION):
            if self.rng.random() < MUTATED:
                (parent,) = self.rng.choices(population, speeds)
                children.append(self.candidates.mutate(parent, self.rng))
            else:
                a, b = self.rng.choices(population, speeds, k=2)
                children.append(self.candidates.crossover(a, b, self.rng))
        return list(dict.fromkeys(children))
