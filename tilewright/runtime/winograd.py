"""Winograd's algorithm for convolutions with windows of three: F(m, 3) computes m outputs from m + 2 inputs with m + 2
multiplications instead of 3 m.

    y = At @ ((G @ w) * (Bt @ d))        along one axis; both axes of an image in turn

The matrices follow from m + 1 distinct points and infinity, by the construction of Cook and Toom: polynomials are
multiplied by their values at the points. Small points that come in pairs of opposite signs, with their inverses, keep
the entries, and so the error, small.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache

import numpy as np

from tilewright.runtime.transform import Shape, Transform

TAPS = 3
POINTS = {
    2: (0, 1, -1),
    4: (0, 1, -1, 2, -2),
    6: (0, 1, -1, 2, -2, Fraction(1, 2), Fraction(-1, 2)),
}

# c of |error| <= c u sum_c max_tile |d_c| sum |g_c| for each tile size, u = 2^-24, on validation's data: four times the
# maximum over random tiles (tests/space/templates/cpu/test_winograd.py). `guaranteed_factor` is for any data.
ERROR_FACTORS = {2: 8.0, 4: 96.0, 6: 192.0}

Matrix = tuple[tuple[Fraction, ...], ...]


@lru_cache(maxsize=8)
def matrices(outputs: int) -> tuple[Matrix, Matrix, Matrix]:
    """(At, G, Bt) of F(outputs, 3), exact.

    With points a_i and N(x) = prod (x - a_i): At has the powers of the points, G the window's value at each, divided by
    N'(a_i), and Bt the coefficients of N(x) / (x - a_i), the last row those of N itself.
    """
    points = [Fraction(point) for point in POINTS[outputs]]
    count = outputs + TAPS - 1
    rows_g: list[tuple[Fraction, ...]] = []
    rows_b: list[tuple[Fraction, ...]] = []
    for number, point in enumerate(points):
        others = points[:number] + points[number + 1 :]
        scale = Fraction(1)
        for other in others:
            scale *= point - other
        rows_g.append(tuple(point**power / scale for power in range(TAPS)))
        rows_b.append((*_from_roots(others), Fraction(0)))
    rows_g.append((*[Fraction(0)] * (TAPS - 1), Fraction(1)))
    rows_b.append(_from_roots(points))
    rows_a = tuple(
        (*(point**power for point in points), Fraction(int(power == outputs - 1))) for power in range(outputs)
    )
    assert all(len(row) == count for row in (*rows_a, *rows_b))
    return rows_a, tuple(rows_g), tuple(rows_b)


def amplification(outputs: int) -> float:
    """The maximum growth of intermediate results over sum_c max |d_c| sum |g_c|, and so of a rounding error until it
    reaches a result."""
    at, g, bt = (np.abs(_array(matrix)) for matrix in matrices(outputs))
    along_one_axis = (at * (g.max(axis=1) * bt.sum(axis=1))).sum(axis=1).max()
    return float(along_one_axis**2)


def guaranteed_factor(outputs: int, channels: int) -> float:
    """The same c for any data and any order of sums, even if all roundings add up.

    On its way to a result a product passes two transforms of its tile, the rounding of its weight, the sum over
    channels and their blocks, and two transforms back. A transform with n terms rounds each at most n times. Each
    rounding error is at most u times a value that `amplification` bounds. Only powers of u are left out."""
    at, _, bt = matrices(outputs)
    terms = sum(max(sum(entry != 0 for entry in row) for row in matrix) for matrix in (at, bt))
    return amplification(outputs) * (channels + 2 * terms + 2)


def _from_roots(roots: list[Fraction]) -> tuple[Fraction, ...]:
    """Coefficients of prod (x - root), the constant first."""
    coefficients = [Fraction(1)]
    for root in roots:
        shifted = [Fraction(0), *coefficients]
        scaled = [*(-root * c for c in coefficients), Fraction(0)]
        coefficients = [a + b for a, b in zip(shifted, scaled, strict=True)]
    return tuple(coefficients)


def _array(matrix: Matrix) -> np.ndarray:
    return np.array([[float(entry) for entry in row] for row in matrix])


def transform_weights(weights: np.ndarray, outputs: int) -> np.ndarray:
    """(3, 3, ...) -> (outputs + 2, outputs + 2, ...), in float64."""
    g = _array(matrices(outputs)[1])
    transformed: np.ndarray = np.einsum("ai,bj,ij...->ab...", g, g, weights.astype(np.float64))
    return transformed


class WinogradWeights(Transform, frozen=True, tag="winograd"):
    """The two leading axes, a 3 x 3 window, are replaced by their transform for F(outputs, 3). The trailing data is
    the original weights, for tiles that must be computed directly."""

    outputs: int

    def is_sound(self, shape: Shape) -> bool:
        return len(shape) > 2 and shape[:2] == (TAPS, TAPS) and self.outputs in POINTS

    def shape_after(self, shape: Shape) -> Shape:
        points = self.outputs + TAPS - 1
        return (points, points, *shape[2:])

    def trailing_size(self, shape: Shape) -> int:
        return math.prod(shape)

    def apply(self, dense: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return transform_weights(dense, self.outputs), dense.reshape(-1)

    def undo(self, dense: np.ndarray, trailing: np.ndarray, shape: Shape) -> np.ndarray:
        return trailing.reshape(shape)
