"""What a cost model is: it predicts the time of configs, says how sure it is, and learns from outcomes.

A model is made for one Candidates. It sees configs and times, and knows neither how configs are found nor how they are
measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from tilewright.space.outcome import Outcome
from tilewright.space.space import Config


class Prediction(NamedTuple):
    """Of several configs, one element each."""

    seconds: np.ndarray
    spread: np.ndarray  # standard deviation of the logarithm of the seconds
    valid: np.ndarray  # probability that it can be built, runs and is right

    def optimistic(self, deviations: float = 1.0) -> np.ndarray:
        """Seconds that it may take if the model errs by so many deviations: what a search that explores ranks by."""
        return np.asarray(self.seconds * np.exp(-deviations * self.spread))


class CostModel(Protocol):
    def predict(self, configs: Sequence[Config]) -> Prediction: ...

    def update(self, outcomes: Sequence[Outcome]) -> None:
        """Learn from trials of configs of the same Candidates. A config that was tried twice counts twice."""
