"""Cycles of Gemmini's RTL in FireSim, as far as the analytical model leaves them out: counted, and then learned.

`calls.py` counts what the RTL executes and has a few constants, fitted to random mappings that ran on the RTL. What it
leaves out is learned: the logarithm of measured over counted cycles is a Gaussian process over the shares of computing
and transfers in a call, sizes of tiles, loops and tensors, how full the memories are, and the kind of a mapping: found
by a search, the library's, or random. The one in `correction.json` has its constants from 1,077 random mappings, and
the rest from these, from 74 mappings that a search had found for 71 layers, and from the library's 74 mappings of the
same layers, all on arrays of 16x16. What is asked about counts as found by a search, if nothing else is said. Far from
all rows the process adds nothing, and what is counted remains. `valid_for` says on which hardware it may be asked.
`fit` trains another one from measured rows of one's own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import NamedTuple

import numpy as np

from tilewright.codesign.calls import Calls, Constants, Fitted, fit
from tilewright.codesign.data import Points
from tilewright.codesign.mapping import Hardware, Mappings
from tilewright.codesign.model import Model
from tilewright.codesign.problem import C, K, Nests, P, Q, R, S
from tilewright.errors import HardwareRangeError, MeasuredDataError

# Chosen on random and automatic mappings, by leaving whole layers out.
_LENGTH = 6.0
_MAX_LEARNED = 0.5  # of what is learned, as a logarithm: some random rows took 10 to 200 times as long


class _Kind(NamedTuple):
    feature: float  # kinds of mappings that are far apart say less about each other
    noise: float


_KINDS = {"found": _Kind(4.0, 0.02), "automatic": _Kind(0.0, 0.02), "random": _Kind(8.0, 0.2)}
TARGET = "gemmini_cycle"
_MIN_ROWS = 10
_SPREAD = 0.05  # below which a feature's spread counts as this


def features(calls: Calls, nests: Nests, mappings: Mappings, fitted: Fitted) -> np.ndarray:
    """The features that predict the error of counted cycles: [rows, features]."""
    full = calls.sizes[0]
    convolution, matmul = (calls.parts(full, each) for each in (fitted.convolution, fitted.matmul))
    compute, transfer, _ = (
        np.where(calls.matmul, one, other) for one, other in zip(matmul, convolution, strict=True)
    )
    issue = np.where(calls.matmul, fitted.matmul.issue, fitted.convolution.issue)
    longest = np.maximum(np.maximum(compute, transfer), issue)
    words, extents = calls.words, nests.extents
    columns = [
        *(np.log(part / longest) for part in (compute, transfer, issue)),
        *(np.log(rows / longest + 0.01) for rows in (full.inputs, full.weights, full.outputs)),
        0.5 * np.log(longest),
        0.5 * np.log(calls.count),
        np.log2(calls.side),
        np.log(words[:, R] * words[:, S]),
        np.log(extents[:, R]),
        np.log(full.width),
        np.log(full.height),
        np.log(full.width / calls.side),
        *(np.log(words[:, loop]) for loop in (C, K)),
        *(0.5 * np.log(extents[:, loop]) for loop in (C, K, P)),
        2.0 * calls.matmul,
        nests.stride[:, 0],
        0.5 * np.log(calls.scratchpad + 0.02),
        0.5 * np.log(calls.accumulator + 0.05),
        *(words[:, loop] < extents[:, loop] for loop in (R, S)),
        *(0.5 * np.log(words) for words in _tensors(nests)),
    ]
    return np.stack([np.asarray(column, float) for column in columns], axis=1)


def _tensors(nests: Nests) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Words of weights, outputs and inputs, these without borders."""
    extents = nests.extents
    return (
        extents[:, [R, S, C, K]].prod(axis=1),
        extents[:, [P, Q, K]].prod(axis=1),
        extents[:, [P, Q, C]].prod(axis=1) * nests.stride.prod(axis=1),
    )


