"""The registry of searches, including user-defined ones.

To add one, write a class with `propose` (see `searcher.py`) or with all methods of a Searcher. Register it here, or
as an entry point of the group `tilewright.searches`, and select it with `compile(search=...)`.
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
from tilewright.space.candidates import Configs
from tilewright.support.plugins import named

ENTRY_POINTS = "tilewright.searches"

Factory = Callable[[Configs, CostModel, int], Searcher]

SEARCHES: dict[str, Factory] = {
    "guided": Guided,
    "evolution": Evolution,
    "annealing": Annealing,
    "random": RandomSearch,
    "exhaustive": Exhaustive,
}


def register(name: str, factory: Factory) -> None:
    """Register a search under a name for `compile(search=...)` and `tilewright tune --search`."""
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
    """Return the search of this name, or raise OptionError."""
    return named("search", name, SEARCHES, ENTRY_POINTS)
