"""The model that needs no measurement: counted terms, and how fast this machine does each."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tilewright.cost.model import Prediction
from tilewright.cost.predictor import calibrated, counted
from tilewright.errors import TilewrightError
from tilewright.space.candidates import Candidates
from tilewright.space.outcome import Outcome
from tilewright.space.space import Config
from tilewright.space.terms import Counted

# Of the logarithm of measured over predicted time, within one task: what the studies of its constants left over.
SPREAD = 0.15
VALID = 0.98  # configs are legal by construction: most that fail do so for a reason that nobody foresaw


class Analytical:
    """Predicts the configs of one Candidates, those of different templates comparably. It learns nothing.

    A config whose template does not count its own terms is made a program, once, and that is counted."""

    def __init__(self, candidates: Candidates, threads: int) -> None:
        self.candidates, self.threads = candidates, threads
        self._predictor = calibrated(candidates.work.machine, threads)
        self.counted: set[Config] = set()  # those whose terms were counted in a program
        self._terms: dict[Config, Counted | None] = {}

    def predict(self, configs: Sequence[Config]) -> Prediction:
        seconds = np.array([self.seconds(config) for config in configs], dtype=float)
        return Prediction(seconds, np.full(len(configs), SPREAD), np.where(np.isfinite(seconds), VALID, 0.0))

    def update(self, outcomes: Sequence[Outcome]) -> None:
        pass

    def seconds(self, config: Config) -> float:
        """Infinite where the config has no program."""
        terms = self.terms(config)
        if terms is None:
            return math.inf
        return self._predictor(terms)

    def terms(self, config: Config) -> Counted | None:
        """None where the config has no program: its space should not have called it legal, but a search goes on."""
        if config not in self._terms:
            self._terms[config] = self._counted(config)
        return self._terms[config]

    def _counted(self, config: Config) -> Counted | None:
        try:
            found, in_program = counted(self.candidates.of_config(config), config, self.candidates.work)
        except TilewrightError:
            return None
        if in_program:
            self.counted.add(config)
        return found
