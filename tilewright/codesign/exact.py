"""The best mapping of a layer on fixed hardware, with a proof: branch and bound over all factors and loop orders.

Everything that the model counts is, once it is known which loops repeat which tensor, a product with one factor for
each group of loops: (P, R), (Q, S), C, K and N. Which loops repeat what depends on the order of DRAM's loops and on
which tiles have more than one iteration; there are few cases (`_CASES`), and in each of them a mapping is charged at
least what it costs, and in one of them exactly that. So the least over all cases is the optimum.

In a case, the options of a group (its factors at each level; padding included) are a table with one column for each
counted quantity. Options that are dominated, no smaller in any column, are dropped. Groups are combined one at a time;
a partial mapping is dropped if it does not fit, or if it cannot be better than the best known mapping even when the
groups that are left take the least value in each column.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from tilewright.codesign.mapping import DRAM_ORDERS, Hardware, Mappings, fits, orders
from tilewright.codesign.model import Model
from tilewright.codesign.problem import LOOPS, C, K, Layer, N, Nests, P, Q, R, S
from tilewright.hw.gemmini import KIB, GemminiMachine

# Columns of a table. The first three are limited by the hardware; all are products over the groups.
_WEIGHT_TILE, _INPUT_TILE, _OUTPUT_TILE = range(3)  # scratchpad, scratchpad, one column of the accumulator
(
    _STEPS,  # macs / (rows * columns)
    _SUMS,  # macs / rows: updates of the accumulator
    _READS,  # macs / columns: inputs that leave the scratchpad
    _MACS,
    _WEIGHTS,  # words from DRAM
    _INPUTS,
    _OUTPUTS,
    _OUTPUTS_COLUMN,  # outputs / columns
    _REPEATS,  # how often an output is stored
    _FILLS,  # weights into registers
) = range(3, 13)
_WIDTH = 13

_CHUNK = 1 << 16  # partial mappings that are expanded at once
_BEAM = 256  # partial mappings that are kept to find a first mapping
_SLACK = 1e-12  # relative: what arithmetic may have added
_NEAR_BEAM = 64  # partial mappings of each case that are kept to find near-optimal ones


@dataclass(frozen=True)
class Objective:
    """The quantity to minimise: cycles, energy, their product, or a weighted sum of both."""

    kind: str = "edp"
    cycle_weight: float = 0.0
    energy_weight: float = 0.0

    @classmethod
    def weighted(cls, cycle_weight: float, energy_weight: float) -> Objective:
        """The objective of a layer in a network. Near the optimum, the network's product of sums decreases if this
        weighted sum does."""
        return cls("weighted", cycle_weight, energy_weight)

    def of(self, cycles: np.ndarray, microjoules: np.ndarray) -> np.ndarray:
        if self.kind == "edp":
            return cycles * microjoules
        if self.kind == "latency":
            return cycles * (1.0 + 1e-12 * microjoules)  # of equally fast ones the one with less energy
        if self.kind == "energy":
            return microjoules * (1.0 + 1e-12 * cycles)
        return self.cycle_weight * cycles + self.energy_weight * microjoules


EDP, LATENCY, ENERGY = Objective("edp"), Objective("latency"), Objective("energy")


@dataclass(frozen=True)
class Best:
    """A mapping, its cost, and a lower bound of all mappings' costs. `proven`: the mapping reaches the bound."""

    mapping: Mappings  # of one row
    cycles: float
    microjoules: float
    value: float  # of the objective
    bound: float
    visited: int  # complete and partial mappings that were bounded

    @property
    def proven(self) -> bool:
        return self.bound >= self.value * (1.0 - 1e-9)

    @property
    def edp(self) -> float:
        return self.cycles * self.microjoules


class _Case(NamedTuple):
    """A case of loop orders: which factors it allows, and which loops cause tiles to be fetched again."""

    order: str
    inner: bool  # R, S, C and K have loops in the accumulator's level
    scratchpad: str  # loops that may have more than one iteration in the scratchpad's level
    fills_scratchpad: bool  # P, Q and N of the scratchpad's level fill registers again
    fills_dram: bool  # so do those of DRAM's level
    stores_scratchpad: bool  # R, S and C of the scratchpad's level store outputs again
    stores_dram: bool  # so do those of DRAM's level
    weights: bool  # P, Q and N of DRAM's level read weights again
    inputs: bool  # K of DRAM's level reads inputs again
    slides: int | None  # the loop along which windows overlap


