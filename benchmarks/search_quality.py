#!/usr/bin/env python3
"""How good searches are, compared with what measuring everything finds.

    python benchmarks/search_quality.py build [--tasks gemm_square,conv_3x3] [--builds FOLDER]
    python benchmarks/search_quality.py measure [--tasks ...] [--seconds 36]
    python benchmarks/search_quality.py replay [--tasks ...] [--json FILE] [--markdown FILE]
    python benchmarks/search_quality.py --target cuda (--collect FILE | --from FILE)      (gpu_search.py)

`build` makes every config of some tasks with small spaces: minutes a task, on this machine or, with the file of tables
that `build --tasks ''` has begun here, on another with more cores. `measure` times all of a task interleaved, for so
many seconds, and keeps them in the file; it wants a quiet machine. Both go on where they were interrupted. `replay`
runs each search on the complete tables, with several seeds, and prints by how much what it finds falls short of the
best there is. It measures nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from random import Random

import numpy as np

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout that is not installed

import gpu_search
from builds import Builds, ManyRunner, Planned
from search_tasks import MIN_POINTS, POINTS, ROUND_SECONDS, TASKS, Table, best_seconds, measure
from tilewright import knobs
from tilewright.cost.analytical import Analytical
from tilewright.cost.boosted import Boosted
from tilewright.cost.model import CostModel
from tilewright.errors import TilewrightError
from tilewright.measure.trial import TaskJob
from tilewright.search import SEARCHES
from tilewright.space.candidates import Candidates
from tilewright.space.outcome import Outcome
from tilewright.space.space import Config

SEEDS = 5
BATCH = 4
EARLY, LATE = 8, 16  # trials after which the best is looked at
COLLECT_SECONDS = 1500.0  # on a GPU, for all tasks together
TRIVIAL = 0.9  # random best of 16, above which a task tells nothing


@dataclass(frozen=True)
class SearchMethod:
    """A search with its model: what the tuner could be made of."""

    search: str
    model: Callable[[Candidates, int, int], CostModel]


SYSTEMS: dict[str, SearchMethod] = {
    "guided": SearchMethod("guided", lambda c, threads, seed: Boosted(c, threads, seed=seed)),
    "guided, analytical only": SearchMethod("guided", lambda c, threads, seed: Analytical(c, threads)),
    "guided, LambdaRank": SearchMethod(
        "guided", lambda c, threads, seed: Boosted(c, threads, objective="rank", seed=seed)
    ),
    "guided, no prior": SearchMethod(
        "guided", lambda c, threads, seed: Boosted(c, threads, prior=False, seed=seed)
    ),
    "annealing": SearchMethod("annealing", lambda c, threads, seed: Boosted(c, threads, seed=seed)),
    "annealing, no prior": SearchMethod(
        "annealing", lambda c, threads, seed: Boosted(c, threads, prior=False, seed=seed)
    ),
    "evolution": SearchMethod("evolution", lambda c, threads, seed: Boosted(c, threads, seed=seed)),
    "evolution, no prior": SearchMethod(
        "evolution", lambda c, threads, seed: Boosted(c, threads, prior=False, seed=seed)
    ),
    "random": SearchMethod("random", lambda c, threads, seed: Analytical(c, threads)),
}


@dataclass(frozen=True)
class Run:
    """One search on one task. Shares of the best speed there is."""

    system: str
    task: str
    seed: int
    early: float
    late: float
    trials: int  # after which it said that it was done, if that was before the last
    at_stop: float
    seconds: float  # of thinking


@dataclass(frozen=True)
class Standing:
    """A task's table."""

    task: str
    points: int
    failures: int
    random: float  # the mean of the best of 16 random configs
    zero: float  # what is predicted best, without any measurement

    @property
    def counts(self) -> bool:
        return self.points >= MIN_POINTS and self.random <= TRIVIAL


