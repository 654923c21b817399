"""How sure a ratio of two systems' medians is."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence


def interval(baseline: Sequence[float], own: Sequence[float]) -> tuple[float, float]:
    """95% of the ratio of medians, by drawing turns again."""
    rng = random.Random(0)
    ratios = []
    for _ in range(1000):
        turns = [rng.randrange(len(own)) for _ in own]
        ratios.append(
            statistics.median(baseline[t] for t in turns) / statistics.median(own[t] for t in turns)
        )
    ratios.sort()
    return ratios[25], ratios[974]
