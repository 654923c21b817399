"""The cost model protocol: predict the time of configs with an uncertainty, and learn from outcomes.

A model is made for one Candidates. It sees configs and times, and knows neither how configs are found nor how they
are measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from tilewright.space.outcome import Outcome
from tilewright.space.space import Config


class Prediction(NamedTuple):
    """Predictions for several configs, one element each."""

    seconds: np.ndarray
    spread: np.ndarray  # standard deviation of log seconds
    valid: np.ndarray  # probability that the config builds, runs and is correct

    def optimistic(self, deviations: float = 1.0) -> np.ndarray:
        """The seconds if the model errs by this many deviations; exploring searches rank by this."""
        return np.asarray(self.seconds * np.exp(-deviations * self.spread))


class CostModel(Protocol):
    def predict(self, configs: Sequence[Config]) -> Prediction: ...

    def update(self, outcomes: Sequence[Outcome]) -> None:
        """Learn from trials of configs of the same Candidates. A config that was tried twice counts twice."""
