"""The database file: one table, its schema versions, and the classification of SQLite's errors.

`user_version` counts the migration steps of STEPS that the file has had; opening it runs the others. To change the
schema, add a step. The version is stored twice, so that a damaged one is not mistaken for a newer version.

Only rows of this table are read: before any query the schema is compared with the one that STEPS make, so foreign
views, triggers, generated columns, checks and virtual tables are never evaluated. Bodies and queries have limits.

Bodies are JSON identified by its digest (see rows.py). The other columns are indices and are not trusted: readers use
the body.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sqlite3
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tilewright.errors import DatabaseFileError, DatabaseVersionError
from tilewright.support.files import require_regular

STEPS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE rows (
            id INTEGER PRIMARY KEY, kind TEXT, digest TEXT UNIQUE,
            task TEXT, machine TEXT, toolchain TEXT, numerics TEXT, threads INTEGER, body BLOB)""",
        "CREATE INDEX rows_by_key ON rows (kind, task, machine, toolchain, numerics, threads)",
    ),
)
_MARK = 0x5457 << 16  # "TW"
_PAGE_BYTES = (
    16384  # nearly every row fits into one page, where it can be found even if everything else is damaged
)
_CHECKED_BYTES = 64 << 20  # a larger file is not checked on every opening: that takes 3 ms per megabyte
_BUSY_SECONDS = 30.0
_BUSY = ("database is locked", "database table is locked", "locking protocol")
_UNWRITABLE = ("readonly database", "disk is full", "disk I/O error", "unable to open database file")
_ENDED = ("interrupted", "out of memory")
MAX_BODY_BYTES = 16 << 20
_SCHEMA_STEPS = 20_000  # of SQLite's virtual machine, to read the schema: Tilewright's takes about a hundred
_QUERY_SECONDS, _SECONDS_PER_BYTE = 60.0, 1e-6  # limit for a query, plus an allowance for large files
_CHECKED_EVERY = 100_000  # steps of SQLite's virtual machine, about a millisecond


class Inconsistent(sqlite3.DatabaseError):
    """A file that SQLite accepts, but Tilewright did not write."""


def is_circumstance(error: sqlite3.Error) -> bool:
    """Whether the cause is the disk, permissions or another process, not a damaged file."""
    # Errors of these classes are misuse of the interface, such as a closed connection.
    misused = isinstance(error, (sqlite3.ProgrammingError, sqlite3.InterfaceError, sqlite3.NotSupportedError))
    return misused or any(words in str(error) for words in (*_BUSY, *_UNWRITABLE, *_ENDED))


class Deadline:
    """Ends a connection's queries after a time limit, which only hostile files exceed."""

    def __init__(self, connection: sqlite3.Connection, path: Path | None) -> None:
        allowed = _QUERY_SECONDS + (0 if path is None else bytes_of(path)) * _SECONDS_PER_BYTE
        self._end = time.monotonic() + allowed
        connection.set_progress_handler(self._is_over, _CHECKED_EVERY)

    def _is_over(self) -> bool:
        return time.monotonic() > self._end


def bytes_of(path: Path) -> int:
    """Size of the database including its write-ahead log."""
    size = 0
    for suffix in ("", "-wal"):
        with contextlib.suppress(OSError):
            size += os.stat(f"{path}{suffix}").st_size
    return size


def bounded(found: Iterable[tuple[Any, ...]], most: int) -> Iterator[tuple[Any, ...]]:
    """The same rows. Raises Inconsistent if they have more bytes than the file: in a hostile file, many rows may
    share pages. `most`: the file's size when the query began, with an allowance for rows added since."""
    left = most + 2 * MAX_BODY_BYTES
    for columns in found:
        left -= 16 + sum(len(value) for value in columns if isinstance(value, (str, bytes)))
        if left < 0:
            raise Inconsistent("its rows are larger than the file")
        yield columns


def require_files(path: Path) -> None:
    """Raise SpecialFileError if a file that SQLite would open is a pipe, a device or a folder."""
    for suffix in ("", "-wal", "-shm", "-journal"):
        with contextlib.suppress(FileNotFoundError):
            require_regular(f"{path}{suffix}")


def guarded_connection(location: str, seconds: float = _BUSY_SECONDS) -> sqlite3.Connection:
    """A connection that has read nothing from the file yet. Several threads may use it, one at a time."""
    connection = sqlite3.connect(
        location, uri=True, timeout=seconds, isolation_level=None, check_same_thread=False
    )
    try:
        for pragma in ("trusted_schema = OFF", "cell_size_check = ON", "mmap_size = 0"):
            connection.execute(f"PRAGMA {pragma}")
        if sys.version_info >= (3, 11):
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 2 * MAX_BODY_BYTES)
    except BaseException:
        connection.close()
        raise
    return connection


