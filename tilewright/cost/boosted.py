"""The model that learns: what measured times differ by from the analytical prediction, in logarithms.

With no outcomes it says what the analytical model says. From the first few on, it learns where that errs: by a
regression on similarity, good with few samples, and by boosted trees, better with more. How much of what the trees say
is believed follows from how well they predict samples that they have not seen, so that noise teaches nothing.

Outcomes of other tasks and other machines may be given to begin with. Of these only differences between configs of one
task count, and less than own ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tilewright.cost.analytical import SPREAD, VALID, Analytical
from tilewright.cost.encoding import Encoder
from tilewright.cost.model import Prediction
from tilewright.cost.smooth import Smooth
from tilewright.cost.trees import Trees, lightgbm
from tilewright.space.candidates import Candidates
from tilewright.space.outcome import Outcome
from tilewright.space.space import Config

OBJECTIVES = ("squared", "rank")

_LEAST = 3  # outcomes, before more than their mean is learned
_TREES = 8  # outcomes, before trees are grown
_FOREIGN = 0.25  # what an outcome of another task weighs
_MOST_FOREIGN = 400  # outcomes of other tasks: those that come first
_OFFSET = 1.0  # outcomes that the analytical model's own scale counts for
_SURE_LEAST = 0.02  # deviation of a time that was predicted well: what timing itself leaves open
_SCALE = 4.0  # of logarithms of seconds, for a ranking


class Experience(NamedTuple):
    """Outcomes of another task, or of another machine."""

    candidates: Candidates
    threads: int
    outcomes: Sequence[Outcome]


@dataclass
class _Samples:
    """Configs with their times, and what the analytical model said."""

    rows: np.ndarray
    residuals: np.ndarray
    weights: np.ndarray


class Boosted:
    """Learns the residual over the analytical model's prediction. `prior=False` learns the time itself, to compare."""

    def __init__(
        self,
        candidates: Candidates,
        threads: int,
        *,
        objective: str = "squared",
        prior: bool = True,
        seed: int = 0,
        warm: Sequence[Experience] = (),
        programs: bool = False,
    ) -> None:
        assert objective in OBJECTIVES, objective
        self._analytical = Analytical(candidates, threads)
        self._encoder = Encoder(threads, programs)
        self._objective, self._prior, self._seed = objective, prior, seed
        self._times: dict[Config, list[float]] = {}
        self._validity = Validity()
        self._foreign = [self._samples_of(one) for one in _first(warm, _MOST_FOREIGN)]
        self._learned: _Learned | None = None
        self._stale = bool(self._foreign)

    def update(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            self._validity.add(outcome)
            if outcome.seconds is not None and math.isfinite(self._analytical.seconds(outcome.config)):
                self._times.setdefault(outcome.config, []).append(outcome.seconds)
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
            return Prediction(analytical.seconds, analytical.spread, valid)
        mean, spread = learned.predict(self._encoder.matrix(self._analytical, known), base)
        seconds, spreads = analytical.seconds.copy(), analytical.spread.copy()
        seconds[finite], spreads[finite] = np.exp(mean), spread
        return Prediction(seconds, spreads, valid)

    # -- learning -------------------------------------------------------------------------------------------------

    def _model(self) -> _Learned | None:
        if self._stale:
            self._learned = self._learn()
            self._stale = False
        return self._learned

    def _learn(self) -> _Learned | None:
        configs = sorted(self._times, key=str)
        own = self._samples(self._analytical, configs, [self._times[config] for config in configs])
        if not len(own.residuals) and not self._foreign:
            return None
        prior = _OFFSET if self._prior else 0.0
        offset = float(np.sum(own.residuals) / (len(own.residuals) + prior)) if len(own.residuals) else 0.0
        parts = [_Samples(own.rows, own.residuals - offset, own.weights)]
        parts += [_centred(part) for part in self._foreign if len(part.residuals) > 1]
        width = len(self._encoder.columns)
        samples = _Samples(
            np.concatenate([_widened(part.rows, width) for part in parts]),
            np.concatenate([part.residuals for part in parts]),
            np.concatenate([part.weights for part in parts]),
        )
        return _Learned.of(samples, len(own.residuals), offset, self._objective, self._seed)

    def _samples_of(self, experience: Experience) -> _Samples:
        model = Analytical(experience.candidates, experience.threads)
        times: dict[Config, list[float]] = {}
        for outcome in experience.outcomes:
            if outcome.seconds is not None and math.isfinite(model.seconds(outcome.config)):
                times.setdefault(outcome.config, []).append(outcome.seconds)
        samples = self._samples(model, list(times), list(times.values()))
        return _Samples(samples.rows, samples.residuals, samples.weights * _FOREIGN)

    def _samples(
        self, model: Analytical, configs: Sequence[Config], times: Sequence[Sequence[float]]
    ) -> _Samples:
        logarithms = np.array([np.mean(np.log(each)) for each in times])
        if self._prior:
            logarithms = logarithms - np.log([model.seconds(config) for config in configs])
        weights = np.array([float(len(each)) for each in times])
        return _Samples(self._encoder.matrix(model, configs), logarithms, weights)


def _first(warm: Sequence[Experience], count: int) -> list[Experience]:
    """So many outcomes, from the front."""
    found = []
    for one in warm:
        if count <= 0:
            break
        found.append(one._replace(outcomes=one.outcomes[:count]))
        count -= len(one.outcomes)
    return found


def _centred(samples: _Samples) -> _Samples:
    """What is another machine's or task's own scale is no news here."""
    mean = np.average(samples.residuals, weights=samples.weights)
    return _Samples(samples.rows, samples.residuals - mean, samples.weights)


def _widened(rows: np.ndarray, width: int) -> np.ndarray:
    missing = np.full((len(rows), width - rows.shape[1]), np.nan)
    return np.concatenate([rows, missing], axis=1)


@dataclass
class _Learned:
    """What the samples have taught: an offset, a smooth part, and trees of what that leaves, as far as believed."""

    offset: float
    width: int
    smooth: Smooth | None
    trees: Trees | None
    believed: float
    noise: float
    rank: bool

    @classmethod
    def of(cls, samples: _Samples, own: int, offset: float, objective: str, seed: int) -> _Learned:
        width = samples.rows.shape[1]
        learned = cls(offset, width, None, None, 0.0, SPREAD, objective == "rank")
        if len(samples.residuals) < _LEAST:
            return learned
        learned.smooth = Smooth(samples.rows, samples.residuals, samples.weights)
        left = samples.residuals - learned.smooth.predict(samples.rows)[0]
        learned.noise = max(_SURE_LEAST, float(np.sqrt(np.average(left**2, weights=samples.weights))))
        library = lightgbm() if len(samples.residuals) >= _TREES else None
        if library is not None:
            learned.trees = Trees(
                library, samples.rows, samples.residuals, samples.weights,
                rank=False, start=np.zeros(len(left)), seed=seed,
            )  # fmt: skip
            learned.believed = 0.5
        return learned

    def predict(self, rows: np.ndarray, base: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows = _widened(rows, max(self.width, rows.shape[1]))[:, : self.width]
        mean, variance = base + self.offset, np.full(len(base), self.noise**2)
        if self.smooth is None:
            return mean, np.sqrt(variance)
        smooth, deviation = self.smooth.predict(rows)
        variance = variance + deviation**2
        if self.trees is not None:
            grown, apart = self.trees.predict(rows)
            smooth = (1 - self.believed) * smooth + self.believed * grown
            variance = variance + apart**2
        return mean + smooth, np.sqrt(variance)


# -- failures ---------------------------------------------------------------------------------------------------------


@dataclass
class Validity:
    """How likely a config is to work: as likely as its least reliable value of a knob has been.

    A value that was in every failure and in no success is to blame; one that has often worked is not. `certainty`:
    trials that the general rate counts for, for each value."""

    certainty: float = 2.0
    trials: int = 0
    failures: int = 0
    _tried: dict[tuple[str, str, object], list[int]] = field(default_factory=dict)

    def add(self, outcome: Outcome) -> None:
        failed = outcome.seconds is None
        self.trials += 1
        self.failures += failed
        for value in _values(outcome.config):
            tried = self._tried.setdefault(value, [0, 0])
            tried[0] += 1
            tried[1] += failed

    def of(self, configs: Sequence[Config]) -> np.ndarray:
        prior = 1 / (1 - VALID)  # trials that the rate before any trial counts for
        rate = (self.failures + prior * (1 - VALID)) / (self.trials + prior)
        return np.array([1 - max(self._failing(value, rate) for value in _values(c)) for c in configs])

    def _failing(self, value: tuple[str, str, object], rate: float) -> float:
        trials, failures = self._tried.get(value, (0, 0))
        return (failures + self.certainty * rate) / (trials + self.certainty)


def _values(config: Config) -> list[tuple[str, str, object]]:
    """The template itself is a choice, too."""
    return [(config.template, "", ""), *((config.template, name, value) for name, value in config.values)]
