"""Random configs: the baseline for all other searches."""

from __future__ import annotations

from collections.abc import Iterable

from tilewright.search.searcher import Search
from tilewright.space.space import Config


class RandomSearch(Search):
    def propose(self, count: int) -> Iterable[Config]:
        return ()
