"""What a report says is what the model does and what the database holds."""

from __future__ import annotations

import json
import math
from pathlib import Path
from random import Random

import pytest

pytest.importorskip("torch")

import torch

import tilewright
from tests.report import samples
from tilewright.cost.analytical import Analytical
from tilewright.dataset.tasks import gemm
from tilewright.db.database import Database
from tilewright.db.record import Record
from tilewright.dtypes import DType
from tilewright.hw.gpu import H200
from tilewright.report.beliefs import beliefs_of
from tilewright.report.data import Report
from tilewright.report.flow import flow_of
from tilewright.report.gather import report_on_database, report_on_model
from tilewright.runtime.model import CompiledModel
from tilewright.space.candidates import Candidates
from tilewright.space.template import Work
from tilewright.support.trace import Trace


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


def test_what_the_attention_model_believes_where_it_was_used(
    report: Report, compiled: CompiledModel, database: Database
) -> None:
    assert all(task.beliefs is None for task in report.tasks)
    trace = Trace()
    trace.mark("tune.begin", cost_model="boosted")
    trace.mark("tune.begin", cost_model="attention")
    for task in report_on_model(compiled, "small", database, events=trace.chrome()["traceEvents"]).tasks:
        beliefs = task.beliefs
        assert beliefs is not None
        measured = {trial.config: trial.seconds for trial in task.trials}
        assert beliefs.trials == len(measured)
        chosen = beliefs.configs[0]
        assert chosen.config == task.winner and chosen.role == "chosen and untuned"
        assert all(row.measured == measured[row.config] for row in beliefs.configs)
        assert all(row.predicted > 0 and row.factor > 1 and 0 < row.valid <= 1 for row in beliefs.configs)
        names = [name for name, _ in beliefs.attention]
        assert names[:4] == ["task", "machine", "terms", "instruction"]
        assert names[4] == task.winner.split(":")[0]
        assert sum(share for _, share in beliefs.attention) == pytest.approx(1.0, rel=1e-4)
        # The trials are made up, far from what the analytical model says; with them, the model is near.
        off = [abs(math.log(seconds / chosen.measured)) for seconds in (chosen.network, chosen.predicted)]
        assert off[1] < off[0]


def test_a_run_with_the_attention_model_says_so(tmp_path: Path) -> None:
    trace, path = Trace(), tmp_path / "tuning.sqlite"
    options = {"effort": "quick", "budget": "6s", "cost_model": "attention", "db": path, "trace": trace}
    x = torch.randn(16, 64)
    fast = tilewright.compile(torch.nn.Linear(64, 48).eval(), (x,), **options)
    with Database.open(path) as database:
        found = report_on_model(fast, "linear", database, events=trace.chrome()["traceEvents"])
        assert database.records()
    assert any(task.beliefs is not None and task.beliefs.trials for task in found.tasks)


def test_beliefs_about_a_kernel_of_a_gpu() -> None:
    """There need be no GPU: they follow from records."""
    work = Work(gemm(512, 512, 512, "relu", DType.F16), H200)
    candidates = Candidates.of(work)
    model = Analytical(candidates, 0)
    configs = [c for c in candidates.sample(Random(0), 12) if math.isfinite(model.seconds(c))]
    records = [Record.of(work, 0, config, times=(2 * model.seconds(config),)) for config in configs]
    found = beliefs_of(work, 0, records, configs[0], str(configs[1]))
    assert found is not None and found.trials == len(configs)
    assert [row.role for row in found.configs[:2]] == ["chosen", "untuned"]
    assert found.attention[4][0] == configs[0].template


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


def test_the_trace_has_the_call_and_the_trials(report: Report, compiled: CompiledModel) -> None:
    spans = [event for event in report.trace if event["ph"] == "X"]
    names = [event["name"] for event in spans if event["pid"] == 1]
    assert names == [step.layer for step in compiled.plan.steps] and "0 + 1" in names
    assert sum(event["pid"] == 2 for event in spans) == len(report.trials)
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in spans)
    json.dumps(report.trace)


def test_tasks_have_the_names_of_layers(report: Report) -> None:
    assert {"0 + 1", "2", "4"} <= {task.name for task in report.tasks}
    assert all(len(task.layers) == task.calls for task in report.tasks)


def test_the_untuned_choice_is_compared_as_it_was_measured(report: Report) -> None:
    """Trials run alone, and so does the one to beat: its time is one of theirs, four times that inside the model."""
    for task in report.tasks:
        assert task.before is not None and task.baseline is not None
        assert task.baseline == task.trials[0].seconds
        assert task.baseline > 3 * task.before


def test_data_flows_as_the_plan_says(report: Report, compiled: CompiledModel) -> None:
    assert report.model is not None
    steps, plan = report.model.steps, compiled.plan
    assert [step.layer for step in steps] == [step.layer for step in plan.steps]
    assert steps[0].reads == (-1,)
    assert all(step.reads == (number - 1,) for number, step in enumerate(steps) if number)
    assert max(step.alive for step in steps) == plan.memory.lower_bound <= report.model.arena_bytes


def test_what_is_read_again_later_is_kept() -> None:
    class Residual(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (torch.nn.Linear(64, 64) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            start = torch.softmax(self.first(x), -1)
            return torch.softmax(self.second(torch.softmax(start * 3, -1)), -1) @ start

    fast = tilewright.compile(Residual().eval(), (torch.randn(64, 64),))
    flow = flow_of(fast.plan)
    assert max(flow.alive) == fast.plan.memory.lower_bound
    assert flow.reads[0] == (-1,) and any(len(reads) == 2 for reads in flow.reads)
    assert all(reads < (number,) for number, reads in enumerate(flow.reads))


def test_the_database_alone(database: Database, compiled: CompiledModel) -> None:
    report = report_on_database(database)
    assert report.model is None and {task.key for task in report.tasks} == set(compiled.plan.tasks)
    for task in report.tasks:
        assert task.typical == task.after and task.code is not None and task.output


def test_an_empty_database(tmp_path: Path) -> None:
    with Database.open(tmp_path / "empty.sqlite") as empty:
        report = report_on_database(empty)
    assert report.tasks == () and report.untuned is None and report.trace == []
