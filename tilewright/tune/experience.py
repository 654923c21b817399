"""What was learned from other tasks and on other machines, as a cost model wants it to begin with."""

from __future__ import annotations

from tilewright.cost.boosted import Experience
from tilewright.db.database import Database
from tilewright.db.record import Key, Record
from tilewright.measure.runner import Measurement
from tilewright.space.candidates import Candidates
from tilewright.space.outcome import Outcome

_RECORDS = 600  # that are looked at
_TASKS = 8  # that are learned from


class Past:
    """The records of a database, task by task. Reading a task anew for each one that learns from it would take long."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._candidates: dict[Key, Candidates | None] = {}

    def experience(self, key: Key, label: str) -> list[Experience]:
        """Of other keys with the same numerics: tasks of the same operators first, then as the database has them."""
        by_key: dict[Key, list[Record]] = {}
        for record in self._database.similar(key, limit=_RECORDS):
            if record.key.numerics == key.numerics:
                by_key.setdefault(record.key, []).append(record)
        alike = sorted(by_key, key=lambda other: by_key[other][0].label != label)
        found = []
        for other in alike:
            candidates = self._candidates_of(by_key[other][0])
            if candidates is None:
                continue
            outcomes = [outcome_of(record) for record in by_key[other] if candidates.is_legal(record.config)]
            if outcomes:
                found.append(Experience(candidates, other.threads, outcomes))
            if len(found) == _TASKS:
                break
        return found

    def _candidates_of(self, record: Record) -> Candidates | None:
        if record.key not in self._candidates:
            work = record.work()
            self._candidates[record.key] = None if work is None else Candidates.of(work)
        return self._candidates[record.key]


def outcome_of(record: Record) -> Outcome:
    """As it was when it was measured."""
    return Measurement(record.config, record.times, failure=record.failure).outcome
