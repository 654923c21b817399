"""Extensions by installed packages: entry points by group."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from importlib import metadata
from typing import TypeVar

from tilewright.support.suggest import one_of

F = TypeVar("F")


@lru_cache(maxsize=16)
def entry_points(group: str) -> dict[str, metadata.EntryPoint]:
    return {entry.name: entry for entry in metadata.entry_points(group=group)}


def named(option: str, name: str, registered: Mapping[str, F], group: str) -> F:
    """The object registered under a name, or the entry point of the group. Raises OptionError for the argument
    `option` if there is neither."""
    if name in registered:
        return registered[name]
    installed = entry_points(group)
    one_of(option, name, (*registered, *installed))
    loaded: F = installed[name].load()
    return loaded
