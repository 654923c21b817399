"""Networks and designs: all layers of one or more models, a hardware point, a mapping of each layer, and what they
cost together.

A network's energy-delay product (EDP) is the sum of its layers' energies times the sum of their cycles, each counted as
often as the network runs the layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from tilewright.codesign.bound import least_cycles
from tilewright.codesign.correction import Correction
from tilewright.codesign.exact import EDP, Objective, best_mapping, near_optimal
from tilewright.codesign.library import is_librarys, library_mapping
from tilewright.codesign.mapping import Hardware, Mappings, Needs, check, needs
from tilewright.codesign.model import Model
from tilewright.codesign.problem import Layer, Nests
from tilewright.errors import HardwareRangeError, MappingError
from tilewright.hw.gemmini import DIM_RANGE, KIB, MEMORY_RANGE, GemminiMachine

_PASSES = 3  # passes over the network; each uses the weights of the previous one
_WITHIN = 0.5  # how far above the optimum a mapping may be that is faster with the correction
_SETTLED = 1e-4  # relative change of the EDP below which there is no further pass


@dataclass(frozen=True)
class Network:
    layers: tuple[Layer, ...]

    def __post_init__(self) -> None:
        if not self.layers:
            raise MappingError(
                "the model has no matmul and no convolution, so the accelerator has nothing to do",
                remedy="give a model with linear, matmul, attention or convolution layers",
            )

    @classmethod
    def of(cls, layers: Iterable[Layer]) -> Network:
        """A network of distinct layers: equal layers become one, with the sum of their counts."""
        found: dict[Layer, Layer] = {}
        for layer in layers:
            key = replace(layer, count=1, name="")
            known = found.get(key)
            found[key] = layer if known is None else replace(known, count=known.count + layer.count)
        return cls(tuple(found.values()))

    def __len__(self) -> int:
        return len(self.layers)

    @cached_property
    def nests(self) -> Nests:
        return Nests.of(self.layers)

    @cached_property
    def counts(self) -> np.ndarray:
        return np.array([layer.count for layer in self.layers], float)

    @property
    def macs(self) -> int:
        return sum(layer.macs * layer.count for layer in self.layers)


@dataclass(frozen=True)
class Limits:
    """The limits of a design: at most so many square millimetres, watts at `clock` and rows of PEs; at least
    `least_dim` rows of PEs."""

    area: float | None = None
    watts: float | None = None
    dim: int = DIM_RANGE[1]
    clock: float = 1e9  # hertz
    least_dim: int = 1

    def __post_init__(self) -> None:
        if self.area is not None and not self.area >= self.smallest_area:
            array = "one PE" if self.least_dim == 1 else f"an array of {self.least_dim}x{self.least_dim}"
            raise HardwareRangeError(
                f"an area of {self.area:g} mm2 is too small: {array} with 1 KiB memories has"
                f" {self.smallest_area:.3f} mm2"
            )
        if self.watts is not None and not self.watts > 0:
            raise HardwareRangeError(f"the power must be above 0 W, got {self.watts:g}")
        if not DIM_RANGE[0] <= self.dim <= DIM_RANGE[1]:
            raise HardwareRangeError(f"dim must be between {DIM_RANGE[0]} and {DIM_RANGE[1]}, got {self.dim}")
        if self.least_dim > self.dim:
            raise HardwareRangeError(f"dim must be at least {self.least_dim}, got {self.dim}")

    @property
    def smallest_area(self) -> float:
        return GemminiMachine(dim=self.least_dim, scratchpad=KIB, accumulator=KIB).area

    def admit(self, machine: GemminiMachine) -> bool:
        """Whether hardware is within the limits that do not depend on its programs."""
        return self.least_dim <= machine.dim <= self.dim and (self.area is None or machine.area <= self.area)


@dataclass(frozen=True)
class Design:
    """Hardware and the mapping of each layer on it."""

    network: Network
    machine: GemminiMachine
    mappings: Mappings
    layer_cycles: np.ndarray  # of one run of each layer
    layer_microjoules: np.ndarray

    @property
    def cycles(self) -> float:
        return float(self.network.counts @ self.layer_cycles)

    @property
    def microjoules(self) -> float:
        return float(self.network.counts @ self.layer_microjoules)

    @property
    def edp(self) -> float:
        """The energy-delay product: microjoules times cycles."""
        return self.cycles * self.microjoules

    @property
    def area(self) -> float:
        return self.machine.area

    def watts(self, clock: float = 1e9) -> float:
        return self.microjoules * 1e-6 * clock / self.cycles

    def within(self, limits: Limits) -> bool:
        return limits.admit(self.machine) and (
            limits.watts is None or self.watts(limits.clock) <= limits.watts
        )

    @property
    def importance(self) -> np.ndarray:
        """Each layer's share in the logarithm of the EDP, which is its share of the energy plus its share of the
        cycles: [layers]. If a layer's energy and cycles decrease by 1%, the EDP decreases by this many percent."""
        counts = self.network.counts
        return np.asarray(
            counts * (self.layer_cycles / self.cycles + self.layer_microjoules / self.microjoules)
        )

    @property
    def utilisation(self) -> np.ndarray:
        """Useful MACs over the MACs that the array could do: [layers]."""
        macs = np.array([layer.macs for layer in self.network.layers], float)
        return np.asarray(macs / (self.layer_cycles * self.machine.pes))


def machine_for(need: Needs, like: GemminiMachine, least_dim: int = 1) -> GemminiMachine:
    """The smallest hardware on which all mappings run, in steps of a KiB."""
    dim = max(least_dim, math.ceil(float(need.dim.max())))
    scratchpad = math.ceil(float(need.scratchpad.max()) / dim) * dim
    accumulator = math.ceil(float(need.accumulator_column.max())) * dim * GemminiMachine.ACCUMULATOR_BYTES
    return replace(like, dim=dim, scratchpad=_memory(scratchpad), accumulator=_memory(accumulator))