def standing(table: Table, outcomes: dict[Config, Outcome], threads: int) -> Standing:
    best = best_seconds(outcomes)
    shares = [share(outcome, best) for outcome in outcomes.values()]
    rng = Random(0)
    random = float(np.mean([max(rng.sample(shares, min(LATE, len(shares)))) for _ in range(1000)]))
    configs = list(outcomes)
    chosen = configs[int(np.argmin(Analytical(table.candidates, threads).predict(configs).seconds))]
    failures = sum(outcome.seconds is None for outcome in outcomes.values())
    return Standing(table.name, len(outcomes), failures, random, share(outcomes[chosen], best))


def share(outcome: Outcome, best: float) -> float:
    return 0.0 if outcome.seconds is None else best / outcome.seconds


def replay(name: str, table: Table, outcomes: dict[Config, Outcome], seed: int, threads: int) -> Run:
    system = SYSTEMS[name]
    model = system.model(table.candidates, threads, seed)
    searcher = SEARCHES[system.search](table.candidates, model, seed)
    best = best_seconds(outcomes)
    found: list[float] = []
    stopped = None
    begin = time.process_time()
    while len(found) < LATE:
        asked = searcher.ask(min(BATCH, LATE - len(found)))
        if not asked:
            break
        told = [outcomes[config] for config in asked]
        searcher.tell(told)
        found += [share(outcome, best) for outcome in told]
        if stopped is None and searcher.done:
            stopped = len(found)
    seconds = time.process_time() - begin
    stopped = stopped or len(found)
    return Run(name, table.name, seed, max(found[:EARLY]), max(found), stopped, max(found[:stopped]), seconds)


# -- what is printed --------------------------------------------------------------------------------------------------


def table_of(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *body))


def percent(value: float) -> str:
    return "-" if math.isnan(value) else f"{100 * value:.1f}%"


def report(standings: Sequence[Standing], runs: Sequence[Run]) -> str:
    counted = {one.task for one in standings if one.counts}
    summed = counted or {one.task for one in standings}  # of a few small tables: better than no results
    head = ["task", "configs", "failed", "random best of 16", "no measurement", "counts"]
    lines = [
        [
            s.task,
            str(s.points),
            str(s.failures),
            percent(s.random),
            percent(s.zero),
            "yes" if s.counts else "no",
        ]
        for s in standings
    ]
    names = list(dict.fromkeys(run.system for run in runs))
    summary = [["search", f"best in {EARLY}", f"best in {LATE}", "when it stops", "after", "thinking, s"]]
    for name in names:
        own = [run for run in runs if run.system == name and run.task in summed]
        summary.append(
            [
                name,
                percent(_mean([run.early for run in own])),
                percent(_mean([run.late for run in own])),
                percent(_mean([run.at_stop for run in own])),
                f"{_mean([run.trials for run in own]):.1f}",
                f"{_mean([run.seconds for run in own]):.2f}",
            ]
        )
    by_task = [["best in 8 / 16", *names]]
    for one in standings:
        cells = []
        for name in names:
            own = [run for run in runs if run.system == name and run.task == one.task]
            cells.append(
                f"{percent(_mean([run.early for run in own]))} / {percent(_mean([run.late for run in own]))}"
            )
        by_task.append([one.task, *cells])
    zeros = [one.zero for one in standings if one.task in summed]
    chosen = (
        f"without measurement: {percent(_mean(zeros))} on average,"
        f" {percent(float(np.percentile(zeros, 10)) if zeros else math.nan)} at the 10th percentile"
    )
    counts = f"{len(counted)} tasks count: at least {MIN_POINTS} configs, random best of {LATE} at most 90%"
    return "\n\n".join([table_of([head, *lines]), counts, chosen, table_of(summary), table_of(by_task)])


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else math.nan


# -- the two stages ---------------------------------------------------------------------------------------------------


def run_build(tables: Sequence[Table], builds: Builds, threads: int) -> None:
    plan = [
        Planned(table.name, TaskJob.of(table.candidates.work, threads), tuple(table.listed))
        for table in tables
    ]
    with ManyRunner(threads) as runner:
        builds.complete(plan, runner)


