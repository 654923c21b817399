"""The conformance suite of cost models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from random import Random

import numpy as np

from tilewright.cost.analytical import Analytical
from tilewright.cost.boosted import Experience
from tilewright.cost.model import CostModel
from tilewright.hw import host
from tilewright.space.candidates import Candidates
from tilewright.space.outcome import Outcome
from tilewright.space.space import Config
from tilewright.space.template import Work
from tilewright.testing.problems import gemm

_THREADS = 2


@cache
def _candidates() -> Candidates:
    return Candidates.of(Work(gemm(128, 256, 64), host()), sketches=False)


@cache
def _configs() -> list[Config]:
    return _candidates().sample(Random(5), 60)


def _seconds(config: Config) -> float:
    """The predicted time, except for a knob that the analytical model gets wrong."""
    first = config.values[0][1] if config.values else 0
    wrong = 1.5 if isinstance(first, int) and first % 4 else 0.8
    return wrong * Analytical(_candidates(), _THREADS).seconds(config)


class CostModelSuite:
    """Inherit it, and implement `make`."""

    learns = True  # False for a model that ignores outcomes

    def make(
        self, candidates: Candidates, threads: int, seed: int, experience: Sequence[Experience]
    ) -> CostModel:
        raise NotImplementedError

    def _model(self, seed: int = 0) -> CostModel:
        return self.make(_candidates(), _THREADS, seed, ())

    def test_a_prediction_for_each_config(self) -> None:
        found = self._model().predict(_configs())
        assert found.seconds.shape == found.spread.shape == found.valid.shape == (len(_configs()),)
        assert np.all(found.seconds > 0) and np.all(np.isfinite(found.seconds))
        assert np.all(found.spread >= 0) and np.all((found.valid >= 0) & (found.valid <= 1))

    def test_a_prediction_does_not_depend_on_its_company(self) -> None:
        together, model = self._model().predict(_configs()[:8]), self._model()
        for at, config in enumerate(_configs()[:8]):
            alone = model.predict([config])
            for one, several in zip(alone, together, strict=True):
                np.testing.assert_allclose(one[0], several[at], rtol=1e-4)

    def test_nothing_is_predicted_for_nothing(self) -> None:
        assert len(self._model().predict([]).seconds) == 0

    def test_the_same_outcomes_predict_the_same(self) -> None:
        outcomes = [Outcome(config, _seconds(config)) for config in _configs()[:24]]
        first, second = self._model(3), self._model(3)
        first.update(outcomes)
        second.update(outcomes)
        np.testing.assert_allclose(
            first.predict(_configs()).seconds, second.predict(_configs()).seconds, rtol=1e-6
        )

    def test_failures_are_learned_from_without_harm(self) -> None:
        model = self._model()
        model.update([Outcome(config, None, "wrong") for config in _configs()[:8]])
        found = model.predict(_configs())
        assert np.all(np.isfinite(found.seconds)) and np.all((found.valid >= 0) & (found.valid <= 1))

    def test_experience_of_another_task_does_no_harm(self) -> None:
        other = Candidates.of(Work(gemm(64, 96, 32), host()), sketches=False)
        costs = Analytical(other, _THREADS)
        outcomes = [Outcome(config, costs.seconds(config)) for config in other.sample(Random(1), 20)]
        model = self.make(_candidates(), _THREADS, 0, [Experience(other, _THREADS, outcomes)])
        assert np.all(np.isfinite(model.predict(_configs()).seconds))

    def test_times_that_are_no_times_do_no_harm(self) -> None:
        """Neither of this task nor of another, such as from a record that somebody else has written."""
        outcomes = [
            Outcome(config, seconds)
            for config, seconds in zip(_configs(), 5 * (0.0, -1e-3, math.inf, math.nan, 1e-3), strict=False)
        ]
        model = self.make(_candidates(), _THREADS, 0, [Experience(_candidates(), _THREADS, outcomes)])
        assert np.all(np.isfinite(model.predict(_configs()).seconds))
        model.update(outcomes)
        assert np.all(np.isfinite(model.predict(_configs()).seconds))

    def test_it_ranks_better_for_what_it_has_seen(self) -> None:
        """A learning model orders more pairs of known configs correctly than before."""
        if not self.learns:
            return
        told, truth = _configs()[:40], np.array([_seconds(config) for config in _configs()[:40]])
        model = self._model()
        before = _agreement(model.predict(told).seconds, truth)
        model.update([Outcome(config, seconds) for config, seconds in zip(told, truth, strict=True)])
        after = _agreement(model.predict(told).seconds, truth)
        assert after >= before and after > 0.75, (before, after)


def _agreement(predicted: np.ndarray, truth: np.ndarray) -> float:
    """The share of pairs in the same order."""
    rows, columns = np.triu_indices(len(truth), 1)
    return float(np.mean((predicted[rows] < predicted[columns]) == (truth[rows] < truth[columns])))
