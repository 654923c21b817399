"""What Gemmini's RTL takes longer than the analytical model says, learned from measured mappings.

The logarithm of measured over predicted cycles is a Gaussian process over a few logarithms: sizes of tiles, rows that
the DMA moves, blocks that the array computes, how often each tensor is fetched, and which part bounds the mapping. It
was trained on the 74 mappings in `correction.json`, which a search had found for 71 layers on arrays of 16x16: it is
for mappings as a search finds them, not for arbitrary ones, and `valid_for` says where it may be asked. `fit` trains
another one from measured rows of one's own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources

import numpy as np

from tilewright.codesign.data import Points
from tilewright.codesign.mapping import DRAM, SCRATCHPAD, Hardware, Mappings
from tilewright.codesign.model import BOUNDS, Model
from tilewright.codesign.problem import C, K, Nests, P, Q, R, S
from tilewright.errors import MeasuredDataError

LENGTH, NOISE = 5.0, 0.03  # chosen among 12 by leaving whole layers of the 74 rows out
TARGET = "gemmini_cycle"


def features(nests: Nests, mappings: Mappings, hardware: Hardware) -> tuple[np.ndarray, np.ndarray]:
    """[rows, features], and [rows] the analytical model's cycles."""
    found = Model().estimate(nests, mappings, hardware)
    cycles = found.cycles.value
    tile = mappings.factors[:, : SCRATCHPAD + 1].prod(axis=1)
    tile[:, C] *= mappings.rows
    tile[:, K] *= mappings.columns
    outer = mappings.factors[:, DRAM]
    width, height = (
        (tile[:, out] - 1) * nests.stride[:, axis] + (tile[:, tap] - 1) * nests.dilation[:, axis] + 1
        for axis, (out, tap) in enumerate(((P, R), (Q, S)))
    )
    dim = hardware.dim
    channels, filters, pixels = (np.ceil(tile[:, loop] / dim) for loop in (C, K, P))
    blocks = tile[:, R] * tile[:, S] * channels * filters * tile[:, Q]
    logarithms = [
        outer.prod(axis=1),
        blocks * tile[:, P],
        blocks * pixels,
        width * height * channels,
        tile[:, P] * tile[:, Q] * filters,
        tile[:, R] * tile[:, S] * tile[:, C] * filters,
        *(found.fetches[tensor].value for tensor in ("inputs", "outputs", "weights")),
        cycles,
        *(np.maximum(found.parts[part].value / cycles, 1e-9) for part in BOUNDS),
        *(tile[:, loop] for loop in (C, K, P, Q)),
        *(nests.extents[:, loop] for loop in (P, C, K)),
    ]
    innermost = _innermost(mappings)
    plain = [
        nests.stride[:, 0],
        tile[:, K] / (filters * dim),
        tile[:, C] / (channels * dim),
        *(np.isin(innermost, loops) for loops in ((K,), (P, Q), (R, S, C))),
        (nests.extents[:, [R, S, Q]] == 1).all(axis=1),
    ]
    return np.stack([*np.log(logarithms), *(np.asarray(each, float) for each in plain)], axis=1), cycles


def _innermost(mappings: Mappings) -> np.ndarray:
    """[rows]: the innermost of DRAM's loops that runs more than once, -1 where none does."""
    order = mappings.order[:, DRAM].astype(np.intp)
    runs = np.take_along_axis(mappings.factors[:, DRAM], order, axis=1) > 1
    last = order.shape[1] - 1 - runs[:, ::-1].argmax(axis=1)
    return np.where(runs.any(axis=1), np.take_along_axis(order, last[:, None], axis=1)[:, 0], -1)


@dataclass(frozen=True)
class Correction:
    """A trained one."""

    rows: np.ndarray  # [trained, features], scaled
    weights: np.ndarray  # [trained]
    centre: np.ndarray  # [features]
    scale: np.ndarray
    mean: float
    dim: int

    @classmethod
    def fit(cls, points: Points) -> Correction:
        """Fit to measured rows, with the target `gemmini_cycle`. Raises MeasuredDataError if they have several arrays,
        or are too few."""
        dims = set(points.hardware.dim.tolist())
        if len(dims) != 1 or len(points) < 10:
            raise MeasuredDataError(
                f"a correction is trained on 10 or more rows of one array, got {len(points)} of {len(dims)} arrays"
            )
        raw, cycles = features(points.nests, points.mappings, points.hardware)
        centre, scale = raw.mean(axis=0), raw.std(axis=0)
        scale[scale < 1e-3] = 1.0  # a feature that all rows share says nothing
        rows = (raw - centre) / scale
        logs = np.log(points.targets[TARGET] / cycles)
        mean = float(logs.mean())
        weights = np.linalg.solve(_kernel(rows, rows) + NOISE * np.eye(len(rows)), logs - mean)
        return cls(rows, weights, centre, scale, mean, int(dims.pop()))

    def valid_for(self, hardware: Hardware) -> np.ndarray:
        """[rows]: whether it was trained on such hardware."""
        return np.asarray(hardware.dim == self.dim)

    def cycles(self, nests: Nests, mappings: Mappings, hardware: Hardware) -> np.ndarray:
        """[rows]: cycles that Gemmini's RTL is expected to take."""
        raw, cycles = features(nests, mappings, hardware)
        logs = self.mean + _kernel((raw - self.centre) / self.scale, self.rows) @ self.weights
        return np.asarray(cycles * np.exp(logs))

    def to_json(self) -> str:
        return json.dumps(
            {
                "source": "trained on firesim_test_data-analytical.csv of the DOSA repository (BSD 2-Clause, copyright"
                " 2022 Charles Hong)",
                "dim": self.dim,
                "mean": self.mean,
                **{
                    name: np.round(getattr(self, name), 6).tolist()
                    for name in ("rows", "weights", "centre", "scale")
                },
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Correction:
        data = json.loads(text)
        rows, weights, centre, scale = (
            np.array(data[name]) for name in ("rows", "weights", "centre", "scale")
        )
        return cls(rows, weights, centre, scale, data["mean"], data["dim"])


@cache
def shipped() -> Correction:
    """The one in `correction.json`."""
    return Correction.from_json(
        resources.files("tilewright.codesign").joinpath("correction.json").read_text()
    )


def _kernel(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    distance = ((left[:, None] - right[None]) ** 2).sum(axis=2)
    return np.asarray(np.exp(-0.5 * distance / LENGTH**2))
