"""Maintain the database: check its integrity, and remove what is obsolete."""

from __future__ import annotations

import math
import sqlite3
import time
from pathlib import Path
from typing import NamedTuple

from tilewright.db.database import Database
from tilewright.db.record import Key
from tilewright.db.rows import DECISION, FACTS, TRIAL, Damaged, Row, Trial, decision_of, key_of, trial_of

_DAY = 86400.0


class Verification(NamedTuple):
    rows: dict[str, int]  # valid ones, by kind
    damaged: tuple[str, ...]  # what is wrong with each of the others
    structure: tuple[str, ...]  # errors that SQLite reports about the file
    set_aside: tuple[Path, ...]  # damaged files that were replaced, with what could not be read from them

    @property
    def ok(self) -> bool:
        return not self.damaged and not self.structure


class Collected(NamedTuple):
    damaged: int
    old: int
    superseded: int  # decisions that a later one replaced
    facts: int  # unreferenced ones
    bytes: int  # by which the file shrank


def verify(database: Database) -> Verification:
    sound: dict[str, set[str]] = {FACTS: set(), DECISION: set(), TRIAL: set()}
    damaged = []
    for kind, digests in sound.items():
        for row in database.rows(kind):
            try:
                key_of(row)
                if kind == TRIAL and not _refers_to(row) <= sound[FACTS]:
                    raise Damaged(f"the facts of the trial {row.digest[:12]} are missing or damaged")
            except Damaged as error:
                damaged.append(str(error))
            else:
                digests.add(row.digest)
    structure = database.run(lambda connection: connection.execute("PRAGMA integrity_check").fetchall())
    aside = sorted(database.path.parent.glob(f"{database.path.name}.corrupt-*"))
    return Verification(
        {kind: len(digests) for kind, digests in sound.items()},
        tuple(damaged),
        tuple(str(line) for (line,) in structure if line != "ok"),
        tuple(path for path in aside if not path.name.endswith(("-wal", "-shm"))),
    )


def collect(database: Database, *, older_than_days: float | None = None, dry_run: bool = False) -> Collected:
    """Remove damaged rows, superseded decisions and unreferenced facts; with an age, also older trials and
    decisions."""
    before = _bytes(database.path)
    oldest = -math.inf if older_than_days is None else time.time() - older_than_days * _DAY

    def sweep(connection: sqlite3.Connection) -> Collected:
        connection.execute(
            "BEGIN IMMEDIATE"
        )  # in one transaction: a trial that another process adds keeps its facts
        try:
            keep, removed = _sort(database, oldest)
            connection.execute("CREATE TEMPORARY TABLE keep (digest TEXT PRIMARY KEY)")
            connection.executemany("INSERT INTO keep VALUES (?)", [(digest,) for digest in keep])
            connection.execute(
                "DELETE FROM rows WHERE digest IS NULL OR digest NOT IN (SELECT digest FROM keep)"
            )
            connection.execute("DROP TABLE keep")
            connection.execute("ROLLBACK" if dry_run else "COMMIT")
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        if not dry_run:
            connection.execute("VACUUM")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return removed

    removed = database.run(sweep)
    return removed._replace(bytes=before - _bytes(database.path))


def _sort(database: Database, oldest: float) -> tuple[set[str], Collected]:
    """Digests of the rows to keep, and the counts of the others by kind."""
    keep: set[str] = set()
    facts: set[str] = set()
    last: dict[Key, tuple[float, str]] = {}
    damaged = old = decisions = 0
    for row in (*database.rows(TRIAL), *database.rows(DECISION)):
        try:
            kept = trial_of(row) if row.kind == TRIAL else decision_of(row)
        except Damaged:
            damaged += 1
            continue
        if kept.when < oldest:
            old += 1
        elif isinstance(kept, Trial):
            keep.add(row.digest)
            facts |= _refers_to(row)
        else:
            decisions += 1
            last[kept.key] = max(last.get(kept.key, (-math.inf, "")), (kept.when, row.digest))
    known = {row.digest for row in database.rows(FACTS)}
    keep |= {digest for _, digest in last.values()} | facts
    return keep, Collected(damaged, old, decisions - len(last), len(known - facts), 0)


def _refers_to(row: Row) -> set[str]:
    trial = trial_of(row)
    return {trial.task, trial.machine}


def _bytes(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
