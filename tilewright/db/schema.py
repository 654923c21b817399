"""The database file: one table, its versions, and what SQLite's errors mean.

`user_version` of the file counts the steps of STEPS that it has taken; opening takes the others. To change the schema,
add a step. The version is written twice, so that a damaged one is not taken for that of a newer Tilewright.

Bodies are JSON that is named by its digest (see rows.py). The other columns are there to find them, and are not
believed: whoever reads a row looks into its body.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tilewright.errors import DatabaseFileError, DatabaseVersionError

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
    16384  # nearly every row fits into one page, where it can be found even when nothing else is sound
)
_CHECKED_BYTES = (
    64 << 20
)  # a larger file is not checked whenever it is opened: that takes 3 ms for a megabyte
_BUSY_SECONDS = 30.0
_BUSY = ("database is locked", "database table is locked", "locking protocol")
_UNWRITABLE = ("readonly database", "disk is full", "disk I/O error", "unable to open database file")


class Inconsistent(sqlite3.DatabaseError):
    """What SQLite does not mind, and we did not write."""


def is_circumstance(error: sqlite3.Error) -> bool:
    """Whether it is the disk, the permissions or another process that stand in the way, and not a damaged file."""
    return any(words in str(error) for words in (*_BUSY, *_UNWRITABLE))


def connect(path: Path | None, mode: str = "rwc", *, network: bool = False) -> sqlite3.Connection:
    """A connection to a database of the current version; `path` None: in memory. `mode`: "rwc", "ro", or, of a file
    that nobody writes, "ro&immutable=1"."""
    place = "file:tuning?mode=memory" if path is None else f"{path.absolute().as_uri()}?mode={mode}"
    connection = sqlite3.connect(place, uri=True, timeout=_BUSY_SECONDS, isolation_level=None)
    try:
        connection.text_factory = lambda text: text.decode(errors="replace")
        for pragma in ("trusted_schema = OFF", "cell_size_check = ON", "mmap_size = 0", "synchronous = FULL"):
            connection.execute(f"PRAGMA {pragma}")
        if path is not None and path.stat().st_size <= _CHECKED_BYTES:
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
        current = connect(None)  # an older version that may not be written: brought up to date in memory
        connection.backup(current)
        connection.close()
        migrate(current)
        return current
    except BaseException:
        connection.close()
        raise


def migrate(connection: sqlite3.Connection, steps: Sequence[Sequence[str]] = STEPS) -> None:
    """Takes the steps that are missing, each in a transaction of its own."""
    while (version := _version(connection, len(steps))) < len(steps):
        connection.execute("BEGIN IMMEDIATE")
        try:
            if _version(connection, len(steps)) == version:  # not taken by another process meanwhile
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
        raise DatabaseVersionError(
            f"the tuning database has format {version}, and this version of Tilewright knows up to {known}"
        )
    return version


@contextlib.contextmanager
def _one_moment(connection: sqlite3.Connection) -> Iterator[None]:
    """What is read inside is of one moment, whatever other processes commit meanwhile."""
    if connection.in_transaction:
        yield
        return
    connection.execute("BEGIN")
    try:
        yield
    finally:
        if connection.in_transaction:  # some errors end it, and are not to be hidden by another
            connection.execute("ROLLBACK")


def _set_journal(connection: sqlite3.Connection, wanted: str) -> None:
    """For as long as others have the file open it keeps the journal that it has, which is right too."""
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
