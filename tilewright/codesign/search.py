"""The search for hardware and programs together.

    descent          many starts at once over all layers' mappings and the hardware, by derivatives (descent.py)
    exact mapping    each layer's best mapping, proven, on the hardware that a start ended at (exact.py)
    memories         the same for memories of all sizes, with the arrays that the starts ended at: a descent moves a
                     memory by what its tiles gain nearby, and tiles that are better in all layers may be far away
    local search     neighbours of the best hardware, mapped exactly; memories shrink to what the mappings use
    front            the same below smaller areas

Every hardware point that is mapped is kept, so the front of EDP against area is a by-product.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np

from tilewright.codesign.bound import edp_floor
from tilewright.codesign.correction import Correction
from tilewright.codesign.descent import Descent
from tilewright.codesign.library import library_mapping
from tilewright.codesign.mapping import Mappings, Needs, needs
from tilewright.codesign.network import Design, Evaluator, Limits, Network, machine_for
from tilewright.errors import HardwareRangeError
from tilewright.hw.gemmini import KIB, MEMORY_RANGE, GemminiMachine

STARTS, STEPS = 8, 120
_DESCENT_SHARE = 0.3  # of the time and of the evaluations, at most, for the descent
_SCAN_SHARE = 0.55  # of the budget, after which no further sizes of memories are tried
_FRONT_SHARE = 0.25  # of the time, for smaller areas
_FRONT_AREAS = tuple(2.0**-power for power in range(1, 6))  # of the best design's
# Sizes in KiB, coarse ones first, so that a scan that is ended early has seen all of the plane.
_SIZES = ((64, 512, 8, 4096), (256, 16, 1024, 2048), (32, 128, 4, 2))
_SCANNED_ARRAYS = 2
_CLIMBS = 6  # from so many designs
_STRIDES = (4.0, 2.0, 1.6, 1.25, 1.1)  # factors by which the local search changes a parameter


@dataclass(frozen=True)
class Budget:
    """The budget of a search: seconds, or evaluations of the network; it ends when either is used up. `clock`: what
    counts the seconds, such as `time.process_time` on a busy machine."""

    seconds: float = math.inf
    evaluations: int = 1 << 62
    clock: Callable[[], float] = time.monotonic


@dataclass(frozen=True)
class ExplorationProgress:
    stage: str
    seconds: float
    evaluations: int
    edp: float  # the least so far


@dataclass
class Exploration:
    """The result of a search; it can be read while the search runs."""

    limits: Limits
    designs: list[Design] = field(default_factory=list)  # all hardware points with mappings of all layers
    history: list[ExplorationProgress] = field(default_factory=list)
    interrupted: bool = False
    seconds: float = 0.0
    evaluations: int = 0
    bounded: int = 0  # partial mappings that the exact mapper has bounded

    @property
    def best(self) -> Design:
        """The least EDP within the limits. Raises HardwareRangeError if no design is within them."""
        within = [design for design in self.designs if design.within(self.limits)]
        if not within:
            raise HardwareRangeError(
                "no design that was tried is within the limits of area and power",
                remedy="allow more area or power, or a longer search",
            )
        return min(within, key=lambda design: design.edp)

    @property
    def front(self) -> list[Design]:
        """The Pareto front of area and EDP, by area."""
        found: list[Design] = []
        for design in sorted(self.designs, key=lambda design: (design.area, design.edp)):
            if design.within(self.limits) and (not found or design.edp < found[-1].edp):
                found.append(design)
        return found


def explore(
    network: Network,
    budget: Budget,
    *,
    base: GemminiMachine | None = None,
    limits: Limits | None = None,
    seed: int = 0,
    starts: int = STARTS,
    steps: int = STEPS,
    importance: bool = True,
    descend: bool = True,
    correction: Correction | None = None,
    progress: Callable[[ExplorationProgress], None] = lambda step: None,
) -> Exploration:
    """Search for hardware and mappings of a network with the least EDP, within a budget. Ctrl-C ends the search and
    returns the designs found so far.

    - `base`: the parameters that all hardware points share, such as DRAM's bandwidth. `limits`: those of the hardware.
    - `starts`, `steps`: of the gradient descent. `importance`: most steps evaluate and move only the layers with the
      largest gradients. `descend=False`: random hardware instead, as a baseline.
    - `correction`: judge mappings and hardware by corrected cycles. All arrays then have the size that it was measured
      on.
    - `progress`: called after each design, with the best EDP so far.
    """
    base = base or GemminiMachine()
    limits = limits or Limits()
    if correction is not None:
        limits = replace(limits, dim=min(limits.dim, correction.dim), least_dim=correction.dim)
    search = _Search(Evaluator(network, base, correction), limits, budget, progress)
    try:
        try:
            search.first()
            rng = np.random.default_rng(seed)
            search.descend(rng, starts, steps, importance) if descend else search.scatter(rng, starts)
            search.scan(limits, _SCAN_SHARE)
            search.climb_all(limits, 1.0 - _FRONT_SHARE)
            for share in _FRONT_AREAS:
                area = max(limits.smallest_area, share * search.found.best.area)
                search.climb("front", replace(limits, area=area), 1.0)
        except _Spent:
            pass
    except KeyboardInterrupt:
        search.found.interrupted = True
    search.finish()
    return search.found


def _memories() -> Iterator[tuple[int, int]]:
    """(scratchpad, accumulator) in KiB."""
    for level in range(len(_SIZES)):
        known = [size for sizes in _SIZES[:level] for size in sizes]
        for scratchpad, accumulator in product([*known, *_SIZES[level]], repeat=2):
            if scratchpad not in known or accumulator not in known:
                yield scratchpad, accumulator


def _far_from(one: GemminiMachine, other: GemminiMachine) -> bool:
    """Whether a climb from one is likely to see other hardware than one from the other."""
    sizes = ((one.scratchpad, other.scratchpad), (one.accumulator, other.accumulator), (one.dim, other.dim))
    return any(max(pair) >= 1.5 * min(pair) for pair in sizes)


class _Spent(Exception):
    pass


class _Search:
    def __init__(
        self,
        evaluator: Evaluator,
        limits: Limits,
        budget: Budget,
        progress: Callable[[ExplorationProgress], None],
    ) -> None:
        self.evaluator, self.limits, self.budget, self._progress = evaluator, limits, budget, progress
        self.found = Exploration(limits)
        self._began = budget.clock()
        self._tried: dict[tuple[int, int, int], Design] = {}
        self._stage = "first design"

    def first(self) -> None:
        """Evaluate the library's tiling on a machine within the limits, so that the search has a design whenever it
        ends."""
        for dim, kib in ((16, 256), (16, 64), (16, 4), (16, 1), (8, 16), (4, 4), (1, 1)):
            machine = replace(
                self.evaluator.base, dim=dim, scratchpad=kib * KIB, accumulator=max(kib // 4, 1) * KIB
            )
            if not self.limits.admit(machine):
                continue
            tiles = [library_mapping(layer, machine) for layer in self.evaluator.network.layers]
            self.found.designs.append(self.evaluator.design(machine, Mappings.joined(tiles)))
            self.report()
            if self.found.designs[-1].within(self.limits):
                return

    def descend(self, rng: np.random.Generator, starts: int, steps: int, importance: bool) -> None:
        self._stage, began, evaluated = "descent", self.budget.clock(), self.evaluator.evaluations
        descent = Descent(self.evaluator, self.limits, starts, rng, importance)
        for _ in range(steps):
            losses = descent.step()
            self.report()
            # The first design may have taken long: the descent has its share nevertheless.
            seconds, evaluations = self.budget.clock() - began, self.evaluator.evaluations - evaluated
            if (
                self.spent(1.0)
                or seconds >= _DESCENT_SHARE * self.budget.seconds
                or evaluations >= _DESCENT_SHARE * self.budget.evaluations
            ):
                break
        self.found.designs += [one for one in map(descent.rounded, range(starts)) if one is not None]
        self._stage = "exact mapping"
        points = descent.hardware()
        for start in np.argsort(losses):
            dim, scratchpad, accumulator = points[start]
            need = Needs(np.array([round(dim)]), np.array([scratchpad]), np.array([accumulator / dim]))
            machine = self._admissible(machine_for(need, self.evaluator.base), self.limits)
            self.map(machine, min(self.found.designs, key=lambda design: design.edp))

    def scatter(self, rng: np.random.Generator, count: int) -> None:
        self._stage = "random hardware"
        for _ in range(count):
            machine = replace(
                self.evaluator.base,
                dim=int(np.exp(rng.uniform(0.0, np.log(self.limits.dim)))),
                scratchpad=int(2 ** rng.uniform(2, 11)) * KIB,
                accumulator=int(2 ** rng.uniform(0, 9)) * KIB,
            )
            self.map(self._admissible(machine, self.limits))

    def scan(self, limits: Limits, share: float) -> None:
        """Memories of all sizes for the best arrays so far, but for those that no mapping can make better."""
        if not self._tried:
            return
        self._stage = "memories"
        ranked = sorted(self._tried.values(), key=lambda design: design.edp)
        dims = list(dict.fromkeys(design.machine.dim for design in ranked))[:_SCANNED_ARRAYS]
        for dim in dims:
            for scratchpad, accumulator in _memories():
                machine = replace(
                    self.evaluator.base, dim=dim, scratchpad=scratchpad * KIB, accumulator=accumulator * KIB
                )
                best = min(self.found.designs, key=lambda design: design.edp)
                if not limits.admit(machine) or edp_floor(self.evaluator.network, machine) >= best.edp:
                    continue
                if self.spent(share):
                    return
                self.map(machine, best)

    def climb_all(self, limits: Limits, share: float) -> None:
        """From the best design, and then from others whose memories have other sizes: there are several local
        optima."""
        begun = sorted(self._tried.values(), key=lambda design: design.edp)
        self.climb("local search", limits, share)
        climbed = begun[:1]
        for design in begun[1:]:
            if self.spent(share) or len(climbed) == _CLIMBS:
                return
            if all(_far_from(design.machine, other.machine) for other in climbed):
                climbed.append(design)
                self.climb("local search", limits, share, design)

    def climb(self, stage: str, limits: Limits, share: float, begin: Design | None = None) -> None:
        """Climb from a design, or from the best one within the limits, to better neighbours, with decreasing step
        sizes."""
        self._stage = stage
        within = [design for design in self.found.designs if design.within(limits)]
        if not within:
            least = min(self.found.designs, key=lambda design: design.edp)
            within = [self.map(self._admissible(least.machine, limits))]
        best = begin or min(within, key=lambda design: design.edp)
        for stride in _STRIDES:
            better = True
            while better:
                better = False
                for machine in self._neighbours(best, stride, limits):
                    if self.spent(share):
                        return
                    if best.within(limits) and edp_floor(self.evaluator.network, machine) >= best.edp:
                        continue
                    found = self.map(machine, best)
                    if found.within(limits) and (found.edp < best.edp or not best.within(limits)):
                        best, better = found, True
                        break

    def map(self, machine: GemminiMachine, near: Design | None = None) -> Design:
        """Find the best mappings for a hardware point, and evaluate them also on the smallest hardware that runs
        them."""
        key = (machine.dim, machine.scratchpad, machine.accumulator)
        if key not in self._tried:
            if self.spent(math.inf):
                raise _Spent
            design = self.evaluator.mapped(machine, near=near, known=self._known(machine))
            smaller = self.evaluator.smallest(design.mappings)
            self.found.designs += [design, smaller]
            self._tried[key] = min(design, smaller, key=lambda one: one.edp)
            self.report()
        return self._tried[key]

    def _known(self, machine: GemminiMachine) -> Mappings | None:
        """Mappings that run on a machine, of the most similar one that is nowhere larger."""
        names = ("dim", "scratchpad", "accumulator_rows")
        sizes = np.array([getattr(machine, name) for name in names], float)
        others = [design.machine for design in self._tried.values()]
        known = np.array([[getattr(other, name) for name in names] for other in others], float)
        if not others or not (smaller := (known <= sizes).all(axis=1)).any():
            return None
        distances = np.where(smaller, np.log(sizes / known).sum(axis=1), math.inf)
        return list(self._tried.values())[int(distances.argmin())].mappings

    def _neighbours(self, design: Design, stride: float, limits: Limits) -> Iterator[GemminiMachine]:
        """Neighbouring machines. Start with memories that the mappings fill: they may be too small."""
        machine = design.machine
        need = needs(self.evaluator.network.nests, design.mappings)
        used = (
            float(need.scratchpad.max()) / machine.scratchpad_words,
            float(need.accumulator_column.max()) / machine.accumulator_rows,
        )
        moves = [
            ("scratchpad", stride if used[0] > 0.9 else 1.0 / stride),
            ("accumulator", stride if used[1] > 0.9 else 1.0 / stride),
            ("dim", stride),
            ("dim", 1.0 / stride),
            ("scratchpad", 1.0 / stride if used[0] > 0.9 else stride),
            ("accumulator", 1.0 / stride if used[1] > 0.9 else stride),
        ]
        for name, factor in moves:
            if (moved := self._moved(machine, name, factor)) is None:
                continue
            if limits.admit(moved):
                yield moved
                continue
            # Area is spent: something else must become smaller.
            for other in ("scratchpad", "accumulator", "dim"):
                if other != name and (traded := self._shrunk(moved, other, limits)) is not None:
                    yield traded
        # Both memories: tiles that are larger in one are often smaller in the other.
        for factors in ((1.0 / stride, stride), (stride, 1.0 / stride), (stride, stride)):
            both: GemminiMachine | None = machine
            for name, factor in zip(("scratchpad", "accumulator"), factors, strict=True):
                both = both and self._moved(both, name, factor)
            if both is not None and limits.admit(both):
                yield both

    def _moved(self, machine: GemminiMachine, name: str, factor: float) -> GemminiMachine | None:
        before = getattr(machine, name)
        if name == "dim":
            least = self.limits.least_dim
            after = min(self.limits.dim, max(least, round(before * factor) or 1))
            if after == before:
                after = min(self.limits.dim, max(least, before + (1 if factor > 1 else -1)))
        else:
            after = round(before * factor / KIB) * KIB
            if after == before:
                after = before + (KIB if factor > 1 else -KIB)
            if not KIB <= after <= MEMORY_RANGE[1]:
                return None
        if after == before:
            return None
        try:
            return replace(machine, **{name: after})  # type: ignore[arg-type]
        except HardwareRangeError:  # no whole row
            return None

    def _shrunk(self, machine: GemminiMachine, name: str, limits: Limits) -> GemminiMachine | None:
        """Decrease one parameter until the area is within its limit."""
        found: GemminiMachine | None = machine
        while found is not None and not limits.admit(found):
            found = self._moved(found, name, 0.93)
            if found is not None and getattr(found, name) <= (limits.least_dim if name == "dim" else KIB):
                return found if limits.admit(found) else None
        return found

    def _admissible(self, machine: GemminiMachine, limits: Limits) -> GemminiMachine:
        """Decrease all parameters of the machine until it is within the limits."""
        if machine.dim < limits.least_dim:
            machine = replace(machine, dim=limits.least_dim)
        while not limits.admit(machine):
            machine = replace(
                machine,
                dim=max(limits.least_dim, int(machine.dim * 0.93)),
                scratchpad=max(1, int(machine.scratchpad * 0.86 / KIB)) * KIB,
                accumulator=max(1, int(machine.accumulator * 0.86 / KIB)) * KIB,
            )
        return machine

    # -- budget ---------------------------------------------------------------------------------------------------

    def spent(self, share: float) -> bool:
        """Whether this share of the budget is used up; a share above 1 means all of it."""
        seconds = self.budget.clock() - self._began
        return (
            seconds >= min(share, 1.0) * self.budget.seconds
            or self.evaluator.evaluations >= min(share, 1.0) * self.budget.evaluations
        )

    def report(self) -> None:
        edps = [design.edp for design in self.found.designs if design.within(self.limits)]
        step = ExplorationProgress(
            self._stage,
            self.budget.clock() - self._began,
            self.evaluator.evaluations,
            min(edps, default=math.inf),
        )
        last = self.found.history[-1] if self.found.history else None
        if last is None or step.edp < last.edp or step.stage != last.stage:
            self.found.history.append(step)
        self._progress(step)

    def finish(self) -> None:
        self.found.seconds = self.budget.clock() - self._began
        self.found.evaluations = self.evaluator.evaluations
        self.found.bounded = self.evaluator.bounded
