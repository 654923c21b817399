"""Integer arithmetic for sizes."""

from __future__ import annotations

from collections.abc import Sequence


def ceil_div(a: int, b: int) -> int:
    """The least integer that is not below a / b."""
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    """The least multiple of b that is not below a."""
    return ceil_div(a, b) * b


def evenly_spread(values: Sequence[int], count: int) -> list[int]:
    """At most `count` of the values, including the first and the last."""
    if len(values) <= count:
        return list(values)
    return [values[round(n * (len(values) - 1) / (count - 1))] for n in range(count)]
