"""Extensions by installed packages: entry points by group.

An entry point of `tilewright.templates`, `tilewright.rules` or `tilewright.intrinsics` is a callable that registers
some; one of `tilewright.searches`, `tilewright.cost_models` or `tilewright.targets` is the factory of that name.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import lru_cache
from importlib import metadata
from typing import TypeVar

from tilewright.errors import TilewrightWarning
from tilewright.support.suggest import one_of

F = TypeVar("F")


@lru_cache(maxsize=16)
def entry_points(group: str) -> dict[str, metadata.EntryPoint]:
    return {entry.name: entry for entry in metadata.entry_points(group=group)}


_registered: set[str] = set()  # groups


def register_installed(group: str) -> None:
    """Call the entry points of a group once: each registers something. One that fails is named in a warning and left
    out."""
    if group in _registered:
        return
    _registered.add(group)  # before the calls, which may ask for what is registered
    for entry in entry_points(group).values():
        try:
            entry.load()()
        except Exception as error:
            which = f"the entry point {entry.name!r} of {group} ({entry.value})"
            words = f"{which} is left out: {type(error).__name__}: {error}"
            warnings.warn(words, TilewrightWarning, stacklevel=2)


def named(option: str, name: str, registered: Mapping[str, F], group: str) -> F:
    """The object registered under a name, or the entry point of the group. Raises OptionError for the argument
    `option` if there is neither."""
    if name in registered:
        return registered[name]
    installed = entry_points(group)
    one_of(option, name, (*registered, *installed))
    loaded: F = installed[name].load()
    return loaded
