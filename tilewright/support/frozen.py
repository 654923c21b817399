"""Makes frozen dataclasses faster to create."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any, TypeVar

C = TypeVar("C", bound=type)


def quickly_made(cls: C) -> C:
    """Give a frozen dataclass an `__init__` that writes its fields at once.

    The one that `dataclass` generates calls `object.__setattr__` for each field and takes two to three times as long. A
    compilation makes hundreds of thousands of configs, tilings and expressions. Fields have plain defaults or none."""
    made: Any = cls
    names = [field.name for field in fields(made)]
    defaults = {f"_default_{field.name}": field.default for field in fields(made)}
    assert all(field.init and field.default_factory is MISSING for field in fields(made))
    parameters = [
        name if defaults[f"_default_{name}"] is MISSING else f"{name}=_default_{name}" for name in names
    ]
    lines = [f"def __init__(self, {', '.join(parameters)}):", " known = self.__dict__"]
    lines += [f" known[{name!r}] = {name}" for name in names]
    if hasattr(made, "__post_init__"):
        lines.append(" self.__post_init__()")
    space = dict(defaults)
    exec("\n".join(lines), space)
    init: Any = space["__init__"]
    init.__qualname__ = f"{made.__qualname__}.__init__"
    init.__annotations__ = made.__init__.__annotations__
    made.__init__ = init
    return cls
