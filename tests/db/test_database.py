"""The database: what goes in comes out, for every key its own, and nothing twice."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.db.samples import config, key, record, work
from tilewright import knobs
from tilewright.db.database import Database
from tilewright.db.record import Decision, Key, Record
from tilewright.db.rows import facts_of, record_of, rows_of_record, trial_of
from tilewright.space.space import Config


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return Database.open(tmp_path / "tuning.sqlite")


def decision(number: int, when: float = 1e9, of: Key | None = None) -> Decision:
    return Decision(of or key(), config(number), 1e-5 * number, "quick", 60.0, 12, when)


def test_what_is_added_is_there_in_order(database: Database) -> None:
    records = [record(number) for number in range(7)]
    database.add(records[:3])
    database.add(records[3:])
    assert database.records() == records
    with Database.open(database.path) as again:
        assert again.records(key()) == records


def test_a_further_trial_of_a_config_is_a_further_row(database: Database) -> None:
    database.add([record(0, when=1.0), record(0, when=2.0)])
    database.add([record(0, when=1.0)])  # the same trial is not another one
    assert [one.when for one in database.records()] == [1.0, 2.0]


def test_each_part_of_the_key_tells_records_apart(database: Database) -> None:
    works = [work(), work(9), work(cores=77), work(numerics="strict")]
    records = [record(0, of=one) for one in works] + [record(0, threads=1)]
    other = msgspec.structs.replace(records[0].key, toolchain="LLVM 1")
    records.append(msgspec.structs.replace(records[0], key=other))
    database.add(records)
    assert len({one.key for one in records}) == 6
    for one in records:
        assert database.records(one.key) == [one]


def test_similar_records_are_those_of_other_keys_this_machine_first(database: Database) -> None:
    mine, other_task, newer, elsewhere = (
        record(0), record(1, of=work(9)), record(2, of=work(10)), record(3, of=work(cores=77)),
    )  # fmt: skip
    database.add([mine, other_task, newer, elsewhere])
    assert database.similar(key()) == [newer, other_task, elsewhere]
    assert database.similar(key(), limit=1) == [newer]


def test_the_last_decision_counts(database: Database) -> None:
    assert database.decision(key()) is None
    database.decide(decision(1, when=10.0))
    database.decide(decision(3, when=30.0))
    database.decide(decision(2, when=20.0))  # came late, from another database
    database.decide(decision(4, of=key(work(9))))
    database.decide(msgspec.structs.replace(decision(5, when=50.0), seconds=float("inf")))  # never ran
    found = database.decision(key())
    assert found is not None and found.config == config(3)


def test_it_is_in_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "deep" / "cache"))
    with Database.open() as database:
        database.add([record()])
    assert database.path == knobs.get("cache_dir") / "tuning.sqlite"
    assert (tmp_path / "deep" / "cache").stat().st_mode & 0o077 == 0  # for no other user


def test_a_record_gives_its_task_and_machine_back() -> None:
    made = record().work()
    assert made is not None and made.task == work().task and made.machine == work().machine
    assert msgspec.structs.replace(record(), text="no graph").work() is None
    assert msgspec.structs.replace(record(), machine={"cpu": "of next year"}).work() is None
    assert msgspec.structs.replace(record(), constants=()).work() is None  # of another key, then


def test_what_failed_has_no_time() -> None:
    assert Record.of(work(), 2, config(0), times=(1.0, 9.0, 1.2)).seconds == 1.2
    assert Record.of(work(), 2, config(0), times=(1.0,), failure="wrong").seconds is None
    assert Record.of(work(), 2, config(0)).seconds is None


VALUES = st.one_of(st.booleans(), st.integers(-(2**53), 2**53), st.text(max_size=8))
CONFIGS = st.builds(
    Config,
    st.text(min_size=1, max_size=8),
    st.lists(st.tuples(st.text(max_size=5), VALUES), max_size=3).map(tuple),
)
SECONDS = st.floats(0, 1e3, exclude_min=True, allow_nan=False)


@given(
    config=CONFIGS,
    times=st.lists(SECONDS, max_size=4).map(tuple),
    message=st.text(max_size=40),
    error=st.none() | SECONDS,
)
def test_any_record_survives(
    config: Config,
    times: tuple[float, ...],
    message: str,
    error: float | None,
) -> None:
    one = Record.of(work(), 2, config, times=times, message=message, error=error)
    task, machine, trial = rows_of_record(one)
    facts = {row.digest: facts_of(row) for row in (task, machine)}
    again = record_of(trial_of(trial), facts.__getitem__)
    assert again == one and hash(again.config) == hash(one.config)
    assert rows_of_record(again) == (task, machine, trial)
