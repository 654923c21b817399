"""The model that needs no measurement: counted terms, and how fast this machine does each."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tilewright.cost import cpu
from tilewright.cost.model import Prediction
from tilewright.cost.program import terms_of
from tilewright.errors import TilewrightError
from tilewright.space.candidates import Candidates
from tilewright.space.outcome import Outcome
from tilewright.space.space import Config
from tilewright.space.template import Terms

# Of the logarithm of measured over predicted time, within one task: what the studies of its constants left over.
SPREAD = 0.15
CALL_SECONDS = 1.5e-6  # that a call takes when it is timed, whatever the kernel does
VALID = 0.98  # configs are legal by construction: most that fail do so for a reason that nobody foresaw


class Analytical:
    """Predicts the configs of one Candidates, those of different templates comparably. It learns nothing.

    A config whose template does not count its own terms is made a program, once, and that is counted."""

    def __init__(self, candidates: Candidates, threads: int) -> None:
        self.candidates, self.threads = candidates, threads
        self.rates = cpu.rates_of(candidates.work.machine)
        self.counted: set[Config] = set()  # those whose terms were counted in a program
        self._terms: dict[Config, Terms | None] = {}

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
        return CALL_SECONDS + cpu.seconds(terms, self.candidates.work.machine, self.threads, self.rates)

    def terms(self, config: Config) -> Terms | None:
        """None where the config has no program: its space should not have called it legal, but a search goes on."""
        if config not in self._terms:
            self._terms[config] = self._counted(config)
        return self._terms[config]

    def _counted(self, config: Config) -> Terms | None:
        applied = self.candidates.of_config(config)
        try:
            terms = applied.terms(config)
            if terms is not None:
                return terms
            work = self.candidates.work
            self.counted.add(config)
            return terms_of(applied.program(config), work.machine, work.task.constants)
        except TilewrightError:
            return None
