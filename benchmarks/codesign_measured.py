"""Mappings that ran on Gemmini's RTL in FireSim, and what is predicted for each from the rows of all other layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tilewright.codesign.calls import Calls, fit
from tilewright.codesign.correction import TARGET, Correction
from tilewright.codesign.data import Points, read_points
from tilewright.codesign.library import library_mapping
from tilewright.codesign.mapping import Hardware, Mappings
from tilewright.hw.gemmini import GemminiMachine

TEST = "firesim_test_data-analytical.csv"
TRAINING = "firesim_training_data-firesim_results.csv"
FIRESIM_DIM = 16
AUTOMATIC = "gemmini_auto_cycle"
DEFAULT = GemminiMachine()


def found_rows(folder: Path, targets: Sequence[str]) -> Points:
    return read_points(folder / TEST, targets)


def random_rows(folder: Path) -> Points:
    """Those that an array of 16x16 can run."""
    points = read_points(folder / TRAINING, [TARGET])
    return points.take(np.maximum(points.mappings.rows, points.mappings.columns) <= FIRESIM_DIM)


def automatic_rows(found: Points) -> Points:
    """The library's mappings of the same layers. It had been made for the default machine: tests/codesign compares its
    tiles with those of `library.py`."""
    layers = found.layers()
    return Points(
        found.nests,
        Mappings.joined([library_mapping(layer, DEFAULT) for layer in layers]),
        Hardware.of([DEFAULT] * len(layers)),
        {TARGET: found.targets[AUTOMATIC]},
    )


Kind = tuple[tuple[int, ...], tuple[int, int]]


def kinds(points: Points) -> list[Kind]:
    """What makes layers the same for training, whatever their names and counts."""
    return [(layer.extents, layer.stride) for layer in points.layers()]


@dataclass(frozen=True)
class LeftOut:
    """Corrections for each layer, trained on the rows of all other layers."""

    found: Points
    automatic: Points
    random: Points
    by_layer: dict[Kind, Correction]

    @classmethod
    def of(cls, folder: Path) -> LeftOut:
        found, random = found_rows(folder, [TARGET, AUTOMATIC]), random_rows(folder)
        automatic = automatic_rows(found)
        calls = Calls.of(random.nests, random.mappings, random.hardware)
        measured = random.targets[TARGET]
        everything = fit(calls, measured)
        by_layer = {}
        for kind in sorted({*kinds(found), *kinds(random)}):
            here, there = (np.array([each == kind for each in kinds(points)]) for points in (random, found))
            fitted = fit(calls.take(~here), measured[~here]) if here.any() else everything
            by_layer[kind] = Correction.fit(
                found.take(~there), random.take(~here), fitted, automatic.take(~there)
            )
        return cls(found, automatic, random, by_layer)

    def cycles(self, points: Points, mapped: str = "found") -> tuple[np.ndarray, np.ndarray]:
        """Counted calls, and with what was learned."""
        counted, learned = np.zeros(len(points)), np.zeros(len(points))
        for row, kind in enumerate(kinds(points)):
            trained, one = self.by_layer[kind], points.take(slice(row, row + 1))
            counted[row] = Calls.of(one.nests, one.mappings, one.hardware).cycles(trained.fitted)[0]
            learned[row] = trained.cycles(one.nests, one.mappings, one.hardware, mapped)[0]
        return counted, learned
