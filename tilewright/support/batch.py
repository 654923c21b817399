"""Arithmetic on one number, or elementwise on arrays of them.

Templates count the terms of a config with these functions. A search that compares all values of some knobs passes
arrays, one element for each config, and counts all of them at once.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np

Number: TypeAlias = Any  # an int or a float, or an array of them
Truth: TypeAlias = Any  # a bool, or an array of them


def least(a: Number, b: Number) -> Number:
    return np.minimum(a, b) if _are_many(a, b) else min(a, b)


def most(a: Number, b: Number) -> Number:
    return np.maximum(a, b) if _are_many(a, b) else max(a, b)


def select(condition: Truth, then: Number, other: Number) -> Number:
    """`then if condition else other`. Both are computed, and must not fail where they are not selected."""
    if isinstance(condition, np.ndarray):
        return np.where(condition, then, other)
    return then if condition else other


def nowhere(condition: Truth) -> bool:
    """Whether the condition holds for none."""
    return not (condition.any() if isinstance(condition, np.ndarray) else condition)


def _are_many(a: Number, b: Number) -> bool:
    return isinstance(a, np.ndarray) or isinstance(b, np.ndarray)


def floor_log2(a: Number) -> Number:
    """The exponent of the largest power of two that is not above `a`, an integer; 0 for numbers below 1."""
    if isinstance(a, np.ndarray):
        return np.frexp(np.maximum(a, 1).astype(np.float64))[1].astype(np.int64) - 1
    return max(a, 1).bit_length() - 1


def root(a: Number) -> Number:
    """The square root, rounded alike for one number and many."""
    return np.sqrt(a) if isinstance(a, np.ndarray) else math.sqrt(a)


def gcd(a: Number, b: Number) -> Number:
    return np.gcd(a, b) if _are_many(a, b) else math.gcd(a, b)
