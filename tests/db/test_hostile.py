"""Databases made to do harm: nothing in them is run, nothing takes long or much memory, and sound rows are kept."""

from __future__ import annotations

import os
import random
import resource
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.db.samples import key, record
from tilewright.db import schema
from tilewright.db.database import Database
from tilewright.db.exchange import import_file
from tilewright.db.salvage import salvage
from tilewright.errors import DatabaseFileError, DatabaseWarning

RECORDS = [record(number) for number in range(4)]
FOREVER = "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) SELECT"
COLUMNS = "id INTEGER PRIMARY KEY, kind TEXT, digest TEXT UNIQUE, task TEXT, machine TEXT, toolchain TEXT"
COLUMNS += ", numerics TEXT"
TABLE = f"CREATE TABLE rows ({COLUMNS}, threads INTEGER, body BLOB)"

MANY_TABLES = (
    "CREATE TABLE t (a)",
    "PRAGMA writable_schema = ON",
    "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c LIMIT 20000) INSERT INTO sqlite_master SELECT"
    " 'table', 't' || n, 't' || n, rootpage, 'CREATE TABLE t' || n || ' (a)' FROM c, sqlite_master WHERE name = 't'",
)

# What is done to a sound database, in SQL.
CHANGES = {
    "a trigger that never ends": (
        f"CREATE TRIGGER t AFTER INSERT ON rows BEGIN DELETE FROM rows WHERE id IN ({FOREVER} n FROM c); END",
    ),
    "a trigger that deletes": ("CREATE TRIGGER t AFTER INSERT ON rows BEGIN DELETE FROM rows; END",),
    "a view in place of the table": (
        "ALTER TABLE rows RENAME TO kept",
        f"CREATE VIEW rows AS {FOREVER} n AS id, 'trial' AS kind, 'x' AS digest, zeroblob(100000000) AS body FROM c",
    ),
    "a generated column": (
        "ALTER TABLE rows RENAME TO kept",
        f"CREATE TABLE rows ({COLUMNS}, threads INTEGER, body BLOB AS (zeroblob(500000000)))",
        "INSERT INTO rows (kind) SELECT 'trial' FROM kept",
    ),
    "a check": (
        "ALTER TABLE rows RENAME TO kept",
        f"CREATE TABLE rows ({COLUMNS}, threads INTEGER, body BLOB, CHECK (length(zeroblob(500000000)) > id))",
        "INSERT INTO rows SELECT * FROM kept",
    ),
    "an index on an expression": ("CREATE INDEX slow ON rows (length(hex(zeroblob(1000000 + id))))",),
    "another table": ("CREATE TABLE more (x)",),
    "a virtual table": ("CREATE VIRTUAL TABLE words USING fts5(x)",),
    "a collation": (
        "ALTER TABLE rows RENAME TO kept",
        TABLE.replace("digest TEXT", "digest TEXT COLLATE nocase"),
        "INSERT INTO rows SELECT * FROM kept",
    ),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "handed" / "in.sqlite"
    with Database.open(path) as database:
        database.add(RECORDS)
    return path


@pytest.fixture(autouse=True)
def within_limits() -> Iterator[None]:
    """A few seconds, and 400 MB more than before."""
    with open("/proc/self/statm") as file:
        held = int(file.read().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (held + (400 << 20), hard))
    begin = time.monotonic()
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert time.monotonic() - begin < 10


def change(path: Path, *statements: str) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    for statement in statements:
        connection.execute(statement)
    connection.close()


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_handed_in_is_read_as_rows_alone(path: Path, tmp_path: Path, name: str) -> None:
    change(path, *CHANGES[name])
    with Database.open(tmp_path / "own.sqlite") as database:
        found = import_file(database, path)
        assert found.damaged and "did not make" in found.damaged[0]
        assert sorted(database.records(), key=lambda one: one.when) == RECORDS


@pytest.mark.parametrize("name", CHANGES)
def test_as_the_database_it_is_set_aside(path: Path, name: str) -> None:
    change(path, *CHANGES[name])
    with pytest.warns(DatabaseWarning, match="did not make"), Database.open(path) as database:
        assert len(database.set_aside) == 1
        assert sorted(database.records(), key=lambda one: one.when) == RECORDS
        database.add([record(9)])
        assert len(database.records()) == 5


def test_a_schema_of_many_tables_is_not_read_to_its_end(path: Path, tmp_path: Path) -> None:
    change(path, *MANY_TABLES)
    with Database.open(tmp_path / "own.sqlite") as database:
        assert "a schema of many objects" in import_file(database, path).damaged[0]
        assert len(database.records()) == len(RECORDS)


def test_a_large_database_of_another_program_stays_where_it_is(tmp_path: Path) -> None:
    path = tmp_path / "others.sqlite"
    change(path, *MANY_TABLES)
    with pytest.raises(DatabaseFileError, match="another program"):
        Database.open(path)
    assert path.exists()


def test_rows_that_share_their_pages(path: Path) -> None:
    """As overflow pages and subtrees of a hostile file may: it then has more rows than bytes."""
    assert len(salvage(path)) == len(RECORDS) + 2
    rows = [(0, "x", b"y" * 1000)] * 1000
    with pytest.raises(schema.Inconsistent, match="larger than the file"):
        for _ in schema.bounded(rows * 100, 1000):
            pass


def test_a_query_that_does_not_end_is_ended(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "_QUERY_SECONDS", 0.2)
    with Database.open(path) as database:
        with pytest.raises(sqlite3.OperationalError, match="interrupted"):
            database.run(lambda connection: connection.execute(f"{FOREVER} max(n) FROM c").fetchall())
        assert database.records() == RECORDS and not database.set_aside


@pytest.mark.parametrize("pattern", ['{"key":', '{"key":[', '{"key":"', '{"key":0,"type":'])
def test_what_looks_like_rows_is_not_searched_for_ever(pattern: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.sqlite"
    filler = ("0123456789abcdef" * 2 + pattern * 60 + '{"type":0},' * 100) * 500
    path.write_bytes(b"SQLite format 3\0" + filler.encode())
    with Database.open(tmp_path / "own.sqlite") as database:
        assert import_file(database, path).added == 0


def test_an_export_without_lines(tmp_path: Path) -> None:
    path = tmp_path / "export.jsonl"
    with Database.open(tmp_path / "own.sqlite") as database:
        for text in (b"x" * (100 << 20), b"x\n" * 1_000_000, b"[" * 1_000_000, b'{"kind":' * 1_000_000):
            path.write_bytes(text)
            with pytest.raises(DatabaseFileError, match="no line of an export"):
                import_file(database, path)


# -- what is no file --------------------------------------------------------------------------------------------------


def make_pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


def make_socket(path: Path) -> Path:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
    return path


def make_folder(path: Path) -> Path:
    path.mkdir()
    return path


SPECIAL: dict[str, Callable[[Path], Path]] = {
    "a pipe": make_pipe,
    "a socket": make_socket,
    "a folder": make_folder,
    "a device": lambda path: Path("/dev/zero"),
}


@pytest.mark.parametrize("kind", SPECIAL)
def test_only_files_are_opened(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # addresses of sockets are short
    special = SPECIAL[kind](Path("special"))
    with pytest.raises(DatabaseFileError, match=f"it is {kind}, not a file"):
        Database.open(special)
    with Database.open(tmp_path / "own.sqlite") as database:
        with pytest.raises(DatabaseFileError, match=f"cannot read .*: it is {kind}, not a file"):
            import_file(database, special)


@pytest.mark.parametrize("suffix", ["-wal", "-journal"])
def test_a_pipe_beside_the_database(path: Path, suffix: str) -> None:
    os.mkfifo(f"{path}{suffix}")
    with pytest.raises(DatabaseFileError, match="it is a pipe"):
        Database.open(path)


# -- threads ----------------------------------------------------------------------------------------------------------


def test_threads_share_a_database(path: Path) -> None:
    errors: list[BaseException] = []
    with Database.open(path) as database:

        def work(thread: int) -> None:
            rng = random.Random(thread)
            try:
                for number in range(25):
                    database.add([record(100 * thread + number)])
                    rng.choice(
                        (database.records, database.keys, database.decisions, lambda: database.similar(key()))
                    )()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors and not database.set_aside and not database.damaged
        assert len(database.records()) == len(RECORDS) + 8 * 25


def test_a_database_that_is_closed_is_not_damaged(path: Path) -> None:
    database = Database.open(path)
    database.close()
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        database.records()
    assert not list(path.parent.glob("*.corrupt-*"))
