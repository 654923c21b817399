"""The benchmarks of cost models, on made-up tables: what each row of the ablation sees, and the table of speeds."""

from __future__ import annotations

import json
import pickle
import sys
import tempfile
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import cost_models
import cost_speed
from cost_models import ABLATION, STATEMENTS, UNTRAINED, Job, Score, _run, _without_terms
from tests.dataset.test_dataset import records
from tilewright.dataset.store import Writer
from tilewright.dataset.tables import Table, tables_of

SHAPES = ((32, 96, 64), (8, 2048, 16), (512, 48, 1024))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Tables of three tasks, and the same with the statements of every program."""
    made = [record for m, n, k in SHAPES for record in records(m, n, k, 8, "rows")]
    path = tmp_path_factory.mktemp("tables") / "tables.pickle"
    path.write_bytes(pickle.dumps(tables_of(made)[0]))
    path.with_name("tables.pickle.statements").write_bytes(pickle.dumps(tables_of(made, statements=True)[0]))
    return str(path)


def tables(path: str) -> list[Table]:
    found: list[Table] = pickle.loads(Path(path).read_bytes())
    return found


def job(part: str, method: str, cache: str) -> Job:
    return Job(part, method, 0, 0, (0,), (1, 2), "cpu", cache, 3)


@pytest.mark.parametrize("method", ABLATION)
def test_every_row_of_the_ablation(method: str, cache: str) -> None:
    (score,) = _run(job("ablation", method, cache))
    assert (score.part, score.method) == ("ablation", method)
    assert 0 < score.top1 <= score.top8 <= 1 and 0 <= score.pairs <= 1


def test_statements_alone_has_every_programs_statements_and_nothing_else(cache: str) -> None:
    plain, lowered = tables(cache)[0], tables(cache + ".statements")[0]
    assert not plain.tokens.statement_mask.any()
    alone = _without_terms(lowered).tokens
    assert alone.statement_mask.any(axis=1).all() and not alone.terms.any()
    assert lowered.tokens.terms.any()
    assert set(ABLATION[STATEMENTS]["levels"]) == {"terms", "statement"}


def test_without_pre_training_is_what_the_analytical_model_says(cache: str) -> None:
    (untrained,) = _run(job("ablation", UNTRAINED, cache))
    (analytical,) = _run(job("held-out", "analytical", cache))
    assert (untrained.top1, untrained.pairs) == (analytical.top1, analytical.pairs)


def test_a_search_leaves_no_folder_and_says_whether_it_got_there(
    cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (search,) = _run(job("search", "attention", cache))
    assert 0 < search.trials <= len(tables(cache)[0].configs) and search.reached
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(cost_models, "MAX_TRIALS", 0)
    (missed,) = _run(job("search", f"attention, {UNTRAINED}", cache))
    assert (missed.trials, missed.reached) == (0, False)
    said = cost_models._trials(
        [search, replace(search, trials=search.trials + 2), replace(missed, trials=64)]
    )
    assert said.startswith(f">= {(2 * search.trials + 66) / 3:.1f} ") and "1 of 3 not within" in said
    assert not cost_models._trials([search]).startswith(">=")


def test_every_seed_searches(cache: str) -> None:
    some = [replace(table, family=name) for table, name in zip(tables(cache), "aab", strict=True)]
    one, three = (cost_models.jobs_of(some, ["search"], seeds, "cpu", cache, 3) for seeds in (1, 3))
    assert len(three) == 3 * len(one) > 0
    assert {each.seed for each in three} == {0, 1, 2}


def test_the_whole_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, found = tmp_path / "data.jsonl", tmp_path / "scores.json"
    Writer(data).add([record for m, n, k in SHAPES for record in records(m, n, k, 6, "rows")])
    arguments = [str(data), "--parts", "ablation", "--seeds", "1", "--steps", "2", "--json", str(found)]
    monkeypatch.setattr(cost_models, "FOLDS", 2)
    monkeypatch.setattr(sys, "argv", ["cost_models.py", *arguments])
    monkeypatch.setattr(cost_models, "ProcessPoolExecutor", Here)
    cost_models.main()
    scores = json.loads(found.read_text())
    assert {score["method"] for score in scores} == set(ABLATION)
    assert len(scores) == len(SHAPES) * len(ABLATION)


class Here:
    """Runs jobs in this process."""

    def __init__(self, *arguments: object, **options: object) -> None:
        pass

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, run: object, job: Job) -> Future[list[Score]]:
        done: Future[list[Score]] = Future()
        done.set_result(_run(job))
        return done


def test_speeds_of_few_configs() -> None:
    rows = cost_speed.speed(configs=20, repeats=1)
    for machine in ("this processor", "an H200"):
        whats = [str(row["what"]) for row in rows if row["machine"] == machine]
        assert whats == ["lowering + features", "features", "predictions", "a round with 16 trials"]
    assert [row["what"] for row in rows[:2]] == ["import tilewright.cost.attention", "read the weights"]
    assert all(float(str(row["ms"])) > 0 for row in rows)
    assert cost_speed.table(rows).count("\n") == len(rows) + 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--parts", "speeed"], "--parts must be some of"), (["--parts", "search"], "DATA is needed")],
)
def test_what_cannot_be_run(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["cost_models.py", *arguments])
    with pytest.raises(SystemExit):
        cost_models.main()
    assert message in capsys.readouterr().err


def test_the_interval_of_a_gain_is_over_tables_and_not_over_their_seeds(cache: str) -> None:
    before, after = cost_models._STEPS[:2]
    (score,) = _run(job("ablation", before, cache))
    some = [
        replace(score, method=method, machine=machine, seed=seed, top1=top1)
        for method, gains in ((before, (0.0, 0.0)), (after, (0.1, 0.3)))
        for machine, gain in zip(("one", "another"), gains, strict=True)  # the same name on two machines
        for seed, top1 in enumerate((0.4 + gain, 0.5 + gain, 0.6 + gain))
    ]
    (row,) = (line for line in cost_models._steps(some) if line.startswith(f"| {after} "))
    assert row == f"| {after} | +0.200 | +0.004 to +0.396 |"
