"""Regression by similarity, in NumPy: what alike configs took, weighted by how alike they are.

A Gaussian process of few, fixed scales: with tens of samples, scales that are learned from them fit their noise. For up
to a few hundred samples.
"""

from __future__ import annotations

import numpy as np

_LENGTH = (
    0.7  # in deviations of a number, over all numbers: at such a distance, configs say little of each other
)
_NOISE = 0.1  # of logarithms of seconds: what timing and the numbers leave open
_USUAL = 0.1  # deviation of what there is to learn, worth so many samples
_WORTH = 8.0


class Smooth:
    """Made of samples: rows of numbers (NaN: has no such number), targets around zero, and weights."""

    def __init__(self, rows: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> None:
        known = ~np.isnan(rows).all(axis=0)
        self._centre, self._scale = np.zeros(rows.shape[1]), np.full(rows.shape[1], np.inf)
        self._centre[known] = np.nanmean(rows[:, known], axis=0)
        deviations = np.nanstd(rows[:, known], axis=0)
        # A number that never differs says nothing.
        self._scale[known] = np.where(deviations > 1e-9, deviations, np.inf)
        self._rows = self._normal(rows)
        total = np.sum(weights)
        spread = float(np.sum(weights * targets**2) + _WORTH * (_USUAL**2 + _NOISE**2)) / (total + _WORTH)
        self._variance = max(_USUAL**2 / 4, spread - _NOISE**2)
        covariance = self._likeness(self._rows) + np.diag(_NOISE**2 / weights)
        self._factor = np.linalg.cholesky(covariance)
        self._solved = np.linalg.solve(self._factor.T, np.linalg.solve(self._factor, targets))
        certainties = np.sum(np.linalg.inv(self._factor) ** 2, axis=0)
        self.left_out = targets - self._solved / certainties  # what the others say of each sample

    def predict(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(mean, standard deviation), the noise of a single timing included."""
        likeness = self._likeness(self._normal(rows))
        explained = np.sum(np.linalg.solve(self._factor, likeness.T) ** 2, axis=0)
        left = np.maximum(self._variance - explained, 0.0)
        return likeness @ self._solved, np.sqrt(left + _NOISE**2)

    def _normal(self, rows: np.ndarray) -> np.ndarray:
        return np.asarray(np.nan_to_num((rows - self._centre) / self._scale, nan=0.0))

    def _likeness(self, rows: np.ndarray) -> np.ndarray:
        """Covariance of each row with each sample."""
        numbers = max(1, int(np.isfinite(self._scale).sum()))
        squares = np.sum(rows**2, axis=1)[:, None] + np.sum(self._rows**2, axis=1)[None, :]
        distances = np.maximum(squares - 2 * rows @ self._rows.T, 0.0) / numbers
        return np.asarray(self._variance * np.exp(-distances / (2 * _LENGTH**2)))
