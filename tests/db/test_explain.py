"""Why there was no hit: the part of the key that differs, in words."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.db.samples import config, key, record, work
from tilewright.db.database import Database
from tilewright.db.explain import MissExplanation, explain
from tilewright.db.record import Decision
from tilewright.hw.machine import description
from tilewright.space.template import Work


@pytest.fixture
def database(tmp_path: Path) -> Database:
    database = Database.open(tmp_path / "tuning.sqlite")
    database.add([record(number) for number in range(4)])
    return database


def asked(database: Database, of: Work, threads: int = 2) -> MissExplanation:
    return explain(database, key(of, threads), of.task.label, of.task.text, description(of.machine))


def test_a_hit(database: Database) -> None:
    found = asked(database, work())
    assert (found.records, found.failures, found.nearest) == (4, 1, ())
    assert "4 record(s), 1 failed, but no search has ended" in str(found)
    database.decide(Decision(key(), config(2), 1.5e-5, "quick", 60.0, 12))
    text = str(asked(database, work()))
    assert (
        "decided by a search of effort quick, 12 trial(s): contraction: rows=2" in text and "15.0 us" in text
    )


def test_other_threads(database: Database) -> None:
    (near,) = asked(database, work(), threads=1).nearest
    assert [(one.part, one.details) for one in near.differences] == [("threads", ("1 here, 2 there",))]


def test_another_machine(database: Database) -> None:
    (near,) = asked(database, work(cores=77)).nearest
    (difference,) = near.differences
    assert difference.part == "machine"
    assert [detail.split(",")[0] for detail in difference.details] == ["cores: 77 here"]
    assert near.records == 4 and near.best is not None


def test_another_toolchain(database: Database) -> None:
    wanted = msgspec.structs.replace(key(), toolchain="LLVM 99")
    found = explain(database, wanted, work().task.label, work().task.text, description(work().machine))
    assert f"toolchain: LLVM 99 here, {key().toolchain} there" in str(found)


def test_another_shape(database: Database) -> None:
    text = str(asked(database, work(9)))
    assert "no record. The nearest:" in text
    assert "task: there %0 = input {index=0} : f32[8,16]; here %0 = input {index=0} : f32[9,16]" in text


def test_the_nearest_come_first(database: Database) -> None:
    database.add([record(1, of=work(cores=77), threads=1), record(2, threads=4)])
    found = asked(database, work(), threads=8)
    assert [len(near.differences) for near in found.nearest] == [1, 1, 2]


def test_nothing_like_it(tmp_path: Path) -> None:
    with Database.open(tmp_path / "empty.sqlite") as database:
        assert "has none of any task like it" in str(asked(database, work()))
