"""The arithmetic and the tables of `ablations.py`: finished runs -> trials and seconds to the same quality."""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from tilewright.space.space import Config

GOOD = 0.98  # of the speed of the best, at which a run is asked how long it took
MODELS = ("mobilenetv2", "bert-base")
SPACES = ("full", "without sketches", "without templates")
COSTS = {"both": "full", "analytical only": "analytical only", "boosted from nothing": "boosted from nothing"}
BEFORE = "before"
ALLOCATIONS = ("round-robin", "heaviest", "gradient")
PARTS = (0.125, 0.25, 0.5, 0.75, 1.0)  # of the trials, after which a model's time is looked at


class Round(msgspec.Struct, frozen=True):
    """After a round for one task: trials and seconds of the whole run, the task's best time and that before tuning."""

    task: str
    trials: int
    seconds: float
    best: float
    before: float


class Run(msgspec.Struct, frozen=True, tag="run"):
    """A line of the file: a finished run. `trials`: that it could have. `start`: of each task, what would be chosen
    without measuring. `found`: after how many of its own trials each task's choice had been measured."""

    subject: str
    variant: str
    seed: int
    trials: int
    ended: str
    rounds: tuple[Round, ...]
    calls: dict[str, int]
    start: dict[str, Config]
    chosen: dict[str, Config]
    found: dict[str, int]

    @property
    def measured(self) -> int:
        return self.rounds[-1].trials if self.rounds else 0


class Raced(msgspec.Struct, frozen=True, tag="raced"):
    """A line of the file: what each task takes as each run has chosen, timed interleaved, and as BEFORE. What is
    missing has no time."""

    subject: str
    seed: int
    trials: int
    variants: tuple[str, ...]
    seconds: dict[str, dict[str, float]]


@dataclass
class Runs:
    """What is finished, in a file that grows by a line at a time; without a path, in memory alone."""

    path: Path | None = None
    found: list[Run] = field(default_factory=list)
    races: list[Raced] = field(default_factory=list)

    @classmethod
    def open(cls, path: Path | None) -> Runs:
        """A line that is damaged, as by a power cut, is one run less."""
        runs = cls(path)
        lines = path.read_bytes().splitlines() if path is not None and path.exists() else []
        for line in lines:
            with contextlib.suppress(msgspec.MsgspecError):
                runs._keep(msgspec.json.decode(line, type=Run | Raced))
        return runs

    def _keep(self, line: Run | Raced) -> None:
        if isinstance(line, Run):
            self.found.append(line)
        else:
            self.races.append(line)

    def add(self, line: Run | Raced) -> None:
        self._keep(line)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                file.write(msgspec.json.encode(line) + b"\n")

    def get(self, subject: str, variant: str, seed: int, trials: int) -> Run | None:
        asked = subject, variant, seed, trials
        return next((r for r in self.found if (r.subject, r.variant, r.seed, r.trials) == asked), None)

    def of_model(self, name: str, seed: int, trials: int) -> list[Run]:
        """A run for each allocation, with so many trials for each task on average; none where one is missing."""
        found = [
            next(
                (
                    run
                    for run in self.found
                    if (run.subject, run.variant, run.seed) == (name, allocation, seed)
                    and run.trials == trials * len(run.calls)
                ),
                None,
            )
            for allocation in ALLOCATIONS
        ]
        complete = [run for run in found if run is not None]
        return complete if len(complete) == len(found) else []

    def raced(self, subject: str, seed: int, trials: int, variants: Sequence[str]) -> Raced | None:
        """The latest race that all of these took part in."""
        asked = subject, seed, trials
        such = [r for r in self.races if (r.subject, r.seed, r.trials) == asked]
        return next((r for r in reversed(such) if set(variants) <= set(r.variants)), None)


# -- curves -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    trials: int
    seconds: float
    time: float  # of a call of the task or the model


