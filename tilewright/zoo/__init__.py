"""The models of the papers as plain PyTorch modules, for demos, tests and benchmarks.

    model = zoo.build("resnet50")
    inputs = zoo.example_inputs("resnet50", batch=8)
    model(*inputs)

One file per family, `init.py` for the random weights, `registry.py` for the table, `catalog.py` for what needs no
PyTorch: names, sizes and inputs. This package imports torch and nothing else of the project; only the command line, the
tests and the benchmarks import it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .catalog import CATALOG, Card, names

if TYPE_CHECKING:
    from .registry import Entry, UnknownModelError, UnknownOptionError, build, entry, example_inputs

__all__ = [
    "CATALOG",
    "Card",
    "Entry",
    "UnknownModelError",
    "UnknownOptionError",
    "build",
    "entry",
    "example_inputs",
    "names",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:  # also for `from tilewright.zoo import registry`, which then looks for the module
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(".registry", __name__), name)
