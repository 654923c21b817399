"""The default search: few trials, each where the model and the results so far promise most.

draft     of each template the configs that the fresh model predicts best: all of a small space; of a large one
          samples, and what a descent from the best of them meets
believe   what the model says now, corrected by what it got wrong: its errors on configs that are alike are alike
ask       the config believed fastest, then the fastest in one draw after another from what is believed possible:
          a batch is as diverse as the belief is unsure
stop      when the best of all drafted is believed to be less than 1% faster than the best measured
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from tilewright.cost.model import CostModel
from tilewright.search.belief import Belief
from tilewright.search.searcher import Search, scores
from tilewright.space.candidates import Candidates
from tilewright.space.outcome import Outcome
from tilewright.space.space import Config
from tilewright.space.template import Applied

CONVERGED = 0.01  # of the best time
_DRAFTED = 1200  # configs that are thought about before the first trial, in all
_MIN = 64  # of each template
_SLOW = 32  # configs of a space whose programs have to be made to be predicted
_SLOW_NEIGHBOURS = 8
_DESCENTS = 4
_KEPT = 512  # of what is drafted of a template, the best; and for each value of a knob the best that has it
_SHORTLIST = 256  # configs for which it is worked out which of them could be the fastest
_DRAWS = 128  # from the belief, to estimate the gain
_DOUBT = 1.25  # times the deviations that are believed: the model is surer of itself than it is right
_EXPLORED = 3  # of the fastest measured, those whose neighbours are drafted too


class Guided(Search):
    def __init__(self, candidates: Candidates, model: CostModel, seed: int = 0) -> None:
        super().__init__(candidates, model, seed)
        self._numpy = np.random.default_rng(seed)
        self._drafted: dict[Config, None] = {}
        self._belief: Belief | None = None  # since the last answers
        self._gain: float | None = None

    def propose(self, count: int) -> Iterable[Config]:
        belief = self._believed()
        ranked = belief.by_mean()
        self._belief = None
        return [*ranked[:1], *belief.fastest(belief.draw(self._numpy, count - 1, _DOUBT)), *ranked]

    def tell(self, outcomes: Sequence[Outcome]) -> None:
        super().tell(outcomes)
        self._belief = self._gain = None

    @property
    def done(self) -> bool:
        gain = self.expected_gain
        return super().done or (gain is not None and gain < CONVERGED)

    @property
    def expected_gain(self) -> float | None:
        if self._gain is None and self.history.seconds:
            best = math.log(min(self.history.seconds.values()))
            rng = np.random.default_rng(len(self.history.seconds))
            ratios = np.exp(self._believed().draw(rng, _DRAWS, _DOUBT).min(axis=1, initial=best) - best)
            self._gain = float(np.maximum(0.0, 1.0 - ratios).mean())
        return self._gain

    def _believed(self) -> Belief:
        if self._belief is None:
            self._draft()
            fresh = [config for config in self._drafted if config not in self.history.taken]
            self._belief = Belief.of(self.candidates, self.model, fresh, self.history.seconds, _SHORTLIST)
        return self._belief

    # -- which configs are thought about --------------------------------------------------------------------------

    def _draft(self) -> None:
        if not self._drafted:
            share = max(_MIN, _DRAFTED // len(self.candidates.applied))
            for applied in self.candidates.applied:
                self._drafted.update(dict.fromkeys(self._drafted_of(applied, share)))
        for config in self.history.best(_EXPLORED):
            self._drafted.update(dict.fromkeys(self._around(config)))
        if all(config in self.history.taken for config in self._drafted):
            self._drafted.update(dict.fromkeys(self.unseen.draw(_SLOW)))

    def _around(self, config: Config) -> list[Config]:
        """Neighbours, each time others where they cannot be thought about all at once."""
        new = [other for other in self.candidates.neighbours(config) if other not in self._drafted]
        if _is_slow(self.candidates.of_config(config)):
            return self.rng.sample(new, min(_SLOW_NEIGHBOURS, len(new)))
        return new

    def _drafted_of(self, applied: Applied, count: int) -> list[Config]:
        """All of a space; or samples, and as many again on the way down from the best of these."""
        space, slow = applied.space, _is_slow(applied)
        if space.size <= (_SLOW if slow else count):
            listed: Iterable[Config | None] = space.configs()
        else:
            listed = (space.sample(self.rng) for _ in range(_SLOW if slow else count // 2))
        configs = list(dict.fromkeys(config for config in listed if config is not None))
        found = dict(zip(configs, map(float, scores(self.model, configs)), strict=True))
        for start in sorted(found, key=lambda config: -found[config])[:_DESCENTS]:
            if slow or len(found) >= min(count, space.size):
                break
            self._descend(start, found)
        return _best_predicted(found)

    def _descend(self, at: Config, found: dict[Config, float]) -> None:
        """To the best neighbour, as long as there is a better one; `found` gets all that are met."""
        while True:
            new = [config for config in self.candidates.neighbours(at) if config not in found]
            found.update(zip(new, map(float, scores(self.model, new)), strict=True))
            best = max(new, key=lambda config: found[config], default=at)
            if found[best] <= found[at]:
                return
            at = best


def _is_slow(applied: Applied) -> bool:
    """Whether a config must be made a program for its time to be predicted."""
    return applied.terms(applied.space.default()) is None


def _best_predicted(found: dict[Config, float]) -> list[Config]:
    ordered = sorted(found, key=lambda config: -found[config])
    with_value: dict[tuple[str, object], Config] = {}
    for config in ordered:
        for choice in config.values:
            with_value.setdefault(choice, config)
    return list(dict.fromkeys((*ordered[:_KEPT], *with_value.values())))
