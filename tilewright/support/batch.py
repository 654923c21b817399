"""Arithmetic on one number, or elementwise on arrays of them.

Templates count the terms of a config with these functions. A search that compares all values of some knobs passes
arrays, one element for each config, and counts all of them at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeAlias

import numpy as np

Number: TypeAlias = Any  # an int or a float, or an array of them
Truth: TypeAlias = Any  # a bool, or an array of them
Values: TypeAlias = Mapping[str, Any]  # of knobs: of each one value for all configs, or an array


def least(a: Number, b: Number) -> Number:
    return np.minimum(a, b) if _are_many(a, b) else min(a, b)


def most(a: Number, b: Number) -> Number:
    return np.maximum(a, b) if _are_many(a, b) else max(a, b)


def select(condition: Truth, then: Number, other: Number) -> Number:
    """`then if condition else other`. Both are computed, and must not fail where they are not selected."""
    if isinstance(condition, np.ndarray):
        return np.where(condition, then, other)
    return then if condition else other


def both(condition: Truth, values: Values, then: Callable[[Values], Truth]) -> Truth:
    """`condition and then(values)`: of many, `then` is asked only for those where the condition holds."""
    if not isinstance(condition, np.ndarray):
        return condition and then(values)
    found = condition.copy()
    if condition.any():
        found[condition] = then(narrowed(values, condition))
    return found


def narrowed(values: Values, at: np.ndarray) -> dict[str, Any]:
    """Those of many configs that an index or a mask selects."""
    return {name: value[at] if isinstance(value, np.ndarray) else value for name, value in values.items()}


def joined(parts: Sequence[tuple[np.ndarray, Any]]) -> Any:
    """One array of what was found for each of the masks, which together select each config once. Of dataclasses, one
    with the arrays as fields."""
    first = parts[0][1]
    if first is None or len(parts) == 1:
        return first
    if is_dataclass(first):
        names = [field.name for field in fields(first)]
        columns = {name: joined([(at, getattr(found, name)) for at, found in parts]) for name in names}
        made: Any = type(first)
        return made(**columns)
    dtype = np.result_type(*(np.asarray(found).dtype for _, found in parts))
    whole = np.empty(len(parts[0][0]), dtype)
    for at, found in parts:
        whole[at] = found
    return whole


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


def rounded(a: Number) -> Number:
    """The nearest integer, of two the even one."""
    return np.rint(a).astype(np.int64) if isinstance(a, np.ndarray) else round(a)


def power(a: Number, exponent: float) -> Number:
    """`a ** exponent`, to the last bit the same for one number and many, of which few are different."""
    if not isinstance(a, np.ndarray):
        return a**exponent
    different, which = np.unique(a, return_inverse=True)
    return np.array([one**exponent for one in different.tolist()], np.float64)[which]


def root(a: Number) -> Number:
    """The square root, rounded alike for one number and many."""
    return np.sqrt(a) if isinstance(a, np.ndarray) else math.sqrt(a)


def gcd(a: Number, b: Number) -> Number:
    return np.gcd(a, b) if _are_many(a, b) else math.gcd(a, b)
