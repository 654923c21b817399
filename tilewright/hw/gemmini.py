"""Gemmini, a systolic accelerator for matmuls and convolutions on 8-bit integers: what its generator takes as
parameters, and what its parts cost in time and energy.

    DRAM -- DMA --> scratchpad (inputs, weights) --> PE array --> accumulator (outputs) -- DMA --> DRAM

The array is weight-stationary: each processing element (PE) keeps one weight in a register, input channels lie along
its rows and output channels along its columns. Partial sums leave a column at its foot, into the accumulator.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from tilewright.dtypes import DType
from tilewright.errors import HardwareRangeError
from tilewright.hw.memory import Memory, Scope

SCRATCHPAD = Scope("scratchpad")
ACCUMULATOR = Scope("accumulator")

KIB = 1024

# What the generator can make and the energies below were fitted for.
DIM_RANGE = (1, 128)
MEMORY_RANGE = (256, 16 << 20)  # bytes of the scratchpad and of the accumulator
DRAM_RANGE = (1.0, 1024.0)  # bytes a cycle


@dataclass(frozen=True)
class AccessEnergy:
    """Picojoules of one MAC and of one word read from or written to each memory, in 40 nm.

    An SRAM's access costs more the larger the SRAM is, in the range of sizes above linearly: a constant and a part for
    each KiB. The accumulator is one SRAM for each column of the array. The numbers are those of DOSA (Hong et al.,
    MICRO 2023), which come from Accelergy and CACTI.
    """

    mac: float = 0.5608
    register: float = 0.48746
    accumulator: float = 1.94
    accumulator_kib: float = 0.1005  # for each KiB of a column's SRAM
    scratchpad: float = 0.49
    scratchpad_kib: float = 0.02513
    dram: float = 100.0


@dataclass(frozen=True)
class Area:
    """Square millimetres in 40 nm: a constant, and parts for each PE, each row of PEs and each KiB of memory.

    The coefficients are a least-squares fit, of relative errors, to the areas that Timeloop and Accelergy give for the
    95 hardware points of DOSA's data set (BSD 2-Clause, copyright 2022 Charles Hong): the mean error is 5.4%, the
    largest 18%. Wires, DMA, controller and the host are not in it.
    """

    constant: float = 0.01384
    pe: float = 4.045e-4
    row: float = 1.0875e-3
    scratchpad_kib: float = 2.6036e-3
    accumulator_kib: float = 5.5497e-3

    def parts(self, dim: float, scratchpad: float, accumulator: float) -> tuple[float, float, float]:
        """(array, scratchpad, accumulator); memories in bytes."""
        array = self.constant + self.pe * dim * dim + self.row * dim
        return array, self.scratchpad_kib * scratchpad / KIB, self.accumulator_kib * accumulator / KIB


@dataclass(frozen=True)
class GemminiMachine:
    """One point of Gemmini's hardware space. Raises HardwareRangeError if the generator has no such point."""

    kind: ClassVar[str] = "gemmini"

    dim: int = 16  # rows and columns of the PE array
    scratchpad: int = 256 * KIB  # bytes
    accumulator: int = 64 * KIB  # bytes
    scratchpad_banks: int = 4
    dram_bytes_per_cycle: float = 8.0  # of the DMA's bus
    dram_block: int = 64  # bytes that DRAM moves together
    dataflow: Literal["weight_stationary"] = "weight_stationary"
    energy: AccessEnergy = field(default_factory=AccessEnergy)
    area_model: Area = field(default_factory=Area)

    INPUT_BYTES: ClassVar[int] = 1
    ACCUMULATOR_BYTES: ClassVar[int] = 4

    def __post_init__(self) -> None:
        _expect("dim", self.dim, *DIM_RANGE, whole=True)
        _expect("scratchpad", self.scratchpad, *MEMORY_RANGE, whole=True)
        _expect("accumulator", self.accumulator, *MEMORY_RANGE, whole=True)
        _expect("dram_bytes_per_cycle", self.dram_bytes_per_cycle, *DRAM_RANGE)
        for name in ("scratchpad_banks", "dram_block"):
            _expect(name, getattr(self, name), 1, 1 << 10, whole=True)
        if self.dataflow != "weight_stationary":
            raise HardwareRangeError(f"dataflow must be 'weight_stationary', got {self.dataflow!r}")
        for name, rows in (("scratchpad", self.scratchpad_rows), ("accumulator", self.accumulator_rows)):
            if rows < 1:
                raise HardwareRangeError(
                    f"the {name} of {getattr(self, name)} bytes has no whole row for an array of {self.dim} columns"
                )

    @property
    def pes(self) -> int:
        return self.dim * self.dim

    @property
    def area(self) -> float:
        """Square millimetres."""
        return sum(self.area_model.parts(self.dim, self.scratchpad, self.accumulator))

    @property
    def bus_bytes(self) -> int:
        """The bytes of the bus to DRAM of Tilewright's RTL. Raises HardwareRangeError if they are no multiple of 4, a
        word of the accumulator: the analytical model takes any bandwidth, the RTL does not."""
        if self.dram_bytes_per_cycle % self.ACCUMULATOR_BYTES:
            raise HardwareRangeError(
                "dram_bytes_per_cycle must be a multiple of 4 for the RTL's bus, got"
                f" {self.dram_bytes_per_cycle:g}"
            )
        return int(self.dram_bytes_per_cycle)

    @property
    def scratchpad_rows(self) -> int:
        """The number of rows of `dim` 8-bit words."""
        return self.scratchpad // (self.dim * self.INPUT_BYTES)

    @property
    def accumulator_rows(self) -> int:
        """The number of rows of `dim` 32-bit words."""
        return self.accumulator // (self.dim * self.ACCUMULATOR_BYTES)

    @property
    def scratchpad_words(self) -> int:
        return self.scratchpad_rows * self.dim

    @property
    def accumulator_words(self) -> int:
        return self.accumulator_rows * self.dim

    @property
    def memories(self) -> tuple[Memory, ...]:
        """From the nearest to the farthest."""
        return (
            Memory("registers", Scope.REGISTER, "thread", self.pes * self.INPUT_BYTES),
            Memory(
                "accumulator",
                ACCUMULATOR,
                "core",
                self.accumulator,
                2.0 * self.dim * self.ACCUMULATOR_BYTES,
                line=self.dim * self.ACCUMULATOR_BYTES,
            ),
            Memory(
                "scratchpad",
                SCRATCHPAD,
                "core",
                self.scratchpad,
                2.0 * self.dim * self.INPUT_BYTES,
                line=self.dim * self.INPUT_BYTES,
            ),
            Memory("DRAM", Scope.GLOBAL, "machine", None, self.dram_bytes_per_cycle, line=self.dram_block),
        )

    def channel_multiple(self, dtype: DType) -> int:
        """The DMA pads rows itself."""
        return 1

    def channel_block(self, channels: int, dtype: DType) -> int:
        """The DMA gathers rows from channels-last tensors: there are no blocks."""
        return 0

    def describe(self) -> str:
        return (
            f"Gemmini, {self.dim}x{self.dim} PEs, scratchpad {self.scratchpad / KIB:g} KiB,"
            f" accumulator {self.accumulator / KIB:g} KiB, DRAM {self.dram_bytes_per_cycle:g} bytes a cycle"
        )


def _expect(name: str, value: float, least: float, most: float, whole: bool = False) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not least <= value <= most or (whole and value != int(value)):
        what = "a whole number between" if whole else "between"
        raise HardwareRangeError(f"{name} must be {what} {least:,.15g} and {most:,.15g}, got {value!r}")
