"""Winners of earlier runs, which a compilation uses without measuring."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tilewright.db.known import read_decisions
from tilewright.db.record import Decision, Key
from tilewright.db.versions import holds
from tilewright.errors import TilewrightError
from tilewright.runtime.plan import Origin
from tilewright.space.candidates import Candidates
from tilewright.space.template import Work
from tilewright.tune.choose import Choice

COMPLETE = "complete"  # effort of a decision after which no more gain was expected


def known_choices(works: Mapping[str, Work], threads: int, db: Path | None) -> dict[str, Choice]:
    """The winners by task key, for the tasks that the database has a decision on. `db` None: the database in the
    cache folder."""
    decided = decided_choices(works, threads, db)
    return {key: choice for key, choice in decided.items() if choice.origin.kind != "predicted"}


def decided_choices(works: Mapping[str, Work], threads: int, db: Path | None) -> dict[str, Choice]:
    """The same, and the predicted choices of tasks that tuning had no time to measure."""
    if not works:
        return {}
    keys = {key: Key.of(work, threads) for key, work in works.items()}
    decisions = read_decisions(keys.values(), db)
    found = {}
    for key, work in works.items():
        decision = decisions.get(keys[key])
        choice = None if decision is None else recalled(work, decision)
        if choice is not None:
            found[key] = choice
    return found


def recalled(work: Work, decision: Decision) -> Choice | None:
    """The choice of a decision; None if its config is no longer legal or now generates other code than was timed."""
    candidates = Candidates.of(work)
    try:
        config = candidates.recalled(decision.config)
        if config is None:
            return None
        implementation = candidates.implementation(config)
        if not holds(decision.code, decision.versions, implementation, work.machine, work.numerics):
            return None
    except TilewrightError:  # a config of another version may build no program today
        return None
    return Choice(implementation, config, decision.seconds, origin_of(decision))


def origin_of(decision: Decision) -> Origin:
    """A decision without a trial was the only candidate, or the analytical model's choice when time ran out."""
    if decision.trials:
        return Origin("tuned", decision.when)
    return Origin("only" if decision.effort == COMPLETE else "predicted")