def _cases() -> Iterator[_Case]:
    for order, loops in DRAM_ORDERS.items():
        weights_stay, inputs_stay, outputs_stay = (
            loops[-1] in still for still in ((P, Q, N), (K,), (R, S, C))
        )
        slides = loops[-1] if "slide" in order else None
        dram = (not weights_stay, not inputs_stay, slides)
        # Nothing in the scratchpad's level: R, S and C of that level could as well be in the accumulator's.
        yield _Case(order, False, "", False, not weights_stay, False, not outputs_stay, *dram)
        yield _Case(order, True, "", False, True, False, not outputs_stay, *dram)
        # Outputs move in the scratchpad's level: whatever is outside of it stores them again.
        yield _Case(order, False, "PQN", False, not weights_stay, True, True, *dram)
        yield _Case(order, False, "RSPQCKN", False, True, True, True, *dram)
        yield _Case(order, True, "PQKN", True, True, True, True, *dram)


_CASES = tuple(_cases())


def best_mapping(
    layer: Layer,
    machine: GemminiMachine,
    objective: Objective = EDP,
    *,
    model: Model | None = None,
    most: int = 50_000_000,
    known: Mappings | None = None,
) -> Best:
    """The mapping of a layer with the least objective, found by branch and bound. After `most` partial mappings the
    search stops, and returns the best mapping so far with a lower bound. `known`: a mapping of the layer that may be
    good here, which saves time."""
    search = _Search(layer, machine, objective, model or Model.of(machine), most)
    if known is not None:
        search.begin(known)
    return search.run()


def near_optimal(
    layer: Layer,
    machine: GemminiMachine,
    objective: Objective = EDP,
    *,
    within: float,
    model: Model | None = None,
    most: int = 50_000_000,
) -> tuple[Mappings, int]:
    """The best mapping of a layer, first, and up to one or two thousand mappings whose objective is at most `within`
    above it, in all loop orders. A more exact cost can choose among them. Also returns how many partial and complete
    mappings were bounded."""
    search = _Search(layer, machine, objective, model or Model.of(machine), most)
    found = [search.run().mapping]
    search.near, search.slack = found, within
    for case, groups in search.problems():
        search.expand(case, groups, beam=_NEAR_BEAM)
    return Mappings.joined(found), search.visited


