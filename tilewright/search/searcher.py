"""The search protocol: ask for configs to try, be told their outcomes, say when nothing more is to be gained.

A search never runs anything and knows no knob: configs come from a Candidates, predictions from a CostModel. For a seed
and the same answers it asks the same questions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from random import Random
from typing import Protocol

import numpy as np

from tilewright.cost.model import CostModel
from tilewright.space.candidates import Candidates
from tilewright.space.outcome import Outcome
from tilewright.space.space import Config

_LISTED = 4096  # combinations of knobs up to which all configs are listed and shuffled
_BLIND = 64  # draws in a row that have all been taken before, after which what is left is listed
_HOPELESS = -1e9  # the score of what has no program or cannot be right


class Searcher(Protocol):
    def ask(self, count: int) -> list[Config]:
        """At most so many configs to try: distinct, legal, none that was asked for or told of before. None at all
        where every config has been."""

    def tell(self, outcomes: Sequence[Outcome]) -> None:
        """What came of trials, be they asked for or known from elsewhere. The search's model learns from them: who
        runs the search need not update it."""

    @property
    def done(self) -> bool:
        """Whether further trials are expected to gain nothing worth their time."""

    @property
    def expected_gain(self) -> float | None:
        """By which share of the best time so far it is expected to fall if the search goes on; None: not known."""


class History:
    """What has been asked for, and what is known of it."""

    def __init__(self) -> None:
        self.taken: set[Config] = set()
        self.seconds: dict[Config, float] = {}  # the least, where a config was tried more than once

    def take(self, configs: Iterable[Config]) -> None:
        self.taken.update(configs)

    def add(self, outcomes: Iterable[Outcome]) -> None:
        for outcome in outcomes:
            self.taken.add(outcome.config)
            if outcome.seconds is not None and 0 < outcome.seconds < math.inf:
                known = self.seconds.get(outcome.config, math.inf)
                self.seconds[outcome.config] = min(known, outcome.seconds)

    def best(self, count: int) -> list[Config]:
        """The fastest configs, best first."""
        return sorted(self.seconds, key=lambda config: (self.seconds[config], str(config)))[:count]


class Unseen:
    """Random configs that have not been taken, until there are none."""

    def __init__(self, candidates: Candidates, history: History, rng: Random) -> None:
        self._candidates, self._history, self._rng = candidates, history, rng
        self._rest: Iterator[Config] | None = None
        self.exhausted = False

    def draw(self, count: int, besides: Iterable[Config] = ()) -> list[Config]:
        """So many, and none of `besides`. Fewer: there are no more."""
        found: dict[Config, None] = {}
        barred = set(besides)
        misses = 0
        while len(found) < count and self._rest is None:
            if self._candidates.size <= _LISTED or misses >= _BLIND:
                self._rest = self._shuffled()
                break
            misses += 1
            for config in self._candidates.sample(self._rng, count - len(found)):
                if config not in self._history.taken and config not in barred and config not in found:
                    found[config] = None
                    misses = 0
        if len(found) < count:
            assert self._rest is not None
            held: list[Config] = []
            for config in self._rest:
                if config in self._history.taken or config in found:
                    continue
                if config in barred:
                    held.append(config)
                    continue
                found[config] = None
                if len(found) == count:
                    break
            else:
                self.exhausted = True
            if held:
                self._rest = _chained(held, self._rest)
        return list(found)

    def _shuffled(self) -> Iterator[Config]:
        left = [config for config in self._candidates.configs() if config not in self._history.taken]
        self._rng.shuffle(left)
        return iter(left)


def _chained(first: Sequence[Config], rest: Iterator[Config]) -> Iterator[Config]:
    yield from first
    yield from rest


class Search:
    """What all searches have in common. A search of one's own says what to `propose`."""

    def __init__(self, candidates: Candidates, model: CostModel, seed: int = 0) -> None:
        self.candidates, self.model = candidates, model
        self.rng = Random(seed)
        self.history = History()
        self.unseen = Unseen(candidates, self.history, self.rng)

    def propose(self, count: int) -> Iterable[Config]:
        """Configs by preference. Those that were taken before are passed over, and random ones fill what is missing."""
        raise NotImplementedError

    def ask(self, count: int) -> list[Config]:
        found: dict[Config, None] = {}
        if count > 0:
            for config in self.propose(count):
                if config not in self.history.taken:
                    found.setdefault(config)
                if len(found) == count:
                    break
            for config in self.unseen.draw(count - len(found), besides=found):
                found.setdefault(config)
        self.history.take(found)
        return list(found)

    def tell(self, outcomes: Sequence[Outcome]) -> None:
        ours = [outcome for outcome in outcomes if self.candidates.is_legal(outcome.config)]
        self.history.add(ours)
        if ours:
            self.model.update(ours)

    @property
    def done(self) -> bool:
        return self.unseen.exhausted

    @property
    def expected_gain(self) -> float | None:
        return None


def scores(model: CostModel, configs: Sequence[Config]) -> np.ndarray:
    """How good the model thinks each is: minus the logarithm of its seconds, less where it may fail."""
    if not configs:
        return np.zeros(0)
    prediction = model.predict(configs)
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.log(np.maximum(prediction.valid, 0.0)) - np.log(prediction.seconds)
    return np.where(np.isfinite(found), found, _HOPELESS)


def diverse(ranked: Sequence[tuple[Config, float]], count: int, worth: float = 0.05) -> list[Config]:
    """Of configs with their scores a batch that is good and has many values of knobs in it: greedily, a config all of
    whose values are new to the batch counts as `worth` better."""
    left = dict(ranked)
    chosen: list[Config] = []
    covered: set[object] = set()

    def gain(config: Config) -> float:
        new = sum((config.template, *choice) not in covered for choice in config.values)
        return left[config] + worth * new / max(1, len(config.values))

    while left and len(chosen) < count:
        best = max(left, key=gain)
        del left[best]
        chosen.append(best)
        covered.update((best.template, *choice) for choice in best.values)
    return chosen
