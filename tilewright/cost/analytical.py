"""The analytical model: counted terms, converted to time at the machine's rates, without measurement."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from tilewright.cost.model import Prediction
from tilewright.cost.predictor import all_seconds, calibrated, counted
from tilewright.errors import TilewrightError
from tilewright.space.candidates import Configs
from tilewright.space.outcome import Outcome
from tilewright.space.space import Config
from tilewright.space.terms import Counted

# Standard deviation of log(measured / predicted) within one task, from the studies of the model's constants.
SPREAD = 0.15
VALID = 0.98  # configs are legal by construction, so few fail


class Analytical:
    """Predicts the times of the configs of one `Configs`, comparably across templates. It learns nothing.

    If a template does not count its own terms, the config's program is built once and counted.
    """

    def __init__(self, candidates: Configs, threads: int) -> None:
        self.candidates, self.threads = candidates, threads
        self._predictor = calibrated(candidates.machine, threads)
        self.counted: set[Config] = set()  # configs whose terms were counted in a program
        self._terms: dict[Config, Counted | None] = {}

    def predict(self, configs: Sequence[Config]) -> Prediction:
        seconds = np.empty(len(configs))
        numbers: dict[str, list[int]] = {}
        for number, config in enumerate(configs):
            numbers.setdefault(config.template, []).append(number)
        for at in numbers.values():
            seconds[at] = self._of_template([configs[number] for number in at])
        return Prediction(seconds, np.full(len(configs), SPREAD), np.where(np.isfinite(seconds), VALID, 0.0))

    def _of_template(self, configs: Sequence[Config]) -> np.ndarray:
        with suppress(TilewrightError):
            applied = self.candidates.of_config(configs[0])
            found = all_seconds(applied, configs, self._predictor)
            if found is not None:
                return found
        return np.array([self.seconds(config) for config in configs], dtype=float)

    def update(self, outcomes: Sequence[Outcome]) -> None:
        pass

    def seconds(self, config: Config) -> float:
        """The predicted seconds; infinite if the config has no program, or no time above 0."""
        terms = self.terms(config)
        if terms is None:
            return math.inf
        found = self._predictor(terms)
        return found if found > 0 else math.inf

    def terms(self, config: Config) -> Counted | None:
        """The terms; None if the config has no program. Its space should have called it illegal, but a search
        continues."""
        if config not in self._terms:
            self._terms[config] = self._counted(config)
        return self._terms[config]

    def _counted(self, config: Config) -> Counted | None:
        try:
            candidates = self.candidates
            applied = candidates.of_config(config)
            found, in_program = counted(applied, config, candidates.machine, candidates.constants)
        except TilewrightError:
            return None
        if in_program:
            self.counted.add(config)
        return found