def _memory(size: float) -> int:
    whole = math.ceil(size / KIB) * KIB
    if whole > MEMORY_RANGE[1]:
        raise HardwareRangeError(
            f"a memory of {size / KIB:,.0f} KiB would be needed, and the largest has {MEMORY_RANGE[1] // KIB:,} KiB"
        )
    return max(whole, KIB)


@dataclass
class Evaluator:
    """Evaluates designs for all searches, and counts evaluations of a whole network. Bounds of the exact mapper are
    counted separately. With a `correction`, cycles approximate those of Gemmini's RTL in FireSim, and
    the library's tilings are predicted as its programs run them; energy is the analytical model's."""

    network: Network
    base: GemminiMachine
    correction: Correction | None = None
    mappings: int = 0  # evaluated, of single layers
    bounded: int = 0  # partial mappings that the exact mapper has bounded

    @property
    def evaluations(self) -> int:
        return self.mappings // len(self.network)

    @cached_property
    def model(self) -> Model:
        return Model.of(self.base)

    def design(self, machine: GemminiMachine, mappings: Mappings) -> Design:
        """The design of these mappings. Raises MappingError if a mapping does not fit."""
        rows = np.zeros(len(self.network), int)
        hardware = Hardware.of([machine]).take(rows)
        check(self.network.nests, mappings, hardware)
        found = self.model.estimate(self.network.nests, mappings, hardware)
        self.mappings += len(self.network)
        cycles = found.cycles.value
        if self.correction is not None:
            each = [
                self._corrected(layer, mappings.take(slice(row, row + 1)), machine, self.correction)[0]
                for row, layer in enumerate(self.network.layers)
            ]
            cycles = np.array(each)
        return Design(self.network, machine, mappings, cycles, found.microjoules.value)

    def smallest(self, mappings: Mappings) -> Design:
        """These mappings on the smallest hardware that runs them."""
        least = 1 if self.correction is None else self.correction.dim
        return self.design(machine_for(needs(self.network.nests, mappings), self.base, least), mappings)

    def mapped(
        self,
        machine: GemminiMachine,
        *,
        near: Design | None = None,
        known: Mappings | None = None,
        most: int = 50_000_000,
    ) -> Design:
        """The best mapping of each layer on this hardware. The network's EDP is a product of sums, so a layer minimises
        a weighted sum of cycles and energy. `near`: a design whose latency/energy weights to start from. `known`:
        mappings that may be good here, which saves time."""
        objective = EDP if near is None else _weights(near)
        best: Design | None = None
        for _ in range(_PASSES if near is None else 1):
            found = self._mapped(machine, objective, most, known if best is None else best.mappings)
            if best is not None and found.edp > best.edp * (1.0 - _SETTLED):
                return min(best, found, key=lambda design: design.edp)
            best, objective = found, _weights(found)
        assert best is not None
        return best

    def _mapped(
        self, machine: GemminiMachine, objective: Objective, most: int, known: Mappings | None
    ) -> Design:
        best = [
            self.best_mapping(
                layer, machine, objective, most, None if known is None else known.take(slice(row, row + 1))
            )
            for row, layer in enumerate(self.network.layers)
        ]
        mappings, cycles, energy = zip(*best, strict=True)
        return Design(self.network, machine, Mappings.joined(mappings), np.array(cycles), np.array(energy))

    def best_mapping(
        self,
        layer: Layer,
        machine: GemminiMachine,
        objective: Objective,
        most: int = 50_000_000,
        known: Mappings | None = None,
    ) -> tuple[Mappings, float, float]:
        """(mapping, cycles, energy) of the optimum, sooner with a `known` mapping that is good. With a correction: of
        the best, by corrected cycles, among mappings near the optimum and the library's tiling."""
        self.mappings += 1
        if self.correction is None:
            found = best_mapping(layer, machine, objective, model=self.model, most=most, known=known)
            self.bounded += found.visited
            return found.mapping, found.cycles, found.microjoules
        near, visited = near_optimal(layer, machine, objective, within=_WITHIN, model=self.model, most=most)
        self.bounded += visited
        mappings = Mappings.joined([near, library_mapping(layer, machine)])
        rows = np.zeros(len(mappings), int)
        nests, hardware = Nests.of([layer]).take(rows), Hardware.of([machine]).take(rows)
        energy = self.model.estimate(nests, mappings, hardware).microjoules.value
        cycles = self._corrected(layer, mappings, machine, self.correction)
        first = int(objective.of(cycles, energy).argmin())
        return mappings.take(slice(first, first + 1)), float(cycles[first]), float(energy[first])

    def _corrected(
        self, layer: Layer, mappings: Mappings, machine: GemminiMachine, correction: Correction
    ) -> np.ndarray:
        """The corrected cycles of a layer's mappings: [rows]."""
        rows = np.zeros(len(mappings), int)
        given = Nests.of([layer]).take(rows), mappings, Hardware.of([machine]).take(rows)
        correction.check(given[2])
        cycles = correction.cycles(*given)
        theirs = is_librarys(layer, mappings, machine)
        if theirs.any():
            # The library cuts the last tiles at the layer's border, so the roofline of whole tiles is no bound.
            automatic = np.maximum(correction.cycles(*given, "automatic"), least_cycles(layer, machine))
            cycles = np.where(theirs, automatic, cycles)
        return cycles


def _weights(design: Design) -> Objective:
    return Objective.weighted(1.0 / design.cycles, 1.0 / design.microjoules)
