"""What no design is below: cycles, energy and EDP.

`least_cycles` and `least_microjoules` are what a layer costs at least on given hardware, whatever its mapping: they
count each word of a tensor once. `least_edp` is a bound over all hardware: least cycles times least energy. A larger
array whose columns have the same accumulators is never worse, so the largest array decides. Sizes of memories are cut
into cells: in a cell tiles may be as large as the largest memories allow, and an access costs what it does in the
smallest ones, so that the exact mapper's least energy is a bound of the cell. The cell with the least bound is cut
again, as often as the caller wants.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tilewright.codesign.exact import ENERGY, best_mapping
from tilewright.codesign.problem import C, K, Layer, N, P, Q, R, S
from tilewright.hw.gemmini import DIM_RANGE, KIB, MEMORY_RANGE, AccessEnergy, GemminiMachine

if TYPE_CHECKING:
    from tilewright.codesign.network import Network

_CELLS = 64
_NARROW = 1.02  # the ratio of the ends of a cell that is not cut again
_WORD = GemminiMachine.ACCUMULATOR_BYTES


def least_cycles(layer: Layer, machine: GemminiMachine) -> float:
    """All MACs with as much of the array as the layer's channels fill, and each word moved once."""
    steps = math.prod(
        math.ceil(extent / machine.dim) if loop in (C, K) else extent
        for loop, extent in enumerate(layer.extents)
    )
    return float(max(steps, math.ceil(_words(layer) / machine.dram_bytes_per_cycle)))


def least_microjoules(layer: Layer, machine: GemminiMachine) -> float:
    """Accesses to the accumulator and the scratchpad as often as the array must make them, and each word moved once."""
    energy, macs = machine.energy, layer.macs
    rows, columns = (min(machine.dim, layer.extents[loop]) for loop in (C, K))
    accumulator = energy.accumulator + energy.accumulator_kib * machine.accumulator_rows * _WORD / KIB
    scratchpad = energy.scratchpad + energy.scratchpad_kib * machine.scratchpad_words / KIB
    weights = layer.words("weights")
    picojoules = (
        macs * (energy.mac + energy.register)
        + weights * energy.register
        + 2.0 * macs / rows * accumulator
        + (macs / columns + _inputs(layer) + 2.0 * weights) * scratchpad
        + _words(layer) * energy.dram
    )
    return picojoules * 1e-6


def edp_floor(network: Network, machine: GemminiMachine) -> float:
    """No mappings of the network on this hardware have a smaller EDP."""
    cycles, energy = (
        sum(layer.count * least(layer, machine) for layer in network.layers)
        for least in (least_cycles, least_microjoules)
    )
    return cycles * energy


def _words(layer: Layer) -> int:
    return _inputs(layer) + layer.words("weights") + layer.words("outputs")


def _inputs(layer: Layer) -> int:
    """The words that windows cover: with a stride above the kernel's size there are others between them."""
    width, height = (
        _covered(layer.extents[outs], layer.extents[taps], layer.stride[axis], layer.dilation[axis])
        for axis, (outs, taps) in enumerate(((P, R), (Q, S)))
    )
    return width * height * layer.extents[C] * layer.extents[N]


def _covered(outs: int, taps: int, stride: int, dilation: int) -> int:
    return len({out * stride + tap * dilation for out in range(outs) for tap in range(taps)})


# -- over all hardware ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EDPBound:
    cycles: float
    microjoules: float

    @property
    def edp(self) -> float:
        return self.cycles * self.microjoules


@dataclass(frozen=True, order=True)
class _Cell:
    """Sizes from the first of a pair to the second, in words: of the scratchpad, and of a column's accumulator."""

    bound: float
    mapped: bool  # the bound is the exact mapper's
    scratchpad: tuple[int, int]
    column: tuple[int, int]

    @property
    def narrow(self) -> bool:
        return all(most <= max(least * _NARROW, least + 1) for least, most in (self.scratchpad, self.column))

    def halves(self) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        """Along the side with the larger ratio. A size on the border is in both."""
        ratios = [most / least for least, most in (self.scratchpad, self.column)]
        wider = int(ratios[1] > ratios[0])
        least, most = (self.scratchpad, self.column)[wider]
        middle = math.isqrt(least * most)
        for half in ((least, middle), (middle, most)):
            yield (self.scratchpad, half) if wider else (half, self.column)


def least_edp(
    network: Network, base: GemminiMachine, *, dim: int = DIM_RANGE[1], cells: int = _CELLS
) -> EDPBound:
    """No design with an array of at most `dim` rows has a smaller EDP. `cells`: how many the exact mapper maps."""

    def costs(scratchpad: int, column: int) -> AccessEnergy:
        """Of accesses to memories of these sizes, whatever size the machine's are."""
        energy = base.energy
        return replace(
            energy,
            scratchpad=energy.scratchpad + energy.scratchpad_kib * scratchpad / KIB,
            scratchpad_kib=0.0,
            accumulator=energy.accumulator + energy.accumulator_kib * column * _WORD / KIB,
            accumulator_kib=0.0,
        )

    def total(machine: GemminiMachine, mapped: bool) -> float:
        return sum(
            layer.count
            * (best_mapping(layer, machine, ENERGY).bound if mapped else least_microjoules(layer, machine))
            for layer in network.layers
        )

    def cell(bound: float, scratchpad: tuple[int, int], column: tuple[int, int], mapped: bool) -> _Cell:
        sizes = {
            "scratchpad": math.ceil(scratchpad[1] / dim) * dim,
            "accumulator": column[1] * dim * _WORD,
        }
        large = {name: min(max(size, MEMORY_RANGE[0]), MEMORY_RANGE[1]) for name, size in sizes.items()}
        machine = replace(base, dim=dim, energy=costs(scratchpad[0], column[0]), **large)  # type: ignore[arg-type]
        return _Cell(max(bound, total(machine, mapped)), mapped, scratchpad, column)

    largest = MEMORY_RANGE[1] // (dim * _WORD)
    # A narrower array may have columns that are larger still. Their accesses cost more than in the largest cell.
    longer = total(replace(base, dim=dim, energy=costs(1, largest)), mapped=False)
    heap = [cell(0.0, (MEMORY_RANGE[0] // 2, MEMORY_RANGE[1]), (1, largest), mapped=False)]
    while cells and heap[0].bound < longer:
        least = heap[0]
        if not least.mapped:
            heapq.heapreplace(heap, cell(least.bound, least.scratchpad, least.column, mapped=True))
            cells -= 1
        elif least.narrow:
            break
        else:
            heapq.heappop(heap)
            for scratchpad, column in least.halves():
                heapq.heappush(heap, cell(least.bound, scratchpad, column, mapped=False))
    cycles = sum(layer.count * least_cycles(layer, replace(base, dim=dim)) for layer in network.layers)
    return EDPBound(cycles, min(heap[0].bound, longer))
