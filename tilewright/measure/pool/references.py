"""The times of a device's reference kernel, which tell whether the device is as fast as it was."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

import msgspec

DRIFT = 1.25  # factor by which the reference kernel may differ from the first times, or from those of other devices
_NEEDED = 3  # times whose median counts


class Speed(msgspec.Struct, frozen=True):
    """What a device knows of its own reference kernel, which outlives the driver that saw it."""

    first: tuple[float, ...] = ()
    last: tuple[float, ...] = ()
    count: int = 0


UNKNOWN = Speed()


class References:
    """The first times of a device, which are what it is compared with however long it runs, and the last ones."""

    def __init__(self, speed: Speed = UNKNOWN) -> None:
        self._first: list[float] = list(speed.first)
        self._last: deque[float] = deque(speed.last, maxlen=_NEEDED)
        self._count = speed.count

    @property
    def speed(self) -> Speed:
        return Speed(tuple(self._first), tuple(self._last), self._count)

    def add(self, seconds: float) -> None:
        self._count += 1
        self._last.append(seconds)
        if len(self._first) < _NEEDED:
            self._first.append(seconds)

    @property
    def are_known(self) -> bool:
        """Whether there are enough times to compare it with other devices."""
        return self._count >= _NEEDED

    @property
    def usual(self) -> float:
        """At first; 0 before it is known."""
        return statistics.median(self._first) if self.are_known else 0.0

    @property
    def now(self) -> float:
        return statistics.median(self._last) if self.are_known else 0.0

    @property
    def change(self) -> float:
        """The factor by which it is slower now than at first; 1 before it is known."""
        return self.now / self.usual if self._count >= 2 * _NEEDED else 1.0

    def begin_anew(self) -> None:
        """Compare it with its last times from now on."""
        self._first = list(self._last)
        self._count = len(self._first)


def ratio_to(others: Sequence[float], own: float) -> float:
    """The time of a device over that of its fellows, if it is slower than half of them, or faster than half of them and
    than at least two; 0 if it agrees with them."""
    slow, fast = statistics.median_high(others), statistics.median_low(others)
    if own > DRIFT * slow:
        return own / slow
    return own / fast if len(others) > 1 and own * DRIFT < fast else 0.0
