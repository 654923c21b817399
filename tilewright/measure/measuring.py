"""The interface between the tuning loop and a runner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tilewright.measure.jobs import Job
from tilewright.measure.measurement import Measurement
from tilewright.space.space import Config


class Measuring(Protocol):
    """What builds, checks and times configs, here or on other machines, for the time of a `with` statement."""

    def __enter__(self) -> Measuring: ...

    def __exit__(self, *_: object) -> None: ...

    @property
    def ahead(self) -> int:
        """How many rounds may be built while another is timed."""

    @property
    def devices(self) -> int:
        """How many devices time at once. More rounds are prepared for several, so that none has to wait."""

    @property
    def spent(self) -> bool:
        """Whether a budget of device time is used up."""

    def expect(self, job: Job) -> None: ...

    def prepare(self, job: Job, configs: Sequence[Config], *, best: float | None = None) -> None: ...

    def prepared(self, job: Job, configs: Sequence[Config]) -> list[Measurement]:
        """The measurements of prepared configs that exist already; the others are not made any more."""

    def measure(
        self, job: Job, configs: Sequence[Config], *, best: float | None, deadline: float | None
    ) -> list[Measurement]: ...

    def race(
        self, job: Job, configs: Sequence[Config], seconds: float, *, deadline: float | None = None
    ) -> list[list[float]]: ...

    def acknowledge(self, job: Job, measured: Sequence[Measurement]) -> None:
        """These are in the database: they need not be kept for a driver that restarts."""
