"""Config -> the numbers that a model that learns sees: where the predicted time goes, and the knobs.

What is learned on one task should hold on another and on another machine. So terms are shares of the predicted time and
ratios, never totals, and each number has a name under which other tasks have it too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tilewright.cost.analytical import Analytical
from tilewright.cost.features import PROGRAM_FEATURES, program_features
from tilewright.space.space import Config
from tilewright.space.template import Terms

_RATIOS = ("loads", "stores", "branches", "scalar", "from_l2", "from_l3", "from_memory", "prefetched")
TERMS_FEATURES: tuple[str, ...] = (
    *(f"{name}_per_arithmetic" for name in _RATIOS),
    "arithmetic_per_iteration",
    "bytes_per_iteration",
    "rounds",
    "idle",
)


def terms_features(terms: Terms, threads: int) -> list[float]:
    """Logarithms of what there is of each per vector of arithmetic, and how the work is dealt out."""
    arithmetic = max(terms.arithmetic, 1.0)
    ratios = [math.log2(1 + 16 * getattr(terms, name) / arithmetic) for name in _RATIOS]
    rounds = -(-terms.iterations // threads)
    moved = terms.from_l2 + terms.from_l3 + terms.from_memory
    return [
        *ratios,
        math.log2(1 + arithmetic / terms.iterations),
        math.log2(1 + moved / terms.iterations),
        math.log2(rounds),
        1 - terms.iterations / (rounds * threads),
    ]


def knob_features(space_template: str, numbers: Sequence[tuple[str, Sequence[float]]]) -> dict[str, float]:
    """Named by template and knob."""
    return {
        f"{space_template}.{knob}.{place}": value
        for knob, values in numbers
        for place, value in enumerate(values)
    }


@dataclass
class Encoder:
    """The rows of configs, each made once. Columns are named in the order in which they first appear; a row has NaN
    where its config has no such number.

    `programs`: whether the loops of a program are looked at even where its template counts terms in closed form."""

    threads: int
    programs: bool = False
    columns: dict[str, int] = field(default_factory=dict)
    _rows: dict[tuple[int, Config], Mapping[str, float]] = field(default_factory=dict)

    def matrix(self, model: Analytical, configs: Sequence[Config]) -> np.ndarray:
        """One row for each config of the model's Candidates."""
        rows = [self._row(model, config) for config in configs]
        for row in rows:
            for name in row:
                self.columns.setdefault(name, len(self.columns))
        found = np.full((len(rows), len(self.columns)), np.nan)
        for at, row in enumerate(rows):
            for name, value in row.items():
                found[at, self.columns[name]] = value
        return found

    def _row(self, model: Analytical, config: Config) -> Mapping[str, float]:
        key = id(model), config
        if key not in self._rows:
            self._rows[key] = self._numbers(model, config)
        return self._rows[key]

    def _numbers(self, model: Analytical, config: Config) -> Mapping[str, float]:
        terms = model.terms(config)
        if terms is None:
            return {}
        applied = model.candidates.of_config(config)
        row = dict(zip(TERMS_FEATURES, terms_features(terms, self.threads), strict=True))
        row[f"is {config.template}"] = 1.0
        values = dict(config.values)
        row |= knob_features(
            config.template, [(knob.name, knob.encode(values[knob.name])) for knob in applied.space.knobs]
        )
        if self.programs or applied.terms(config) is None:
            row |= zip(PROGRAM_FEATURES, program_features(applied.program(config)).tolist(), strict=True)
        return row
