"""Validation inputs of contractions whose elements differ in size by many orders of magnitude, weights included.

An algorithm that is accurate for numbers of one magnitude may lose all digits if large numbers of a row meet small
ones of a column. So rows of the data and columns of the weight are of several kinds, and every kind meets every
other:

    plain      as usual
    decades    magnitudes log-uniform over 12 decades (float16: over 5)
    sparse     19 of 20 elements are zero
    outliers   a few channels are larger by a factor of 2^5 to 2^12, and in the weight as much smaller
    periodic   signs and zeros that repeat themselves with a period of 2, 4, 16 or 64 elements
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tilewright.dtypes import DType

_DECADES, _DECADES_HALF = 12.0, 5.0
_KEPT = 0.05  # share of nonzero elements in a sparse row
_FACTORS = (32.0, 128.0, 1024.0, 4096.0)
_PERIODS = (2, 4, 16, 64)
_KINDS = 5


def spread_out(
    array: np.ndarray, dtype: DType, summed_axes: Sequence[int], weight: bool, rng: np.random.Generator
) -> np.ndarray:
    """`array`, with each line along `summed_axes` of one of these kinds. `weight`: outliers are divided where those
    of the data are multiplied."""
    kept = [axis for axis in range(array.ndim) if axis not in summed_axes]
    moved = np.transpose(array, (*kept, *summed_axes))
    lines = moved.reshape(-1, int(np.prod([array.shape[axis] for axis in summed_axes]))).astype(np.float64)
    count, length = lines.shape
    if not lines.size:
        return array
    kinds = np.arange(count) * _KINDS // count if count >= _KINDS else rng.integers(0, _KINDS, count)
    decades = _DECADES_HALF if dtype is DType.F16 else _DECADES
    _, of_decades, sparse, outliers, periodic = (np.nonzero(kinds == kind)[0] for kind in range(_KINDS))
    lines[of_decades] *= 10.0 ** rng.uniform(-decades / 2, decades / 2, (len(of_decades), length))
    lines[sparse] *= rng.random((len(sparse), length)) < _KEPT
    positions = _outlying(length)
    factors = np.resize(_FACTORS[: 1 if dtype is DType.F16 else None], len(positions))
    lines[np.ix_(outliers, positions)] *= 1.0 / factors if weight else factors
    for number, line in enumerate(periodic):
        period = _PERIODS[number % len(_PERIODS)]
        pattern = rng.choice([-1.0, 0.0, 1.0], period)
        pattern[0] = 1.0
        lines[line] = np.abs(lines[line]) * np.resize(pattern, length)
    back = lines.reshape(moved.shape).transpose(np.argsort((*kept, *summed_axes)))
    return np.ascontiguousarray(back.astype(array.dtype))


def _outlying(length: int) -> np.ndarray:
    """The outlier channels: the same in data and weight."""
    return np.unique(np.linspace(0, length - 1, 4).astype(int))
