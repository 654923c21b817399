"""Sums of products, two products by one multiplication: Winograd's inner product of 1968.

    a1 b1 + a2 b2 = (a1 + b2) (a2 + b1) - a1 a2 - b1 b2

What is subtracted depends on one operand alone: it is summed once for each row of the one and each column of the other.
Of about half of the pairs a2 and b2 are negated, which leaves their product as it is: so of numbers with a mean neither
sums nor corrections grow beyond the result. Which half has no period, as what the numbers stand for has: even and odd
places, heads, the pixels of a window. Both operands have to be of about one size: what is added up is rounded at the
size of the larger.
"""

from __future__ import annotations

import numpy as np

HALF = 8  # taps from one of a pair to the other
GROUP = 2 * HALF  # taps whose pairs are within it
_GOLDEN = 0x9E3779B9  # 2**32 times the golden ratio's fraction, whose multiples are spread most evenly
_MOST_DOUBLINGS = (
    60  # of a column's size: what is multiplied by it and by a row's is not beyond float32 thereby
)


def pair_count(taps: int) -> int:
    return -(-taps // GROUP) * HALF


def pair_signs(taps: int) -> np.ndarray:
    """Of each pair, group by group, that of its second elements: 1 or -1."""
    turns = np.arange(pair_count(taps), dtype=np.uint64) * np.uint64(_GOLDEN)
    return 1.0 - 2.0 * (turns >> np.uint64(31) & np.uint64(1)).astype(np.float32)


def prepare_weights(taps_first: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(columns, corrections, sizes): each column divided by a power of two, its size, so that its elements are about 1,
    with its pairs' signs; and what is to be subtracted for it."""
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
    seconds = pair_signs(shape[0]).reshape(-1, 1, HALF)
    signs = np.concatenate([np.ones_like(seconds), seconds], axis=1).reshape(-1)[: shape[0]]
    return signs.reshape(-1, *[1] * (len(shape) - 1))


def _sizes(taps_first: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        typical = np.sqrt(np.mean(np.square(taps_first, dtype=np.float64), axis=0))
        doublings = np.round(np.log2(typical))
    usable = np.isfinite(doublings)
    return np.exp2(np.where(usable, np.clip(doublings, -_MOST_DOUBLINGS, _MOST_DOUBLINGS), 0.0))
