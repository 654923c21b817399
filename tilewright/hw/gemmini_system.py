"""A processor with Gemmini beside it: what `target="gemmini"` compiles for."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, fields
from typing import ClassVar

from tilewright.dtypes import DType
from tilewright.errors import HardwareRangeError
from tilewright.hw.cpu import CpuMachine
from tilewright.hw.gemmini import GemminiMachine
from tilewright.hw.gemmini_timing import GemminiTiming
from tilewright.support.suggest import did_you_mean

# What "gemmini:name=value,..." may set.
_SETTABLE = (
    "dim",
    "scratchpad",
    "accumulator",
    "scratchpad_banks",
    "dram_bytes_per_cycle",
)


@dataclass(frozen=True)
class GemminiSystem:
    """Integer matmuls and convolutions run on the accelerator, everything else on the host."""

    kind: ClassVar[str] = "gemmini"

    host: CpuMachine
    accelerator: GemminiMachine = field(default_factory=GemminiMachine)
    timing: GemminiTiming = field(default_factory=GemminiTiming)
    # Of a design that an exploration found: layers and their tilings, in the form of `loops/gemmini/chosen.py`.
    tilings: tuple[tuple[str, Hashable], ...] = ()

    def __post_init__(self) -> None:
        _ = self.accelerator.bus_bytes  # its programs run on the RTL

    def channel_multiple(self, dtype: DType) -> int:
        return 1

    def channel_block(self, channels: int, dtype: DType) -> int:
        """The accelerator reads channels-last tensors."""
        return 0

    def describe(self) -> str:
        return f"{self.accelerator.describe()}; host: {self.host.describe()}"


def machine_named(options: str) -> GemminiMachine:
    """`"dim=8,scratchpad=65536"` -> the machine; raises HardwareRangeError if there is no such option or value."""
    given: dict[str, int | float] = {}
    for option in filter(None, options.split(",")):
        name, _, value = option.partition("=")
        if name not in _SETTABLE:
            raise HardwareRangeError(
                f"Gemmini has no parameter {name!r}; it has: {', '.join(_SETTABLE)}",
                remedy=did_you_mean(name, _SETTABLE) or None,
            )
        try:
            given[name] = float(value) if name == "dram_bytes_per_cycle" else int(value)
        except ValueError:
            raise HardwareRangeError(f"{name} must be a number, got {value!r}") from None
    assert set(given) <= {each.name for each in fields(GemminiMachine)}
    return GemminiMachine(**given)  # type: ignore[arg-type]
