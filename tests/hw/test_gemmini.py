"""Gemmini as data."""

from __future__ import annotations

from typing import Any

import pytest

from tilewright.errors import HardwareRangeError
from tilewright.hw.gemmini import KIB, GemminiMachine
from tilewright.hw.memory import scopes_of


def test_sizes_follow_from_the_array() -> None:
    machine = GemminiMachine(dim=16, scratchpad=256 * KIB, accumulator=64 * KIB)
    assert (machine.pes, machine.scratchpad_rows, machine.accumulator_rows) == (256, 16 * KIB, KIB)
    assert [memory.name for memory in machine.memories] == ["registers", "accumulator", "scratchpad", "DRAM"]
    assert machine.memories[2].bytes_per_cycle == 32.0
    assert {scope.value for scope in scopes_of(machine)} == {
        "register",
        "accumulator",
        "scratchpad",
        "global",
    }
    assert "16x16" in machine.describe() and "256 KiB" in machine.describe()


def test_memory_that_is_no_whole_row_is_not_used() -> None:
    assert GemminiMachine(dim=48, scratchpad=1000).scratchpad_words == 20 * 48


def test_the_bus_of_the_rtl_has_whole_words_of_the_accumulator() -> None:
    assert GemminiMachine(dram_bytes_per_cycle=12.0).bus_bytes == 12
    for bandwidth in (6.0, 7.5):
        with pytest.raises(HardwareRangeError, match=f"multiple of 4 for the RTL's bus, got {bandwidth:g}"):
            _ = GemminiMachine(dram_bytes_per_cycle=bandwidth).bus_bytes


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"dim": 0}, "dim must be a whole number between 1 and 128, got 0"),
        ({"dim": 256}, "dim must be a whole number between 1 and 128"),
        ({"dim": 16.5}, "dim must be a whole number between 1 and 128, got 16.5"),
        ({"dim": True}, "dim must be a whole number"),
        ({"scratchpad": 100}, "scratchpad must be a whole number between 256 and 16,777,216, got 100"),
        ({"scratchpad_banks": 2.5}, "scratchpad_banks must be a whole number between 1 and 1,024, got 2.5"),
        ({"dram_block": 64.5}, "dram_block must be a whole number"),
        ({"accumulator": 1 << 30}, "accumulator must be a whole number between"),
        ({"dram_bytes_per_cycle": float("nan")}, "dram_bytes_per_cycle must be between"),
        ({"scratchpad_banks": 0}, "scratchpad_banks must be a whole number between 1"),
        ({"dataflow": "row_stationary"}, "dataflow must be 'weight_stationary'"),
        ({"dim": 128, "accumulator": 256}, "the accumulator of 256 bytes has no whole row"),
    ],
)
def test_hardware_out_of_range_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(HardwareRangeError, match=said):
        GemminiMachine(**wrong)
