"""Regression by similarity, in NumPy: what alike configs took, weighted by how alike they are.

A Gaussian process with a linear and a smooth part. Scales and noise are those under which the samples are most likely,
of a few: where the samples show no order, the noise explains them and the prediction stays at zero. For tens to a few
hundred samples.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

_SMOOTH = (0.0, 0.1, 0.2, 0.4)  # standard deviations of the parts, as of logarithms of seconds
_LINEAR = (0.0, 0.1, 0.3)
_LENGTHS = (0.5, 1.0, 2.0)  # in standard deviations of a number, over all numbers
_NOISE = (0.03, 0.08, 0.2)


@dataclass(frozen=True)
class _Scales:
    smooth: float
    linear: float
    length: float
    noise: float


class Smooth:
    """Made of samples: rows of numbers (NaN: has no such number), targets around zero, and weights."""

    def __init__(self, rows: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> None:
        with np.errstate(invalid="ignore"):
            self._centre = _column(np.nanmean, rows)
            scale = _column(np.nanstd, rows)
        self._scale = np.where(scale > 1e-9, scale, np.inf)  # a number that never differs says nothing
        self._rows = self._normal(rows)
        distances, products = self._likeness(self._rows)
        best: tuple[float, _Scales] | None = None
        for smooth, linear, length, noise in itertools.product(_SMOOTH, _LINEAR, _LENGTHS, _NOISE):
            if (smooth == 0.0 and length != _LENGTHS[0]) or (smooth == linear == 0.0 and noise != _NOISE[-1]):
                continue
            scales = _Scales(smooth, linear, length, noise)
            likelihood = _likelihood(_covariance(scales, distances, products), noise, targets, weights)
            if best is None or likelihood > best[0]:
                best = likelihood, scales
        assert best is not None
        self.scales = best[1]
        covariance = _covariance(self.scales, distances, products) + np.diag(self.scales.noise**2 / weights)
        self._factor = np.linalg.cholesky(covariance)
        self._solved = _solve(self._factor, targets)

    def predict(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(mean, standard deviation)"""
        normal = self._normal(rows)
        distances, products = self._likeness(normal)
        likeness = _covariance(self.scales, distances, products)
        own = self.scales.smooth**2 + self.scales.linear**2 * np.mean(normal**2, axis=1)
        explained = np.sum(np.linalg.solve(self._factor, likeness.T) ** 2, axis=0)
        return likeness @ self._solved, np.sqrt(np.maximum(own - explained, 0.0))

    def _normal(self, rows: np.ndarray) -> np.ndarray:
        known = rows[:, : len(self._centre)]
        return np.asarray(np.nan_to_num((known - self._centre) / self._scale, nan=0.0))

    def _likeness(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(squared distances, products) of each row with each sample, as means over the numbers that differ."""
        numbers = max(1, int(np.isfinite(self._scale).sum()))
        products = rows @ self._rows.T / numbers
        squares = np.sum(rows**2, axis=1)[:, None] + np.sum(self._rows**2, axis=1)[None, :]
        return np.maximum(squares / numbers - 2 * products, 0.0), products


def _column(of: object, rows: np.ndarray) -> np.ndarray:
    known = ~np.all(np.isnan(rows), axis=0)
    found = np.zeros(rows.shape[1])
    found[known] = of(rows[:, known], axis=0)  # type: ignore[operator]
    return found


def _covariance(scales: _Scales, distances: np.ndarray, products: np.ndarray) -> np.ndarray:
    return np.asarray(
        scales.smooth**2 * np.exp(-distances / (2 * scales.length**2)) + scales.linear**2 * products
    )


def _likelihood(covariance: np.ndarray, noise: float, targets: np.ndarray, weights: np.ndarray) -> float:
    factor = np.linalg.cholesky(covariance + np.diag(noise**2 / weights))
    whitened = np.linalg.solve(factor, targets)
    return float(-0.5 * whitened @ whitened - np.sum(np.log(np.diag(factor))))


def _solve(factor: np.ndarray, targets: np.ndarray) -> np.ndarray:
    return np.asarray(np.linalg.solve(factor.T, np.linalg.solve(factor, targets)))
