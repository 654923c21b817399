"""The result of a trial: every runner returns it, and the tuner and the database keep it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from tilewright.space.outcome import Outcome
from tilewright.space.space import Config


class Measurement(msgspec.Struct, frozen=True):
    """One trial: its call times and its error against the oracle, or a failure and its message."""

    config: Config
    times: tuple[float, ...] = ()
    error: float | None = None
    failure: str = ""
    message: str = ""
    build_seconds: float = 0.0

    @property
    def seconds(self) -> float | None:
        return typical(self.times) if self.times else None

    @property
    def outcome(self) -> Outcome:
        return Outcome(self.config, self.seconds, self.failure)


def typical(times: Sequence[float]) -> float:
    """The time of a call, from several; timing continues until it is known."""
    return statistics.median(times)
