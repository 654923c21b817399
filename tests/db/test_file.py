"""The file in circumstances: other versions, damage, places where it cannot be written, processes next to each
other."""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.db.samples import key, record
from tests.faults import database as faults
from tilewright.db import schema
from tilewright.db.database import Database
from tilewright.db.location import is_network
from tilewright.db.maintain import verify
from tilewright.errors import DatabaseFileError, DatabaseVersionError, DatabaseWarning

ROOT = Path(__file__).parents[2]
RECORDS = [record(number) for number in range(10)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of a database with ten records."""
    path = tmp_path / "tuning.sqlite"
    with Database.open(path) as database:
        database.add(RECORDS)
    return path


# -- versions ---------------------------------------------------------------------------------------------------------


def test_an_old_file_takes_the_steps_that_are_missing(path: Path) -> None:
    """A file as version 1 wrote it, and a version 2 that has one more column and fills it."""
    second = ("ALTER TABLE rows ADD COLUMN size INTEGER", "UPDATE rows SET size = length(body)")
    connection = sqlite3.connect(path, isolation_level=None)
    assert connection.execute("PRAGMA user_version").fetchone() == (1,)
    schema.migrate(connection, (*schema.STEPS, second))
    assert connection.execute("PRAGMA user_version").fetchone() == (2,)
    assert connection.execute("SELECT count(*) FROM rows WHERE size = length(body)").fetchone()[0] >= 10
    schema.migrate(connection, (*schema.STEPS, second))  # nothing more to do
    connection.close()


def test_a_step_that_fails_leaves_the_file_as_it_was(path: Path) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    broken = ("ALTER TABLE rows ADD COLUMN size INTEGER", "no SQL")
    with pytest.raises(sqlite3.OperationalError):
        schema.migrate(connection, (*schema.STEPS, broken))
    connection.close()
    with Database.open(path) as database:
        assert database.records() == RECORDS


def test_the_first_version_is_read_for_ever(tmp_path: Path) -> None:
    """What the first version made, statement by statement."""
    path = tmp_path / "old.sqlite"
    connection = sqlite3.connect(path)
    connection.executescript(
        "CREATE TABLE rows (id INTEGER PRIMARY KEY, kind TEXT, digest TEXT UNIQUE, task TEXT, machine TEXT,"
        " toolchain TEXT, numerics TEXT, threads INTEGER, body BLOB);"
        "CREATE INDEX rows_by_key ON rows (kind, task, machine, toolchain, numerics, threads);"
        f"PRAGMA user_version = 1; PRAGMA application_id = {(0x5457 << 16) + 1};"
    )
    connection.close()
    with Database.open(path) as database:
        database.add(RECORDS)
        assert database.records() == RECORDS


def test_a_file_of_a_newer_version_is_left_alone(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.executescript(f"PRAGMA user_version = 9; PRAGMA application_id = {(0x5457 << 16) + 9}")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(
        DatabaseVersionError, match=r"tuning.sqlite: .* has format 9, .* up to 1\n  try: install"
    ):
        Database.open(path)
    assert path.read_bytes() == before


def test_a_database_of_another_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bookmarks.sqlite"
    connection = sqlite3.connect(path)
    connection.executescript("CREATE TABLE bookmarks (url TEXT); INSERT INTO bookmarks VALUES ('x')")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(DatabaseFileError, match="another program"):
        Database.open(path)
    assert path.read_bytes() == before


# -- damage -----------------------------------------------------------------------------------------------------------


def test_a_damaged_row_is_passed_over_and_can_be_written_again(path: Path) -> None:
    data = path.read_bytes()
    assert data.count(b'["rows",3]') == 1
    path.write_bytes(data.replace(b'["rows",3]', b'["rows",7]'))
    with Database.open(path) as database, pytest.warns(DatabaseWarning, match="damaged and passed over"):
        assert database.records() == [one for one in RECORDS if one.config["rows"] != 3]
        assert database.damaged == 1
        assert not verify(database).ok
        database.add(RECORDS)
        assert verify(database).ok and len(database.records()) == len(RECORDS)


@pytest.mark.parametrize("damage", ["header", "page", "truncated", "garbage", "schema"])
def test_a_damaged_file_is_set_aside_and_what_is_sound_is_kept(path: Path, damage: str) -> None:
    data = bytearray(path.read_bytes())
    if damage == "header":
        data[:100] = bytes(100)
    elif damage == "page":
        data[16384:16500] = os.urandom(116)
    elif damage == "truncated":
        del data[-16384:]
    elif damage == "garbage":
        data[:] = os.urandom(len(data))
    else:
        data = data.replace(b"TABLE rows", b"TABLE r0ws")
    path.write_bytes(data)
    with pytest.warns(DatabaseWarning, match="is damaged .* kept as tuning.sqlite.corrupt-"):
        database = Database.open(path)
    with database:
        (aside,) = database.set_aside
        assert aside.read_bytes() == data
        found = database.records()
        assert all(one in RECORDS for one in found)
        assert found == [] if damage == "garbage" else len(found) >= 5
        database.add(RECORDS)
        assert verify(database).ok and verify(database).set_aside == (aside,)
    with Database.open(path) as again:
        assert sorted(again.records(), key=lambda one: one.when) == RECORDS


def test_damage_that_comes_while_it_is_open(path: Path) -> None:
    with Database.open(path) as database, Database.open(path) as other:
        assert other.records() == RECORDS
        path.write_bytes(b"x" * path.stat().st_size)
        Path(f"{path}-wal").write_bytes(b"")
        with pytest.warns(DatabaseWarning):
            database.add([record(50)])
            other.add([record(51)])  # finds the new file, and does not set that aside too
        assert len(list(path.parent.glob("*.corrupt-*[0-9]"))) == 1
    with Database.open(path) as again:
        assert {50.0, 51.0} <= {one.when - 1e9 for one in again.records()}


def test_flipped_bits() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = faults.flips(30, Path(folder), seed=7)
    assert found.wrong == 0 and found.crashes == 0 and found.lost < found.records // 20


# -- places -----------------------------------------------------------------------------------------------------------


def as_nobody(code: str) -> str:
    """Run by a user who may not write what is read-only (root may)."""
    begin = (
        "import os; from pathlib import Path; from tests.db.samples import *\n"
        "from tilewright.db.database import Database\n"
        "record(0)\n"  # what is imported late
        "os.getuid() or (os.setgid(65534), os.setuid(65534))\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", begin + code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("DatabaseWarning: cannot write to the tuning database") == 1
    return done.stdout.strip()


@pytest.mark.parametrize("there", [True, False])
def test_a_read_only_folder_is_read_and_new_records_are_kept_in_memory(path: Path, there: bool) -> None:
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        if there:
            shutil.copy(path, folder / "tuning.sqlite")
            (folder / "tuning.sqlite").chmod(0o444)
        folder.chmod(0o555)
        printed = as_nobody(
            f"with Database.open(Path({str(folder / 'tuning.sqlite')!r})) as database:\n"
            "    before = len(database.records())\n"
            "    database.add([record(20), record(21)])\n"
            "    database.add([record(22)])\n"
            "    print(before, len(database.records()), len(database.records(key())))\n"
        )
        assert printed == ("10 13 13" if there else "0 3 3")
        assert [one.name for one in folder.iterdir()] == (["tuning.sqlite"] if there else [])
    finally:
        folder.chmod(stat.S_IRWXU)
        shutil.rmtree(folder)


def test_a_full_disk_loses_nothing(path: Path) -> None:
    """SQLite itself says that the disk is full, at a limit of pages."""
    with Database.open(path) as database:
        pages = database.run(lambda c: c.execute("PRAGMA page_count").fetchone()[0])
        database.run(lambda c: c.execute(f"PRAGMA max_page_count = {pages}"))
        more = [record(number) for number in range(100, 180)]
        with pytest.warns(
            DatabaseWarning, match="disk is full; what is found out .* is kept in memory"
        ) as caught:
            database.add(more[:60])
            database.add(more[60:])
        assert len(caught) == 1
        assert database.records() == [*RECORDS, *more] and database.records(key()) == [*RECORDS, *more]
        with Database.open(path) as other:
            assert other.records() == RECORDS
        database.run(lambda c: c.execute("PRAGMA max_page_count = 100000"))  # there is room again
        database.add([record(200)])
    with Database.open(path) as again:
        assert again.records() == [*RECORDS, *more, record(200)]


def test_a_cache_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(DatabaseWarning, match="kept in memory"):
        database = Database.open(tmp_path / "file" / "tuning.sqlite")
    with database:
        database.add(RECORDS)
        assert database.records() == RECORDS


MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
40 22 0:40 / /home rw shared:2 - nfs4 server:/home rw,vers=4.2
41 40 0:41 / /home/me/local\\040disk rw - xfs /dev/sdb1 rw
42 22 0:42 / /mnt/far rw - fuse.sshfs me@far:/ rw
43 22 0:43 / /mnt/near rw - fuse.ntfs-3g /dev/sdc1 rw
"""


@pytest.mark.parametrize(
    ("folder", "network"),
    [
        ("/var/cache", False),
        ("/home/me/.cache/tilewright", True),
        ("/home/me/local disk/x", False),
        ("/homework", False),
        ("/mnt/far/x", True),
        ("/mnt/near/x", False),
    ],
)
def test_a_networks_filesystem_is_told(folder: str, network: bool) -> None:
    assert is_network(Path(folder), MOUNTS) is network


def test_on_a_network_there_is_no_write_ahead_log(tmp_path: Path) -> None:
    path = tmp_path / "tuning.sqlite"
    for network, journal in ((True, "delete"), (False, "wal"), (True, "delete")):
        with Database.open(path, network=network) as database:
            database.add(RECORDS)
            assert database.run(lambda c: c.execute("PRAGMA journal_mode").fetchone()[0]) == journal
            assert database.run(lambda c: c.execute("PRAGMA synchronous").fetchone()[0]) == 2
            assert database.records() == RECORDS


# -- processes --------------------------------------------------------------------------------------------------------


def test_a_version_is_read_of_one_moment(tmp_path: Path) -> None:
    """Another process makes the table after this one has read half of what tells the version."""
    ours, other = (sqlite3.connect(tmp_path / "tuning.sqlite", isolation_level=None) for _ in range(2))
    ours.execute("PRAGMA journal_mode = wal")

    def interrupted(statement: str) -> None:
        if statement == "PRAGMA application_id":
            ours.set_trace_callback(None)
            schema.migrate(other)

    ours.set_trace_callback(interrupted)
    schema.migrate(ours)
    assert ours.execute("PRAGMA user_version").fetchone() == (len(schema.STEPS),)
    ours.close()
    other.close()


def test_a_disk_that_fails_is_not_taken_for_a_damaged_file(path: Path) -> None:
    """SQLite ends the transaction itself then."""
    schema.connect(path, network=True).close()
    connection = sqlite3.connect(path, isolation_level=None)
    (number,) = (
        fd for fd in os.listdir("/proc/self/fd") if os.path.realpath(f"/proc/self/fd/{fd}") == str(path)
    )
    ends = os.pipe()
    os.dup2(ends[0], int(number))  # where no lock can be taken
    with pytest.raises(sqlite3.OperationalError, match="disk I/O error") as error:
        schema.migrate(connection)
    assert schema.is_circumstance(error.value)
    connection.close()
    for end in ends:
        os.close(end)


@pytest.mark.parametrize("deleted", [False, True])
def test_a_writer_goes_on_in_the_new_file_when_its_own_is_taken_away(path: Path, deleted: bool) -> None:
    with Database.open(path) as database:
        for suffix in ("", "-wal", "-shm"):
            old = Path(f"{path}{suffix}")
            if deleted:
                old.unlink(missing_ok=True)
            elif old.exists():
                old.rename(f"{old}.aside")
        database.add([record(100)])
        database.add([record(101)])
    with Database.open(path) as again:
        assert again.records() == [record(100), record(101)]


def test_a_file_that_is_set_aside_while_it_is_opened(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(slot: Path, *, network: bool) -> sqlite3.Connection:
        monkeypatch.undo()
        connection = schema.connect(slot, network=network)
        for suffix in ("", "-wal", "-shm"):
            Path(f"{path}{suffix}").rename(f"{path}{suffix}.aside")
        return connection

    monkeypatch.setattr("tilewright.db.database.connect", interrupted)
    with Database.open(path) as database:
        database.add([record(100)])
    with Database.open(path) as again:
        assert again.records() == [record(100)]


@pytest.mark.parametrize("network", [False, True])
def test_writers_at_once_lose_nothing(tmp_path: Path, network: bool) -> None:
    assert faults.writers(3, 15, tmp_path, network=network) == faults.Lost(45, 0)


def test_a_killed_writer_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    found = faults.kills(2, tmp_path)
    assert found.acknowledged >= 2 and found.lost == 0