@lru_cache(maxsize=4096)
def coverings(extent: int, parts: int, first: int = 0) -> np.ndarray:
    """All minimal factors whose product is at least the extent: [count, parts]. `first`: the maximum of the first
    factor."""
    if parts == 1:
        return np.array([[extent]] if not first or extent <= first else np.empty((0, 1), int))
    rows: list[np.ndarray] = []
    for head in range(1, min(extent, first or extent) + 1):
        rest = -(-extent // head)
        tails = coverings(rest, parts - 1)
        # The head itself must not be reducible.
        minimal = (head - 1) * tails.prod(axis=1) < extent
        rows.append(np.concatenate([np.full((minimal.sum(), 1), head), tails[minimal]], axis=1))
    return np.concatenate(rows) if rows else np.empty((0, parts), int)


def _undominated(table: np.ndarray) -> np.ndarray:
    """The indices of rows that no other row is less than or equal to in every column; of equal rows the first."""
    order = np.lexsort((*table.T, table.sum(axis=1)))
    left = table[order][:, (table != table[0]).any(axis=0)]
    kept: list[int] = []
    while len(order):
        kept.append(int(order[0]))
        alive = (left < left[0] * (1.0 - _SLACK)).any(axis=1)
        order, left = order[alive], left[alive]
    return np.array(kept, int)


class _Group(NamedTuple):
    loops: tuple[int, ...]
    table: np.ndarray  # [options, _WIDTH]
    factors: (
        np.ndarray
    )  # [options, loops, 4]: in the array, in the accumulator's level, the scratchpad's and DRAM's


_GROUPS = ((K,), (C,), (P, R), (Q, S), (N,))


@lru_cache(maxsize=1 << 15)
def _options(
    loops: tuple[int, ...],
    extents: tuple[int, ...],
    stride: int,
    dilation: int,
    dim: int,
    case: _Case,
) -> _Group:
    """The undominated options of a group in a case. They are the same for all layers with these extents and for
    memories of any size."""
    found = [_loop_factors(case, loop, extent, dim) for loop, extent in zip(loops, extents, strict=True)]
    if len(found) == 1:
        factors = found[0][:, None]
    else:
        left, right = (side.ravel() for side in np.indices((len(found[0]), len(found[1]))))
        factors = np.stack([found[0][left], found[1][right]], axis=1)
    table = np.ones((len(factors), _WIDTH))
    for index, loop in enumerate(loops):
        _count(case, loop, factors[:, index], table)
    if len(loops) == 2:
        _count_window(case, loops, factors, stride, dilation, table)
    kept = _undominated(table)
    return _Group(loops, table[kept], factors[kept])


class _Problems(NamedTuple):
    cases: tuple[tuple[_Case, tuple[_Group, ...]], ...]
    least: np.ndarray  # [cases, _WIDTH]: each column's least, of mappings that need not fit


@lru_cache(maxsize=1 << 13)
def _problems(
    extents: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...], dim: int, sliding: bool
) -> _Problems:
    """All cases of such layers, for memories of any size."""
    cases = []
    for case in _CASES:
        groups = []
        for loops in _GROUPS:
            axis, window = int(loops[0] == Q), len(loops) == 2
            own = case._replace(
                order="",
                scratchpad="".join(name for name in case.scratchpad if LOOPS.index(name) in loops),
                slides=case.slides if sliding and case.slides in loops else None,
            )
            groups.append(
                _options(
                    loops,
                    tuple(extents[loop] for loop in loops),
                    stride[axis] if window else 1,
                    dilation[axis] if window else 1,
                    dim if loops[0] in (C, K) else 0,
                    own,
                )
            )
        cases.append((case, tuple(groups)))
    least = [math.prod(group.table.min(axis=0) for group in groups) for _, groups in cases]
    return _Problems(tuple(cases), np.array(least))


def _loop_factors(case: _Case, loop: int, extent: int, dim: int) -> np.ndarray:
    """The factors of a loop: [options, 4]."""
    allowed = [loop in (C, K), loop in (P, Q, N) or case.inner, LOOPS[loop] in case.scratchpad, True]
    cover = coverings(extent, sum(allowed), dim)
    factors = np.ones((len(cover), 4), int)
    factors[:, np.flatnonzero(allowed)] = cover
    return factors


def _count(case: _Case, loop: int, factors: np.ndarray, table: np.ndarray) -> None:
    array, inner, middle, outer = factors.T.astype(float)
    tile, padded = array * inner * middle, array * inner * middle * outer
    table[:, _STEPS] *= padded / array
    table[:, _SUMS] *= padded / (array if loop == C else 1.0)
    table[:, _READS] *= padded / (array if loop == K else 1.0)
    table[:, _MACS] *= padded
    if loop in (R, S, C, K):
        table[:, _WEIGHT_TILE] *= tile
        table[:, _WEIGHTS] *= padded
        table[:, _FILLS] *= padded
    else:
        table[:, _WEIGHTS] *= outer if case.weights else 1.0
        table[:, _FILLS] *= middle if case.fills_scratchpad else 1.0
        table[:, _FILLS] *= outer if case.fills_dram else 1.0
    if loop in (R, S, C):
        table[:, _REPEATS] *= middle if case.stores_scratchpad else 1.0
        table[:, _REPEATS] *= outer if case.stores_dram else 1.0
    else:
        table[:, _OUTPUT_TILE] *= inner
        table[:, _OUTPUTS] *= padded
        table[:, _OUTPUTS_COLUMN] *= padded / array
    if loop in (C, N):
        table[:, _INPUT_TILE] *= tile
        table[:, _INPUTS] *= padded
    if loop == K:
        table[:, _INPUTS] *= outer if case.inputs else 1.0


def _count_window(
    case: _Case, loops: Sequence[int], factors: np.ndarray, stride: int, dilation: int, table: np.ndarray
) -> None:
    outputs, taps = factors[:, 0, :3].prod(axis=1), factors[:, 1, :3].prod(axis=1)
    extent = (outputs - 1) * stride + (taps - 1) * dilation + 1
    steps, turns = factors[:, 0, 3], factors[:, 1, 3]
    table[:, _INPUT_TILE] *= extent
    words = extent * steps * turns
    if case.slides == loops[0]:
        words = (extent + (steps - 1) * np.minimum(outputs * stride, extent)) * turns
    elif case.slides == loops[1]:
        words = (extent + (turns - 1) * np.minimum(taps * dilation, extent)) * steps
    table[:, _INPUTS] *= words


