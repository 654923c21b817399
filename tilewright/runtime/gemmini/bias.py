"""A 32-bit bias as rows of bytes that the array multiplies and adds, instead of 4 bytes for each result from DRAM.

    bias = 1 * rows[0] + 127 * (rows[1] + rows[2] + ...)

In DRAM: the multipliers, one for each row, then the rows."""

from __future__ import annotations

import numpy as np

_MAX = 127


def limit(rows: int) -> int:
    """The largest magnitude that so many rows hold."""
    return _MAX + _MAX * _MAX * (rows - 1)


def rows_for(magnitude: int) -> int:
    return 1 - (_MAX - max(magnitude, _MAX)) // (_MAX * _MAX)


def stored_bytes(channels: int, rows: int) -> int:
    return rows * (1 + channels)


def encoded(bias: np.ndarray, rows: int) -> np.ndarray:
    """The bytes in DRAM. What the rows cannot hold is clipped."""
    values = np.clip(bias.astype(np.int64), -limit(rows), limit(rows))
    most = _MAX * (rows - 1)
    high = np.clip(np.rint(values / _MAX).astype(np.int64), -most, most)
    found = np.empty((rows, 1 + bias.size), np.int64)
    found[0] = [1, *(values - _MAX * high)]
    for row in range(1, rows):
        part = np.clip(high, -_MAX, _MAX)
        found[row] = [_MAX, *part]
        high = high - part
    return np.concatenate([found[:, 0], found[:, 1:].ravel()]).astype(np.int8).view(np.uint8)


def decoded(stored: np.ndarray, rows: int) -> np.ndarray:
    """The sums that the array makes of bytes in DRAM."""
    values = stored.view(np.int8).astype(np.int64)
    sums: np.ndarray = values[:rows] @ values[rows:].reshape(rows, -1)
    return sums