def run_measure(tables: Sequence[Table], builds: Builds, seconds: float, threads: int) -> None:
    """One that fails does not keep the others from being measured."""
    for number, table in enumerate(tables):
        if table.entries and table.complete:
            print(f"{table.name}: complete", flush=True)
            continue
        try:
            with ManyRunner(threads) as runner:
                print(f"[{number + 1}/{len(tables)}] {measure(table, runner, builds, seconds)}", flush=True)
        except TilewrightError as error:
            print(f"{table.name}: {error}", file=sys.stderr, flush=True)


def run_replay(
    tables: Sequence[Table], systems: Sequence[str], threads: int, jobs: int
) -> tuple[list[Standing], list[Run]]:
    complete = []
    for table in tables:
        if table.entries and table.complete:
            complete.append(table)
        else:
            print(f"{table.name}: not measured completely, left out", file=sys.stderr)
    sources = [(table.name, table.path, table.points, tuple(systems), threads) for table in complete]
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        found = list(pool.map(_replayed, sources))
    return [standing for standing, _ in found], [run for _, runs in found for run in runs]


def _replayed(source: tuple[str, Path, int, tuple[str, ...], int]) -> tuple[Standing, list[Run]]:
    name, path, points, systems, threads = source
    table = Table.open(name, path, points)
    outcomes = table.outcomes()
    runs = [replay(system, table, outcomes, seed, threads) for system in systems for seed in range(SEEDS)]
    return standing(table, outcomes, threads), runs


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", nargs="?", choices=("build", "measure", "replay"))
    parser.add_argument("--target", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--collect", type=Path, help="cuda: measure on the card here, into this file")
    parser.add_argument("--from", type=Path, dest="source", help="cuda: replay searches over this file")
    parser.add_argument("--tasks", help="names, separated by commas; all")
    parser.add_argument("--searches", default=";".join(SYSTEMS), help="names, separated by semicolons")
    parser.add_argument("--tables", type=Path, default=knobs.get("cache_dir") / "search_quality.jsonl")
    parser.add_argument("--points", type=int, default=POINTS, help="configs of each task, about")
    parser.add_argument("--builds", type=Path, default=knobs.get("cache_dir") / "search_builds")
    parser.add_argument("--seconds", type=float, help="for measuring a task; cuda: for all of it")
    parser.add_argument("--threads", type=int, default=knobs.usable_cores())
    parser.add_argument("--jobs", type=int, default=1, help="tasks that are replayed at the same time")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    if options.target == "cuda":
        if (options.collect is None) == (options.source is None) or options.stage:
            parser.error("with --target cuda, say either --collect FILE or --from FILE")
        options.seconds = options.seconds or COLLECT_SECONDS
        return gpu_search.run(options)
    if options.stage is None:
        parser.error("say what to do: build, measure or replay")
    wanted = ",".join(TASKS) if options.tasks is None else options.tasks
    names = [name for name in wanted.split(",") if name]
    unknown = [name for name in names if name not in TASKS]
    if unknown:
        parser.error(f"unknown task {', '.join(unknown)}; use one of {', '.join(TASKS)}")
    tables = [Table.open(name, options.tables, options.points) for name in names]
    builds = Builds(options.builds)
    if options.stage == "build":
        if not options.tables.exists():
            for name in TASKS:
                Table(name, options.tables, options.points).begin()
        run_build(tables, builds, options.threads)
        return 0
    if options.stage == "measure":
        run_measure(tables, builds, options.seconds or ROUND_SECONDS, options.threads)
        return 0
    systems = options.searches.split(";")
    standings, runs = run_replay(tables, systems, options.threads, options.jobs)
    text = report(standings, runs)
    print(text)
    if options.markdown:
        options.markdown.write_text(f"# Searches alongside measuring everything\n\n{text}\n")
    if options.json:
        plain = {"tasks": list(map(asdict, standings)), "runs": list(map(asdict, runs))}
        options.json.write_text(json.dumps(plain, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