@dataclass(frozen=True)
class Correction:
    """A trained correction of counted cycles."""

    fitted: Fitted
    rows: np.ndarray  # [trained, features], scaled
    weights: np.ndarray  # [trained]
    centre: np.ndarray  # [features]
    scale: np.ndarray
    mean: float
    dim: int

    @classmethod
    def fit(
        cls,
        found: Points,
        random: Points | None = None,
        fitted: Fitted | None = None,
        automatic: Points | None = None,
    ) -> Correction:
        """Fit a correction to measured rows, with the target `gemmini_cycle`: the constants to random mappings, if
        there are any, and the remaining error to all of them. `automatic`: the library's mappings. `fitted`: constants
        that are known already. Raises MeasuredDataError if the rows have several arrays, or are too few."""
        dims = set(found.hardware.dim.tolist())
        if len(dims) != 1 or len(found) < _MIN_ROWS:
            raise MeasuredDataError(
                f"a correction is trained on {_MIN_ROWS} or more rows of one array, got {len(found)} of {len(dims)}"
                " arrays"
            )
        counted = found if random is None else random
        fitted = fitted or fit(_calls(counted), counted.targets[TARGET])
        of_kinds = {"found": found, "automatic": automatic, "random": random}
        parts = [(points, kind) for kind, points in of_kinds.items() if points is not None]
        raw, logs, noise = (
            np.concatenate(column)
            for column in zip(
                *(_examples(points, _KINDS[kind], fitted) for points, kind in parts), strict=True
            )
        )
        alike = slice(0, sum(len(points) for points, kind in parts if kind != "random"))
        centre, scale = raw[alike].mean(axis=0), np.maximum(raw[alike].std(axis=0), _SPREAD)
        scale[-1] = 1.0
        rows = (raw - centre) / scale
        mean = float(np.median(logs[alike]))
        weights = np.linalg.solve(_kernel(rows, rows) + np.diag(noise), logs - mean)
        return cls(fitted, rows, weights, centre, scale, mean, int(dims.pop()))

    def valid_for(self, hardware: Hardware) -> np.ndarray:
        """Whether it was trained on such hardware: [rows]."""
        return np.asarray(hardware.dim == self.dim)

    def check(self, hardware: Hardware) -> None:
        """Raise HardwareRangeError unless it was trained on such hardware."""
        if not self.valid_for(hardware).all():
            raise HardwareRangeError(
                f"the correction was measured on an array of {self.dim} rows, and is asked about one of"
                f" {hardware.dim[~self.valid_for(hardware)][0]:g}",
                remedy=f"use an array of {self.dim} rows, or the analytical model without the correction",
            )

    def cycles(
        self, nests: Nests, mappings: Mappings, hardware: Hardware, mapped: str = "found"
    ) -> np.ndarray:
        """The predicted cycles of Gemmini's RTL in FireSim: [rows]. `mapped`: the kind of the mappings: found,
        automatic or random. Those that are found never take fewer than by the analytical model, a roofline; of others,
        whose last tiles are cut at the layer's border, it is none."""
        calls = Calls.of(nests, mappings, hardware)
        raw = _of_kind(features(calls, nests, mappings, self.fitted), _KINDS[mapped])
        logs = self.mean + _kernel((raw - self.centre) / self.scale, self.rows) @ self.weights
        cycles = calls.cycles(self.fitted) * np.exp(logs)
        if mapped != "found":
            return np.asarray(cycles)
        return np.asarray(np.maximum(cycles, Model().estimate(nests, mappings, hardware).cycles.value))

    def to_json(self) -> str:
        return json.dumps(
            {
                "source": "trained on firesim_training_data-firesim_results.csv and"
                " firesim_test_data-analytical.csv of the DOSA repository (BSD 2-Clause, copyright 2022 Charles Hong)",
                "dim": self.dim,
                "mean": self.mean,
                **{
                    name: {key: round(value, 6) for key, value in constants._asdict().items()}
                    for name, constants in (
                        ("convolution", self.fitted.convolution),
                        ("matmul", self.fitted.matmul),
                    )
                },
                **{
                    name: np.round(getattr(self, name), 4).tolist()
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
        fitted = Fitted(Constants(**data["convolution"]), Constants(**data["matmul"]))
        return cls(fitted, rows, weights, centre, scale, data["mean"], data["dim"])


@cache
def shipped() -> Correction:
    """The correction in `correction.json`."""
    return Correction.from_json(
        resources.files("tilewright.codesign").joinpath("correction.json").read_text()
    )


def _calls(points: Points) -> Calls:
    return Calls.of(points.nests, points.mappings, points.hardware)


def _of_kind(raw: np.ndarray, kind: _Kind) -> np.ndarray:
    return np.concatenate([raw, np.full((len(raw), 1), kind.feature)], axis=1)


def _examples(points: Points, kind: _Kind, fitted: Fitted) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(features, what is learned, noise) of each row."""
    calls = _calls(points)
    raw = _of_kind(features(calls, points.nests, points.mappings, fitted), kind)
    logs = np.log(points.targets[TARGET] / calls.cycles(fitted))
    return raw, np.clip(logs, -_MAX_LEARNED, _MAX_LEARNED), np.full(len(points), kind.noise)


def _kernel(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    squares = (left**2).sum(axis=1)[:, None] + (right**2).sum(axis=1)[None] - 2.0 * left @ right.T
    return np.asarray(np.exp(-np.sqrt(np.maximum(squares, 0.0)) / _LENGTH))
