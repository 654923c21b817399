"""Reads the confirmed winners of tasks, for a compilation that measures nothing.

Every compilation does this, so it is cheap and changes nothing: no file is created, locked or repaired, and only the
requested rows are read. A database that cannot be read causes one warning and never fails a compilation: the
analytical model then chooses. Tuning uses `Database` instead.
"""

from __future__ import annotations

import contextlib
import sqlite3
import stat
import time
import warnings
from collections.abc import Collection
from pathlib import Path

import msgspec

from tilewright.db.location import default_path
from tilewright.db.record import Decision, Key
from tilewright.db.rows import DECISION, Damaged, Row, decision_of
from tilewright.db.schema import connect
from tilewright.errors import DatabaseFileError, DatabaseWarning

_SECONDS = 0.5  # time limit: another process may lock the file, or a hostile file may be slow
_STEPS = 20_000  # of SQLite's virtual machine between two looks at the clock
_PER_KEY = 64  # maximum decisions read, the newest first
_QUERY = (
    "SELECT kind, digest, body FROM rows WHERE kind = ? AND task = ? AND machine = ? AND toolchain = ?"
    f" AND numerics = ? AND threads = ? ORDER BY id DESC LIMIT {_PER_KEY}"
)
_warned: set[tuple[Path, str]] = set()


def read_decisions(keys: Collection[Key], path: Path | None = None) -> dict[Key, Decision]:
    """The latest decision for each of `keys` that has one. `path` None: the database in the cache folder, which need
    not exist."""
    named, path = path is not None, path or default_path()
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        if named:
            _warn(path, "the file does not exist")
        return {}
    except OSError as error:
        _warn(path, str(error.strerror or error))
        return {}
    if not stat.S_ISREG(mode):
        _warn(path, "it is not a regular file")
        return {}
    reason = ""
    for how in _modes(path):
        try:
            return _read(keys, path, how)
        except (sqlite3.Error, DatabaseFileError, OSError) as error:
            reason = reason or (error.message if isinstance(error, DatabaseFileError) else str(error))
            if "locked" in str(error) or "interrupted" in str(error):
                break  # another attempt would take as long
    _warn(path, reason)
    return {}


def _modes(path: Path) -> tuple[str, ...]:
    """Without a write-ahead log no process writes the file: it is read in place, and no file is created next to it. If
    somebody starts to write meanwhile, it is read once more."""
    logs = [Path(f"{path}{suffix}") for suffix in ("-wal", "-journal")]
    alone, shared = "ro&immutable=1", "ro"
    return (shared, alone) if any(log.exists() for log in logs) else (alone, shared)


def _read(keys: Collection[Key], path: Path, mode: str) -> dict[Key, Decision]:
    deadline = time.monotonic() + _SECONDS
    with contextlib.closing(connect(path, mode, seconds=_SECONDS, check=False)) as connection:
        connection.set_progress_handler(lambda: time.monotonic() > deadline, _STEPS)
        found = {}
        for key in keys:
            decision = _last(connection, key, path)
            if decision is not None:
                found[key] = decision
        return found


def _last(connection: sqlite3.Connection, key: Key, path: Path) -> Decision | None:
    sound = []
    for kind, digest, body in connection.execute(_QUERY, (DECISION, *msgspec.structs.astuple(key))):
        raw = body if isinstance(body, bytes) else str(body).encode()
        try:
            decision = decision_of(Row(str(kind), str(digest), msgspec.Raw(raw)))
        except Damaged:
            _warn(path, "a row of it is damaged; `tilewright db verify` names all")
            continue
        if decision.key == key:
            sound.append(decision)
    return max(sound, key=lambda decision: decision.when, default=None)


def _warn(path: Path, why: str) -> None:
    """Once per process for each file and reason."""
    if (path, why) not in _warned:
        _warned.add((path, why))
        warnings.warn(
            f"the tuning database {path} cannot be used: {why}; kernels are chosen by the analytical model",
            DatabaseWarning,
            stacklevel=2,
        )
