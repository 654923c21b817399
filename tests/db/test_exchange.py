"""Out of one database and into another: nothing lost, nothing twice, nothing believed that is not sound."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from tests.db.samples import config, key, record, work
from tilewright.db.database import Database
from tilewright.db.exchange import export_lines, import_file
from tilewright.db.maintain import collect, verify
from tilewright.db.record import Decision
from tilewright.db.rows import DECISION as DECIDED
from tilewright.db.rows import TRIAL, row_of, trial_of
from tilewright.errors import DatabaseFileError

RECORDS = [record(number, of=work(8 + number % 2)) for number in range(6)]
DECISION = Decision(key(), config(1), 1e-5, "quick", 60.0, 12, 1e9)


@pytest.fixture
def database(tmp_path: Path) -> Database:
    database = Database.open(tmp_path / "here" / "tuning.sqlite")
    database.add(RECORDS)
    database.decide(DECISION)
    return database


@pytest.fixture
def other(tmp_path: Path) -> Database:
    return Database.open(tmp_path / "there" / "tuning.sqlite")


@pytest.fixture
def exported(database: Database, tmp_path: Path) -> Path:
    path = tmp_path / "records.jsonl"
    path.write_bytes(b"".join(export_lines(database)))
    return path


def test_an_export_can_be_read_by_people(exported: Path) -> None:
    lines = [json.loads(line) for line in exported.read_text().splitlines()]
    assert [line["kind"] for line in lines].count("trial") == len(RECORDS)
    assert sum(line["kind"] == "facts" for line in lines) == 3  # two tasks and a machine, each once
    trial = next(line["body"] for line in lines if line["kind"] == "trial")
    assert trial["config"]["template"] == "contraction" and len(trial["times"]) == 5


def test_import_twice_is_import_once(exported: Path, other: Database) -> None:
    first, second = import_file(other, exported), import_file(other, exported)
    assert (first.added, first.known, first.damaged) == (10, 0, ())
    assert (second.added, second.known, second.damaged) == (0, 10, ())
    assert other.records() == RECORDS and other.decision(key()) == DECISION
    assert b"".join(export_lines(other)) == exported.read_bytes()


def test_one_task_alone(database: Database, other: Database, tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    path.write_bytes(b"".join(export_lines(database, task=key(work(9)).task[:10])))
    import_file(other, path)
    assert other.records() == [one for one in RECORDS if one.key == key(work(9))]
    assert other.decision(key()) is None


def test_merge_takes_what_is_new(database: Database, other: Database) -> None:
    other.add([*RECORDS[3:], record(9)])
    assert import_file(other, database.path).damaged == ()
    assert sorted(other.records(), key=lambda one: one.when) == [*RECORDS, record(9)]
    database.close()
    assert import_file(other, database.path).added == 0


def test_merge_takes_what_is_sound_of_a_damaged_database(database: Database, other: Database) -> None:
    database.close()
    data = database.path.read_bytes()
    database.path.write_bytes(data[:16] + bytes(84) + data[100:])
    found = import_file(other, database.path)
    assert found.damaged and sorted(other.records(), key=lambda one: one.when) == RECORDS
    assert database.path.read_bytes()[:16] == data[:16]  # not touched


def test_lines_that_are_not_sound_are_named_and_left_out(exported: Path, other: Database) -> None:
    lines = exported.read_text().splitlines()
    trials = [number for number, line in enumerate(lines) if '"kind":"trial"' in line]
    lines[trials[0]] = lines[trials[0]].replace('["rows",0]', '["rows",1]')  # a config that was not measured
    lines[trials[1]] = lines[trials[1]][:50]
    lines[trials[2]] = lines[trials[2]].replace('"kind":"trial"', '"kind":"decision"')
    exported.write_text("\n".join(lines))
    found = import_file(other, exported)
    assert other.records() == RECORDS[3:]
    assert [damage.split(":")[0] for damage in found.damaged] == [f"line {trials[n] + 1}" for n in range(3)]
    assert "does not have the digest" in found.damaged[0]


@pytest.mark.parametrize("times", [(0.0,), (-1e-5, 1e-5), (1e-5, 0.0)])
def test_times_that_are_no_times_are_left_out(
    times: tuple[float, ...], exported: Path, database: Database, other: Database
) -> None:
    trial = next(trial for row in database.rows(TRIAL) if (trial := trial_of(row)).times)
    wrong = row_of(TRIAL, msgspec.structs.replace(trial, times=times))
    with exported.open("ab") as file:
        file.write(msgspec.json.encode(wrong) + b"\n")
    found = import_file(other, exported)
    assert sorted(other.records(), key=lambda one: one.when) == RECORDS
    assert [damage.partition(": ")[2] for damage in found.damaged] == [
        f"the trial {wrong.digest[:12]} has times that are not positive numbers"
    ]


def test_a_decision_without_a_time_is_left_out(exported: Path, other: Database) -> None:
    wrong = row_of(DECIDED, msgspec.structs.replace(DECISION, seconds=0.0))
    with exported.open("ab") as file:
        file.write(msgspec.json.encode(wrong) + b"\n")
    found = import_file(other, exported)
    assert len(found.damaged) == 1 and "has a time that is not a positive number" in found.damaged[0]


def test_trials_without_their_facts_are_left_out(exported: Path, other: Database) -> None:
    lines = [line for line in exported.read_text().splitlines() if '"type":"machine"' not in line]
    exported.write_text("\n".join(lines))
    found = import_file(other, exported)
    assert other.records() == [] and len(found.damaged) == len(RECORDS)
    assert "are missing" in found.damaged[0]


def test_files_that_are_neither(other: Database, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("buy milk\n")
    with pytest.raises(
        DatabaseFileError, match=r"notes.txt has no line of an export: line 1.*\n  try: name a tuning"
    ):
        import_file(other, tmp_path / "notes.txt")
    with pytest.raises(DatabaseFileError, match=r"cannot read .*absent"):
        import_file(other, tmp_path / "absent")


# -- maintenance ------------------------------------------------------------------------------------------------------


def test_collecting_keeps_every_trial(database: Database) -> None:
    later = Decision(key(), config(2), 1e-5, "full", 60.0, 12, 2e9)
    database.decide(later)
    would = collect(database, dry_run=True)
    assert (would.damaged, would.old, would.superseded, would.facts) == (0, 0, 1, 0)
    assert len(database.decisions()) == 2
    assert collect(database)[:4] == would[:4]
    assert database.decisions() == [later] and database.records() == RECORDS
    assert verify(database).ok


def test_collecting_by_age(database: Database) -> None:
    database.add([new := record(3, of=work(10), when=4e9)])
    found = collect(database, older_than_days=1)
    assert found.old == len(RECORDS) + 1 and found.facts == 2  # two tasks; the machine has a new record
    assert database.records() == [new] and database.decisions() == []


def test_collecting_what_is_damaged(database: Database) -> None:
    database.close()
    data = database.path.read_bytes()
    database.path.write_bytes(data.replace(b'["rows",4]', b'["rows",5]'))
    with Database.open(database.path) as again:
        (damage,) = verify(again).damaged
        assert "trial" in damage and "digest" in damage
        assert collect(again).damaged == 1
        assert verify(again).ok and again.records() == [one for one in RECORDS if one.config["rows"] != 4]
