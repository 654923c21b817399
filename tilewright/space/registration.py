"""Which modules register templates and rules of a user's own: other processes import them before they build."""

from __future__ import annotations

from tilewright.hw import intrinsics
from tilewright.support.modules import importable_modules

_modules: dict[str, str] = {}  # what is registered -> the module that registers it when it is imported


def remember(what: str, registered: object, module: str | None) -> None:
    """`what`: in words, such as "sketch rule 'unroll'". `module`: None for the one in which its class is."""
    _modules[what] = module or type(registered).__module__


def forget(what: str) -> None:
    _modules.pop(what, None)


def registering_modules() -> tuple[str, ...]:
    """What another process imports to have everything that is registered in this one, intrinsics too."""
    return tuple(sorted({*importable_modules(_modules), *intrinsics.registering_modules()}))
