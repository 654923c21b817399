"""Sums of products, two products by one multiplication: Winograd's inner product of 1968.

    a1 b1 + a2 b2 = (a1 + b2) (a2 + b1) - a1 a2 - b1 b2

What is subtracted depends on one operand alone: it is summed once for each row of the one and each column of the other.
Of every second pair a2 and b2 are negated, which leaves their product as it is: so of numbers with a mean neither sums
nor corrections grow beyond the result. Both operands have to be of about one size: what is added up is rounded at the
size of the larger.
"""

from __future__ import annotations

import numpy as np

HALF = 8  # taps from one of a pair to the other
GROUP = 2 * HALF  # taps whose pairs are within it
_SIGNS = np.array([*[1.0] * HALF, *[1.0, -1.0] * (HALF // 2)], np.float32)
_MOST_DOUBLINGS = (
    60  # of a column's size: what is multiplied by it and by a row's is not beyond float32 thereby
)


def prepare_weights(taps_first: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(columns, corrections, sizes): each column divided by a power of two, its size, so that its elements are about 1,
    with its signs; and what is to be subtracted for it."""
    sizes = _sizes(taps_first)
    columns = (taps_first / sizes * _signs(taps_first.shape)).astype(taps_first.dtype)
    taps, *others = columns.shape
    whole = np.zeros((-(-taps // GROUP) * GROUP, *others))
    whole[:taps] = columns
    first, second = np.moveaxis(whole.reshape(-1, 2, HALF, *others), 1, 0)
    with np.errstate(all="ignore"):
        corrections = (first * second).sum(axis=(0, 1))
    return columns, corrections.astype(columns.dtype), sizes.astype(columns.dtype)


def restore_weights(columns: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """What `prepare_weights` was given."""
    restored: np.ndarray = columns * sizes * _signs(columns.shape)
    return restored


def _signs(shape: tuple[int, ...]) -> np.ndarray:
    return np.resize(_SIGNS, shape[0]).reshape(-1, *[1] * (len(shape) - 1))


def _sizes(taps_first: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        typical = np.sqrt(np.mean(np.square(taps_first, dtype=np.float64), axis=0))
        doublings = np.round(np.log2(typical))
    usable = np.isfinite(doublings)
    return np.exp2(np.where(usable, np.clip(doublings, -_MOST_DOUBLINGS, _MOST_DOUBLINGS), 0.0))
