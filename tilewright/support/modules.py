"""The modules that another process must import to have the same registrations."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping

from tilewright.errors import TilewrightWarning


def importable_modules(registered: Mapping[str, str]) -> tuple[str, ...]:
    """`registered`: a description such as "sketch rule 'unroll'", and the module that registers it on import. A
    script that is run as a file cannot be imported, which is a warning."""
    found = set()
    for what, module in registered.items():
        if module != "__main__":
            found.add(module)
        elif (spec := getattr(sys.modules["__main__"], "__spec__", None)) is not None:  # python -m
            found.add(spec.name)
        else:
            warnings.warn(
                f"{what} is registered by the program itself, which other processes cannot import: what"
                " comes of it is not built, and never chosen by measuring. Try: put it into a module, and import that",
                TilewrightWarning,
                stacklevel=3,
            )
    return tuple(sorted(found))
