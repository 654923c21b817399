"""The search protocol: ask for configs to try, tell their outcomes, and report when no more gain is expected.

A search runs nothing and knows no knobs: configs come from a `Configs`, predictions from a CostModel. It is
deterministic for a given seed and given outcomes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from random import Random
from typing import Protocol

import numpy as np

from tilewright.cost.model import CostModel
from tilewright.space.candidates import Configs
from tilewright.space.outcome import Outcome
from tilewright.space.space import Config

_LISTED = 4096  # number of knob combinations up to which all configs are listed and shuffled
_BLIND = 64  # consecutive draws of known configs after which the remaining ones are listed
_HOPELESS = -1e9  # score of a config that has no program or cannot be correct


class Searcher(Protocol):
    def ask(self, count: int) -> list[Config]:
        """Return at most `count` configs to try: distinct, legal, and neither asked for nor told before. The list is
        empty once the space is exhausted."""

    def tell(self, outcomes: Sequence[Outcome]) -> None:
        """Take outcomes of trials, asked for or known from elsewhere. The search updates its model; the caller need
        not."""

    @property
    def done(self) -> bool:
        """Whether further trials are expected to gain nothing worth their time."""

    @property
    def expected_gain(self) -> float | None:
        """The expected reduction of the best time if the search continues, as a share; None if unknown."""


class History:
    """The configs that were asked for, and their outcomes."""

    def __init__(self) -> None:
        self.taken: set[Config] = set()
        self.seconds: dict[Config, float] = {}  # the least, if a config was tried more than once

    def take(self, configs: Iterable[Config]) -> None:
        self.taken.update(configs)

    def add(self, outcomes: Iterable[Outcome]) -> None:
        for outcome in outcomes:
            self.taken.add(outcome.config)
            if outcome.time is not None:
                known = self.seconds.get(outcome.config, math.inf)
                self.seconds[outcome.config] = min(known, outcome.time)

    def best(self, count: int) -> list[Config]:
        """The fastest configs, best first."""
        return sorted(self.seconds, key=lambda config: (self.seconds[config], str(config)))[:count]


class Unseen:
    """A source of random configs that were not returned before, until the space is exhausted."""

    def __init__(self, candidates: Configs, history: History, rng: Random) -> None:
        self._candidates, self._history, self._rng = candidates, history, rng
        self._rest: Iterator[Config] | None = None
        self.exhausted = False

    def draw(self, count: int, besides: Iterable[Config] = ()) -> list[Config]:
        """Return `count` configs, none of them in `besides`; fewer if the space is exhausted."""
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
    """Base class of searches. A subclass implements `propose`."""

    def __init__(self, candidates: Configs, model: CostModel, seed: int = 0) -> None:
        self.candidates, self.model = candidates, model
        self.rng = Random(seed)
        self.history = History()
        self.unseen = Unseen(candidates, self.history, self.rng)

    def propose(self, count: int) -> Iterable[Config]:
        """Yield configs by preference. Known ones are skipped, and random ones fill the batch."""
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
    """The model's score of each config: minus the log of its predicted seconds, lower if it may fail."""
    if not configs:
        return np.zeros(0)
    prediction = model.predict(configs)
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.log(np.maximum(prediction.valid, 0.0)) - np.log(prediction.seconds)
    return np.where(np.isfinite(found), found, _HOPELESS)


def diverse(ranked: Sequence[tuple[Config, float]], count: int, worth: float = 0.05) -> list[Config]:
    """Select a batch of good and diverse configs greedily: a config whose knob values are all new to the batch counts
    as `worth` better."""
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
