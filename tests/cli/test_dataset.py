"""`tilewright dataset`, from measuring to weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.inprocess import Done, run_here
from tilewright.cost import weights


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):  # type: ignore[no-untyped-def]
    return lambda *arguments: run_here(monkeypatch, capsys, "dataset", *map(str, arguments))


def test_from_nothing_to_weights(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("torch")
    data, merged, made = (tmp_path / name for name in ("a.jsonl", "all.jsonl.xz", "w.safetensors"))
    done: Done = run("collect", "-o", data, "--tasks", 1, "--configs", 9, "--budget", "60s", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out) == {"added": 9, "failed": 0, "left": 0, "unsampled": 0}, data.read_text()
    assert json.loads(run("merge", data, data, "-o", merged, "--json").out)["records"] == 9
    (machine,) = json.loads(run("stats", merged, "--json").out)["machines"]
    assert (machine["tasks"], machine["records"]) == (1, 9)
    assert "records" in run("stats", merged).out
    done = run("train", merged, "-o", made, "--steps", 2, "--json")
    assert done.code == 0, done.err
    assert int(weights.load(made).metadata["configs"]) >= 4
    done = run("train", merged, "-o", made, "--steps", 1, "--start", made)
    assert done.code == 0 and "TILEWRIGHT_COST_WEIGHTS" in done.out.replace("\n", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("stats", "missing.jsonl"), "cannot read"),
        (("collect", "-o", "data.xz"), "must end in .jsonl"),
        (("collect", "-o", "data.jsonl", "--target", "sm_90"), "that is here"),
        (
            ("train", "missing.jsonl", "-o", "w.safetensors", "--start", "missing.safetensors"),
            "cannot read the weights",
        ),
    ],
)
def test_mistakes_are_named(run, monkeypatch, tmp_path: Path, arguments, message: str) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)
    done = run(*arguments)
    assert done.code == 1 and message in " ".join(done.err.split())
