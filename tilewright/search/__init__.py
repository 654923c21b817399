"""Which configs to try next: searches that ask for trials and are told what came of them."""

from tilewright.search.searcher import Searcher
from tilewright.search.searches import SEARCHES

__all__ = ["SEARCHES", "Searcher"]
