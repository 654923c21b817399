"""The Machine protocol, and machines as plain data.

A kind of machine is a frozen dataclass with a `kind`; it is listed in `KINDS` once. Everything that depends on the
kind (candidates, code generation, timing, cost) is looked up by that name, in one table per package.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, ClassVar, Protocol

import msgspec

from tilewright.dtypes import DType
from tilewright.hw.cpu import CpuMachine
from tilewright.hw.gemmini_system import GemminiSystem
from tilewright.hw.gpu import GpuMachine


class Machine(Protocol):
    """The properties of a machine that target-independent packages need: its kind, and its description."""

    kind: ClassVar[str]

    def __hash__(self) -> int: ...

    def describe(self) -> str:
        """One line for display."""

    def channel_multiple(self, dtype: DType) -> int:
        """Numbers of channels that kernels read fastest are multiples of this."""

    def channel_block(self, channels: int, dtype: DType) -> int:
        """The best number of channels per block for kernels that read blocks as vectors; 0: there are no such
        kernels."""


KINDS: dict[str, type[Any]] = {kind.kind: kind for kind in (CpuMachine, GpuMachine, GemminiSystem)}


def description(machine: Machine) -> dict[str, Any]:
    """A machine as plain data: its fields without its kind, which `machine_of` infers."""
    found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(machine))
    return found


def machine_of(described: dict[str, Any]) -> Machine:
    """Rebuild a machine from its description. Raises ValueError if no kind has such fields; it may be of another
    version."""
    for kind in KINDS.values():
        try:
            found = msgspec.convert(described, kind)
        except msgspec.ValidationError:
            continue
        # A rate that was written as a whole number stays one: keys of equal machines are fingerprints of such text.
        whole = {
            name: value
            for name, value in described.items()
            if type(value) is int and type(getattr(found, name)) is float
        }
        machine: Machine = replace(found, **whole)
        return machine
    raise ValueError("this is the description of no kind of machine that this version knows")


def to_text(machine: Machine) -> str:
    """The machine as text for other processes: equal for equal machines."""
    return msgspec.json.encode(machine).decode()


@lru_cache(maxsize=16)
def from_text(text: str) -> Machine:
    return machine_of(msgspec.json.decode(text))
