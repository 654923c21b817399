"""Winograd's inner-product trick of 1968, and the certificate for its accuracy.

    a1 b1 + a2 b2 = (a1 + b2) (a2 + b1) - a1 a2 - b1 b2

The corrections a1 a2 and b1 b2 depend on one operand alone: they are summed once for each row of the data and once
for each column of the weight. In about half of the pairs a2 and b2 are negated, which does not change their product,
so that sums and corrections do not grow beyond the result if the numbers have a nonzero mean. The choice follows
multiples of the golden ratio, because numbers in a tensor are often periodic (even and odd channels, heads, pixels).

**Error.** Rows and columns are divided by powers of two so that their root mean squares are in [1, 2). With K the
number of products, A and B the norms of a scaled row and column, u = 2^-24, and sums of `CHUNK` pairs that are added
up one after the other,

    |error| <= error_constant(K) u (A^2 + B^2) / 2,    and    (A^2 + B^2) / 2 <= 1.25 A B

That is a bound by norms. A plain sum has one for each element, K u sum |a_k b_k|. They agree where

    kappa = A B / sum |a_k b_k|

is small. `certified_ratios` bounds kappa from above, rigorously and at almost no cost: for any number t,

    sum |a_k| |b_k| >= sum |a_k| (t - (t - |b_k|)+) >= t |a|_1 - |a|_2 * |(t - |b|)+|_2

so kappa <= `largest_kappa(K)` holds for every row whose ratio |a|_1 / (sqrt(K) |a|_2) is at least

    min over t of (|(t - |b|)+|_2 + |b|_2 / kappa) / (t sqrt(K))

which depends only on the column. A register tile uses the trick if the least ratio of its rows is at least the
largest that its columns require; otherwise it runs the plain loop on the same packed weight.
"""

from __future__ import annotations

import math

import numpy as np

from tilewright.runtime.transform import Shape, Transform

HALF = 8  # distance between the two products of a pair
GROUP = 2 * HALF  # products within which pairs are formed
CHUNK = 64  # pairs summed in registers before they are added to the total
LARGEST_SIZE = 24  # maximum exponent of a row's or column's scale, so that scaled products do not underflow
BOUND_FACTOR = 32.0  # |error| <= BOUND_FACTOR K u sum |a b| for every certified tile
_LARGEST_KAPPA = (
    64.0  # above this, errors exceed those of plain sums by more than the order of summation does
)
_MISMATCH = 1.25  # (A^2 + B^2) / 2 relative to A B, if neither is twice the other
_MARGIN = 1.01  # for rounding in the sums that the certificate uses
_THRESHOLDS = (0.08, 0.15, 0.25, 0.4, 0.7, 1.1)  # t in units of the column's root mean square
_GOLDEN = 0x9E3779B9  # 2**32 times the fraction of the golden ratio, whose multiples are spread most evenly
_COLUMNS_AT_ONCE = 1 << 17  # elements of a weight that stay in a cache for all thresholds


