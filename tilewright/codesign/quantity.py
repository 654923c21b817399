"""Arrays that know their derivatives: what the model of a mapping is computed with.

A `Quantity` has one value for each row of a batch, and, where gradients are wanted, its derivatives by the coordinates
of the mapping and the hardware. Coordinates are logarithms, so the derivative of a product of factors is the product
times a row of ones and zeros. Without gradients it is a plain array with the same arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_ROUNDING = 1e-9  # relative: what arithmetic may have added to a whole number


@dataclass(frozen=True)
class Quantity:
    value: np.ndarray  # [rows]
    gradient: np.ndarray | None = None  # [rows, coordinates]

    def __add__(self, other: Quantity | np.ndarray | float) -> Quantity:
        other = _quantity(other, self)
        return Quantity(self.value + other.value, _sum(self.gradient, other.gradient))

    def __sub__(self, other: Quantity | np.ndarray | float) -> Quantity:
        return self + _quantity(other, self) * -1.0

    def __mul__(self, other: Quantity | np.ndarray | float) -> Quantity:
        other = _quantity(other, self)
        return Quantity(
            self.value * other.value,
            _sum(_scaled(self.gradient, other.value), _scaled(other.gradient, self.value)),
        )

    def __truediv__(self, other: Quantity | np.ndarray | float) -> Quantity:
        other = _quantity(other, self)
        value = self.value / other.value
        return Quantity(
            value,
            _sum(_scaled(self.gradient, 1.0 / other.value), _scaled(other.gradient, -value / other.value)),
        )

    __radd__ = __add__
    __rmul__ = __mul__

    def __rsub__(self, other: np.ndarray | float) -> Quantity:
        return self * -1.0 + other

    def __rtruediv__(self, other: np.ndarray | float) -> Quantity:
        return _quantity(other, self) / self


def product(factors: Sequence[Quantity]) -> Quantity:
    result = factors[0]
    for factor in factors[1:]:
        result = result * factor
    return result


def smaller(left: Quantity, right: Quantity) -> Quantity:
    """The elementwise minimum; of equal values, the left one's derivatives are taken."""
    first = left.value <= right.value
    gradient = _sum(_scaled(left.gradient, first), _scaled(right.gradient, ~first))
    return Quantity(np.where(first, left.value, right.value), gradient)


def largest(parts: Sequence[Quantity], smoothing: float = 0.0) -> Quantity:
    """The maximum. With smoothing it is (sum x^(1/s))^s, which exceeds the maximum by at most a factor of len(parts)^s
    and distributes the derivatives over the parts."""
    values = np.stack([part.value for part in parts], axis=1)
    top = values.max(axis=1)
    if smoothing > 0.0:
        powers = (values / top[:, None]) ** (1.0 / smoothing)
        total = powers.sum(axis=1)
        value = top * total**smoothing
        shares = powers / total[:, None] * (value[:, None] / values)
    else:
        value = top
        shares = (values.argmax(axis=1)[:, None] == np.arange(len(parts))).astype(float)
    gradient = None
    for part, share in zip(parts, shares.T, strict=True):
        gradient = _sum(gradient, _scaled(part.gradient, share))
    return Quantity(value, gradient)


def whole(part: Quantity, block: float = 1.0) -> Quantity:
    """Round up to whole blocks. Derivatives are those before rounding."""
    blocks = part.value / block
    return Quantity(np.ceil(blocks * (1.0 - _ROUNDING)) * block, part.gradient)


def _quantity(value: Quantity | np.ndarray | float, like: Quantity) -> Quantity:
    if isinstance(value, Quantity):
        return value
    return Quantity(np.broadcast_to(np.asarray(value, float), like.value.shape))


def _scaled(gradient: np.ndarray | None, by: np.ndarray) -> np.ndarray | None:
    return None if gradient is None else gradient * by[:, None]


def _sum(left: np.ndarray | None, right: np.ndarray | None) -> np.ndarray | None:
    if left is None or right is None:
        return right if left is None else left
    return left + right
