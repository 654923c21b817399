"""The default search: few trials, each where the model and the results so far promise most.

draft     collect the configs that the fresh model predicts best for each template: all of a small space; of a
          large one, samples and the configs on a descent from the best of them
believe   correct the model's predictions by its errors so far: similar configs have similar errors
ask       return the config believed fastest, then the fastest in each of several draws from the belief:
          a batch is as diverse as the belief is uncertain
stop      when the best drafted config is believed to be less than 1% faster than the best measured one
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from tilewright.cost.model import CostModel
from tilewright.errors import TilewrightError
from tilewright.search.belief import Belief
from tilewright.search.searcher import Search, scores
from tilewright.space.candidates import Configs
from tilewright.space.outcome import Outcome
from tilewright.space.space import Config
from tilewright.space.template import Applied

CONVERGED = 0.01  # share of the best time
_DRAFTED = 1200  # total configs drafted before the first trial
_MIN = 64  # minimum per template
_SLOW = 32  # configs drafted of a space whose predictions need a program
_SLOW_NEIGHBOURS = 8
_DESCENTS = 4
_KEPT = 512  # best drafted configs kept per template, plus the best one for each value of a knob
_SHORTLIST = 256  # configs considered as possibly the fastest
_DRAWS = 128  # from the belief, to estimate the gain
_DOUBT = 1.25  # factor for the believed deviations: the model is overconfident
_EXPLORED = 3  # fastest measured configs whose neighbours are drafted too


class Guided(Search):
    def __init__(self, candidates: Configs, model: CostModel, seed: int = 0) -> None:
        super().__init__(candidates, model, seed)
        self._numpy = np.random.default_rng(seed)
        self._drafted: dict[Config, None] = {}
        self._belief: Belief | None = None  # current until the next outcomes
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

    # -- drafting -------------------------------------------------------------------------------------------------

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
        """Neighbours of a config; a different sample each time if there are too many."""
        new = [other for other in self.candidates.neighbours(config) if other not in self._drafted]
        if _is_slow(self.candidates.of_config(config)):
            return self.rng.sample(new, min(_SLOW_NEIGHBOURS, len(new)))
        return new

    def _drafted_of(self, applied: Applied, count: int) -> list[Config]:
        """All configs of a small space; otherwise samples, and as many configs on a descent from the best of them."""
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
        """Move to the best neighbour as long as it is better; add all visited configs to `found`."""
        while True:
            new = [config for config in self.candidates.neighbours(at) if config not in found]
            found.update(zip(new, map(float, scores(self.model, new)), strict=True))
            best = max(new, key=lambda config: found[config], default=at)
            if found[best] <= found[at]:
                return
            at = best


def _is_slow(applied: Applied) -> bool:
    """Whether predicting a config's time requires building its program."""
    try:
        return applied.terms(applied.space.default()) is None
    except TilewrightError:  # the default builds nothing: the others may
        return False


def _best_predicted(found: dict[Config, float]) -> list[Config]:
    ordered = sorted(found, key=lambda config: -found[config])
    with_value: dict[tuple[str, object], Config] = {}
    for config in ordered:
        for choice in config.values:
            with_value.setdefault(choice, config)
    return list(dict.fromkeys((*ordered[:_KEPT], *with_value.values())))
