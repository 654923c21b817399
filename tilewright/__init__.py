"""Tilewright: a tensor compiler. A PyTorch model goes in, a compiled model comes out.

    fast = tilewright.compile(model, (x,))
    fast(x)
    fast.save("model.tw")
    tilewright.load("model.tw")

Names are imported when they are first used: `import tilewright` is cheap, and `load` needs no compiler.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tilewright.support.version import VERSION

if TYPE_CHECKING:
    from tilewright.driver import compile, compile_all
    from tilewright.errors import TilewrightError
    from tilewright.runtime.artifact import load
    from tilewright.runtime.dynamic import DynamicModel
    from tilewright.runtime.model import CompiledModel

__version__ = VERSION
__all__ = [
    "CompiledModel",
    "DynamicModel",
    "TilewrightError",
    "__version__",
    "compile",
    "compile_all",
    "load",
]

_HOMES = {
    "compile": "tilewright.driver",
    "compile_all": "tilewright.driver",
    "load": "tilewright.runtime.artifact",
    "CompiledModel": "tilewright.runtime.model",
    "DynamicModel": "tilewright.runtime.dynamic",
    "TilewrightError": "tilewright.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tilewright' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
