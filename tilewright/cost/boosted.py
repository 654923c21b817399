"""The learned cost model: it predicts the log ratio of measured times to the analytical prediction.

Without outcomes it returns the analytical prediction. From the first few outcomes on, it learns the errors of that:
by a similarity regression, which is good with few samples, and by boosted trees, which are better with more. Each is
weighted by its accuracy on samples that it has not seen.

It can be warm-started with outcomes of other tasks and machines. Only differences between configs of one task count
there, with less weight than the task's own outcomes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from tilewright.cost.analytical import SPREAD, VALID, Analytical
from tilewright.cost.encoding import Encoder
from tilewright.cost.model import Prediction
from tilewright.cost.smooth import Smooth
from tilewright.cost.trees import Trees, lightgbm
from tilewright.space.candidates import Configs
from tilewright.space.outcome import Outcome
from tilewright.space.space import Config

OBJECTIVES = ("squared", "rank")

_MIN = 3  # minimum outcomes for more than a mean correction
_TREES = 8  # minimum outcomes for trees
_FOREIGN = 0.25  # weight of an outcome of another task
_MAX_FOREIGN = 400  # maximum outcomes of other tasks, the first ones
_OFFSET = 1.0  # weight of the analytical model's own scale, in outcomes
_CAUTION = 2.0  # weight of a value's prior failure rate, in trials
_TO_BLAME = 0.5  # failure rate above which a knob value is to blame
_SURE = 0.03  # deviation below which the trees' opinion does not matter
_RANK_SCALE = 4.0  # factor from scores to log seconds


_Value = tuple[str, str, str]  # template, knob, value


class Experience(NamedTuple):
    """Outcomes of another task, or of another machine."""

    candidates: Configs
    threads: int
    outcomes: Sequence[Outcome]


@dataclass
class Samples:
    """Configs with the log ratio of their times to `base`, the analytical prediction."""

    rows: np.ndarray
    base: np.ndarray
    residuals: np.ndarray
    weights: np.ndarray


class Boosted:
    """Learns the residual of the analytical prediction. `prior=False` learns the time itself, for comparison."""

    def __init__(
        self,
        candidates: Configs,
        threads: int,
        *,
        objective: str = "squared",
        prior: bool = True,
        seed: int = 0,
        warm: Sequence[Experience] = (),
    ) -> None:
        assert objective in OBJECTIVES, objective
        self._analytical = Analytical(candidates, threads)
        self._encoder = Encoder()
        self._objective, self._prior, self._seed = objective, prior, seed
        self._times: dict[Config, list[float]] = {}
        self._validity = Validity()
        self._foreign = [self._samples_of(one) for one in _first(warm, _MAX_FOREIGN)]
        self._learned: Learned | None = None
        self._columns = np.array([], dtype=int)  # the columns it has learned from
        self._stale = bool(self._foreign)

    def update(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            self._validity.add(outcome)
            if outcome.time is not None and math.isfinite(self._analytical.seconds(outcome.config)):
                self._times.setdefault(outcome.config, []).append(outcome.time)
                self._stale = True

    def predict(self, configs: Sequence[Config]) -> Prediction:
        analytical = self._analytical.predict(configs)
        finite = np.isfinite(analytical.seconds)
        valid = np.where(finite, self._validity.of(configs), 0.0)
        if not len(configs) or not finite.any():
            return Prediction(analytical.seconds, analytical.spread, valid)
        base = np.log(analytical.seconds[finite]) if self._prior else np.zeros(int(finite.sum()))
        known = [config for config, is_finite in zip(configs, finite, strict=True) if is_finite]
        learned = self._model()
        if learned is None:
            seconds = analytical.seconds if self._prior else np.where(finite, 1.0, np.inf)
            return Prediction(seconds, analytical.spread, valid)
        mean, spread = learned.predict(self._encoder.matrix(self._analytical, known)[:, self._columns], base)
        seconds, spreads = analytical.seconds.copy(), analytical.spread.copy()
        seconds[finite], spreads[finite] = np.exp(mean), spread
        return Prediction(seconds, spreads, valid)

    # -- learning -------------------------------------------------------------------------------------------------

    def _model(self) -> Learned | None:
        if self._stale:
            self._learned = self._learn()
            self._stale = False
        return self._learned

    def _learn(self) -> Learned | None:
        own = self._samples(self._analytical, self._times)
        if not len(own.residuals) and not self._foreign:
            return None
        offset = 0.0
        if len(own.residuals):
            offset = float(np.sum(own.residuals) / (len(own.residuals) + (_OFFSET if self._prior else 0.0)))
        parts = [replace(own, residuals=own.residuals - offset)]
        parts += [_centred(part) for part in self._foreign if len(part.residuals) > 1]
        width = len(self._encoder.columns)
        rows = np.concatenate([_widened(part.rows, width) for part in parts])
        self._columns = self._encoder.informative(rows)
        samples = Samples(
            rows[:, self._columns],
            np.concatenate([part.base for part in parts]),
            np.concatenate([part.residuals for part in parts]),
            np.concatenate([part.weights for part in parts]),
        )
        return Learned.of(samples, samples.base, offset, self._objective, self._seed)

    def _samples_of(self, experience: Experience) -> Samples:
        model = Analytical(experience.candidates, experience.threads)
        times: dict[Config, list[float]] = {}
        for outcome in experience.outcomes:
            if outcome.time is not None and math.isfinite(model.seconds(outcome.config)):
                times.setdefault(outcome.config, []).append(outcome.time)
        samples = self._samples(model, times)
        return replace(samples, weights=samples.weights * _FOREIGN)

    def _samples(self, model: Analytical, times: Mapping[Config, Sequence[float]]) -> Samples:
        """Sorted, so that the order of the outcomes does not matter."""
        configs = sorted(times, key=str)
        logarithms = np.array([np.mean(np.log(times[config])) for config in configs])
        base = (
            np.log([model.seconds(config) for config in configs]) if self._prior else np.zeros(len(configs))
        )
        weights = np.array([float(len(times[config])) for config in configs])
        return Samples(self._encoder.matrix(model, configs), base, logarithms - base, weights)


def _first(warm: Sequence[Experience], count: int) -> list[Experience]:
    """The first `count` outcomes."""
    found = []
    for one in warm:
        if count <= 0:
            break
        found.append(one._replace(outcomes=one.outcomes[:count]))
        count -= len(one.outcomes)
    return found


def _centred(samples: Samples) -> Samples:
    """Remove the scale of each foreign task or machine, which is irrelevant here."""
    mean = np.average(samples.residuals, weights=samples.weights)
    return replace(samples, residuals=samples.residuals - mean)


def _widened(rows: np.ndarray, width: int) -> np.ndarray:
    missing = np.full((len(rows), width - rows.shape[1]), np.nan)
    return np.concatenate([rows, missing], axis=1)


@dataclass
class Learned:
    """The learned correction: an offset, a smooth part and trees, each with its weight; or a ranking, and the seconds
    for its scores."""

    offset: float
    smooth: Smooth | None = None
    smooth_believed: float = 0.0
    trees: Trees | None = None
    trees_believed: float = 0.0
    ranking: tuple[Trees, float, float] | None = (
        None  # the line from scores to log seconds: value at 0, and slope
    )

    @classmethod
    def of(cls, samples: Samples, base: np.ndarray, offset: float, objective: str, seed: int) -> Learned:
        learned = cls(offset)
        rows, residuals, weights = samples.rows, samples.residuals, samples.weights
        if len(residuals) < _MIN:
            return learned
        learned.smooth = Smooth(rows, residuals, weights)
        learned.smooth_believed = believed(learned.smooth.left_out, residuals, weights)
        library = lightgbm() if len(residuals) >= _TREES and rows.shape[1] else None
        if library is None:
            return learned
        if objective == "rank":
            smooth = base + learned.smooth_believed * learned.smooth.predict(rows)[0]
            grown = Trees(
                library, rows, base + residuals, weights, seed, rank=True, start=-_RANK_SCALE * smooth
            )
            scores = grown.predict(rows)[0] - _RANK_SCALE * smooth
            learned.ranking = (grown, *_falling_line(scores, base + residuals, weights))
            return learned
        learned.trees = Trees(library, rows, residuals, weights, seed)
        learned.trees_believed = believed(learned.trees.left_out, residuals, weights)
        return learned

    def predict(self, rows: np.ndarray, base: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (log seconds, their deviations)."""
        if self.smooth is None:
            return base + self.offset, np.full(len(base), SPREAD)
        similar, deviation = self.smooth.predict(rows)
        learned = self.smooth_believed * similar
        if self.ranking is not None:
            grown, at_zero, slope = self.ranking
            scores, spread = grown.predict(rows)
            line = at_zero + slope * (scores - _RANK_SCALE * (base + learned))
            return line + self.offset, np.hypot(deviation, slope * spread)
        if self.trees is not None:
            grown_mean, spread = self.trees.predict(rows)
            learned = learned + self.trees_believed * (grown_mean - learned)
            deviation = np.hypot(deviation, self.trees_believed * spread)
        return base + learned + self.offset, deviation