def pair_count(k_size: int) -> int:
    return -(-k_size // GROUP) * HALF


def pair_signs(k_size: int) -> np.ndarray:
    """The sign of each pair's second elements, group by group: 1 or -1."""
    turns = np.arange(pair_count(k_size), dtype=np.uint64) * np.uint64(_GOLDEN)
    return 1.0 - 2.0 * (turns >> np.uint64(31) & np.uint64(1)).astype(np.float32)


def error_constant(k_size: int) -> float:
    """E in |error| <= E u (A^2 + B^2) / 2: rounding of the products, of the chunks' sum, of the row's correction (8
    sums, A^2 being at most 1.6 times the mean of both), and of the subtractions."""
    pairs = pair_count(k_size)
    chunk = min(CHUNK, pairs)
    products = chunk + 2 + -(-pairs // chunk)
    correction = pairs / HALF + HALF - 1
    return 2.0 * products + 0.8 * correction + 5.0


def largest_kappa(k_size: int) -> float:
    """The largest kappa for which the error is at most BOUND_FACTOR K u sum |a b|."""
    return min(_LARGEST_KAPPA, BOUND_FACTOR * k_size / (_MISMATCH * error_constant(k_size)))


def prepare_weights(k_first: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(columns, corrections, sizes, ratios): each column divided by a power of two (its size) with its pairs' signs;
    its correction; and the least ratio that a row must have for the trick. A column that cannot be certified is
    stored unchanged; a zero column has size zero, so that its results are zero."""
    sizes, usable = _sizes(k_first)
    ratios = np.where(usable, certified_ratios(k_first), np.inf)
    with np.errstate(all="ignore"):
        columns = (k_first / sizes * _signs(k_first.shape)).astype(k_first.dtype)
    k_size, *others = columns.shape
    whole = np.zeros((-(-k_size // GROUP) * GROUP, *others), columns.dtype)
    whole[:k_size] = columns
    first, second = np.moveaxis(whole.reshape(-1, 2, HALF, *others), 1, 0)
    with np.errstate(all="ignore"):
        corrections = np.einsum("gh...,gh...->...", first, second, dtype=np.float64)
    zero = ~k_first.any(axis=0)
    sizes, ratios = np.where(zero, 0.0, sizes), np.where(zero, 0.0, ratios)
    dtype = columns.dtype
    return columns, corrections.astype(dtype), sizes.astype(dtype), ratios.astype(dtype)


def restore_weights(columns: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The inverse of `prepare_weights`."""
    with np.errstate(all="ignore"):
        restored: np.ndarray = columns * np.where(sizes == 0, 1, sizes) * _signs(columns.shape)
    return restored


def certified_ratios(k_first: np.ndarray) -> np.ndarray:
    """The least |a|_1 / (sqrt(K) |a|_2) of a row for which the trick is certified, for each column."""
    k_size = len(k_first)
    flat = k_first.reshape(k_size, -1)
    found = np.empty(flat.shape[1], np.float32)
    step = max(1, _COLUMNS_AT_ONCE // max(1, k_size))
    allowance = np.float32(1.0 / largest_kappa(k_size))
    for begin in range(0, flat.shape[1], step):
        with np.errstate(all="ignore"):
            sizes = np.abs(flat[:, begin : begin + step])
            sizes /= _root_mean_square(sizes).astype(np.float32)
            least = np.full(sizes.shape[1], np.inf, np.float32)
            below = np.empty_like(sizes)
            for threshold in map(np.float32, _THRESHOLDS):
                np.maximum(np.subtract(threshold, sizes, out=below), 0, out=below)
                np.fmin(least, (_root_mean_square(below) + allowance) / threshold, out=least)
        found[begin : begin + step] = least * _MARGIN
    return found.reshape(k_first.shape[1:])


def row_ratios(rows: np.ndarray) -> np.ndarray:
    """The ratio |a|_1 / (sqrt(K) |a|_2) of rows along the last axis, as kernels compute it; 2 for zero rows."""
    wide = np.abs(rows.astype(np.float64))
    return ratios_of(wide.mean(axis=-1), np.square(wide).mean(axis=-1))


def ratios_of(mean_size: np.ndarray, mean_square: np.ndarray) -> np.ndarray:
    usable = (mean_square >= 4.0**-LARGEST_SIZE) & (mean_square <= 4.0**LARGEST_SIZE)
    with np.errstate(all="ignore"):
        ratios = np.where(usable, mean_size / np.sqrt(mean_square), -1.0)
    return np.where(mean_size == 0, 2.0, ratios)


def _root_mean_square(k_first: np.ndarray) -> np.ndarray:
    root: np.ndarray = np.sqrt(np.einsum("kn,kn->n", k_first, k_first) / len(k_first))
    return root


def _signs(shape: tuple[int, ...]) -> np.ndarray:
    seconds = pair_signs(shape[0]).reshape(-1, 1, HALF)
    signs = np.concatenate([np.ones_like(seconds), seconds], axis=1).reshape(-1)[: shape[0]]
    return signs.reshape(-1, *[1] * (len(shape) - 1))


def _sizes(k_first: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The power of two at or below each column's root mean square, and whether it can be used as a scale."""
    flat = k_first.reshape(len(k_first), -1)
    with np.errstate(all="ignore"):
        squares = np.einsum("kn,kn->n", flat, flat, dtype=np.float64) / len(flat)
        exponents = np.floor(0.5 * np.log2(squares))
        usable = np.abs(exponents) <= LARGEST_SIZE
    sizes = np.exp2(np.where(usable, exponents, 0.0)).astype(k_first.dtype)
    return sizes.reshape(k_first.shape[1:]), usable.reshape(k_first.shape[1:])


class PairedWeights(Transform, frozen=True, tag="paired"):
    """Columns from `prepare_weights`; `axes` are the reduction axes, outermost first. The trailing data is, for all
    columns, the corrections, then the sizes, then the required row ratios, and then the signs of all pairs."""

    axes: tuple[int, ...]

    def is_sound(self, shape: Shape) -> bool:
        return 0 < len(self.axes) == len(set(self.axes)) and set(self.axes) <= set(range(len(shape)))

    def trailing_size(self, shape: Shape) -> int:
        return self.signs_at(shape) + pair_count(self._length(shape))

    def signs_at(self, shape: Shape) -> int:
        """The start of the signs in the trailing data."""
        return 3 * self.columns(shape)

    def columns(self, shape: Shape) -> int:
        return math.prod(self._column_shape(shape))

    def ratios(self, trailing: np.ndarray, shape: Shape) -> np.ndarray:
        """The ratios of all columns in the trailing data."""
        end = self.signs_at(shape)
        return trailing[end - self.columns(shape) : end]

    def apply(self, dense: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        shape = dense.shape
        columns, *of_columns = prepare_weights(self._reduced_first(dense))
        trailing = [*of_columns, pair_signs(self._length(shape)).astype(dense.dtype)]
        return self._in_place(columns, shape), np.concatenate([part.reshape(-1) for part in trailing])

    def undo(self, dense: np.ndarray, trailing: np.ndarray, shape: Shape) -> np.ndarray:
        count = self.columns(shape)
        sizes = trailing[count : 2 * count].reshape(self._column_shape(shape))
        return self._in_place(restore_weights(self._reduced_first(dense), sizes), shape)

    def _length(self, shape: Shape) -> int:
        return math.prod(shape[axis] for axis in self.axes)

    def _column_shape(self, shape: Shape) -> Shape:
        return tuple(extent for axis, extent in enumerate(shape) if axis not in self.axes)

    def _reduced_first(self, dense: np.ndarray) -> np.ndarray:
        """The fused reduction axes, before all others."""
        moved = np.moveaxis(dense, self.axes, range(len(self.axes)))
        return moved.reshape(-1, *self._column_shape(dense.shape))

    def _in_place(self, reduced_first: np.ndarray, shape: Shape) -> np.ndarray:
        reduced = [shape[axis] for axis in self.axes]
        whole = reduced_first.reshape(*reduced, *self._column_shape(shape))
        return np.moveaxis(whole, range(len(reduced)), self.axes)
