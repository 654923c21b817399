"""Explains why the database has no answer for a task: which part of the key differs from the nearest records."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import msgspec

from tilewright.db.database import Database
from tilewright.db.record import Decision, Key, Record

_NEAREST = 3
_LINES = 4  # lines of a task's text that are shown


class Difference(msgspec.Struct, frozen=True):
    part: str  # of the key
    details: tuple[str, ...]  # "cores: 2 here, 8 there"


class Nearest(msgspec.Struct, frozen=True):
    """A key that has records, and how it differs from the requested one."""

    key: Key
    label: str
    records: int
    best: float | None  # seconds
    differences: tuple[Difference, ...]


class MissExplanation(msgspec.Struct, frozen=True):
    key: Key
    label: str
    decision: Decision | None
    records: int
    failures: int
    nearest: tuple[Nearest, ...]  # if there is no record

    def __str__(self) -> str:
        head = f"{self.label} ({self.key.task[:12]}): "
        if self.decision is not None:
            found = self.decision
            return (
                f"{head}decided by a search of effort {found.effort}, {found.trials} trial(s): "
                f"{found.config}, {found.seconds * 1e6:.1f} us"
            )
        if self.records:
            return f"{head}{self.records} record(s), {self.failures} failed, but no search has ended with a decision"
        if not self.nearest:
            return f"{head}no record, and the database has none of any task like it"
        lines = [f"{head}no record. The nearest:"]
        for near in self.nearest:
            best = "" if near.best is None else f", best {near.best * 1e6:.1f} us"
            lines.append(
                f"  {near.label} ({near.key.task[:12]}), {near.records} record(s){best}; it differs in"
            )
            lines += [f"    {one.part}: {'; '.join(one.details)}" for one in near.differences]
        return "\n".join(lines)


def explain(
    database: Database, key: Key, label: str, text: str, machine: Mapping[str, Any]
) -> MissExplanation:
    """`text` is the task's text, `machine` its machine's description."""
    records = database.records(key)
    failures = sum(bool(record.failure) for record in records)
    decision = database.decision(key)
    nearest: list[Nearest] = []
    if not records and decision is None:
        candidates = sorted(database.keys(), key=lambda other: _distance(key, other))
        same_task = [other for other in candidates if other.task == key.task][:_NEAREST]
        for other in same_task or candidates:
            found = database.records(other)
            if found and (same_task or found[0].label == label):
                nearest.append(_nearest(key, text, machine, found))
            if len(nearest) == _NEAREST:
                break
    return MissExplanation(key, label, decision, len(records), failures, tuple(nearest))


def _distance(key: Key, other: Key) -> int:
    return sum(getattr(key, part) != getattr(other, part) for part in Key.__struct_fields__)


def _nearest(key: Key, text: str, machine: Mapping[str, Any], found: list[Record]) -> Nearest:
    other = found[-1]
    times = [record.seconds for record in found if record.seconds is not None]
    differences = []
    for part in Key.__struct_fields__:
        here, there = getattr(key, part), getattr(other.key, part)
        if here == there:
            continue
        if part == "task":
            details = _text_details(text, other.text)
        elif part == "machine":
            details = _machine_details(machine, other.machine)
        else:
            details = (f"{here} here, {there} there",)
        differences.append(Difference(part, details))
    return Nearest(other.key, other.label, len(found), min(times, default=None), tuple(differences))


def _text_details(here: str, there: str) -> tuple[str, ...]:
    lines = difflib.ndiff(there.splitlines(), here.splitlines())
    changed = [line for line in lines if line[0] in "+-"]
    words = {"+": "here ", "-": "there "}
    details = [words[line[0]] + " ".join(line[2:].split()) for line in changed[:_LINES]]
    more = len(changed) - _LINES
    if not details:
        return ("which of its inputs are constants",)
    return (*details, *([f"{more} more lines"] if more > 0 else []))


def _machine_details(here: Mapping[str, Any], there: Mapping[str, Any], prefix: str = "") -> tuple[str, ...]:
    details: list[str] = []
    for name in sorted({*here, *there}):
        mine, theirs = here.get(name), there.get(name)
        if mine == theirs:
            continue
        if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
            details += _machine_details(mine, theirs, f"{prefix}{name}.")
        elif isinstance(mine, list) and isinstance(theirs, list):
            only_here = [item for item in mine if item not in theirs]
            only_there = [item for item in theirs if item not in mine]
            parts = [("only here", only_here), ("only there", only_there)]
            details += [
                f"{prefix}{name} {where} {', '.join(map(str, items))}" for where, items in parts if items
            ]
        else:
            details.append(f"{prefix}{name}: {mine} here, {theirs} there")
    return tuple(details)
