"""Records of other tasks, machines and source versions that a cost model starts from."""

from __future__ import annotations

import msgspec

from tilewright.cost.boosted import Experience
from tilewright.db.database import Database
from tilewright.db.record import Key, Record
from tilewright.db.versions import sources
from tilewright.hw.machine import machine_of
from tilewright.measure.measurement import Measurement
from tilewright.space.candidates import Configs
from tilewright.space.outcome import Outcome
from tilewright.tune.tunable import Tunable

_RECORDS = 600  # maximum records read
_TASKS = 8  # maximum tasks learned from


class PastRecords:
    """The records of a database, by task, cached because many tasks learn from the same ones."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._candidates: dict[tuple[type, Key], Configs | None] = {}
        self._kinds: dict[str, str] = {}  # of machines, by fingerprint

    def experience(self, tunable: Tunable) -> list[Experience]:
        """Return the records to learn from: of this task, those measured before the sources changed; of other tasks
        on machines of this kind, with the same numerics, those with the same operators first."""
        key, label, kind = tunable.key, tunable.label, tunable.candidates.machine.kind
        by_key: dict[Key, list[Record]] = {}
        before = [record for record in self._database.records(key) if record.versions.sources != sources()]
        if before:
            by_key[key] = before
        for record in self._database.similar(key, limit=_RECORDS):
            if record.key.numerics == key.numerics and self._kind_of(record) == kind:
                by_key.setdefault(record.key, []).append(record)
        alike = sorted(by_key, key=lambda other: by_key[other][0].label != label)
        found = []
        for other in alike:
            candidates = self._candidates_of(tunable, by_key[other][0])
            if candidates is None:
                continue
            recalled = [(record, candidates.recalled(record.config)) for record in by_key[other]]
            outcomes = [
                msgspec.structs.replace(outcome_of(record), config=config)
                for record, config in recalled
                if config is not None
            ]
            if outcomes:
                found.append(Experience(candidates, other.threads, outcomes))
            if len(found) == _TASKS:
                break
        return found

    def _kind_of(self, record: Record) -> str:
        """The kind of its machine; "" if this version does not know it."""
        at = record.key.machine
        if at not in self._kinds:
            try:
                self._kinds[at] = machine_of(record.machine).kind
            except ValueError:
                self._kinds[at] = ""
        return self._kinds[at]

    def _candidates_of(self, tunable: Tunable, record: Record) -> Configs | None:
        at = type(tunable), record.key
        if at not in self._candidates:
            self._candidates[at] = tunable.configs_of(record)
        return self._candidates[at]


def outcome_of(record: Record) -> Outcome:
    """The outcome when the record was measured."""
    return Measurement(record.config, record.times, failure=record.failure).outcome
