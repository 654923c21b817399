"""The searches by name. One of your own: a class with `propose`, or anything with the methods of a Searcher, in a file
of its own, and its name here."""

from __future__ import annotations

from collections.abc import Callable

from tilewright.cost.model import CostModel
from tilewright.search.annealing import Annealing
from tilewright.search.evolution import Evolution
from tilewright.search.exhaustive import Exhaustive
from tilewright.search.guided import Guided
from tilewright.search.random import RandomSearch
from tilewright.search.searcher import Searcher
from tilewright.space.candidates import Candidates

Factory = Callable[[Candidates, CostModel, int], Searcher]

SEARCHES: dict[str, Factory] = {
    "guided": Guided,
    "evolution": Evolution,
    "annealing": Annealing,
    "random": RandomSearch,
    "exhaustive": Exhaustive,
}
