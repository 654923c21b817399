"""The tuning state of one task: its candidates, its measurements, and what to measure next."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property

from tilewright.cost.model import CostModel
from tilewright.db.record import Record
from tilewright.db.versions import sources
from tilewright.errors import TilewrightWarning
from tilewright.measure.measurement import Measurement
from tilewright.search import Searcher, search_named
from tilewright.space.outcome import Outcome
from tilewright.space.space import Config
from tilewright.tune.allocate import TaskStanding
from tilewright.tune.choose import Choice
from tilewright.tune.effort import CONVERGED, EFFORTS, Tuning
from tilewright.tune.experience import PastRecords, outcome_of
from tilewright.tune.tunable import Tunable

BETTER = 0.99  # share of the time to beat that a winner must stay under
_UNCONFIRMED = 0.97  # the same without a final comparison
_FINALISTS = 3  # configs besides the one to beat
_CLOSE = 1.05  # factor of the best time within which a config may turn out to be the best
_PATIENCE = 3  # rounds without any successful measurement before giving up
_MIN_TRIALS = 8
_REPEATS = 16  # answers of a search without a new config, in a row, before it counts as done


class TaskState:
    def __init__(self, tunable: Tunable, tuning: Tuning, past: PastRecords, *, timed: bool = False) -> None:
        """`timed`: measure the task even if it has only one candidate."""
        self.tunable = tunable
        self.key, self.job, self.label = tunable.key, tunable.job, tunable.label
        self.candidates = tunable.candidates
        self.start = tunable.start  # what would run without measuring
        self.trials = 0  # in this run and earlier ones
        self.failures: Counter[str] = Counter()
        self.complete = False  # no more gain is expected
        self.times: dict[Config, float] = {}  # seconds of every measured, correct config
        self._failed: dict[Config, str] = {}
        self._tuning, self._past = tuning, past
        self._warned = False  # of a search that proposes what is no candidate
        predicted = tunable.predict(self.start.config)
        self.standing = TaskStanding(tunable.kind, tunable.operations, predicted)
        if self.candidates.size == 1 and not timed:  # its time would not change anything
            self.complete = self.standing.done = True

    # -- what was measured --------------------------------------------------------------------------------------------

    @property
    def best(self) -> Config:
        """The fastest measured config. On a tie, or within the measurement error, the unmeasured choice wins."""
        return min(
            self.times,
            key=lambda config: (self.times[config], config != self.start.config, str(config)),
            default=self.start.config,
        )

    @property
    def before(self) -> float:
        """Seconds of the unmeasured choice: predicted until it is measured."""
        return self.times.get(self.start.config, self.standing.predicted)

    # -- what may win -------------------------------------------------------------------------------------------------

    @property
    def finalists(self) -> list[Config]:
        """The config to beat, and those that may be faster."""
        best, start = (self.times.get(config, math.inf) for config in (self.best, self.start.config))
        return self.faster(min(_CLOSE * best, BETTER * start))

    def faster(self, limit: float) -> list[Config]:
        """The config to beat, and the fastest others within `limit` seconds. On a tie, the first wins."""
        start = self.start.config
        if start not in self.times:  # unmeasured or wrong: any correct config is better
            return [self.best]
        faster = sorted(
            (config for config, seconds in self.times.items() if seconds <= limit and config != start),
            key=lambda config: (self.times[config], str(config)),
        )
        return [start, *faster[:_FINALISTS]]

    @property
    def unconfirmed(self) -> Config:
        """The best measured config, if it is clearly faster."""
        best, start = self.best, self.start.config
        if start in self.times and self.times[best] > _UNCONFIRMED * self.times[start]:
            return start
        return best

    # -- what earlier runs have measured ------------------------------------------------------------------------------

    def resume(self, records: Sequence[Record]) -> None:
        """Take measurements of earlier runs as if made now, except times of kernels that may have changed since."""
        outcomes = [
            outcome_of(record)
            for record in records
            if record.versions.sources == sources() and self.candidates.is_legal(record.config)
        ]
        size = self._tuning.preset.round
        for begin in range(0, len(outcomes), size):
            self._learn(outcomes[begin : begin + size])

    # -- what to measure ----------------------------------------------------------------------------------------------

    def ask(self, most: int | None = None, size: int | None = None) -> list[Config]:
        """The configs of the next round, `size` or as many as the effort says, `most` at most; the first round includes
        the one to beat. Empty when the search is done."""
        configs = [] if self._is_known(self.start.config) else [self.start.config]
        wanted = self._tuning.preset.round if size is None else size
        count = wanted if most is None else min(most, wanted)
        repeats = 0  # how often in a row it has proposed nothing new
        while len(configs) < count:
            # A search that has proposed everything is done, but what it proposed last is still to be measured.
            ended = self._converged or repeats >= _REPEATS
            asked = [] if ended else self._searcher.ask(count - len(configs))
            if not asked:
                self.complete = self.standing.done = True
                break
            known = [config for config in asked if self._is_known(config)]
            self._searcher.tell([self._outcome(config) for config in known])
            others = [config for config in dict.fromkeys(asked) if config not in known]
            new = [config for config in others if config not in configs and self._is_candidate(config)]
            repeats = 0 if new else repeats + 1
            configs += new[: count - len(configs)]
        return configs

    def _is_candidate(self, config: Config) -> bool:
        if self.candidates.is_legal(config):
            return True
        if not self._warned:
            warnings.warn(
                f"search {self._tuning.search!r} proposed {config}, which is not a candidate of {self.label}: such"
                " configs are not measured; tilewright.testing.SearchSuite checks a search for this",
                TilewrightWarning,
                stacklevel=2,
            )
        self._warned = True
        return False

    def records(self, measurements: Sequence[Measurement], predicted: Mapping[Config, float]) -> list[Record]:
        """A round's measurements as records. `predicted`: the seconds expected of each config before."""
        return [
            self.tunable.record(
                measurement.config,
                times=measurement.times,
                error=measurement.error,
                failure=measurement.failure,
                message=measurement.message,
                build_seconds=measurement.build_seconds,
                predicted=predicted.get(measurement.config),
            )
            for measurement in measurements
        ]

    def tell(self, measurements: Sequence[Measurement]) -> None:
        """Pass a round's measurements to the search."""
        self._learn([measurement.outcome for measurement in measurements])

    def predict(self, configs: Sequence[Config]) -> dict[Config, float]:
        return dict(zip(configs, map(float, self._model.predict(configs).seconds), strict=True))

    @property
    def gain(self) -> float | None:
        """The expected gain from further trials, as a share of the best time; None if unknown."""
        return 0.0 if self.standing.done else self._searcher.expected_gain

    def _learn(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            self.trials += 1
            if outcome.seconds is None:
                self.failures[outcome.failure] += 1
                self._failed[outcome.config] = outcome.failure
            else:
                self.times[outcome.config] = min(
                    outcome.seconds, self.times.get(outcome.config, outcome.seconds)
                )
        self._searcher.tell(outcomes)
        self.standing.times.append(self.times.get(self.best, self.standing.predicted))
        hopeless = not self.times and len(self.standing.times) >= _PATIENCE
        self.complete = self._converged or hopeless or self.trials >= EFFORTS["full"].trials
        self.standing.done = self.complete or self.trials >= self._tuning.preset.trials

    @property
    def _converged(self) -> bool:
        """Whether the search is done; never before a minimum number of trials."""
        gain = self._searcher.expected_gain
        return self.trials >= _MIN_TRIALS and (self._searcher.done or (gain is not None and gain < CONVERGED))

    def _is_known(self, config: Config) -> bool:
        return config in self.times or config in self._failed

    def _outcome(self, config: Config) -> Outcome:
        return Outcome(config, self.times.get(config), self._failed.get(config, ""))

    @cached_property
    def _model(self) -> CostModel:
        experience = self._past.experience(self.tunable)
        return self.tunable.model(self._tuning.cost_model, self._tuning.seed, experience)

    @cached_property
    def _searcher(self) -> Searcher:
        return search_named(self._tuning.search)(self.candidates, self._model, self._tuning.seed)

    def choice(self, config: Config, seconds: float | None) -> Choice:
        return self.tunable.choice(config, seconds)