class _Found(NamedTuple):
    value: float  # of the objective
    cycles: float
    microjoules: float
    mapping: Mappings


@dataclass
class _Search:
    layer: Layer
    machine: GemminiMachine
    objective: Objective
    model: Model
    most: int
    visited: int = 0
    best: _Found | None = None
    near: list[Mappings] | None = None  # where complete mappings are collected
    slack: float = 0.0  # how far above the best a mapping may be

    def begin(self, known: Mappings) -> None:
        """Look only for what is better than a mapping, if it fits."""
        nests, hardware = Nests.of([self.layer]), Hardware.of([self.machine])
        if not fits(nests, known, hardware)[0]:
            return
        found = self.model.estimate(nests, known, hardware)
        cycles, energy = found.cycles.value, found.microjoules.value
        value = float(self.objective.of(cycles, energy)[0])
        self.best = _Found(value, float(cycles[0]), float(energy[0]), known)

    def problems(self) -> Iterator[tuple[_Case, list[_Group]]]:
        """Cases with mappings that fit and may be better than the best at that time, the one with the least bound
        first."""
        layer = self.layer
        cases, least = _problems(
            layer.extents, layer.stride, layer.dilation, self.machine.dim, self.model.sliding
        )
        bounds = self._values(least)
        for index in np.argsort(bounds, kind="stable"):
            if bounds[index] >= self._enough:
                return
            case, groups = cases[index]
            fitting = [self._fitting(group) for group in groups]
            if all(len(group.table) for group in fitting):
                bound = self._values(math.prod(group.table.min(axis=0) for group in fitting)[None])[0]
                if bound < self._enough:
                    yield case, fitting

    @property
    def _enough(self) -> float:
        """The search skips what cannot be below this."""
        return math.inf if self.best is None else self.best.value * (1.0 + self.slack) * (1.0 - 1e-9)

    def run(self) -> Best:
        for case, groups in self.problems():
            self.expand(case, groups, beam=_BEAM)
        unseen = math.inf
        for case, groups in self.problems():
            unseen = min(unseen, self.expand(case, groups))
        # One word of each tensor fits every machine that there is.
        assert self.best is not None, (self.layer, self.machine)
        value, cycles, energy, mapping = self.best
        return Best(mapping, cycles, energy, value, min(value, unseen), self.visited)

    def _fitting(self, group: _Group) -> _Group:
        """Its options that fit."""
        fits = self._fits(group.table)
        return group if fits.all() else _Group(group.loops, group.table[fits], group.factors[fits])

    # -- cost -----------------------------------------------------------------------------------------------------

    def _fits(self, table: np.ndarray) -> np.ndarray:
        column = self.machine.accumulator_words // self.machine.dim
        fits: np.ndarray = (
            table[:, _WEIGHT_TILE] + table[:, _INPUT_TILE] <= self.machine.scratchpad_words
        ) & (table[:, _OUTPUT_TILE] <= column)
        return fits

    def _costs(self, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Cycles and microjoules, computed as in `Model`."""
        model, machine = self.model, self.machine
        columns = table.T
        weights, inputs, fills = columns[_WEIGHTS], columns[_INPUTS], columns[_FILLS]
        stored = columns[_OUTPUTS] * columns[_REPEATS]
        loaded = columns[_OUTPUTS] * (columns[_REPEATS] - 1.0)
        scratchpad = fills + weights + columns[_READS] + inputs
        accumulator = 2.0 * columns[_SUMS] + loaded
        cycles = np.maximum(
            columns[_STEPS] + columns[_OUTPUTS_COLUMN] * (columns[_REPEATS] - 1.0) / 2.0,
            np.maximum(
                scratchpad / (2.0 * machine.dim),
                (weights + inputs + stored + loaded) / model.dram_bytes_per_cycle,
            ),
        )
        moved = (weights, inputs, stored, loaded)
        if model.rounded:
            cycles = np.ceil(cycles * (1.0 - 1e-9))
            block = model.dram_block
            moved = tuple(np.ceil(part / block * (1.0 - 1e-9)) * block for part in moved)
        energy = model.energy
        picojoules = (
            columns[_MACS] * (energy.mac + energy.register)
            + fills * energy.register
            + accumulator
            * (
                energy.accumulator
                + energy.accumulator_kib * machine.accumulator_words * 4 / KIB / machine.dim
            )
            + scratchpad * (energy.scratchpad + energy.scratchpad_kib * machine.scratchpad_words / KIB)
            + sum(moved) * energy.dram
        )
        return cycles, picojoules * 1e-6

    def _values(self, table: np.ndarray) -> np.ndarray:
        return self.objective.of(*self._costs(table))

    # -- branch and bound -----------------------------------------------------------------------------------------

    def expand(self, case: _Case, groups: list[_Group], beam: int | None = None) -> float:
        """Expand a case. Returns the smallest bound of the options that were left out."""
        groups = sorted(groups, key=lambda group: len(group.table))
        least = [np.ones(_WIDTH)]
        for group in reversed(groups):
            least.append(least[-1] * group.table.min(axis=0))
        least.reverse()  # least[i]: of groups i and after
        left_out = math.inf
        stack = [(0, np.ones((1, _WIDTH)), np.zeros((1, 0), np.int32))]
        while stack:
            depth, tables, chosen = stack.pop()
            if depth == len(groups):
                self._keep(case, groups, tables, chosen)
                continue
            options = groups[depth].table
            if beam is None and self.visited > self.most:
                left_out = min(left_out, float(self._values(tables * least[depth]).min()))
                continue
            size = max(1, _CHUNK // len(options))
            if len(tables) > size and beam is None:
                stack.append((depth, tables[size:], chosen[size:]))
                tables, chosen = tables[:size], chosen[:size]
            product = (tables[:, None] * options[None]).reshape(-1, _WIDTH)
            self.visited += len(product)
            optimistic = product * least[depth + 1]
            alive = np.flatnonzero(self._fits(optimistic))
            if not len(alive):
                continue
            bounds = self._values(optimistic[alive])
            if self.best is not None:
                better = bounds < self._enough
                alive, bounds = alive[better], bounds[better]
            # Of complete mappings only the best counts: nothing is left that could change their order.
            width = 1 if depth + 1 == len(groups) and self.near is None else beam
            ranked = np.argsort(bounds, kind="stable")[:width]
            alive = alive[ranked]
            if len(alive):
                picked = np.concatenate(
                    [chosen[alive // len(options)], (alive % len(options))[:, None].astype(np.int32)], axis=1
                )
                stack.append((depth + 1, product[alive], picked))
        return left_out

    def _keep(self, case: _Case, groups: list[_Group], tables: np.ndarray, chosen: np.ndarray) -> None:
        cycles, energy = self._costs(tables)
        if self.near is not None:
            self.near.append(_mappings(case, _factors(groups, chosen)))
        values = self.objective.of(cycles, energy)
        first = int(values.argmin())
        if self.best is None or values[first] < self.best.value:
            mapping = _mappings(case, _factors(groups, chosen[first : first + 1]))
            self.best = _Found(float(values[first]), float(cycles[first]), float(energy[first]), mapping)


def _factors(groups: Sequence[_Group], chosen: np.ndarray) -> np.ndarray:
    """The factors of the chosen options: [mappings, loop, 4]."""
    factors = np.ones((len(chosen), len(LOOPS), 4), int)
    for group, options in zip(groups, chosen.T, strict=True):
        factors[:, list(group.loops)] = group.factors[options]
    return factors


def _mappings(case: _Case, by_loop: np.ndarray) -> Mappings:
    """The mappings with these factors."""
    factors = np.ones((len(by_loop), 4, len(LOOPS)))
    # The registers' level and the accumulator's are one for P, Q and N: weights stay in both.
    for loop in range(len(LOOPS)):
        factors[:, 0 if loop in (P, Q, N) else 1, loop] = by_loop[:, loop, 1]
    factors[:, 2:] = by_loop[:, :, 2:].transpose(0, 2, 1)
    order = orders(DRAM_ORDERS[case.order], len(by_loop))
    return Mappings(factors, by_loop[:, C, 0].astype(float), by_loop[:, K, 0].astype(float), order)
