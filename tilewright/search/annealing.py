"""Simulated annealing on the cost model, as in AutoTVM.

Several chains walk over the space while the temperature falls. A batch is a diverse selection of the best visited
configs, plus a few random ones.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable

from tilewright.cost.model import CostModel
from tilewright.search.searcher import Search, diverse, scores
from tilewright.space.candidates import Configs
from tilewright.space.space import Config

CHAINS = 64
STEPS = 32
HOT = 0.5  # initial temperature, in log seconds; it falls to 0
PATIENCE = 8  # steps without a new best before the chains stop
RANDOM_SHARE = 0.05
_VISITED = 4  # candidates per wanted config, from which a diverse selection is made


class Annealing(Search):
    """Annealing whose chains continue from their last positions."""

    def __init__(self, candidates: Configs, model: CostModel, seed: int = 0) -> None:
        super().__init__(candidates, model, seed)
        self._chains: list[Config] = []

    def propose(self, count: int) -> Iterable[Config]:
        ordered = self._walk(_VISITED * count)
        by_model = diverse(ordered, count)
        return [config for config in by_model if self.rng.random() >= RANDOM_SHARE]

    def _walk(self, wanted: int) -> list[tuple[Config, float]]:
        """Walk the chains, and return the best visited configs that were not asked for yet, with scores."""
        rng = self.rng
        if not self._chains:
            self._chains = self.candidates.sample(rng, CHAINS)
        at = scores(self.model, self._chains)
        visited = dict(zip(self._chains, map(float, at), strict=True))
        best, settled = float(at.max()), 0
        for step in range(STEPS):
            temperature = HOT * (1 - step / STEPS)
            moves = [self.candidates.mutate(config, rng) for config in self._chains]
            there = scores(self.model, moves)
            visited.update(zip(moves, map(float, there), strict=True))
            for chain, (old, new) in enumerate(zip(at, there, strict=True)):
                if new >= old or rng.random() < math.exp((new - old) / temperature):
                    self._chains[chain], at[chain] = moves[chain], new
            settled = 0 if there.max() > best else settled + 1
            best = max(best, float(there.max()))
            if settled == PATIENCE:
                break
        fresh = ((config, score) for config, score in visited.items() if config not in self.history.taken)
        return heapq.nlargest(wanted, fresh, key=lambda pair: pair[1])
