"""Every config once, in the order in which spaces list them."""

from __future__ import annotations

from collections.abc import Iterable

from tilewright.cost.model import CostModel
from tilewright.search.searcher import Search
from tilewright.space.candidates import Configs
from tilewright.space.space import Config


class Exhaustive(Search):
    def __init__(self, candidates: Configs, model: CostModel, seed: int = 0) -> None:
        super().__init__(candidates, model, seed)
        self._listed = candidates.configs()

    def propose(self, count: int) -> Iterable[Config]:
        return self._listed
