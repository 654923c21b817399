"""An analytical cost model: the cycles and energy of a mapping on a hardware point, with derivatives.

Traffic is counted for each tensor and memory, as Timeloop counts it. A tile is read again from the memory above
it whenever a loop around it moves to another tile; loops inside the innermost such loop reuse the tile. Cycles are the
maximum over the hardware's parts, as in a roofline model; energy is the sum over all accesses of the energy of each.

For integer factors the counts are exact, and between them they are continuous. A loop that does not index a tensor
multiplies its traffic only if an inner loop does: its exponent rises from 0, if these inner factors are 1, to 1, if
they are 2 or more. So a search can follow derivatives from one mapping to another.

Coordinates are logarithms: of the 28 factors by level and loop, of the rows and columns that are used, and of the
hardware's array, scratchpad and accumulator.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from tilewright.codesign.mapping import ACCUMULATOR, DRAM, LEVELS, REGISTERS, SCRATCHPAD, Hardware, Mappings
from tilewright.codesign.problem import LOOPS, RELEVANT, TENSORS, C, K, N, Nests, P, Q, R, S
from tilewright.codesign.quantity import Quantity, largest, product, smaller, whole
from tilewright.hw.gemmini import KIB, AccessEnergy, GemminiMachine

_FACTORS = len(LEVELS) * len(LOOPS)
ROWS, COLUMNS, DIM, SCRATCHPAD_WORDS, ACCUMULATOR_WORDS = range(_FACTORS, _FACTORS + 5)
COORDINATES = (
    *(f"{level} {loop}" for level in LEVELS for loop in LOOPS),
    *("rows", "columns", "dim", "scratchpad words", "accumulator words"),
)

_LN2 = float(np.log(2.0))
_AXES = ((P, R), (Q, S))  # loops that move an input's window along its width, and along its height

BOUNDS = ("PE array", "accumulator", "scratchpad", "DRAM")


@dataclass(frozen=True)
class Estimate:
    """The estimates for a batch of mappings, with derivatives if requested."""

    cycles: Quantity
    microjoules: Quantity
    parts: dict[str, Quantity]  # cycles of each of BOUNDS alone
    accesses: dict[tuple[str, str], Quantity]  # words by (level, tensor)
    tiles: dict[str, Quantity]  # words that a mapping needs in the scratchpad, and in all of the accumulator
    fetches: dict[str, Quantity]  # how often DRAM's loops bring in a tile of each tensor

    @cached_property
    def edp(self) -> Quantity:
        """Energy-delay product, in microjoules times cycles."""
        return self.cycles * self.microjoules

    @property
    def bound_by(self) -> np.ndarray:
        """The index in BOUNDS of the part that determines the cycles: [batch]."""
        return np.stack([self.parts[name].value for name in BOUNDS], axis=1).argmax(axis=1)


@dataclass(frozen=True)
class Model:
    """`smoothing`: the softness of the maximum over parts; 0: an exact maximum. `rounded`: cycles are whole numbers,
    and DRAM moves whole blocks; derivatives are those before rounding. `sliding`: if a window overlaps the previous
    one, only its new elements are read."""

    energy: AccessEnergy = field(default_factory=AccessEnergy)
    dram_bytes_per_cycle: float = 8.0
    dram_block: int = 64
    smoothing: float = 0.0
    rounded: bool = True
    sliding: bool = True

    @classmethod
    def of(cls, machine: GemminiMachine, **options: float) -> Model:
        """The model with the parameters that all points of a search share with this machine: DRAM and access
        energies."""
        return cls(machine.energy, machine.dram_bytes_per_cycle, machine.dram_block, **options)  # type: ignore[arg-type]

    def estimate(
        self, nests: Nests, mappings: Mappings, hardware: Hardware, *, gradients: bool = False
    ) -> Estimate:
        """Cycles and energy. Whether mappings fit is not checked; `mapping.check` does that."""
        loops = _Loops(nests, mappings, hardware, gradients)
        macs, rows, columns = loops.macs, loops.coordinate(ROWS), loops.coordinate(COLUMNS)
        weight_fills = rows * columns * loops.fetches("weights", ACCUMULATOR)
        fetches = {tensor: loops.fetches(tensor, DRAM) for tensor in TENSORS}
        weights = loops.tile("weights", SCRATCHPAD) * fetches["weights"]
        inputs = loops.tile("inputs", SCRATCHPAD) * fetches["inputs"]
        if self.sliding:
            inputs = inputs * (1.0 - loops.overlap())
        stored = loops.tile("outputs", ACCUMULATOR) * loops.fetches("outputs", SCRATCHPAD)
        loaded = stored - loops.tile("outputs", DRAM)  # partial sums that come back
        accesses = {
            ("registers", "weights"): macs + weight_fills,
            # A sum is read and written for each row of the array that feeds it, but for the first one of all.
            ("accumulator", "outputs"): 2.0 * macs / rows + loaded,
            ("scratchpad", "weights"): weight_fills + weights,
            ("scratchpad", "inputs"): macs / columns + inputs,
            ("DRAM", "weights"): weights,
            ("DRAM", "inputs"): inputs,
            ("DRAM", "outputs"): stored + loaded,
        }
        parts = {
            "PE array": macs / (rows * columns),
            "accumulator": _of_level(accesses, "accumulator") / (2.0 * columns),
            "scratchpad": _of_level(accesses, "scratchpad") / (2.0 * loops.coordinate(DIM)),
            "DRAM": _of_level(accesses, "DRAM") / self.dram_bytes_per_cycle,
        }
        cycles = largest([parts[name] for name in BOUNDS], self.smoothing)
        if self.rounded:
            cycles = whole(cycles)
        moved = [weights, inputs, stored, loaded]
        if self.rounded:
            moved = [whole(part, self.dram_block) for part in moved]
        picojoules = macs * self.energy.mac + sum(moved[1:], moved[0]) * self.energy.dram
        for level, cost in self._on_chip(loops).items():
            picojoules = picojoules + _of_level(accesses, level) * cost
        tiles = {
            "scratchpad": loops.tile("weights", SCRATCHPAD) + loops.tile("inputs", SCRATCHPAD),
            "accumulator": loops.tile("outputs", ACCUMULATOR),
        }
        return Estimate(cycles, picojoules * 1e-6, parts, accesses, tiles, fetches)

    def _on_chip(self, loops: _Loops) -> dict[str, Quantity | float]:
        """Picojoules of an access to each memory."""
        energy = self.energy
        column_kib = loops.coordinate(ACCUMULATOR_WORDS) * (4 / KIB) / loops.coordinate(DIM)
        scratchpad_kib = loops.coordinate(SCRATCHPAD_WORDS) / KIB
        return {
            "registers": energy.register,
            "accumulator": energy.accumulator + energy.accumulator_kib * column_kib,
            "scratchpad": energy.scratchpad + energy.scratchpad_kib * scratchpad_kib,
        }


def _of_level(accesses: dict[tuple[str, str], Quantity], level: str) -> Quantity:
    found = [words for (where, _), words in accesses.items() if where == level]
    return sum(found[1:], found[0])


class _Loops:
    """Tiles and fetches of a batch of mappings."""

    def __init__(self, nests: Nests, mappings: Mappings, hardware: Hardware, gradients: bool) -> None:
        self._nests, self._gradients = nests, gradients
        batch = len(mappings)
        self._values = np.concatenate(
            [
                mappings.factors.reshape(batch, _FACTORS),
                np.stack([mappings.rows, mappings.columns, *hardware], axis=1),
            ],
            axis=1,
        )
        self._logs = np.log(self._values[:, :_FACTORS])
        # 0 for the innermost loop of all.
        depth = np.empty((batch, len(LEVELS), len(LOOPS)), np.int16)
        inwards = np.broadcast_to(np.arange(len(LOOPS) - 1, -1, -1, dtype=np.int16), depth.shape)
        np.put_along_axis(depth, mappings.order.astype(np.intp), inwards, axis=2)
        depth += np.arange(len(LEVELS), dtype=np.int16)[None, :, None] * len(LOOPS)
        self._depth = depth.reshape(batch, _FACTORS)

    def coordinate(self, index: int) -> Quantity:
        value = self._values[:, index]
        return Quantity(value, self._one_hot([index], value))

    @cached_property
    def macs(self) -> Quantity:
        return self._monomial([*range(_FACTORS), ROWS, COLUMNS])

    def tile(self, tensor: str, level: int) -> Quantity:
        """The words of a tensor in one tile of a level; for the accumulator, in all columns of the array."""
        if tensor != "inputs":
            return self._monomial([index for loop in RELEVANT[tensor] for index in self._inside(loop, level)])
        channels = self._monomial([*self._inside(C, level), *self._inside(N, level)])
        return product([channels, self._extent(0, level), self._extent(1, level)])

    def fetches(self, tensor: str, level: int) -> Quantity:
        """How often the loops of this level and those above it fetch a tile."""
        moving = [
            index for index in range(level * len(LOOPS), _FACTORS) if index % len(LOOPS) in RELEVANT[tensor]
        ]
        still = [index for index in range(level * len(LOOPS), _FACTORS) if index not in moving]
        counted, slope, inside = self._counted(still, moving)
        # Powers, not the exponential of a sum of logarithms: whole factors have whole products.
        value = self._values[:, moving].prod(axis=1) * (self._values[:, still] ** counted).prod(axis=1)
        if not self._gradients:
            return Quantity(value)
        gradient = np.zeros((len(value), len(COORDINATES)))
        gradient[:, still] = counted
        gradient[:, moving] = 1.0 + np.einsum("bs,bsm->bm", slope * self._logs[:, still], inside)
        return Quantity(value, gradient * value[:, None])

    def overlap(self) -> Quantity:
        """The share of the inputs that need not be read again from DRAM, because the innermost loop moves a window by
        less than its size. It is 0 if another loop is inside that loop, even one that does not move the window."""
        level = list(range(DRAM * len(LOOPS), _FACTORS))
        total = Quantity(np.zeros(len(self._values)))
        for axis, (out, tap) in enumerate(_AXES):
            extent = self._extent(axis, SCRATCHPAD)
            for loop, step in ((out, self._nests.stride), (tap, self._nests.dilation)):
                index = DRAM * len(LOOPS) + loop
                others = [other for other in level if other != index]
                counted, slope, inside = self._counted([index], others)
                innermost = Quantity(1.0 - counted[:, 0])
                if self._gradients:
                    gradient = np.zeros((len(counted), len(COORDINATES)))
                    gradient[:, others] = -slope * inside[:, 0]
                    innermost = Quantity(innermost.value, gradient)
                moved = self._monomial(self._inside(loop, SCRATCHPAD)) * step[:, axis]
                kept = 1.0 - smaller(moved, extent) / extent
                total = total + innermost * kept * (1.0 - 1.0 / self.coordinate(index))
        return total

    def _counted(self, loops: list[int], movers: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For each of `loops`: its exponent, from 0 to 1, given the movers inside it; the exponent's derivative by a
        mover's logarithm; and which movers are inside."""
        inside = self._depth[:, None, movers] < self._depth[:, loops, None]
        above = np.einsum("bsm,bm->bs", inside, self._logs[:, movers]) / _LN2
        return np.clip(above, 0.0, 1.0), np.where((above > 0.0) & (above < 1.0), 1.0 / _LN2, 0.0), inside

    def _extent(self, axis: int, level: int) -> Quantity:
        """The extent of an input's window along an axis."""
        out, tap = _AXES[axis]
        outputs, taps = (self._monomial(self._inside(loop, level)) for loop in (out, tap))
        stride, dilation = self._nests.stride[:, axis], self._nests.dilation[:, axis]
        return (outputs - 1.0) * stride + (taps - 1.0) * dilation + 1.0

    def _inside(self, loop: int, level: int) -> list[int]:
        """The factors of a loop within one tile of a level."""
        found = [inner * len(LOOPS) + loop for inner in range(REGISTERS, level + 1)]
        if loop == C and level >= ACCUMULATOR:
            found.append(ROWS)
        # The accumulator is one memory for each column: a tile is in all of them.
        if loop == K and level >= ACCUMULATOR:
            found.append(COLUMNS)
        return found

    def _monomial(self, indices: list[int]) -> Quantity:
        value = self._values[:, indices].prod(axis=1)
        return Quantity(value, self._one_hot(indices, value))

    def _one_hot(self, indices: list[int], value: np.ndarray) -> np.ndarray | None:
        if not self._gradients:
            return None
        gradient = np.zeros((len(value), len(COORDINATES)))
        gradient[:, indices] = value[:, None]
        return gradient
