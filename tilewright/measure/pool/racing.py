"""Races that run on several devices."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from tilewright.space.space import Config


def comparable(
    raced: Sequence[Mapping[Config, tuple[float, ...]]], anchor: Config
) -> dict[Config, list[float]]:
    """Times of races on several devices, scaled to the first one: the anchor ran in each of them."""
    times: dict[Config, list[float]] = {}
    unit = 0.0
    for race in raced:
        own = statistics.median(race[anchor]) if race.get(anchor) else 0.0
        if not own:
            continue
        unit = unit or own
        for config, found in race.items():
            if config == anchor and anchor in times:
                continue
            times[config] = [each * unit / own for each in found]
    return times
