"""Check names that users pass as options, and suggest the one they meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from tilewright.errors import OptionError


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`"did you mean 'full'?"`, or "" if no known name is similar."""
    by_lower = {each.lower(): each for each in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=2, cutoff=0.6)
    return f"did you mean {' or '.join(repr(by_lower[each]) for each in near)}?" if near else ""


def one_of(name: str, value: str, allowed: Iterable[str]) -> str:
    """Return the value of the option `name`; raises OptionError if it is not one of those allowed."""
    known = tuple(allowed)
    if value not in known:
        raise OptionError(
            f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}",
            remedy=did_you_mean(str(value), known) or f"pass {name}={known[0]!r}, or leave it out",
        )
    return value
