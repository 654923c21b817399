"""Modules that register users' templates and rules, which worker processes import before they build."""

from __future__ import annotations

from tilewright.hw import intrinsics
from tilewright.support.modules import importable_modules

_modules: dict[str, str] = {}  # registered object -> the module that registers it on import
_changes: list[str] = []  # what was registered or removed, in order


def remember(what: str, registered: object, module: str | None) -> None:
    """`what`: a description, such as "sketch rule 'unroll'". `module`: None for the module of its class."""
    _modules[what] = module or type(registered).__module__
    _changes.append(what)


def forget(what: str) -> None:
    _modules.pop(what, None)
    _changes.append(what)


def changes() -> int:
    """How often something was registered or removed: what was found out before may no longer hold."""
    return len(_changes)


def registering_modules() -> tuple[str, ...]:
    """The modules that another process imports to have everything that is registered here, including intrinsics."""
    return tuple(sorted({*importable_modules(_modules), *intrinsics.registering_modules()}))
