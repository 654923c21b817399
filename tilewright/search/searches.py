"""The searches by name, those of users among them.

One of your own is a class with `propose` (see `searcher.py`), or anything with the methods of a Searcher: register it
here, or name it as an entry point of the group `tilewright.searches`, and ask for it with `compile(search=...)`.
"""

from __future__ import annotations

from collections.abc import Callable

from tilewright.cost.model import CostModel
from tilewright.errors import OptionError
from tilewright.search.annealing import Annealing
from tilewright.search.evolution import Evolution
from tilewright.search.exhaustive import Exhaustive
from tilewright.search.guided import Guided
from tilewright.search.random import RandomSearch
from tilewright.search.searcher import Searcher
from tilewright.space.candidates import Candidates
from tilewright.support.plugins import named

ENTRY_POINTS = "tilewright.searches"

Factory = Callable[[Candidates, CostModel, int], Searcher]

SEARCHES: dict[str, Factory] = {
    "guided": Guided,
    "evolution": Evolution,
    "annealing": Annealing,
    "random": RandomSearch,
    "exhaustive": Exhaustive,
}


def register(name: str, factory: Factory) -> None:
    """A search of your own, under a name that `compile(search=...)` and `tilewright tune --search` take."""
    if not name or not callable(factory):
        raise OptionError(
            f"{factory!r} is not a search",
            remedy="give a class, or a function, of (candidates, model, seed) that returns a Searcher",
        )
    if name in SEARCHES:
        raise OptionError(f"there is a search {name!r} already", remedy="choose another name")
    SEARCHES[name] = factory


def unregister(name: str) -> None:
    SEARCHES.pop(name, None)


def search_named(name: str) -> Factory:
    """OptionError where there is none of that name."""
    return named("search", name, SEARCHES, ENTRY_POINTS)
