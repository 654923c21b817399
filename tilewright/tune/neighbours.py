"""The config of a launch from launches that were measured: those whose key has other values.

Of each config that was measured nearby, the analytical model is off by about the same factor here. The prediction for
this launch times that factor, averaged over the nearest launches, is what the config is expected to take.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tilewright.cost.analytical import Analytical
from tilewright.db.record import Record
from tilewright.runtime.plan import Origin
from tilewright.space.space import Config
from tilewright.tune.choose import Choice
from tilewright.tune.kernel_tunable import NOTHING, TunableKernel

_NEAREST = 4  # launches that count
_FAR = 4.0  # octaves, over all values of the key together, beyond which a launch says nothing


def from_neighbours(tunable: TunableKernel, records: Sequence[Record]) -> Choice | None:
    """None where nothing near enough was measured."""
    near = _nearest(tunable, records)
    if not near:
        return None
    factors: dict[Config, list[tuple[float, float]]] = {}  # (weight, logarithm of measured over predicted)
    failed: set[Config] = set()
    for distance, some in near:
        configs = tunable.configs_of(some[0])
        assert configs is not None
        model = Analytical(configs, tunable.threads)
        for record in some:
            if record.failure:
                failed.add(record.config)
            elif record.seconds and math.isfinite(expected := model.seconds(record.config)):
                error = math.log(record.seconds / expected)
                factors.setdefault(record.config, []).append((1 / (distance + 0.1), error))
    best: tuple[float, Config] | None = None
    weight_of_all = sum(1 / (distance + 0.1) for distance, _ in near)
    usual = statistics.median(error for some_ in factors.values() for _, error in some_) if factors else 0.0
    for config, found in factors.items():
        predicted = tunable.predict(config) if config in tunable.space and config not in failed else math.inf
        if not math.isfinite(predicted):
            continue
        # What a config was not measured at counts as usual: one that is known from a single launch is less sure.
        weight = sum(each for each, _ in found)
        error = (sum(w * e for w, e in found) + (weight_of_all - weight) * usual) / weight_of_all
        seconds = predicted * math.exp(error)
        if best is None or seconds < best[0]:
            best = seconds, config
    return None if best is None else Choice(NOTHING, best[1], best[0], Origin("neighbour"))


def _nearest(tunable: TunableKernel, records: Sequence[Record]) -> list[tuple[float, list[Record]]]:
    """Launches of the same kernel on this machine: (distance, their records), the nearest first."""
    launches: dict[str, tuple[float, list[Record]]] = {}
    for record in records:
        if record.config.template != tunable.space.template or record.key.machine != tunable.key.machine:
            continue
        if record.key.threads != tunable.key.threads or record.key.toolchain != tunable.key.toolchain:
            continue
        if record.text not in launches:
            facts = tunable.facts.like(record.text, tunable.launched.source)
            if facts is None or tunable.configs_of(record) is None:
                continue
            launches[record.text] = _distance(tunable.facts.key, facts.key), []
        launches[record.text][1].append(record)
    near = sorted((each for each in launches.values() if each[0] <= _FAR), key=lambda each: each[0])
    return near[:_NEAREST]


def _distance(here: Mapping[str, Any], there: Mapping[str, Any]) -> float:
    """Octaves between the numbers of two keys; infinite where anything else differs."""
    total = 0.0
    for name, value in here.items():
        for a, b in zip(_numbers(value), _numbers(there[name]), strict=False):
            if isinstance(a, str | bool) or isinstance(b, str | bool) or a is None or b is None:
                total += 0.0 if a == b else math.inf
            else:
                total += abs(math.log2((1 + abs(a)) / (1 + abs(b))))
        if len(_numbers(value)) != len(_numbers(there[name])):
            return math.inf
    return total


def _numbers(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]
