"""The database of tuning records: append-only, shared by every process of a user.

`add` returns when its records are on disk. If the file cannot be written (a read-only folder, a full disk, a
filesystem without locks), there is one warning; new records stay in memory and are retried with each further `add`,
and reading still works. Damaged rows are skipped and counted. A file that SQLite cannot read is renamed, never
deleted, and its intact rows go into a new file.

SQLite's write-ahead log does not work on a network filesystem: there the database uses a rollback journal, and a lock
file serialises writers.
"""

from __future__ import annotations

import contextlib
import math
import os
import sqlite3
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tilewright.db.location import default_path, inode, is_network, locked
from tilewright.db.record import Decision, Key, Record
from tilewright.db.rows import (
    DECISION,
    FACTS,
    TRIAL,
    Damaged,
    Facts,
    Row,
    decision_of,
    facts_of,
    key_of,
    record_of,
    row_of_decision,
    rows_of_record,
    trial_of,
)
from tilewright.db.salvage import salvage
from tilewright.db.schema import Deadline, bounded, bytes_of, connect, is_circumstance
from tilewright.errors import DatabaseFileError, DatabaseWarning
from tilewright.support.files import SpecialFileError

T = TypeVar("T")
_KEY_COLUMNS = "task = ? AND machine = ? AND toolchain = ? AND numerics = ? AND threads = ?"
# An existing row stays unchanged, unless it is damaged.
_INSERT = (
    "INSERT INTO rows (kind, digest, task, machine, toolchain, numerics, threads, body) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
    " ON CONFLICT (digest) DO UPDATE SET kind = excluded.kind, task = excluded.task, machine = excluded.machine,"
    " toolchain = excluded.toolchain, numerics = excluded.numerics, threads = excluded.threads, body = excluded.body"
    " WHERE (kind, task, machine, toolchain, numerics, threads, body) IS NOT (excluded.kind, excluded.task,"
    " excluded.machine, excluded.toolchain, excluded.numerics, excluded.threads, excluded.body)"
)