def curve(run: Run, raced: Mapping[str, float], before: Mapping[str, float]) -> list[Point]:
    """The time of all tasks together after each round, and before the first. `raced`: what each task's choice takes,
    timed interleaved with those of other runs: what it takes since it was measured, and in units of which earlier times
    are. `before`: the same of what would be chosen without measuring, where that is to be compared with."""
    last = {each.task: each.best for each in run.rounds}
    own = dict.fromkeys(run.calls, 0)  # trials
    done = 0
    now = {task: seconds for task, seconds in before.items() if task in run.calls}
    points = []

    def look(trials: int, seconds: float) -> None:
        if all(task in now for task in run.calls):
            total = sum(calls * now[task] for task, calls in run.calls.items())
            points.append(Point(trials, seconds, total))

    if before:
        look(0, 0.0)
    for each in run.rounds:
        own[each.task] += each.trials - done
        done = each.trials
        final = raced.get(each.task, last[each.task])
        is_found = own[each.task] >= run.found.get(each.task, 0)
        now[each.task] = final if is_found else max(final, final * each.best / last[each.task])
        look(each.trials, each.seconds)
    return points


def reached(curve: Sequence[Point], time: float) -> Point | None:
    """Where it first was as fast as that."""
    return next((point for point in curve if point.time <= time * (1 + 1e-9)), None)


def after(curve: Sequence[Point], trials: float) -> float:
    """The time after so many trials; infinite where the first round had more."""
    return min((point.time for point in curve if point.trials <= trials), default=math.inf)


