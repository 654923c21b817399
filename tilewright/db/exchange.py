"""Export and import records: JSON lines, or whole database files.

A line is `{"kind": ..., "digest": ..., "body": {...}}`. Facts (the text of a task, a machine's description) come
before the trials that refer to them. Rows are identified by their digests, so importing twice is the same as
importing once.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from tilewright.db.database import Database
from tilewright.db.rows import DECISION, FACTS, TRIAL, Damaged, Row, decision_of, facts_of, key_of, trial_of
from tilewright.db.salvage import salvage
from tilewright.db.schema import MAX_BODY_BYTES, connect
from tilewright.errors import DatabaseFileError
from tilewright.support.files import require_regular

_SQLITE = b"SQLite format 3\0"
_MAX_DAMAGED = (
    1000  # maximum damaged lines listed; after this many without a valid one, the file is not an export
)


class Imported(NamedTuple):
    added: int
    known: int  # already present
    damaged: tuple[str, ...]  # what was skipped, and why


def export_lines(database: Database, task: str = "") -> Iterator[bytes]:
    """The valid rows as lines; `task`: only those of tasks whose key has this prefix."""
    facts = {row.digest: row for row in database.rows(FACTS)}
    written: set[str] = set()
    for row in database.rows(TRIAL):
        with contextlib.suppress(Damaged, KeyError):
            trial = trial_of(row)
            needed = [facts[digest] for digest in (trial.task, trial.machine) if digest not in written]
            if not trial.key.task.startswith(task) or any(facts_of(one) is None for one in needed):
                continue
            written |= {trial.task, trial.machine}
            yield from map(_line, (*needed, row))
    for row in database.rows(DECISION):
        with contextlib.suppress(Damaged):
            if decision_of(row).key.task.startswith(task):
                yield _line(row)


def _line(row: Row) -> bytes:
    return msgspec.json.encode(row) + b"\n"


def import_file(database: Database, path: Path) -> Imported:
    """Import all valid rows of an export or of another database, even a damaged one."""
    rows, damaged = _rows_in(path)
    facts = {row.digest for row in rows if row.kind == FACTS} | {row.digest for row in database.rows(FACTS)}
    whole = []
    for row in rows:
        if row.kind == TRIAL and not {(trial := trial_of(row)).task, trial.machine} <= facts:
            damaged.append(f"trial {row.digest[:12]}: the facts that it refers to are missing")
        else:
            whole.append(row)
    added = database.write(whole)
    return Imported(added, len(whole) - added, tuple(damaged))


def _rows_in(path: Path) -> tuple[list[Row], list[str]]:
    try:
        require_regular(path)
        with path.open("rb") as file:
            if file.read(len(_SQLITE)) == _SQLITE:
                return _rows_of_database(path)
            file.seek(0)
            return _rows_of_export(file, path)
    except OSError as error:
        raise DatabaseFileError(f"cannot read {path}: {error.strerror}") from None


def _rows_of_database(path: Path) -> tuple[list[Row], list[str]]:
    try:
        connect(path, "ro").close()
    except sqlite3.Error as error:
        return salvage(path), [f"{path.name}: {error}"]
    return salvage(path), []


def _rows_of_export(file: BinaryIO, path: Path) -> tuple[list[Row], list[str]]:
    rows: dict[str, Row] = {}
    damaged: list[str] = []
    decode = msgspec.json.Decoder(Row).decode
    lines = iter(lambda: file.readline(2 * MAX_BODY_BYTES), b"")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = decode(line)
            row = Row(row.kind, row.digest, msgspec.Raw(bytes(row.body)))
            key_of(row)
        except (Damaged, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            if len(damaged) == _MAX_DAMAGED and not rows:
                raise DatabaseFileError(f"{path} has no line of an export: {damaged[0]}") from None
            if len(damaged) < _MAX_DAMAGED:
                damaged.append(f"line {number}: {error}")
        else:
            rows[row.digest] = row
    if not rows and damaged:
        raise DatabaseFileError(f"{path} has no line of an export: {damaged[0]}")
    return list(rows.values()), damaged
