"""`tilewright db`, run as a user runs it, and what is behind it in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.db.samples import config, key, record, work
from tilewright.cli.app import app
from tilewright.db.database import Database
from tilewright.db.record import Decision


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tuning.sqlite"
    with Database.open(path) as database:
        database.add([record(number, of=work(8 + number % 2)) for number in range(10)])
        database.decide(Decision(key(), config(1), 1e-5, "quick", 60.0, 12))
    return path


def run(*arguments: str | Path, code: int = 0) -> str:
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["db", *map(str, arguments)])
    assert done.exit_code == code, done.output
    return done.output


def test_ls(path: Path) -> None:
    rows = json.loads(run("ls", "--db", path, "--json"))
    assert [(row["label"], row["records"], row["failures"]) for row in rows] == [("matmul+relu", 5, 2)] * 2
    assert rows[0]["decided"] == str(config(1)) and rows[1]["decided"] is None
    assert "10 records of 2 tasks" in " ".join(run("ls", "--db", path).split())


def test_export_import_merge_verify_gc(path: Path, tmp_path: Path) -> None:
    exported, other = tmp_path / "records.jsonl", tmp_path / "other.sqlite"
    assert "14 lines" in run("export", "--db", path, "-o", exported).replace("\n", "")
    assert run("export", "--db", path) == exported.read_text()
    assert "14 rows added, 0 known already, 0 damaged" in run("import", exported, "--db", other)
    merged = json.loads(run("merge", path, "--db", other, "--json"))[str(path)]
    assert merged == {"added": 0, "known": 14, "damaged": []}
    assert "10 trial" in run("verify", "--db", other)
    assert json.loads(run("gc", "--db", other, "--json"))["superseded"] == 0


def test_verify_fails_where_something_is_damaged(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'["rows",4]', b'["rows",5]'))
    assert "damaged: the trial" in run("verify", "--db", path, code=1)


def test_explain(path: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import tilewright

    model = torch.nn.Sequential(torch.nn.Linear(16, 4), torch.nn.ReLU()).eval()
    tilewright.compile(model, (torch.ones(3, 16),)).save(tmp_path / "m.tw")
    text = run("explain", tmp_path / "m.tw", "--db", path)
    assert "no record" in text
    (found,) = json.loads(run("explain", tmp_path / "m.tw", "--db", path, "--json", "--threads", "3"))
    assert found["records"] == 0 and found["key"]["threads"] == 3
