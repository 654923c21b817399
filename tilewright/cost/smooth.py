"""Similarity regression in NumPy: predict a config's time from similar configs.

This is a Gaussian process with a few fixed length scales, because scales learned from tens of samples would fit
noise. It is meant for up to a few hundred samples.
"""

from __future__ import annotations

import numpy as np

_LENGTH = 0.7  # distance, in deviations over all features, at which configs say little about each other
_NOISE = 0.1  # of log seconds: timing noise and unmodelled effects
_USUAL = 0.1  # prior deviation of the residual, and its weight in samples
_WORTH = 8.0


class Smooth:
    """Fitted to samples: feature rows (NaN: missing), targets around zero, and weights."""

    def __init__(self, rows: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> None:
        known = ~np.isnan(rows).all(axis=0)
        self._centre, self._scale = np.zeros(rows.shape[1]), np.full(rows.shape[1], np.inf)
        self._centre[known] = np.nanmean(rows[:, known], axis=0)
        deviations = np.nanstd(rows[:, known], axis=0)
        # Constant features carry no information.
        self._scale[known] = np.where(deviations > 1e-9, deviations, np.inf)
        self._rows = self._normal(rows)
        total = np.sum(weights)
        spread = float(np.sum(weights * targets**2) + _WORTH * (_USUAL**2 + _NOISE**2)) / (total + _WORTH)
        self._variance = max(_USUAL**2 / 4, spread - _NOISE**2)
        covariance = self._likeness(self._rows) + np.diag(_NOISE**2 / weights)
        self._factor = np.linalg.cholesky(covariance)
        self._solved = np.linalg.solve(self._factor.T, np.linalg.solve(self._factor, targets))
        certainties = np.sum(np.linalg.inv(self._factor) ** 2, axis=0)
        self.left_out = targets - self._solved / certainties  # leave-one-out errors

    def predict(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(mean, standard deviation), including the noise of a single timing."""
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
