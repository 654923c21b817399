"""Which configs to try next: searches that ask for trials and are told what came of them."""

from tilewright.search.searcher import Search, Searcher
from tilewright.search.searches import SEARCHES, register, search_named, unregister

__all__ = ["SEARCHES", "Search", "Searcher", "register", "search_named", "unregister"]