# -- tables -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A variant on a task. `share`: of the speed of the best variant; 0 where nothing computes the task. `good`: where
    it was within 98% of that; None: never, within the trials that it had."""

    task: str
    label: str
    seconds: float | None
    share: float
    good: Point | None
    trials: int
    spent: float  # seconds of all of its trials


def task_rows(
    runs: Runs, tasks: Sequence[str], variants: Mapping[str, str], seed: int, trials: int
) -> list[Row]:
    """Of the tasks that have all of their runs."""
    rows: list[Row] = []
    for task in tasks:
        race = runs.raced(task, seed, trials, list(variants.values()))
        found = {label: runs.get(task, variant, seed, trials) for label, variant in variants.items()}
        if race is None or any(run is None for run in found.values()):
            continue
        times = {
            label: sum(race.seconds[variant].values())
            for label, variant in variants.items()
            if race.seconds.get(variant)
        }
        best = min(times.values(), default=math.inf)
        for label, run in found.items():
            assert run is not None
            spent = run.rounds[-1].seconds if run.rounds else 0.0
            if label not in times:
                rows.append(Row(task, label, None, 0.0, None, run.measured, spent))
                continue
            seconds = times[label]
            good = reached(curve(run, race.seconds[variants[label]], {}), best / GOOD)
            rows.append(Row(task, label, seconds, best / seconds, good, run.measured, spent))
    return rows


@dataclass(frozen=True)
class Total:
    """A variant on all tasks. A task on which it was never good counts with all that it spent there."""

    label: str
    share: float  # geometric mean; 0 where there is a task that nothing computes
    good: int
    tasks: int
    trials: int
    seconds: float


def totals(rows: Sequence[Row]) -> list[Total]:
    found = []
    for label in dict.fromkeys(row.label for row in rows):
        own = [row for row in rows if row.label == label]
        share = 0.0 if any(not row.share for row in own) else _geomean([row.share for row in own])
        found.append(
            Total(
                label,
                share,
                sum(row.good is not None for row in own),
                len(own),
                sum(row.good.trials if row.good else row.trials for row in own),
                sum(row.good.seconds if row.good else row.spent for row in own),
            )
        )
    return found


def _geomean(values: Sequence[float]) -> float:
    return math.exp(statistics.mean(map(math.log, values)))


def task_tables(rows: Sequence[Row]) -> str:
    lines = [["task", "", "best, us", "of the best", "trials to 98%", "seconds to 98%", "trials in all"]]
    for row in rows:
        if row.seconds is None:
            lines.append([row.task, row.label, "nothing computes it", "", "", "", ""])
            continue
        good = ("never", "never") if row.good is None else (str(row.good.trials), f"{row.good.seconds:.1f}")
        lines.append(
            [row.task, row.label, f"{row.seconds * 1e6:.1f}", _percent(row.share), *good, str(row.trials)]
        )
    summary = [["all tasks", "of the best, geomean", "tasks at 98%", "trials to it", "seconds to it"]]
    for one in totals(rows):
        least = "" if one.good == one.tasks else "more than "
        summary.append(
            [
                one.label,
                _percent(one.share) if one.share else "-",
                f"{one.good} of {one.tasks}",
                f"{least}{one.trials}",
                f"{least}{one.seconds:.1f}",
            ]
        )
    return f"{table_of(summary)}\n\n{table_of(lines)}"


def schedule_table(name: str, runs: Sequence[Run], race: Raced) -> str:
    """Of one model, a row for each allocation."""
    before = race.seconds[BEFORE]
    curves = {run.variant: curve(run, race.seconds[run.variant], before) for run in runs}
    most = max(run.trials for run in runs)
    worst = max(points[-1].time for points in curves.values())
    asked = [round(part * most) for part in PARTS]
    head = [name, "before", *(f"{count} trials" for count in asked)]
    head += [f"trials to {worst * 1e3:.3f} ms", "seconds to it", "in all"]
    lines = [head]
    for label, points in curves.items():
        point = reached(points, worst)
        assert point is not None
        times = (points[0].time, *(after(points, count) for count in asked))
        spent = f"{points[-1].trials} trials, {points[-1].seconds:.1f} s"
        lines.append(
            [label, *(f"{t * 1e3:.3f} ms" for t in times), str(point.trials), f"{point.seconds:.1f}", spent]
        )
    return table_of(lines)


def document(runs: Runs, machine: Mapping[str, Any], options: argparse.Namespace) -> str:
    """The markdown. What is unfinished is said."""
    parts = [
        f"# Ablations of the tuner, on {'a GPU' if options.target == 'cuda' else 'a CPU'}",
        f"{machine['target']}; {machine['cpu']}, {machine['cores']} cores, load {machine['load_average']},"
        f" {machine['date']}. By `python benchmarks/ablations.py --target {options.target}`, seed {options.seed}.",
    ]
    sections: list[tuple[str, str, Mapping[str, str], str]] = [
        ("space", "The search space", {name: name for name in SPACES}, SPACE_TEXT),
        ("cost", "The cost model", COSTS, COST_TEXT),
    ]
    for kind, title, variants, text in sections:
        if kind in options.only:
            rows = task_rows(runs, options.tasks, variants, options.seed, options.trials)
            missing = [task for task in options.tasks if task not in {row.task for row in rows}]
            parts += [f"## {title}", text.format(trials=options.trials)]
            parts += [task_tables(rows)] if rows else []
            parts += _unfinished(missing)
    if "schedule" in options.only:
        parts += ["## The task scheduler", SCHEDULE_TEXT.format(trials=options.model_trials)]
        missing = []
        for name in options.models:
            own = runs.of_model(name, options.seed, options.model_trials)
            race = own and runs.raced(name, options.seed, own[0].trials, ALLOCATIONS)
            if own and race:
                parts.append(schedule_table(name, own, race))
            else:
                missing.append(name)
        parts += _unfinished(missing)
    return "\n\n".join(parts) + "\n"


SPACE_TEXT = (
    "Each run has {trials} trials of one task, fewer where its search ends before that. The choices of a task are timed"
    " interleaved. 98%: of the speed of the fastest of these choices."
)
COST_TEXT = (
    "The whole space, {trials} trials of one task at most. Boosted from nothing: the trees learn the time itself, and"
    " the first trial alone is what the analytical model would choose."
)
SCHEDULE_TEXT = (
    "Each run has {trials} trials for each task of a model on average. Times: the sum over the tasks, each as often as"
    " it is called; the choices of each task are timed interleaved. The last columns: how long each run took to be as"
    " fast as the slowest of them is in the end."
)


def _unfinished(names: Sequence[str]) -> list[str]:
    return [f"Unfinished: {', '.join(names)}."] if names else []


def table_of(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *body))


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"
