"""Encodes a config for a learned model: the terms of the predicted time, and the knobs.

Features should transfer to other tasks and machines. So terms are ratios and shares of the predicted time, never
totals, and each feature has a name that is the same for all tasks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tilewright.cost.analytical import Analytical
from tilewright.cost.features import PROGRAM_FEATURES, program_features
from tilewright.space.space import Config
from tilewright.space.template import Featured
from tilewright.space.terms import Counted, Cycles, GpuTerms, Roofline, StreamTerms, Terms

_RATIOS = ("loads", "stores", "branches", "scalar", "from_l2", "from_l3", "from_memory", "prefetched")
TERMS_FEATURES: tuple[str, ...] = (
    *(f"{name}_per_arithmetic" for name in _RATIOS),
    "arithmetic_per_iteration",
    "bytes_per_iteration",
    "rounds",
    "idle",
)


def features_of(terms: Counted, threads: int) -> dict[str, float]:
    """The features of counted terms, by name; each kind of terms has its own."""
    if isinstance(terms, Terms):
        return dict(zip(TERMS_FEATURES, terms_features(terms, threads), strict=True))
    if isinstance(terms, GpuTerms):
        return gpu_features(terms)
    if isinstance(terms, StreamTerms):
        return stream_features(terms)
    if isinstance(terms, Roofline):
        return {"busy": terms.busy, "intensity": math.log2(1 + terms.flops / max(1.0, terms.bytes))}
    if isinstance(terms, Cycles):
        return {"cycles": math.log2(1 + terms.count)}
    found: dict[str, float] = {"kernels": float(len(terms))}
    for each in terms:
        if isinstance(each, GpuTerms):
            found |= gpu_features(each)
    return found


def gpu_features(terms: GpuTerms) -> dict[str, float]:
    """The tiling of the work, and the costs per operation of a step of the main loop, in logarithms."""
    work = max(1.0, terms.flops, 64 * (terms.scalar + terms.ordinary))
    return {
        "blocks": math.log2(terms.blocks),
        "threads": math.log2(terms.threads),
        "registers": terms.registers / 64,
        "shared": math.log2(1 + terms.shared_bytes),
        "steps": math.log2(1 + terms.steps),
        "stages": float(terms.stages),
        "cluster": math.log2(terms.cluster),
        "persistent": float(terms.persistent),
        "work_per_step": math.log2(work),
        "shared_per_work": math.log2(1 + 1024 * terms.shared_traffic / work),
        "loaded_per_work": math.log2(1 + 1024 * terms.loaded / work),
        "copies_per_work": math.log2(1 + 65536 * terms.copies / work),
        "scalar_per_work": math.log2(1 + 1024 * (terms.scalar + terms.ordinary) / work),
        "written": math.log2(1 + terms.written + terms.write_loaded),
    }


def stream_features(terms: StreamTerms) -> dict[str, float]:
    """The division of the work, and the data in flight per thread, in logarithms."""
    return {
        "blocks": math.log2(terms.blocks),
        "threads": math.log2(terms.threads),
        "registers": min(8.0, terms.registers / 64),
        "steps": math.log2(1 + terms.steps),
        "loaded_per_thread": math.log2(1 + terms.loaded / terms.steps / terms.threads),
        "loaded_again": math.log2(1 + terms.blocks * terms.loaded / max(1.0, terms.memory)),
        "scalar_per_step": math.log2(1 + terms.scalar / terms.steps),
    }


def terms_features(terms: Terms, threads: int) -> list[float]:
    """The log of each count per vector of arithmetic, and how the work is distributed."""
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


@dataclass
class Encoder:
    """Feature rows of configs, cached. Columns are named in the order of their first use; a row has NaN for missing
    features. If a template counts no terms, its program's loops are analysed."""

    columns: dict[str, int] = field(default_factory=dict)
    _rows: dict[tuple[Analytical, Config], np.ndarray] = field(default_factory=dict)

    def matrix(self, model: Analytical, configs: Sequence[Config]) -> np.ndarray:
        """One row for each config of the model's `Configs`."""
        rows = [self._row(model, config) for config in configs]
        found = np.full((len(rows), len(self.columns)), np.nan)
        for at, row in enumerate(rows):
            found[at, : len(row)] = row
        return found

    def informative(self, rows: np.ndarray) -> np.ndarray:
        """The columns in which the rows differ, in an order independent of earlier calls."""
        missing = np.isnan(rows)
        filled = np.where(missing, 0.0, rows)
        differ = (filled != filled[:1]).any(axis=0) | (missing != missing[:1]).any(axis=0)
        names = sorted(
            name for name, position in self.columns.items() if position < len(differ) and differ[position]
        )
        return np.array([self.columns[name] for name in names], dtype=int)

    def _row(self, model: Analytical, config: Config) -> np.ndarray:
        """A row as long as the number of columns when it was made."""
        key = model, config
        if key not in self._rows:
            numbers = self._numbers(model, config)
            positions = [self.columns.setdefault(name, len(self.columns)) for name in numbers]
            row = np.full(len(self.columns), np.nan)
            row[positions] = list(numbers.values())
            self._rows[key] = row
        return self._rows[key]

    def _numbers(self, model: Analytical, config: Config) -> dict[str, float]:
        terms = model.terms(config)
        if terms is None:
            return {}
        applied, values = model.candidates.of_config(config), dict(config.values)
        row = features_of(terms, model.threads)
        row[f"is {config.template}"] = 1.0
        for knob in applied.space.knobs:
            for position, number in enumerate(knob.encode(values[knob.name])):
                row[f"{config.template}.{knob.name}.{position}"] = number
        row |= applied.features(config) if isinstance(applied, Featured) else {}
        if config in model.counted:
            features = program_features(model.candidates.program(config)).tolist()
            row |= zip(PROGRAM_FEATURES, features, strict=True)
        return row
