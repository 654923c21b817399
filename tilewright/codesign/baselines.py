"""The baselines that the search is compared with; all use the same evaluator.

    random       random hardware, random mappings on it
    annealing    hardware by the simulated annealing of `search/`, random mappings on it
    bayesian     hardware by Bayesian optimisation with a Gaussian process, random mappings on it
    dosa         gradient descent over mappings with hardware inferred from them, rounded to divisors: three loop
                 orders, no padding, no exact mapper (Hong et al., DOSA, MICRO 2023, re-implemented)
    descended    the same with all loop orders and, if asked, importance of layers: this project's descent and
                 rounding alone

The first three are two loops: a hardware point costs as many evaluations as mappings are drawn for each layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from tilewright.codesign.descent import STATIONARY, Descent
from tilewright.codesign.mapping import DRAM_ORDERS, INNER_ORDER, Hardware, Mappings, fits
from tilewright.codesign.network import Design, Evaluator, Limits
from tilewright.codesign.problem import LOOPS, C, K, Layer, Nests, R, S
from tilewright.codesign.search import Budget
from tilewright.cost.model import CostModel, Prediction
from tilewright.errors import HardwareRangeError
from tilewright.hw.gemmini import KIB, GemminiMachine
from tilewright.search import Search, search_named
from tilewright.space.candidates import Candidates
from tilewright.space.outcome import Outcome
from tilewright.space.space import Config, Knob, Space, Value

_DRAWN = 100  # mappings of each layer on each hardware point
_NAME = "gemmini"
_DIMS = tuple(range(4, 129, 4))
_KIBS = tuple(sorted({round(2 ** (power / 2)) for power in range(0, 23)}))


# -- random mappings --------------------------------------------------------------------------------------------------


def random_mappings(layer: Layer, count: int, dim: int, rng: np.random.Generator) -> Mappings:
    """Factors that cover the layer, in random levels and orders; some of the mappings do not fit."""
    factors, spatial = np.ones((count, 4, 7)), np.ones((count, 2))
    share = rng.uniform(0.0, 1.0, count)  # of a loop's logarithm, in tiles
    for loop, extent in enumerate(layer.extents):
        left = np.full(count, float(extent))
        if loop in (C, K):
            spatial[:, loop - C] = np.minimum(dim, extent) ** np.sqrt(rng.uniform(0.0, 1.0, count))
            spatial[:, loop - C] = np.floor(spatial[:, loop - C])
            left = np.ceil(left / spatial[:, loop - C])
        for level in rng.permutation([1, 2] if loop in (R, S, C, K) else [0, 2]):
            factors[:, level, loop] = np.floor(left ** (share * rng.uniform(0.0, 1.0, count)))
            left = np.ceil(left / factors[:, level, loop])
        factors[:, 3, loop] = left
    order = np.empty((count, 4, len(LOOPS)), np.int8)
    order[:, :3] = INNER_ORDER
    order[:, 3] = rng.choice(np.array(list(DRAM_ORDERS.values()), np.int8), count)
    return Mappings(factors, spatial[:, 0], spatial[:, 1], order)


def randomly_mapped(
    evaluator: Evaluator, machine: GemminiMachine, rng: np.random.Generator, drawn: int = _DRAWN
) -> Design | None:
    """The best of several random legal mappings for each layer; None if some layer has none."""
    chosen = []
    hardware = Hardware.of([machine])
    for layer in evaluator.network.layers:
        legal: list[Mappings] = []
        for _ in range(20):  # legal ones are rare on small hardware; only they are evaluated
            mappings = random_mappings(layer, 4 * drawn, machine.dim, rng)
            rows = np.zeros(len(mappings), int)
            legal.append(mappings.take(fits(Nests.of([layer]).take(rows), mappings, hardware.take(rows))))
            if sum(map(len, legal)) >= drawn:
                break
        mappings = Mappings.joined(legal).take(slice(0, drawn))
        evaluator.mappings += drawn
        if not len(mappings):
            return None
        rows = np.zeros(len(mappings), int)
        found = evaluator.model.estimate(Nests.of([layer]).take(rows), mappings, hardware.take(rows))
        best = int(found.edp.value.argmin())
        chosen.append(mappings.take(slice(best, best + 1)))
    return evaluator.design(machine, Mappings.joined(chosen))


# -- hardware as a space of the project's searches --------------------------------------------------------------------


@dataclass(frozen=True)
class _Applied:
    space: Space

    def terms(self, config: Config) -> None:
        return None

    def program(self, config: Config) -> Any:
        raise NotImplementedError


def hardware_candidates(base: GemminiMachine, limits: Limits) -> Candidates:
    """All hardware points within the limits, as candidates for a search of `search/`."""

    def legal(values: Mapping[str, Value]) -> bool:
        try:
            return limits.admit(machine_of(base, Config.of(_NAME, values)))
        except HardwareRangeError:
            return False

    knobs = (
        Knob("dim", tuple(dim for dim in _DIMS if dim <= limits.dim) or (limits.dim,)),
        Knob("scratchpad", _KIBS),
        Knob("accumulator", _KIBS),
    )
    return Candidates(cast(Any, None), only=(_Applied(Space(_NAME, knobs, legal)),))


def machine_of(base: GemminiMachine, config: Config) -> GemminiMachine:
    return replace(
        base,
        dim=config.int("dim"),
        scratchpad=config.int("scratchpad") * KIB,
        accumulator=config.int("accumulator") * KIB,
    )


class GaussianProcess:
    """A cost model for `search/`: it predicts logarithms of results from the encoded knobs, with a squared-exponential
    kernel."""

    def __init__(self, candidates: Candidates, length: float = 1.0, noise: float = 0.05) -> None:
        self._candidates, self._length, self._noise = candidates, length, noise
        self._rows: list[np.ndarray] = []
        self._logs: list[float] = []

    def predict(self, configs: Sequence[Config]) -> Prediction:
        count = len(configs)
        if not self._rows:
            return Prediction(np.ones(count), np.ones(count), np.ones(count))
        points = np.stack([self._encoded(config) for config in configs])
        known, logs = np.stack(self._rows), np.array(self._logs)
        mean, scale = logs.mean(), max(float(logs.std()), 1e-6)
        covariance = self._kernel(known, known) + self._noise * np.eye(len(known))
        across = self._kernel(points, known)
        solved = np.linalg.solve(covariance, np.stack([(logs - mean) / scale, *across]).T)
        variance = np.maximum(1.0 - np.einsum("pk,kp->p", across, solved[:, 1:]), 1e-9)
        return Prediction(
            np.exp(np.clip(mean + scale * (across @ solved[:, 0]), -300.0, 300.0)),
            scale * np.sqrt(variance),
            np.ones(count),
        )

    def update(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            if outcome.seconds is not None:
                self._rows.append(self._encoded(outcome.config))
                self._logs.append(math.log(outcome.seconds))

    def _encoded(self, config: Config) -> np.ndarray:
        return np.array(self._candidates.encode(config))[1::2] / 3.0  # logarithms of sizes

    def _kernel(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        distance = ((left[:, None] - right[None]) ** 2).sum(axis=2)
        return np.asarray(np.exp(-0.5 * distance / self._length**2))


class Bayesian(Search):
    """Proposes the points with the largest expected improvement among random hardware and neighbours of the best."""

    def propose(self, count: int) -> Iterable[Config]:
        if len(self.history.seconds) < 5:
            return ()
        pool = self.candidates.sample(self.rng, 256)
        for config in self.history.best(4):
            pool += self.candidates.neighbours(config)
        prediction = self.model.predict(pool)
        best = math.log(min(self.history.seconds.values()))
        gap = (best - np.log(prediction.seconds)) / prediction.spread
        density = np.exp(-0.5 * gap**2) / math.sqrt(2 * math.pi)
        below = np.array([0.5 * (1.0 + math.erf(value / math.sqrt(2.0))) for value in gap])
        expected = prediction.spread * (gap * below + density)
        return [pool[index] for index in np.argsort(-expected)]


def two_loops(
    evaluator: Evaluator, limits: Limits, budget: Budget, search: str, *, seed: int = 0, drawn: int = _DRAWN
) -> Design | None:
    """Search hardware by a search of `search/` or by `bayesian`, with random mappings. None if nothing fits."""
    candidates = hardware_candidates(evaluator.base, limits)
    model: CostModel = GaussianProcess(candidates)
    factory: Callable[..., Any] = Bayesian if search == "bayesian" else search_named(search)
    searcher = factory(candidates, model, seed)
    rng, began = np.random.default_rng(seed), budget.clock()
    best: Design | None = None
    while not searcher.done:
        asked = searcher.ask(4)
        if not asked:
            break
        outcomes = []
        for config in asked:
            if evaluator.evaluations + drawn > budget.evaluations or budget.clock() - began > budget.seconds:
                return best
            found = randomly_mapped(evaluator, machine_of(evaluator.base, config), rng, drawn)
            if found is None or not found.within(limits):
                outcomes.append(Outcome(config, None, "illegal"))
                continue
            outcomes.append(Outcome(config, found.edp))
            if best is None or found.edp < best.edp:
                best = found
        searcher.tell(outcomes)
    return best


# -- descent and rounding ---------------------------------------------------------------------------------------------


def dosa(
    evaluator: Evaluator, limits: Limits, budget: Budget, *, seed: int = 0, between: int = 60
) -> Design | None:
    """DOSA's search: one order for each tensor that can stay, and all layers at each step."""
    return descended(
        evaluator, limits, budget, seed=seed, between=between, importance=False, orders=STATIONARY
    )


def descended(
    evaluator: Evaluator,
    limits: Limits,
    budget: Budget,
    *,
    seed: int = 0,
    starts: int = 7,
    between: int = 60,
    importance: bool = True,
    orders: tuple[int, ...] = tuple(range(len(DRAM_ORDERS))),
) -> Design | None:
    """Descend from a batch of starts, round every few steps, and continue with new starts."""
    rng, began = np.random.default_rng(seed), budget.clock()
    best: Design | None = None
    while True:
        descent = Descent(evaluator, limits, starts, rng, importance=importance, orders=orders)
        for step in range(5 * between):
            if evaluator.evaluations >= budget.evaluations or budget.clock() - began > budget.seconds:
                return best
            descent.step()
            if (step + 1) % between == 0:
                for start in range(starts):
                    found = descent.rounded(start)
                    if found is not None and found.within(limits) and (best is None or found.edp < best.edp):
                        best = found