class Database:
    """Open it with `Database.open`. Threads may share it: their queries are serialised. Other processes open their
    own."""

    def __init__(self, path: Path, network: bool) -> None:
        self.path = path
        self.network = network
        self.damaged = 0  # rows skipped since it was opened
        self.set_aside: list[Path] = []
        self._pending: dict[str, Row] = {}
        self._facts: dict[str, Facts] = {}
        self._warned: set[str] = set()
        self._lock = threading.RLock()  # protects the connection and all fields above
        self._connection: sqlite3.Connection
        self._inode: tuple[int, int] | None = None
        self._connect()

    @classmethod
    def open(cls, path: Path | None = None, *, network: bool | None = None) -> Database:
        """`path` None: in the cache folder. `network`: whether it is on a network filesystem; None: detect it. Raises
        DatabaseVersionError for a file of a newer Tilewright, DatabaseFileError for a file of another program."""
        path = path or default_path()
        return cls(path, is_network(path.parent) if network is None else network)

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            if self._pending:
                self.write(())
            self._connection.close()

    # -- records ------------------------------------------------------------------------------------------------------

    def add(self, records: Sequence[Record]) -> None:
        self.write([row for record in records for row in rows_of_record(record)])

    def records(self, key: Key | None = None) -> list[Record]:
        """The records of one key, or all, in insertion order."""
        found = self._records(self.rows(TRIAL, key))
        return found if key is None else [record for record in found if record.key == key]

    def similar(self, key: Key, *, limit: int = 1000) -> list[Record]:
        """Records of other keys, including failures: those of the same machine first, then the newest. A GPU's are not
        similar to a processor's."""
        where = (
            f"kind = ? AND NOT ({_KEY_COLUMNS}) AND (threads = 0) = ?"
            " ORDER BY machine = ? DESC, id DESC LIMIT ?"
        )
        values = (TRIAL, *msgspec.structs.astuple(key), key.threads == 0, key.machine, limit)
        return [r for r in self._records(self._select(where, values)) if r.key != key]

    def decide(self, decision: Decision) -> None:
        """Store a decision. A winner without a time, whose last runs all failed, is not stored."""
        if 0 < decision.seconds < math.inf:
            self.write([row_of_decision(decision)])

    def decision(self, key: Key) -> Decision | None:
        """The latest decision."""
        return max(
            (decision for decision in self.decisions(key) if decision.key == key),
            key=lambda decision: decision.when,
            default=None,
        )

    def decisions(self, key: Key | None = None) -> list[Decision]:
        found = []
        for row in self.rows(DECISION, key):
            with self._passing_over():
                found.append(decision_of(row))
        return found

    def keys(self) -> list[Key]:
        """The keys that have records."""
        columns = "task, machine, toolchain, numerics, threads"
        query = f"SELECT DISTINCT {columns} FROM rows WHERE kind = ? ORDER BY id"
        found: list[Any] = self._guarded(lambda c: c.execute(query, (TRIAL,)).fetchall(), [])
        pending = [trial_of(row).key for row in self._unwritten() if row.kind == TRIAL]
        return list(dict.fromkeys([*(Key(*values) for values in found), *pending]))

    # -- rows ---------------------------------------------------------------------------------------------------------

    def rows(self, kind: str, key: Key | None = None) -> list[Row]:
        """The stored rows, including damaged ones."""
        with self._lock:  # no row may move between the two queries
            pending = [row for row in self._unwritten() if row.kind == kind]
            if key is None:
                return [*self._select("kind = ? ORDER BY id", (kind,)), *pending]
            values = (kind, *msgspec.structs.astuple(key))
            found = self._select(f"kind = ? AND {_KEY_COLUMNS} ORDER BY id", values)
            return [*found, *(row for row in pending if key_of(row) == key)]

    def _unwritten(self) -> list[Row]:
        with self._lock:
            return list(self._pending.values())

    def write(self, rows: Iterable[Row]) -> int:
        """Store the rows that are new, and return how many. Raises Damaged for invalid rows."""
        given = {row.digest: row for row in rows}
        with self._lock:
            wanted = self._pending | given
            values = [_columns(row) for row in wanted.values()]
            self._pending = wanted
            try:
                added = self._guarded(lambda connection: self._insert(connection, values))
            except (sqlite3.Error, OSError) as error:
                self._cannot_write(error)
                return 0
            self._pending = {}
            return added

    def _insert(self, connection: sqlite3.Connection, values: list[tuple[object, ...]]) -> int:
        with locked(self.path) if self.network else contextlib.nullcontext():
            before = connection.total_changes
            connection.execute("BEGIN IMMEDIATE")
            try:
                connection.executemany(_INSERT, values)
                connection.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
                raise
        if self._moved():  # committed to a file that another process has renamed, perhaps after it was read
            raise sqlite3.DatabaseError("another process has set the file aside")
        return connection.total_changes - before

    def run(self, action: Callable[[sqlite3.Connection], T]) -> T:
        """Run a maintenance `action` on the connection itself."""
        return self._guarded(action)

    def _select(self, where: str, values: Sequence[object]) -> list[Row]:
        query = f"SELECT kind, digest, body FROM rows WHERE {where}"

        def selected(connection: sqlite3.Connection) -> list[Row]:
            most = bytes_of(self.path)
            return [_row(*columns) for columns in bounded(connection.execute(query, values), most)]

        return self._guarded(selected, [])

    def _records(self, rows: Iterable[Row]) -> list[Record]:
        found = []
        for row in rows:
            with self._passing_over():
                found.append(record_of(trial_of(row), self._fact))
        return found

    def _fact(self, digest: str) -> Facts:
        if digest not in self._facts:
            rows = self._select("digest = ?", (digest,)) or [
                row for row in self._unwritten() if row.digest == digest
            ]
            if not rows or rows[0].digest != digest or rows[0].kind != FACTS:
                raise Damaged(f"the facts {digest[:12]} are missing")
            self._facts[digest] = facts_of(rows[0])
        return self._facts[digest]

    @contextlib.contextmanager
    def _passing_over(self) -> Iterator[None]:
        try:
            yield
        except Damaged as error:
            self.damaged += 1
            self._warn(
                "damaged",
                f"a row of the tuning database {self.path} is damaged and passed over ({error}); "
                "`tilewright db verify` names all, `tilewright db gc` removes them",
            )

    # -- the file -----------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._open()
        except SpecialFileError as error:
            raise DatabaseFileError(f"{self.path} cannot be the tuning database: {error.strerror}") from None
        except (sqlite3.Error, OSError) as error:
            if isinstance(error, OSError) or is_circumstance(error):
                self._connect_to_read(error)
            else:
                self._replace(error)
            return
        except DatabaseFileError as error:
            raise type(error)(f"{self.path}: {error.message}") from None

    def _open(self) -> None:
        before = inode(self.path)  # to notice when another process renames the file
        self._connection = connect(self.path, network=self.network)
        self._inode = before or inode(self.path)

    def _moved(self) -> bool:
        return self._inode is not None and inode(self.path) != self._inode

    def _connect_to_read(self, error: Exception) -> None:
        self._cannot_write(error)
        for mode in ("ro", "ro&immutable=1") if self.path.exists() else ():
            with contextlib.suppress(sqlite3.Error):
                self._connection = connect(self.path, mode)
                return
        self._connection = connect(None)
        if self.path.exists():
            self._take(salvage(self.path))

    def _guarded(self, action: Callable[[sqlite3.Connection], T], otherwise: T | None = None) -> T:
        """Run the action; retry it on a new connection if the file was replaced or is damaged. If it fails:
        `otherwise`, if given."""
        with self._lock:
            for last in (False, True):
                try:
                    Deadline(self._connection, self.path)
                    return action(self._connection)
                except sqlite3.ProgrammingError:
                    raise  # the connection was closed: the file is fine
                except sqlite3.DatabaseError as error:
                    moved = self._moved()
                    if not last and (moved or not is_circumstance(error)):
                        with contextlib.suppress(sqlite3.Error):
                            self._connection.close()
                        self._connect() if moved else self._replace(error)
                    elif otherwise is None:
                        raise
                    else:
                        self._warn("read", f"cannot read the tuning database {self.path}: {error}")
            assert otherwise is not None
            return otherwise

    def _replace(self, error: sqlite3.Error) -> None:
        """Rename the damaged file, and make a new one from its intact rows."""
        damaged = self._inode or inode(self.path)
        aside = self.path.with_name(
            f"{self.path.name}.corrupt-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        )
        try:
            with locked(self.path):
                if inode(self.path) == damaged:
                    for suffix in ("-wal", "-shm", ""):
                        with contextlib.suppress(FileNotFoundError):
                            os.rename(f"{self.path}{suffix}", f"{aside}{suffix}")
                    self.set_aside.append(aside)
                self._open()
        except (OSError, sqlite3.Error) as reason:
            self._cannot_write(reason)
            aside = aside if aside.exists() else self.path
            self._connection, self._inode = connect(None), None
        if not aside.exists():
            return  # another process did it first
        rows = salvage(aside)
        trials = sum(row.kind == TRIAL for row in rows)
        warnings.warn(
            f"the tuning database {self.path} is damaged ({error}); {trials} record(s) could be read from it"
            + (f", and it is kept as {aside.name}" if aside != self.path else ""),
            DatabaseWarning,
        )
        self._take(rows)

    def _take(self, rows: Sequence[Row]) -> None:
        self._pending = {row.digest: row for row in rows} | self._pending
        self.write(())

    def _cannot_write(self, error: Exception) -> None:
        self._warn(
            "write",
            f"cannot write to the tuning database {self.path}: {error}; what is found out from now on is kept in"
            " memory, and what the database holds stays as it is",
        )

    def _warn(self, what: str, message: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            warnings.warn(message, DatabaseWarning)


def _columns(row: Row) -> tuple[object, ...]:
    key = key_of(row)
    parts: tuple[object, ...] = (None,) * 5 if key is None else msgspec.structs.astuple(key)
    return (row.kind, row.digest, *parts, bytes(row.body))


def _row(kind: object, digest: object, body: object) -> Row:
    """A row from columns that may hold anything."""
    return Row(str(kind), str(digest), msgspec.Raw(body if isinstance(body, bytes) else str(body).encode()))
