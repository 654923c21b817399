"""The search's belief about config times: a model's predictions, corrected by its errors on measured configs.

The logarithm of a config's time is normally distributed around the prediction, with the model's spread. Errors of two
configs are correlated: configs of one template share a part of the error, and configs with similar knob values share
more of it (a Gaussian process over the knobs' encodings). So measured times also inform the belief about unmeasured
configs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tilewright.cost.model import CostModel
from tilewright.space.candidates import Configs
from tilewright.space.space import Config

# Shares of an error's variance: common to all configs of a template, from single knobs, and from all knobs at once.
TEMPLATE, KNOBS, CONFIG = 0.3, 0.4, 0.3
REACH = 0.3  # distance, as a share of a knob's range, at which the correlation falls by 1/e
NOISE = 0.02  # of a measurement, in log seconds
_JITTER = 1e-6  # added to a variance, as a share of it
_UNLIKELY = 0.02  # probability of validity below which a config is asked for only as a last resort


@dataclass(frozen=True)
class Belief:
    """The joint distribution of some configs' log times: the means, and a square root of the covariance."""

    configs: Sequence[Config]
    mean: np.ndarray
    root: np.ndarray

    @classmethod
    def of(
        cls,
        candidates: Configs,
        model: CostModel,
        configs: Sequence[Config],
        measured: Mapping[Config, float],
        count: int,
    ) -> Belief:
        """The belief about the `count` configs that could be fastest, given the model and the measurements."""
        known = list(measured)
        everything = [*known, *configs]
        predicted = model.predict(everything)
        usable = np.isfinite(predicted.seconds) & (predicted.valid > _UNLIKELY)
        usable |= ~usable[len(known) :].any()
        seconds = np.where(np.isfinite(predicted.seconds), predicted.seconds, 1e6)
        logs, spread = np.log(np.maximum(seconds, 1e-12)), np.maximum(predicted.spread, 1e-3)
        points = _Points.of(candidates, everything)

        here = np.arange(len(known))
        errors = np.log(np.array([measured[config] for config in known])) - logs[here]
        inverse = np.linalg.inv(points.covariance(here, here, spread) + NOISE**2 * np.eye(len(known)))

        def posterior(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            """Return (means, covariance of each row with the measured configs)."""
            across = points.covariance(rows, here, spread)
            return logs[rows] + across @ (inverse @ errors), across

        rows = len(known) + np.flatnonzero(usable[len(known) :])
        mean, across = posterior(rows)
        variance = np.maximum(spread[rows] ** 2 - np.einsum("ij,jk,ik->i", across, inverse, across), 0.0)
        hopes = mean - np.sqrt(variance) - np.log(np.maximum(predicted.valid[rows], _UNLIKELY))
        rows = rows[np.argsort(hopes, kind="stable")[:count]]
        mean, across = posterior(rows)
        covariance = points.covariance(rows, rows, spread) - across @ inverse @ across.T
        root = _root(covariance)
        failing = -np.log(np.maximum(predicted.valid[rows], _UNLIKELY))
        return cls([everything[row] for row in rows], mean + failing, root)

    def by_mean(self) -> list[Config]:
        """Indices, the one believed fastest first."""
        return [self.configs[position] for position in np.argsort(self.mean, kind="stable")]

    def fastest(self, logs: np.ndarray) -> list[Config]:
        """The index of the fastest config in each row of `draw`."""
        return [self.configs[position] for position in np.argmin(logs, axis=1)] if self.configs else []

    def draw(self, rng: np.random.Generator, count: int, doubt: float = 1.0) -> np.ndarray:
        """Draw log times from the joint distribution, one row per draw. `doubt` scales all deviations."""
        normal = rng.standard_normal((max(0, count), len(self.configs)))
        return self.mean + doubt * normal @ self.root.T


def _root(covariance: np.ndarray) -> np.ndarray:
    """A square root by Cholesky, ten times cheaper than by eigenvectors, which are used if rounding made the matrix
    indefinite."""
    try:
        jitter = _JITTER * float(np.mean(np.diag(covariance))) if len(covariance) else 0.0
        return np.linalg.cholesky(covariance + jitter * np.eye(len(covariance)))
    except np.linalg.LinAlgError:
        values, vectors = np.linalg.eigh(covariance)
        return np.asarray(vectors * np.sqrt(np.maximum(values, 0.0)))


@dataclass(frozen=True)
class _Points:
    """Configs as points: the knobs' encodings, each scaled to its range, within one template."""

    template: np.ndarray  # its index
    positions: np.ndarray

    @classmethod
    def of(cls, candidates: Configs, configs: Sequence[Config]) -> _Points:
        names = {config.template: None for config in configs}
        numbers = {name: number for number, name in enumerate(names)}
        template = np.array([numbers[config.template] for config in configs])
        encoded = [candidates.encode(config) for config in configs]
        positions = np.zeros((len(configs), max(map(len, encoded), default=0)))
        for at, row in enumerate(encoded):
            positions[at, : len(row)] = row
        for number in range(len(names)):
            own = template == number
            low, high = positions[own].min(axis=0), positions[own].max(axis=0)
            positions[own] = (positions[own] - low) / np.where(high > low, high - low, 1.0)
        return cls(template, positions)

    def covariance(self, rows: np.ndarray, columns: np.ndarray, spread: np.ndarray) -> np.ndarray:
        distances = np.abs(self.positions[rows, None, :] - self.positions[None, columns, :])
        alike = np.exp(-distances / REACH)
        varying = np.ptp(self.positions, axis=0) > 0 if len(self.positions) else np.zeros(0, bool)
        knobs = alike[:, :, varying].mean(axis=2) if varying.any() else 1.0
        whole = np.exp(-distances.sum(axis=2) / (REACH * max(1, varying.sum())))
        same = self.template[rows, None] == self.template[None, columns]
        correlation = same * (TEMPLATE + KNOBS * knobs + CONFIG * whole)
        return np.asarray(correlation * spread[rows, None] * spread[None, columns])
