"""Suggest the name that a user meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`"did you mean 'full'?"`, or "" if no known name is similar."""
    by_lower = {each.lower(): each for each in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=2, cutoff=0.6)
    return f"did you mean {' or '.join(repr(by_lower[each]) for each in near)}?" if near else ""
