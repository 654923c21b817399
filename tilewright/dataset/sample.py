"""Selects the configs of a task for a data set: those predicted to be fast, and others from the whole space."""

from __future__ import annotations

from random import Random

import numpy as np

from tilewright.cost.analytical import Analytical
from tilewright.space.candidates import Candidates
from tilewright.space.libraries import LIBRARIES
from tilewright.space.space import Config

_POOL = 800  # configs that are predicted
_FAST = 0.4  # share of a sample that is predicted to be fast


def sample(candidates: Candidates, count: int, seed: int = 0) -> list[Config]:
    """At most this many configs, in an order in which every prefix is a sample too."""
    rng = Random(seed)
    pool = sorted(candidates.sample(rng, _POOL), key=str)
    model = Analytical(candidates, 1)
    seconds = model.predict(pool).seconds
    ranked = [pool[at] for at in np.argsort(seconds, kind="stable") if np.isfinite(seconds[at])]
    fast = ranked[: max(1, round(2 * _FAST * count))]
    # Neighbours of the fastest: in a large space they are not in the pool.
    near = [other for config in ranked[:8] for other in candidates.neighbours(config)[:24]]
    near = [other for other in near if np.isfinite(model.seconds(other))]
    fast = sorted(dict.fromkeys([*fast, *near]), key=lambda config: (model.seconds(config), str(config)))
    fast = fast[: max(1, round(2 * _FAST * count))]
    names = {template.name for template in LIBRARIES}
    calls = [config for config in pool if config.template in names]
    others = [config for config in ranked if config not in set(calls)]
    rng.shuffle(fast)
    rng.shuffle(others)
    best = ranked[: max(1, round(0.08 * count))]
    mixed: dict[Config, None] = dict.fromkeys([*calls, *best])
    turns = iter([*fast])
    rest = iter([*others, *fast])
    while len(mixed) < count:
        drawn = next(turns if rng.random() < _FAST else rest, None) or next(rest, None)
        if drawn is None:
            break
        mixed.setdefault(drawn)
    return list(mixed)[:count]
