"""The tables of ablations by hand, and runs through the tuner's own loop that go on where they ended."""

from __future__ import annotations

import sys
from argparse import Namespace
from itertools import pairwise
from pathlib import Path

import pytest
from msgspec import structs

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # as where it is a command

import ablation_steps as steps
import ablation_tables as tables
import ablations
from ablation_tables import BEFORE, Point, Raced, Round, Run, Runs
from tests.tune.test_tuner import Told, product, varied
from tilewright.graph.op import apply
from tilewright.hw import host
from tilewright.space.space import Config
from tilewright.space.template import Work
from tilewright.targets.resolve import resolve_target
from tilewright.testing.problems import Inputs

START, CHOSEN = Config.of("default", {}), Config.of("contraction", {"rows": 4})


def run(
    variant: str, rounds: list[Round], calls: dict[str, int], trials: int = 8, subject: str = "one"
) -> Run:
    start, chosen = dict.fromkeys(calls, START), dict.fromkeys(calls, CHOSEN)
    last = dict.fromkeys(calls, trials)  # the choice is the last trial
    return Run(subject, variant, 0, trials, "trials", tuple(rounds), calls, start, chosen, last)


TWO = run(
    "gradient",
    [Round("a", 4, 1.0, 10.0, 10.0), Round("b", 8, 2.0, 3.0, 6.0), Round("a", 12, 3.0, 5.0, 10.0)],
    {"a": 1, "b": 2},
    trials=12,
)


def test_a_curve_ends_where_the_race_has_it() -> None:
    """a takes 4 s in the race, where the run saw 5; b, called twice, 3 s."""
    points = tables.curve(TWO, {"a": 4.0, "b": 3.0}, {"a": 9.0, "b": 7.0})
    assert points == [
        Point(0, 0.0, 9.0 + 2 * 7.0),
        Point(4, 1.0, 8.0 + 2 * 7.0),
        Point(8, 2.0, 8.0 + 2 * 3.0),
        Point(12, 3.0, 4.0 + 2 * 3.0),
    ]


def test_a_choice_takes_what_it_does_since_it_was_measured() -> None:
    """The start, say: that others seemed faster later, and lost the race, is no progress."""
    early = structs.replace(TWO, found={"a": 3, "b": 4})
    points = tables.curve(early, {"a": 4.0, "b": 3.0}, {"a": 9.0, "b": 7.0})
    assert [point.time for point in points] == [23.0, 18.0, 10.0, 10.0]


def test_without_a_time_before_a_curve_begins_when_every_task_was_measured() -> None:
    assert [point.trials for point in tables.curve(TWO, {"a": 4.0, "b": 3.0}, {})] == [8, 12]


def test_where_a_quality_is_reached() -> None:
    points = [Point(4, 1.0, 8.0), Point(8, 2.0, 6.0), Point(12, 3.0, 5.0)]
    assert tables.reached(points, 6.0) == points[1] and tables.reached(points, 5.5) == points[2]
    assert tables.reached(points, 4.9) is None
    assert [tables.after(points, trials) for trials in (3, 4, 11, 99)] == [float("inf"), 8.0, 6.0, 5.0]


@pytest.fixture
def raced() -> Runs:
    """The whole space takes 100, after two rounds 101 (within 98%); half of it 125."""
    runs = Runs()
    runs.add(run("full", [Round("k", 4, 1.5, 202.0, 0), Round("k", 8, 2.5, 200.0, 0)], {"k": 1}))
    runs.add(run("without sketches", [Round("k", 4, 1.0, 150.0, 0), Round("k", 8, 2.0, 125.0, 0)], {"k": 1}))
    runs.add(run("without templates", [], {}))
    seconds = {"full": {"k": 100.0}, "without sketches": {"k": 125.0}, "without templates": {}}
    runs.add(Raced("one", 0, 8, tables.SPACES, seconds))
    return runs