def believed(left_out: np.ndarray, residuals: np.ndarray, weights: np.ndarray) -> float:
    """The weight of a predictor, from its accuracy on left-out samples; lower with few samples."""
    known = ~np.isnan(left_out)
    said, was, weight = left_out[known], residuals[known], weights[known]
    if not len(said):
        return 0.0
    total = float(np.sum(weight))
    right = float(np.sum(weight * said * was) / (np.sum(weight * said**2) + total * _SURE**2))
    return min(max(right, 0.0), 1.0) * total / (total + _TREES)


def _falling_line(scores: np.ndarray, logarithms: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    """(value at 0, slope) of log seconds over the score; the slope is never positive."""
    score, logarithm = np.average(scores, weights=weights), np.average(logarithms, weights=weights)
    spread = scores - score
    slope = np.sum(weights * spread * (logarithms - logarithm)) / (np.sum(weights * spread**2) + 1e-9)
    slope = min(float(slope), -0.1 / _RANK_SCALE)
    return float(logarithm - slope * score), slope


# -- failures ---------------------------------------------------------------------------------------------------------


class Validity:
    """The probability that a config works, estimated from past failures.

    As many failures as possible are blamed on single knob values: first the value that fails most often, then, in the
    trials without it, the next one. The remaining failures may happen to any config.
    """

    def __init__(self) -> None:
        self._trials: list[tuple[frozenset[_Value], bool]] = []
        self._blamed: tuple[dict[_Value, float], float] | None = None

    def add(self, outcome: Outcome) -> None:
        self._trials.append((_values(outcome.config), outcome.seconds is None))
        self._blamed = None

    def of(self, configs: Sequence[Config]) -> np.ndarray:
        """The probability that each config builds, runs and is correct."""
        if self._blamed is None:
            self._blamed = self._blame()
        rates, rest = self._blamed
        found = np.full(len(configs), 1 - rest)
        if rates:
            for at, config in enumerate(configs):
                found[at] *= math.prod(1 - rates[value] for value in _values(config) if value in rates)
        return found

    def _blame(self) -> tuple[dict[_Value, float], float]:
        """(failure rate of each value to blame, failure rate of everything else)"""
        trials, rates = self._trials, dict[_Value, float]()
        while any(failed for _, failed in trials):
            counts: dict[_Value, list[int]] = {}
            for values, failed in trials:
                for value in values:
                    count = counts.setdefault(value, [0, 0])
                    count[0] += 1
                    count[1] += failed
            rate, worst = max(
                ((failures + _CAUTION * (1 - VALID)) / (tried + _CAUTION), value)
                for value, (tried, failures) in counts.items()
            )
            if rate < _TO_BLAME:
                break
            rates[worst] = rate
            trials = [(values, failed) for values, failed in trials if worst not in values]
        usual = 1 / (1 - VALID)  # weight of the prior failure rate, in trials
        return rates, (sum(failed for _, failed in trials) + 1) / (len(trials) + usual)


def _values(config: Config) -> frozenset[_Value]:
    """The template itself counts as a choice too."""
    return frozenset(
        [(config.template, "", ""), *((config.template, name, repr(value)) for name, value in config.values)]
    )
