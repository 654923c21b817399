"""Counts the records, tasks and failures of each machine in a data set."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.db.record import Record
from tilewright.hw.machine import machine_of


@dataclass(frozen=True)
class MachineStats:
    """`versions` and `days`: those of its oldest and its newest record."""

    machine: str
    threads: int
    tasks: int
    records: int
    failures: tuple[tuple[str, int], ...]
    labels: tuple[tuple[str, int], ...]  # the operators of its tasks, and how many tasks have them
    toolchain: str
    versions: tuple[str, ...]
    days: tuple[str, str]


def stats(records: Sequence[Record]) -> list[MachineStats]:
    groups: dict[tuple[str, int], list[Record]] = {}
    for record in records:
        groups.setdefault((record.key.machine, record.key.threads), []).append(record)
    return [_machine(some) for some in groups.values()]


def _machine(records: Sequence[Record]) -> MachineStats:
    first = records[0]
    tasks = {record.key.task: record.label for record in records}
    return MachineStats(
        machine=described(first),
        threads=first.key.threads,
        tasks=len(tasks),
        records=len(records),
        failures=tuple(Counter(record.failure for record in records if record.failure).most_common()),
        labels=tuple(Counter(tasks.values()).most_common()),
        toolchain=first.key.toolchain,
        versions=tuple(sorted({record.versions.tilewright for record in records})),
        days=days_of(records),
    )


def days_of(records: Sequence[Record]) -> tuple[str, str]:
    """The days of the oldest and the newest record."""
    days = [datetime.datetime.fromtimestamp(r.when, datetime.UTC).date().isoformat() for r in records]
    return min(days), max(days)


def described(record: Record) -> str:
    try:
        return machine_of(record.machine).describe()
    except ValueError:
        return f"a machine of another version ({record.key.machine[:8]})"
