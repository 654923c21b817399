"""Which modules register templates and rules of a user's own: other processes import them before they build."""

from __future__ import annotations

import sys
import warnings

from tilewright.errors import TilewrightWarning

_modules: dict[str, str] = {}  # what is registered -> the module that registers it when it is imported


def remember(what: str, registered: object, module: str | None) -> None:
    """`what`: in words, such as "sketch rule 'unroll'". `module`: None for the one in which its class is."""
    _modules[what] = module or type(registered).__module__


def forget(what: str) -> None:
    _modules.pop(what, None)


def registering_modules() -> tuple[str, ...]:
    """What another process imports to have everything that is registered in this one."""
    found = set()
    for what, module in _modules.items():
        if module != "__main__":
            found.add(module)
        elif (spec := getattr(sys.modules["__main__"], "__spec__", None)) is not None:  # python -m
            found.add(spec.name)
        else:
            warnings.warn(
                f"{what} is registered by the program itself, which other processes cannot import: what"
                " it makes is not built, and never chosen by measuring. Try: put it into a module, and import that",
                TilewrightWarning,
                stacklevel=2,
            )
    return tuple(sorted(found))
