"""`tilewright report`: the file, the data, and a place where it cannot be written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.db.samples import record
from tilewright.cli.app import app
from tilewright.cli.options import OutputFileError
from tilewright.db.database import Database


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "tuning.sqlite"
    with Database.open(path) as opened:
        opened.add([record(number) for number in range(10)])
    return path


def test_the_file_and_the_data(database: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    done = CliRunner().invoke(app, ["report", "--db", str(database), "-o", str(page)])
    assert done.exit_code == 0, done.output
    assert "1 tasks, 10 trials" in " ".join(done.output.split())
    text = page.read_text()
    assert "matmul+relu" in text and "timeout" in text and len(text) < 2_000_000
    done = CliRunner().invoke(app, ["report", "--db", str(database), "--json"])
    (task,) = json.loads(done.output)["tasks"]
    assert len(task["trials"]) == 10 and task["code"]["loops"].startswith("program")


def test_a_position_that_cannot_be_written(database: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["report", "--db", str(database), "-o", str(tmp_path / "no" / "r.html")])
    assert isinstance(done.exception, OutputFileError)
    assert "cannot write" in str(done.exception) and "try: name a file" in str(done.exception)