def check_schema(connection: sqlite3.Connection) -> None:
    """Raise Inconsistent if there is anything but Tilewright's table and index. Listing a schema evaluates nothing in
    it; a schema that is too large is not read to its end."""
    query = "SELECT type, name, tbl_name, sql FROM sqlite_master"
    mark = 0
    connection.set_progress_handler(lambda: 1, _SCHEMA_STEPS)
    try:
        with _one_moment(
            connection
        ):  # the two numbers are in the file's header, so no schema is read for them
            version = int(connection.execute("PRAGMA user_version").fetchone()[0])
            mark = int(connection.execute("PRAGMA application_id").fetchone()[0])
            found = {_plain(*columns) for columns in connection.execute(query).fetchmany(100)}
    except sqlite3.OperationalError as error:
        if "interrupted" not in str(error):
            raise
        if mark >> 16 != _MARK >> 16:
            raise DatabaseFileError("this is a database of another program") from None
        raise Inconsistent("it holds what Tilewright did not make: a schema of many objects") from None
    finally:
        connection.set_progress_handler(None, 0)
    if found and not any(name == "rows" for _, name, _, _ in found) and mark >> 16 != _MARK >> 16:
        raise DatabaseFileError("this is a database of another program")
    if version > len(STEPS) and mark == _MARK + version:
        raise _newer(version, len(STEPS))
    expected = _objects(version) if 0 <= version <= len(STEPS) else frozenset()
    if foreign := sorted(found - expected):
        kind, name, _, _ = foreign[0]
        raise Inconsistent(f"it holds what Tilewright did not make: {kind[:20]} {name[:40]!r}")
    if expected - found:
        raise Inconsistent("a table or an index is missing")


@functools.cache
def _objects(version: int) -> frozenset[tuple[str, str, str, str]]:
    """The schema objects of a file after this many steps."""
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        for statement in (statement for step in STEPS[:version] for statement in step):
            connection.execute(statement)
        query = "SELECT type, name, tbl_name, sql FROM sqlite_master"
        return frozenset(_plain(*columns) for columns in connection.execute(query))


def _plain(*columns: object) -> tuple[str, str, str, str]:
    """Without insignificant white space, which versions have written differently."""
    kind, name, table, sql = ("" if column is None else str(column) for column in columns)
    return kind, name, table, re.sub(r"\s*([(),])\s*", r"\1", " ".join(sql.split()))


def connect(
    path: Path | None,
    mode: str = "rwc",
    *,
    network: bool = False,
    seconds: float = _BUSY_SECONDS,
    check: bool = True,
) -> sqlite3.Connection:
    """A connection to a database of the current version; `path` None: in memory. `mode`: "rwc", "ro", or
    "ro&immutable=1" for a file that no process writes. `seconds`: how long to wait for other processes. `check`: check
    the whole file first."""
    location = "file:tuning?mode=memory" if path is None else f"{path.absolute().as_uri()}?mode={mode}"
    if path is not None:
        require_files(path)
    connection = guarded_connection(location, seconds)
    try:
        connection.text_factory = lambda text: text.decode(errors="replace")
        if path is not None:
            check_schema(connection)  # first, because most pragmas read the whole schema
            Deadline(connection, path)
        connection.execute("PRAGMA synchronous = FULL")
        if check and path is not None and path.stat().st_size <= _CHECKED_BYTES:
            problem = str(connection.execute("PRAGMA integrity_check(1)").fetchone()[0])
            if problem != "ok":
                raise Inconsistent(" ".join(problem.split()))
        version = _version(connection)
        if mode == "rwc":
            connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
            _set_journal(connection, "delete" if network else "wal")
            migrate(connection)
            return connection
        if version == len(STEPS):
            return connection
        current = connect(None)  # an older version that is read-only is migrated in memory
        connection.backup(current)
        connection.close()
        migrate(current)
        return current
    except BaseException:
        connection.close()
        raise


def migrate(connection: sqlite3.Connection, steps: Sequence[Sequence[str]] = STEPS) -> None:
    """Run the missing steps, each in its own transaction."""
    while (version := _version(connection, len(steps))) < len(steps):
        connection.execute("BEGIN IMMEDIATE")
        try:
            if _version(connection, len(steps)) == version:  # unless another process has run it meanwhile
                for statement in steps[version]:
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {version + 1}")
                connection.execute(f"PRAGMA application_id = {_MARK + version + 1}")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise


def _version(connection: sqlite3.Connection, known: int = len(STEPS)) -> int:
    with _one_moment(connection):
        version = int(connection.execute("PRAGMA user_version").fetchone()[0])
        mark = int(connection.execute("PRAGMA application_id").fetchone()[0])
        tables = {
            name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        }
    if not tables and not version and not mark:
        return 0
    if mark != _MARK + version:
        if "rows" not in tables and mark >> 16 != _MARK >> 16:
            raise DatabaseFileError("this is a database of another program")
        raise Inconsistent("the version of the database is damaged")
    if version > known:
        raise _newer(version, known)
    return version


def _newer(version: int, known: int) -> DatabaseVersionError:
    return DatabaseVersionError(
        f"the tuning database has format {version}, and this version of Tilewright knows up to {known}"
    )


@contextlib.contextmanager
def _one_moment(connection: sqlite3.Connection) -> Iterator[None]:
    """A read transaction: everything read inside is consistent, whatever other processes commit."""
    if connection.in_transaction:
        yield
        return
    connection.execute("BEGIN")
    try:
        yield
    finally:
        if connection.in_transaction:  # some errors end it, and must not be hidden by another
            connection.execute("ROLLBACK")


def _set_journal(connection: sqlite3.Connection, wanted: str) -> None:
    """While other processes have the file open it keeps its journal mode, which is valid too."""
    deadline = time.monotonic() + 2.0
    while str(connection.execute("PRAGMA journal_mode").fetchone()[0]).lower() not in (wanted, "memory"):
        try:
            connection.execute(f"PRAGMA journal_mode = {wanted}")
        except sqlite3.OperationalError as error:
            if not is_circumstance(error):
                raise
            if time.monotonic() > deadline:
                return
            time.sleep(0.02)
