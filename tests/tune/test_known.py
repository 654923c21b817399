"""What was tuned is used: a compilation that measures nothing takes the winners from the database, whatever state that
is in, and says of each kernel where its choice came from."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import warnings
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import nn

import tilewright
from tilewright.codegen.generator import code_of
from tilewright.db import known
from tilewright.db.database import Database
from tilewright.db.record import Decision, Key
from tilewright.db.versions import Versions
from tilewright.driver import compile_imported
from tilewright.errors import DatabaseWarning
from tilewright.frontend import import_model
from tilewright.hw import host
from tilewright.runtime.model import CompiledModel
from tilewright.runtime.plan import Origin
from tilewright.space.candidates import Candidates
from tilewright.space.template import Work
from tilewright.support.trace import Trace
from tilewright.targets.cpu import CpuTarget
from tilewright.targets.target import together
from tilewright.tune.choose import choose
from tilewright.tune.effort import EFFORTS, Effort, Tuning

THREADS = 1
INPUTS = (torch.ones(16, 48),)


def model() -> nn.Module:
    torch.manual_seed(0)
    # Rows are joined in pairs in between, so that the two layers are no chain on any machine.
    pairs = nn.Unflatten(0, (-1, 2)), nn.Flatten(1)
    return (
        nn.Sequential(nn.Linear(48, 64), nn.ReLU(), *pairs, nn.Linear(128, 32)).eval().requires_grad_(False)
    )


def works() -> dict[str, Work]:
    """The tasks of the model, as every compilation of it cuts it."""
    imported = import_model(model(), INPUTS)
    tasks = together([CpuTarget(host()).partition(imported, "fast", Trace.off())])
    return {key: Work(task, host(), "fast") for key, (task, _) in tasks.items()}


def winner_of(work: Work) -> Decision | None:
    """A decision for a config that is not the one which would be chosen without it; None where there is none near."""
    usual = choose(work)
    candidates = Candidates.of(work)
    near = candidates.neighbours(usual.config)
    other = next((config for config in near if candidates.program(config) != usual.program), None)
    if other is None:
        return None
    code = code_of(candidates.implementation(other), work.machine, work.numerics)
    return Decision(Key.of(work, THREADS), other, 1e-6, "quick", 60.0, 12, code=code, default_seconds=2e-6)


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where every task of the model is decided."""
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(known, "_warned", set())
    path = tmp_path / "tuning.sqlite"
    with Database.open(path) as opened:
        for work in works().values():
            decision = winner_of(work)
            assert decision is not None
            opened.decide(decision)
    return path


def compiled(**options: object) -> CompiledModel:
    return tilewright.compile(model(), INPUTS, threads=THREADS, **options)  # type: ignore[call-overload]


def kinds(compiled: CompiledModel) -> Counter[str]:
    return Counter(info.origin.kind for info in compiled.plan.tasks.values())


def rows(path: Path) -> int:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        return int(connection.execute("SELECT count(*) FROM rows").fetchone()[0])


def test_a_plain_compilation_takes_the_winners_and_leaves_the_database_alone(database: Path) -> None:
    before = (database.read_bytes(), sorted(database.parent.iterdir()))
    trace = Trace()
    fast = compiled(trace=trace)
    assert kinds(fast) == {"tuned": 2}
    for key, work in works().items():
        wanted = winner_of(work)
        assert wanted is not None
        assert fast.plan.tasks[key].program == Candidates.of(work).program(wanted.config).decisions
    names = {event["name"] for event in trace.chrome()["traceEvents"]}
    assert "choose" in names and not {name for name in names if name.startswith("tune")}
    assert database.read_bytes() == before[0]
    left = {path for path in database.parent.iterdir() if path not in before[1]}
    assert all(path.is_dir() for path in left), left  # the cache of kernels, and no file of SQLite's
    assert torch.allclose(fast(*INPUTS), model()(*INPUTS), atol=1e-5)


def test_a_database_that_is_named_is_used_and_the_others_are_not(database: Path, tmp_path: Path) -> None:
    other = database.rename(tmp_path / "other.sqlite")
    assert kinds(compiled()) == {"predicted": 2}
    assert kinds(compiled(db=other)) == {"tuned": 2}


def test_a_missing_database_is_not_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kinds(compiled()) == {"predicted": 2}
    assert not list(tmp_path.rglob("tuning.sqlite*"))
    with pytest.warns(DatabaseWarning, match="the file does not exist"):
        compiled(db=tmp_path / "misspelt.sqlite")


@pytest.mark.parametrize("options", [{"threads": 2}, {"numerics": "strict"}], ids=["threads", "numerics"])
def test_decisions_hold_for_their_own_key_alone(database: Path, options: dict[str, object]) -> None:
    fast = tilewright.compile(model(), INPUTS, **{"threads": THREADS, **options})  # type: ignore[call-overload]
    assert kinds(fast) == {"predicted": 2}


def test_code_that_has_changed_since_is_chosen_anew(database: Path) -> None:
    with Database.open(database) as opened:
        for decision in opened.decisions():
            changed = {
                "code": "of another day",
                "versions": Versions("0", "3", "0"),
                "when": decision.when + 1,
            }
            opened.decide(
                Decision(**{**{f: getattr(decision, f) for f in decision.__struct_fields__}, **changed})
            )
    assert kinds(compiled()) == {"predicted": 2}


def test_what_a_run_left_out_for_want_of_time_is_predicted_and_a_lone_candidate_says_so(
    database: Path,
) -> None:
    (first, second) = works().values()
    with Database.open(database) as opened:
        for work, effort in ((first, "unmeasured in x"), (second, "complete")):
            config = choose(work).config
            opened.decide(Decision(Key.of(work, THREADS), config, 1e-6, effort, 60.0, 0, when=4e9))
    assert kinds(compiled()) == {"predicted": 1, "only": 1}


