"""What all kinds of machines have in common, and a machine as plain data.

A kind of machine is a frozen dataclass with a `kind`; it is listed in `KINDS` once. Everything that depends on the kind
(candidates, code generation, timing, cost) is looked up by that name, in one table for each room.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, ClassVar, Protocol

import msgspec

from tilewright.dtypes import DType
from tilewright.hw.cpu import CpuMachine
from tilewright.hw.gpu import GpuMachine


class Machine(Protocol):
    """What the target-independent packages know of a machine: that it has a kind, and how to describe it."""

    kind: ClassVar[str]

    def __hash__(self) -> int: ...

    def describe(self) -> str:
        """One line for people."""

    def channel_block(self, channels: int, dtype: DType) -> int:
        """Of so many channels, how many are best stored together as a block that kernels read as vectors; 0: there
        are no such kernels."""


KINDS: dict[str, type[Any]] = {kind.kind: kind for kind in (CpuMachine, GpuMachine)}


def description(machine: Machine) -> dict[str, Any]:
    """A machine as it is written down: its fields, without its kind, which `machine_of` finds by them."""
    found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(machine))
    return found


def machine_of(described: dict[str, Any]) -> Machine:
    """The machine that a description is of. ValueError where no kind has such fields: it may be of another version."""
    for kind in KINDS.values():
        try:
            found: Machine = msgspec.convert(described, kind)
        except msgspec.ValidationError:
            continue
        return found
    raise ValueError("this is the description of no kind of machine that this version knows")


def to_text(machine: Machine) -> str:
    """As one process tells another: equal for equal machines."""
    return msgspec.json.encode(machine).decode()


@lru_cache(maxsize=16)
def from_text(text: str) -> Machine:
    return machine_of(msgspec.json.decode(text))
