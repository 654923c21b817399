"""What earlier runs have decided: the winners that a compilation takes without measuring."""

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

COMPLETE = "complete"  # effort of a decision after which no more was to be expected


def known_choices(works: Mapping[str, Work], threads: int, db: Path | None) -> dict[str, Choice]:
    """Of those tasks that a measurement has decided on, by key: what won. `db` None: the database in the cache
    folder."""
    if not works:
        return {}
    keys = {key: Key.of(work, threads) for key, work in works.items()}
    decisions = read_decisions(keys.values(), db)
    found = {}
    for key, work in works.items():
        decision = decisions.get(keys[key])
        if decision is None or origin_of(decision).kind == "predicted":
            continue
        choice = recalled(work, decision)
        if choice is not None:
            found[key] = choice
    return found


def recalled(work: Work, decision: Decision) -> Choice | None:
    """What a decision stands for; None where its config is no longer legal, or leads to other code than was timed."""
    candidates = Candidates.of(work)
    try:
        config = candidates.recalled(decision.config)
        if config is None:
            return None
        implementation = candidates.implementation(config)
        if not holds(decision.code, decision.versions, implementation, work.machine, work.numerics):
            return None
    except TilewrightError:  # the config is of another version, whose structures may make no program today
        return None
    return Choice(implementation, config, decision.seconds, origin_of(decision))


def origin_of(decision: Decision) -> Origin:
    """A decision without a trial was the only candidate, or what the analytical model chose for want of time."""
    if decision.trials:
        return Origin("tuned", decision.when)
    return Origin("only" if decision.effort == COMPLETE else "predicted")
