"""Atomic functions of the tile language, besides `tl.atomic_add`."""

from __future__ import annotations

from typing import Any

from tilewright.tile.frontend.builder import Builder, tile_type
from tilewright.tile.frontend.builtin import Builtin, builtin
from tilewright.tile.frontend.language import converted, pointers_of, written
from tilewright.tile.ir import Value


def _atomic(kind: str, what: str) -> Builtin:
    def atomic(b: Builder, pointer: Any, value: Any, mask: Any = None) -> Value:
        name = f"atomic_{kind}"
        return b.emit(name, *written(b, pointers_of(b, pointer, name, ()), value, mask))

    atomic.__doc__ = (
        f"{what}, each element as one indivisible step, and gives the values from before, as `atomic_add`."
    )
    return Builtin(atomic, f"atomic_{kind}")


atomic_max = _atomic(
    "max", "Replaces an integer of 32 or 64 bits in memory by the greater of it and the value"
)
atomic_min = _atomic(
    "min", "Replaces an integer of 32 or 64 bits in memory by the smaller of it and the value"
)
atomic_and = _atomic(
    "and", "Replaces an integer of 32 or 64 bits in memory by its bitwise and with the value"
)
atomic_or = _atomic("or", "Replaces an integer of 32 or 64 bits in memory by its bitwise or with the value")
atomic_xor = _atomic(
    "xor", "Replaces an integer of 32 or 64 bits in memory by its bitwise exclusive or with the value"
)
atomic_xchg = _atomic("xchg", "Replaces an integer or float of 32 or 64 bits in memory by the value")


@builtin
def atomic_cas(b: Builder, pointer: Any, expected: Any, value: Any) -> Value:
    """Replaces an integer of 32 or 64 bits in memory by the value if it equals `expected`, atomically for each element;
    returns the old values."""
    pointers, given = written(b, pointers_of(b, pointer, "atomic_cas", ()), value, None)
    wanted = b.broadcast(converted(b, expected, tile_type(pointers).dtype), tile_type(pointers).shape)
    return b.emit("atomic_cas", pointers, wanted, given)
