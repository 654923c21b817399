"""The effort of tuning: how many trials to measure, and for how long."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from tilewright.errors import OptionError
from tilewright.support.suggest import one_of
from tilewright.tune.allocate import ALLOCATIONS

BUILT_IN_SEARCHES = ("guided", "evolution", "annealing", "random", "exhaustive")
BUILT_IN_COST_MODELS = ("boosted", "analytical", "attention")
CONVERGED = 0.01  # expected gain, as a share of the time, under which a task or a model is done

_UNITS = {"us": 1e-6, "": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Effort:
    seconds: float  # the default budget
    round: int  # configs of one task measured per round
    trials: int  # maximum for one task


EFFORTS = {"quick": Effort(60.0, 4, 48), "full": Effort(math.inf, 8, 512)}


@dataclass(frozen=True)
class Tuning:
    """The caller's tuning options.

    `effort` "none": measure nothing, and use the database. `db`: the database file, None for the one in the cache
    folder. `allocation`: which task gets the next round (`allocate.py`). `trials`: the total number of trials at most;
    None: as many as the budget allows.
    """

    effort: str = "quick"
    budget: float | None = None
    seed: int = 0
    search: str = "guided"
    db: Path | None = None
    cost_model: str = "boosted"
    allocation: str = "gradient"
    trials: int | None = None

    @property
    def measures(self) -> bool:
        return self.effort != "none"

    @property
    def seconds(self) -> float:
        return self.preset.seconds if self.budget is None else self.budget

    @property
    def preset(self) -> Effort:
        return EFFORTS[self.effort]


KNOWN = Tuning("none")  # nothing is measured


def resolve_tuning(
    effort: str,
    budget: float | str | None = None,
    seed: int = 0,
    search: str = "guided",
    db: str | Path | None = None,
    cost_model: str = "boosted",
    allocation: str = "gradient",
    trials: int | None = None,
) -> Tuning:
    """Return the options as a `Tuning`; raises OptionError for a value that cannot be used."""
    one_of("effort", effort, ("none", *EFFORTS))
    one_of("allocation", allocation, ALLOCATIONS)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise OptionError(f"seed={seed!r} must be a whole number", remedy="pass an int, such as seed=0")
    if trials is not None and (isinstance(trials, bool) or not isinstance(trials, int) or trials < 1):
        raise OptionError(f"trials must be a whole number above 0, got {trials!r}")
    if search not in BUILT_IN_SEARCHES:
        from tilewright.search import search_named  # a user's own search is registered there

        search_named(search)
    if cost_model not in BUILT_IN_COST_MODELS:
        from tilewright.cost.models import cost_model_named

        cost_model_named(cost_model)
    seconds = None if budget is None else parse_duration(budget)
    return Tuning(
        effort, seconds, seed, search, None if db is None else Path(db), cost_model, allocation, trials
    )


def parse_duration(value: float | str, name: str = "budget") -> float:
    """Parse a duration to seconds: `120`, `"120s"`, `"1.5m"`, `"50us"`. Raises OptionError unless it is positive."""
    seconds = math.nan
    if isinstance(value, str):
        match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*(us|ms|s|m|h|)", value.strip())
        if match is not None:
            seconds = float(match[1]) * _UNITS[match[2]]
    elif isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    if not seconds > 0:
        raise OptionError(
            f"{name} must be a time above 0, got {value!r}",
            remedy=f'give {name} in seconds, such as 120, or with a unit, such as "120s" or "5m"',
        )
    return seconds
