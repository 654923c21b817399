"""The outcome of a trial, as searches and cost models see it."""

from __future__ import annotations

import math

import msgspec

from tilewright.space.space import Config

FAILURES = ("build", "illegal", "timeout", "crash", "wrong", "memory")


class Outcome(msgspec.Struct, frozen=True):
    """The seconds that a config takes, or None and the kind of its failure."""

    config: Config
    seconds: float | None
    failure: str = ""

    @property
    def time(self) -> float | None:
        """The seconds to learn from: a positive number, or None. A record may have been written by anybody."""
        return self.seconds if self.seconds is not None and 0 < self.seconds < math.inf else None
