"""Timing constants of Gemmini that the RTL in this repository shares with the cycle-level simulator."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.errors import HardwareRangeError

MAX_ENTRIES = 31


@dataclass(frozen=True)
class GemminiTiming:
    """Cycles, and entries of the reservation station for each unit. They are those of our RTL, not of the chip that
    FireSim simulated."""

    dram_latency: int = 32  # from a beat's turn on the bus to its end
    load_entries: int = 8
    execute_entries: int = 16
    store_entries: int = 4

    def __post_init__(self) -> None:
        if not 2 <= self.dram_latency <= 10_000:
            raise HardwareRangeError(f"dram_latency must be between 2 and 10000, got {self.dram_latency}")
        for name in ("load_entries", "execute_entries", "store_entries"):
            if not 1 <= getattr(self, name) <= MAX_ENTRIES:
                raise HardwareRangeError(
                    f"{name} must be between 1 and {MAX_ENTRIES}, got {getattr(self, name)}"
                )
