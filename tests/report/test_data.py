"""What a report says is what the model does and what the database holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.report import samples
from tilewright.db.database import Database
from tilewright.report.data import Report
from tilewright.report.gather import report_on_database, report_on_model
from tilewright.runtime.model import CompiledModel


@pytest.fixture(scope="module")
def compiled() -> CompiledModel:
    return samples.model()


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory, compiled: CompiledModel) -> Database:
    return samples.database(tmp_path_factory.mktemp("report"), compiled)


@pytest.fixture(scope="module")
def report(compiled: CompiledModel, database: Database) -> Report:
    return report_on_model(compiled, "small", database)


def test_every_task_of_the_model_is_there_the_longest_first(report: Report, compiled: CompiledModel) -> None:
    assert {task.key for task in report.tasks} == set(compiled.plan.tasks)
    assert sum(task.calls for task in report.tasks) == len(compiled.plan.steps)
    totals = [task.total for task in report.tasks]
    assert totals == sorted(totals, reverse=True) and report.seconds == pytest.approx(sum(totals))
    assert all(task.error is not None and task.error < 1e-5 for task in report.tasks)


def test_what_tuning_has_gained(report: Report, database: Database) -> None:
    assert all(task.gain == pytest.approx(1.25) for task in report.tasks)
    assert report.untuned == pytest.approx(1.25 * report.seconds)
    assert len(report.trials) == len(database.records())
    failed = sum(bool(record.failure) for record in database.records())
    assert sum(kinds.total() for kinds in report.failures.values()) == failed > 0
    assert report.misprediction is not None and 1 < report.misprediction < 2


def test_the_code_is_that_of_the_kernel_that_runs(report: Report) -> None:
    for task in report.tasks:
        assert task.code is not None and task.code.runs, task.label
        assert task.code.loops.startswith("program ")
        assert task.code.assembly


def test_limits_are_limits(report: Report) -> None:
    """No task can be faster than its arithmetic, nor than its bytes from the nearest memory that they fit in."""
    machine = report.machine
    assert machine is not None
    for task in report.tasks:
        assert task.limit is not None and task.typical is not None
        arithmetic, fastest = task.flops / machine.flops, max(machine.bandwidths.values())
        assert task.limit >= max(arithmetic, task.bytes / fastest) > 0
        assert task.limit <= max(arithmetic, task.bytes / machine.bandwidths["memory"])
        assert task.efficiency == task.limit / task.typical


def test_the_trace_has_the_call_and_the_trials(report: Report) -> None:
    spans = [event for event in report.trace if event["ph"] == "X"]
    assert sum(event["pid"] == 1 for event in spans) == len(report.tasks)
    assert sum(event["pid"] == 2 for event in spans) == len(report.trials)
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in spans)
    json.dumps(report.trace)


def test_the_database_alone(database: Database, compiled: CompiledModel) -> None:
    report = report_on_database(database)
    assert report.model is None and {task.key for task in report.tasks} == set(compiled.plan.tasks)
    for task in report.tasks:
        assert task.typical == task.after and task.code is not None and task.output


def test_an_empty_database(tmp_path: Path) -> None:
    with Database.open(tmp_path / "empty.sqlite") as empty:
        report = report_on_database(empty)
    assert report.tasks == () and report.untuned is None and report.trace == []