def test_the_rows_and_totals_of_tasks(raced: Runs) -> None:
    rows = tables.task_rows(raced, ["one", "unknown"], {name: name for name in tables.SPACES}, 0, 8)
    assert [(row.label, row.seconds, row.share) for row in rows] == [
        ("full", 100.0, 1.0),
        ("without sketches", 125.0, 0.8),
        ("without templates", None, 0.0),
    ]
    assert rows[0].good == Point(4, 1.5, 101.0) and rows[1].good is None
    full, sketches, templates = tables.totals(rows)
    assert (full.good, full.tasks, full.trials, full.seconds) == (1, 1, 4, 1.5)
    assert (sketches.good, sketches.trials, sketches.seconds) == (0, 8, 2.0)  # all that it spent
    assert templates.share == 0.0 and templates.good == 0
    text = tables.task_tables(rows)
    assert "| without sketches | 80.0% | 0 of 1 | more than 8 | more than 2.0 |" in text
    assert "| one | without templates | nothing computes it |" in text


def test_the_table_of_allocations_asks_for_what_the_slowest_reaches() -> None:
    slow = run("round-robin", [Round("a", 4, 2.0, 8.0, 0)], {"a": 1})
    fast = run("gradient", [Round("a", 4, 1.0, 6.0, 0), Round("a", 8, 2.0, 3.0, 0)], {"a": 1})
    seconds = {"round-robin": {"a": 8e-3}, "gradient": {"a": 3e-3}, BEFORE: {"a": 9e-3}}
    text = tables.schedule_table(
        "one", [slow, fast], Raced("one", 0, 8, ("round-robin", "gradient"), seconds)
    )
    assert "trials to 8.000 ms" in text
    assert "| gradient | 9.000 ms | 9.000 ms | 9.000 ms | 6.000 ms | 6.000 ms | 3.000 ms | 4 | 1.0 |" in text
    assert (
        "| round-robin | 9.000 ms | 9.000 ms | 9.000 ms | 8.000 ms | 8.000 ms | 8.000 ms | 4 | 2.0 |" in text
    )


def test_what_is_unfinished_is_said(raced: Runs) -> None:
    options = Namespace(
        target="cpu",
        only=["space", "cost", "schedule"],
        tasks=["one", "two"],
        models=["bert-base"],
        seed=0,
        trials=8,
        model_trials=8,
    )
    machine = {"target": "t", "cpu": "c", "cores": 2, "load_average": 0.1, "date": "today"}
    space, cost, schedule = tables.document(raced, machine, options).split("\n## ")[1:]
    assert "Unfinished: two." in space and "80.0%" in space
    assert "Unfinished: one, two." in cost and "Unfinished: bert-base." in schedule


