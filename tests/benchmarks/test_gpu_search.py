"""Searches replayed over what was measured on a GPU: the file continues where it ended, no config is new."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from random import Random

import msgspec
import pytest

from benchmarks import gpu_search as module
from benchmarks.gpu_search import (
    TASKS,
    Table,
    Trial,
    append,
    chosen,
    collect,
    read,
    replay,
    report,
    restricted,
)
from tests.nvrtc import needs_nvrtc
from tests.space.implementations import WITH_LIBRARIES
from tilewright.hw.gpu import A100
from tilewright.hw.machine import description
from tilewright.measure.runner import Runner
from tilewright.space.candidates import Candidates
from tilewright.space.space import Config
from tilewright.space.template import Work

needs_nvrtc()


def work_of(name: str) -> Work:
    return Work(TASKS[name].make(), WITH_LIBRARIES, TASKS[name].numerics)


@pytest.mark.slow
def test_at_least_twelve_tasks_have_large_spaces() -> None:
    sizes = {name: sum(1 for _ in Candidates.of(work_of(name)).configs()) for name in TASKS}
    assert sum(size >= module.MIN_SPACE for size in sizes.values()) >= 12, sizes


def test_what_is_measured_has_all_library_calls_and_the_fastest_by_prediction() -> None:
    candidates = Candidates.of(work_of("gemm_f32"))
    found = chosen(candidates)
    assert len(found) == len(set(found)) == module.MAX and found == chosen(candidates)
    assert all(candidates.is_legal(config) for config in found)
    calls = [config for config in candidates.configs() if config.template == "cublaslt"]
    assert found[: len(calls)] == calls


def test_collecting_goes_on_where_it_ended(tmp_path: Path) -> None:
    """With a process in the place of the card."""
    path, names = tmp_path / "trials.jsonl", ["gemm_f32"]
    timing = "tests.tune.fake_gpu:serve"
    with Runner(0, device=0, builders=2, timing=timing) as runner:
        (said,) = collect(path, names, WITH_LIBRARIES, runner, 60.0, most=8)
        assert "8 of 8 measured, 0 failed" in said
        size = path.stat().st_size
        path.write_bytes(path.read_bytes() + b'{"type": "trial", "na')  # as a power cut leaves it
        (said,) = collect(path, names, WITH_LIBRARIES, runner, 60.0, most=8)
        assert "0 of 0 measured" in said and path.stat().st_size < size + 100
        (said,) = collect(path, names, A100, runner, 60.0, most=8)
        assert "measured on NVIDIA H200" in said
    (table,) = read(path).values()
    assert len(table.trials) == 8 and table.work.task.key == work_of("gemm_f32").task.key
    assert table.work.machine == WITH_LIBRARIES


@pytest.fixture
def table(tmp_path: Path) -> Table:
    """Made-up times: as predicted, times something between 1 and 1.3."""
    from tilewright.cost.analytical import Analytical

    work, path, rng = work_of("sum_columns"), tmp_path / "trials.jsonl", Random(0)
    candidates = Candidates.of(work)
    model = Analytical(candidates, 0)
    task = work.task
    machine = description(WITH_LIBRARIES)
    append(path, [module.Begun("sum_columns", task.text, tuple(task.constants), "fast", machine, 522)])
    for config in chosen(candidates, 120):
        seconds = model.seconds(config) * rng.uniform(1.0, 1.3)
        fails = rng.random() < 0.1
        append(path, [Trial("sum_columns", config, None if fails else seconds, "wrong" if fails else "")])
    return read(path)["sum_columns"]


def test_only_what_was_measured_is_searched(table: Table) -> None:
    outcomes = table.outcomes()
    candidates = restricted(table.work, outcomes)
    assert set(candidates.configs()) == set(outcomes) and candidates.size == len(outcomes)
    rng = Random(1)
    drawn = candidates.sample(rng, 50)
    assert len(set(drawn)) == 50 and set(drawn) <= set(outcomes)
    for config in drawn:
        assert {*candidates.neighbours(config), candidates.mutate(config, rng)} <= set(outcomes)


def test_each_search_is_replayed_and_reported(table: Table) -> None:
    runs = replay(table, seeds=2)
    assert [run.system for run in runs] == [
        module.RANKING,
        *(name for name in module.SYSTEMS for _ in range(2)),
    ]
    for run in runs:
        assert 0 <= run.first <= run.early <= run.late <= 1 or math.isclose(run.late, 1)
    assert max(run.late for run in runs) > 0.9
    text = report({"sum_columns": table}, runs)
    assert all(name in text for name in (module.RANKING, *module.SYSTEMS, "best of 16"))


def test_a_config_recorded_without_a_newer_knob_is_replayed_with_its_default() -> None:
    work = work_of("gemm_f32")
    config = next(c for c in chosen(Candidates.of(work)) if c.template == "sketch:tiled")
    older = Config(
        config.template, tuple(pair for pair in config.values if pair[0] not in ("prefetch", "fused"))
    )
    assert len(older.values) == len(config.values) - 2
    begun = module.Begun(
        "gemm_f32", work.task.text, tuple(work.task.constants), "fast", description(WITH_LIBRARIES), 1
    )
    (found,) = Table(begun, {older: Trial("gemm_f32", older, 1e-5)}).outcomes().values()
    assert found.seconds == 1e-5
    assert (found.config["prefetch"], found.config["fused"]) == (False, True)
    assert set(older.values) < set(found.config.values)


def test_a_config_recorded_under_former_names_is_replayed(table: Table) -> None:
    names = {"results": "beside"}
    former = {
        config: Config(
            config.template, tuple((names.get(name, name), value) for name, value in config.values)
        )
        for config in table.trials
    }
    renamed = {
        former[c]: msgspec.structs.replace(trial, config=former[c]) for c, trial in table.trials.items()
    }
    assert renamed.keys() - table.trials.keys()
    assert Table(table.begun, renamed).outcomes() == table.outcomes()


def test_configs_that_are_legal_no_more_are_left_out(table: Table) -> None:
    count = len(table.outcomes())
    config, trial = next(iter(table.trials.items()))
    other = replace(config, template="of another day")
    table.trials[other] = trial
    assert len(table.outcomes()) == count