def _cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _overwrite(path: Path) -> None:
    path.write_bytes(b"no database" * 999)


def _another_programs(path: Path) -> None:
    path.unlink()
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("CREATE TABLE things (name)")
        connection.execute("PRAGMA application_id = 77")


def _newer(path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA user_version = 99")
        connection.execute(f"PRAGMA application_id = {(0x5457 << 16) + 99}")


def _rows_without_end(path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute("ALTER TABLE rows RENAME TO old")
        endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
        names = ("kind", "digest", "task", "machine", "toolchain", "numerics", "threads", "body")
        columns = ", ".join(f"'x' || i AS {name}" for name in names)
        connection.execute(f"CREATE VIEW rows AS {endless} SELECT i AS id, {columns} FROM n")
        connection.execute("DROP INDEX rows_by_key")


def _damaged_rows(path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("UPDATE rows SET body = replace(CAST(body AS TEXT), 'quick', 'quack')")


@pytest.mark.parametrize(
    "harm", [_cut_off, _overwrite, _another_programs, _newer, _rows_without_end, _damaged_rows]
)
def test_a_database_that_cannot_be_read_costs_one_warning(database: Path, harm) -> None:
    harm(database)
    before = database.read_bytes()
    with pytest.warns(
        DatabaseWarning, match="cannot be used: .*; kernels are chosen by the analytical model"
    ):
        assert kinds(compiled()) == {"predicted": 2}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kinds(compiled()) == {"predicted": 2}
    assert database.read_bytes() == before and not list(database.parent.glob("*.corrupt*"))


def test_a_pipe_and_a_folder_are_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "_warned", set())
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.warns(DatabaseWarning, match="not a regular file"):
            assert kinds(compiled(db=path)) == {"predicted": 2}


def test_a_database_that_another_process_holds(database: Path) -> None:
    with closing(sqlite3.connect(database)) as holder:
        holder.execute("PRAGMA journal_mode = delete")
    holder = sqlite3.connect(database, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    holder.execute("INSERT INTO rows (kind) VALUES ('x')")
    try:
        with pytest.warns(DatabaseWarning, match="locked"):
            assert kinds(compiled()) == {"predicted": 2}
    finally:
        holder.execute("ROLLBACK")
        holder.close()
    assert kinds(compiled()) == {"tuned": 2}


def test_what_another_process_is_writing_is_seen(database: Path) -> None:
    """Its write-ahead log is read too."""
    (first, _) = works().values()
    with Database.open(database) as opened:
        opened.decide(Decision(Key.of(first, THREADS), choose(first).config, 1e-6, "x", 1.0, 0, when=4e9))
        assert kinds(compiled()) == {"tuned": 1, "predicted": 1}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder(database: Path) -> None:
    other = database.parent / "closed"
    other.mkdir()
    moved = database.rename(other / database.name)
    other.chmod(0o500)
    try:
        assert kinds(compiled(db=moved)) == {"tuned": 2}
    finally:
        other.chmod(0o700)


def test_several_models_and_new_shapes_take_them_too(database: Path) -> None:
    both = tilewright.compile_all([(model(), INPUTS)] * 2, effort="none", threads=THREADS)
    assert [kinds(one) for one in both] == [{"tuned": 2}] * 2
    anysize = tilewright.compile(model(), INPUTS, dynamic=True, threads=THREADS)
    assert kinds(anysize.variants[0]) == {"tuned": 2}
    assert rows(database) == 2


def test_where_each_choice_came_from_is_said_and_kept_in_the_file(database: Path, tmp_path: Path) -> None:
    fast = compiled(lock=tmp_path / "model.lock")
    day = str(Origin("tuned", next(iter(fast.plan.tasks.values())).origin.when))
    assert day.startswith("tuned 20")
    fast.save(tmp_path / "model.tw")
    for one in (fast, tilewright.load(tmp_path / "model.tw")):
        explanation = one.explain()
        assert explanation.table(None).count(day) == 2 and "chosen   2 tuned" in str(explanation)
        assert {row["origin"]["kind"] for row in explanation.to_dict()["rows"]} == {"tuned"}
    locked = compiled(lock=tmp_path / "model.lock", db=tmp_path / "absent")
    assert locked.plan.kernels == fast.plan.kernels and kinds(locked) == {"lock": 2}
    pooling = tilewright.compile(nn.MaxPool2d(2).eval(), (torch.ones(1, 2, 8, 8),), threads=THREADS)
    assert kinds(pooling) == {"default": 1}


def test_a_tuning_run_says_so_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On this machine, without anything in the place of what measures."""
    monkeypatch.setitem(EFFORTS, "quick", Effort(60.0, 4, 8))
    path = tmp_path / "own.sqlite"
    imported = import_model(model(), INPUTS)
    tuned = compile_imported(
        imported, host(), threads=THREADS, tuning=Tuning("quick", search="random", db=path)
    )
    kept = rows(path)
    assert set(kinds(tuned)) <= {"tuned", "predicted"} and kinds(tuned)["tuned"]
    again = compile_imported(imported, host(), threads=THREADS, tuning=Tuning("none", db=path))
    assert again.plan.kernels == tuned.plan.kernels and rows(path) == kept
    for key, info in tuned.plan.tasks.items():
        assert again.plan.tasks[key].origin == info.origin


def test_opening_the_database_imports_nothing_at_import_of_the_package() -> None:
    code = (
        "import sys, tilewright; assert 'sqlite3' not in sys.modules and 'tilewright.db' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
