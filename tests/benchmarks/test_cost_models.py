"""The benchmarks of cost models, on made-up tables: what each row of the ablation sees, and the table of speeds."""

from __future__ import annotations

import json
import pickle
import sys
import tempfile
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import cost_models
import cost_report
import cost_speed
from cost_models import ABLATION, Job, Log, _run, _without_terms, thinned
from cost_report import STATEMENTS, UNTRAINED, Score, ceiling_table, ceilings, kind_of
from tests.dataset.test_dataset import records
from tilewright.cost.boosted import Boosted
from tilewright.dataset.store import Writer
from tilewright.dataset.tables import Table, tables_of
from tilewright.space.candidates import Candidates

SHAPES = ((32, 96, 64), (8, 2048, 16), (512, 48, 1024))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Tables of three tasks, and the same with the statements of every program."""
    made = [record for m, n, k in SHAPES for record in records(m, n, k, 8, "rows")]
    path = tmp_path_factory.mktemp("tables") / "tables.pickle"
    path.write_bytes(pickle.dumps(tables_of(made)[0]))
    path.with_name("tables.pickle.ablation").write_bytes(pickle.dumps(tables_of(made, statements=True)[0]))
    return str(path)


def tables(path: str) -> list[Table]:
    found: list[Table] = pickle.loads(Path(path).read_bytes())
    return found


def job(part: str, method: str, cache: str) -> Job:
    return Job(part, method, 0, 0, (0,), (1, 2), "cpu", cache, 3)


@pytest.mark.parametrize("method", ABLATION)
def test_every_row_of_the_ablation(method: str, cache: str) -> None:
    (score,) = _run(job("ablation", method, cache + ".ablation"))
    assert (score.part, score.method) == ("ablation", method)
    assert 0 < score.top1 <= score.top8 <= 1 and 0 <= score.pairs <= 1


def test_statements_alone_has_every_programs_statements_and_nothing_else(cache: str) -> None:
    plain, lowered = tables(cache)[0], tables(cache + ".ablation")[0]
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
    monkeypatch.setattr(cost_report, "MAX_TRIALS", 0)
    (missed,) = _run(job("search", f"attention, {UNTRAINED}", cache))
    assert (missed.trials, missed.reached) == (0, False)
    said = cost_report.trials_of(
        [search, replace(search, trials=search.trials + 2), replace(missed, trials=64)]
    )
    assert said.startswith(f">= {(2 * search.trials + 66) / 3:.1f} ") and "1 of 3 not within" in said
    assert not cost_report.trials_of([search]).startswith(">=")


def test_every_seed_searches(cache: str) -> None:
    some = [replace(table, family=name) for table, name in zip(tables(cache), "aab", strict=True)]
    one, three = (cost_models.jobs_of(some, ["search"], seeds, "cpu", cache, 3) for seeds in (1, 3))
    assert len(three) == 3 * len(one) > 0
    assert {each.seed for each in three} == {0, 1, 2}


def test_the_seconds_of_a_search_are_those_of_its_builds_and_its_thinking(cache: str) -> None:
    table = replace(tables(cache)[0], builds=np.full(len(tables(cache)[0].configs), 0.25))
    work = table.job.work()
    found = cost_models.searched(Boosted(Candidates.of(work), 1), table)
    assert found.reached and found.building == 0.25 * found.trials and found.thinking > 0
    assert found.trials <= len(table.configs)


def test_what_the_log_has_is_not_run_again(cache: str, tmp_path: Path) -> None:
    log, first, other = (
        tmp_path / "log.jsonl",
        job("held-out", "analytical", cache),
        job("held-out", "random", cache),
    )
    scores = _run(first)
    Log(log).add(first, scores)
    Log(log).add(other, [])  # one that failed is run again
    again = Log(log)
    assert again.of(first) == scores and again.of(other) is None
    assert again.of(replace(first, seed=1)) is None and again.of(replace(first, held_out=(1,))) is None


def test_a_ceiling_is_what_half_of_the_times_say_about_the_others(cache: str) -> None:
    some = records(32, 96, 64, 20)
    steady = [msgspec.structs.replace(r, times=(r.times[0],) * 4) for r in some]
    (exact,) = ceilings(steady, tables(cache))
    assert (exact.top1, exact.top8, exact.pairs, exact.tables) == (1.0, 1.0, 1.0, 1)
    noise = np.random.default_rng(0).lognormal(0.0, 0.5, (len(some), 4))
    noisy = [
        msgspec.structs.replace(r, times=tuple((r.times[0] * each).tolist()))
        for r, each in zip(some, noise, strict=True)
    ]
    (rough,) = ceilings(noisy, tables(cache))
    assert rough.pairs < 0.95 and rough.top1 <= rough.top8 <= 1.0
    assert f"| {rough.kind} | 1 | {rough.top1:.3f} |" in ceiling_table([rough])
    assert ceilings(some, tables(cache)) == []  # one time says nothing about noise


def test_thinning_keeps_the_same_configs_again() -> None:
    some = records(32, 96, 64, 20)
    few = thinned(some, 6)
    assert len(few) == 6 and few == thinned(some[::-1], 6) and set(map(str, few)) <= set(map(str, some))
    assert len(thinned(some, 50)) == 20


def test_threads_are_a_machine_of_their_own(cache: str) -> None:
    table = tables(cache)[0]
    two = replace(table, job=msgspec.structs.replace(table.job, threads=2))
    assert kind_of(two) == f"{kind_of(table)}, 2 threads"


def test_the_whole_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, found = tmp_path / "data.jsonl", tmp_path / "scores.json"
    Writer(data).add([record for m, n, k in SHAPES for record in records(m, n, k, 6, "rows")])
    arguments = [str(data), "--parts", "ablation", "--seeds", "1", "--steps", "2", "--json", str(found)]
    arguments += ["--log", str(tmp_path / "log.jsonl")]
    monkeypatch.setattr(cost_models, "FOLDS", 2)
    monkeypatch.setattr(sys, "argv", ["cost_models.py", *arguments])
    monkeypatch.setattr(cost_models, "ProcessPoolExecutor", Here)
    cost_models.main()
    scores = json.loads(found.read_text())
    assert {score["method"] for score in scores} == set(ABLATION)
    assert len(scores) == len(SHAPES) * len(ABLATION)
    monkeypatch.setattr(cost_models, "_run", None)
    cost_models.main()  # from the log
    assert json.loads(found.read_text()) == scores


class Here:
    """Runs jobs in this process."""

    def __init__(self, *arguments: object, **options: object) -> None:
        pass

    def shutdown(self) -> None:
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
    before, after = cost_report.STEPS[:2]
    (score,) = _run(job("ablation", before, cache))
    some = [
        replace(score, method=method, machine=machine, seed=seed, top1=top1)
        for method, gains in ((before, (0.0, 0.0)), (after, (0.1, 0.3)))
        for machine, gain in zip(("one", "another"), gains, strict=True)  # the same name on two machines
        for seed, top1 in enumerate((0.4 + gain, 0.5 + gain, 0.6 + gain))
    ]
    (row,) = (line for line in cost_report.gains(some) if line.startswith(f"| {after} "))
    assert row == f"| {after} | +0.200 | +0.004 to +0.396 |"