def test_a_file_of_runs_outlives_a_damaged_line(raced: Runs, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "runs.jsonl"
    kept = Runs.open(path)
    for line in (*raced.found, *raced.races):
        kept.add(line)
    with path.open("ab") as file:
        file.write(b'{"type": "run", "subj')
    again = Runs.open(path)
    assert again.found == raced.found and again.races == raced.races
    assert again.raced("one", 0, 8, ["full"]) == raced.races[0]
    assert again.raced("one", 0, 8, ["full", "analytical only"]) is None


def test_runs_go_through_the_tuner_and_are_not_run_again(tmp_path: Path) -> None:
    told = Told(varied)
    path, work = tmp_path / "runs.jsonl", Work(product(), host())
    names = ["full", "without sketches", "without templates"]
    bench = ablations.Bench(
        resolve_target("cpu"), Runs.open(path), 60.0, threads=1, search="random", runner=told
    )
    bench.task("matmul", work, names, trials=8)
    assert [found.variant for found in bench.runs.found] == names
    whole, templates, sketches = bench.runs.found
    assert [found.measured for found in bench.runs.found] == [8, 8, 8]
    assert not any(config.template.startswith("sketch:") for config in templates.chosen.values())
    others = {config.template for config in sketches.chosen.values()}
    assert all(name.startswith("sketch:") or name == "default" for name in others)
    race = bench.runs.raced("matmul", 0, 8, names)
    assert race is not None and set(race.seconds) == {*names, BEFORE}
    measured = len(told.measured)
    again = ablations.Bench(
        resolve_target("cpu"), Runs.open(path), 60.0, threads=1, search="random", runner=told
    )
    again.task("matmul", work, names, trials=8)
    assert len(told.measured) == measured and again.runs.found == bench.runs.found
    assert whole.rounds[-1].seconds > 0 and all(1 <= each <= 8 for each in whole.found.values())


def test_every_allocation_is_run_and_what_the_time_ends_is_not_kept(tmp_path: Path) -> None:
    works = {work.task.key: (work, 1) for work in (Work(product(rows), host()) for rows in (8, 9))}
    target, told = resolve_target("cpu"), Told(varied)
    bench = ablations.Bench(target, Runs(), 60.0, threads=1, search="random", runner=told)
    bench.model("both", works, trials=8)
    found = bench.runs.of_model("both", 0, 8)
    assert [each.variant for each in found] == list(tables.ALLOCATIONS)
    assert {each.measured for each in found} == {16}
    assert bench.runs.raced("both", 0, 16, tables.ALLOCATIONS) is not None
    late = ablations.Bench(target, Runs(), 1e-6, threads=1, search="random", runner=told)
    late.model("both", works, trials=8)
    assert not late.runs.found and not late.runs.races


# -- parts added in turn ----------------------------------------------------------------------------------------------


def test_what_a_template_is_a_part_of() -> None:
    names = ("default", "sketch:micro+pack", "sketch:tensorised", "contraction_int8", "contraction")
    assert [steps.kind_of(name) for name in names] == [
        "default",
        "sketch",
        "instruction",
        "instruction",
        "template",
    ]


def test_each_step_adds_to_the_one_before() -> None:
    for one, two in pairwise(steps.STEPS):
        assert one.kinds <= two.kinds
        pairs = ((one.kinds, two.kinds), (one.partition, two.partition), (one.allocation, two.allocation))
        assert sum(a != b for a, b in pairs) == 1
    assert steps.STEPS[-1].kinds == {"default", "instruction", "sketch", "template"}


class TwoCuts:
    """A model that both partitions cut alike, into two tasks."""

    def works(self, name: str, partition: str) -> dict[str, tuple[Work, int]]:
        return {work.task.key: (work, 2) for work in (Work(product(rows), host()) for rows in (8, 9))}


def test_every_step_is_run_with_its_part_of_the_space(tmp_path: Path) -> None:
    path, told = tmp_path / "runs.jsonl", Told(varied)
    bench = ablations.Bench(
        resolve_target("cpu"), Runs.open(path), 60.0, threads=1, search="random", runner=told
    )
    bench.steps("small", TwoCuts(), trials=4)  # type: ignore[arg-type]
    found = {run.variant: run for run in bench.runs.found}
    assert tuple(found) == steps.NAMES

    def kinds(name: str) -> set[str]:
        return {steps.kind_of(config.template) for config in found[name].chosen.values()}

    assert kinds("default programs") == kinds("+ dynamic partition") == {"default"}
    assert kinds("+ task scheduler") <= {"default", "sketch"}
    text = steps.steps_section(Runs.open(path), ["small", "large"], 0, 4)
    assert text.count("| + ") == 5 and "Unfinished: large." in text
    run, race = found["+ register mapping"], bench.runs.races[0]
    assert f"{steps.total(run, race.seconds[run.variant]) * 1e3:.3f}" in text


def test_a_task_that_only_templates_compute_has_the_whole_space() -> None:
    x = Inputs()
    heads = (x(2, 8, 16), x(2, 8, 16), x(2, 8, 16))
    work = Work(x.task(apply("attention", *heads, scale=0.25, causal=False)), host())
    narrow = steps.Stepped(work, 1, step=steps.STEPS[0])
    assert narrow.is_whole and narrow.start.config.template != "default"
