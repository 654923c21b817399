"""Searches propose which configs to try next, and learn from the outcomes."""

from tilewright.search.searcher import Search, Searcher
from tilewright.search.searches import SEARCHES, register, search_named, unregister

__all__ = ["SEARCHES", "Search", "Searcher", "register", "search_named", "unregister"]
