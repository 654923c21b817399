"""Every search is held to the suite that users' own are held to. A new one in SEARCHES is, without a line here."""

from __future__ import annotations

import pytest

from tilewright.cost.model import CostModel
from tilewright.errors import OptionError
from tilewright.search import SEARCHES, Searcher, register, search_named, unregister
from tilewright.space.candidates import Candidates
from tilewright.testing import SearchSuite


@pytest.mark.parametrize("name", sorted(SEARCHES), scope="class")
class TestSearches(SearchSuite):
    @pytest.fixture(autouse=True)
    def named(self, name: str) -> None:
        self.name = name

    def make(self, candidates: Candidates, model: CostModel, seed: int) -> Searcher:
        return SEARCHES[self.name](candidates, model, seed)


def test_a_search_of_ones_own_is_found_by_name() -> None:
    register("mine", SEARCHES["random"])
    try:
        assert search_named("mine") is SEARCHES["random"]
        with pytest.raises(OptionError, match="there is a search 'mine' already"):
            register("mine", SEARCHES["random"])
    finally:
        unregister("mine")
    with pytest.raises(OptionError, match=r"search must be one of 'guided', .*, got 'mine'"):
        search_named("mine")
    with pytest.raises(OptionError, match="is not a search"):
        register("other", "not callable")  # type: ignore[arg-type]
