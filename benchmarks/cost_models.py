"""Cost models on tasks that they have not seen: whole tasks held out, several folds and seeds.

    python benchmarks/cost_models.py DATA... [--device cuda] [--jobs 12] [--seeds 5] [--json FILE] [--markdown FILE]
                                     [--weights FILE] [--log FILE] [--methods attention;boosted]
                                     [--parts held-out,ablation,machine,search,speed]

DATA are files of `tilewright dataset collect` or `merge`. A table has the measured configs of one task on one machine.
Tables of tasks that are near copies of each other are held out together, with all their machines (`dataset/split.py`).

    top-k           the best measured time over the best of the k configs ranked first; a failure counts as never
    TenSet's top-k  the same of sums over all tables: sum of best times / sum of the best of the k ranked first; TenSet
                    and TLP weigh tasks by how often a network has them, and here each table counts once
    pairs           share of pairs of configs whose times differ by more than 2%, in the right order

`random` is the expectation over random orders. `boosted`, `LambdaRank` (LightGBM) and `MLP` (TenSet's: two hidden
layers, regression of the same target) see the tokens of the attention model as one flat vector.

In the ablation, `statements alone` sees nothing but the statements of the loop programs, which are made for all
configs; `without pre-training` is the model as it is without weights: what the analytical model predicts. `speed` needs
no data: see cost_speed.py.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout that is not installed

import cost_report
import cost_speed
from cost_baselines import perceptron, trees
from cost_report import (
    ABLATION_ROWS,
    NETWORK_ALONE,
    SEARCHES,
    STATEMENTS,
    TREES_ALONE,
    UNTRAINED,
    Score,
    at_random,
    judged,
    kind_of,
    report,
)
from tilewright.cost import weights
from tilewright.cost.attention import Attention
from tilewright.cost.boosted import Boosted
from tilewright.cost.forest import PREFIX, Forest, flat_rows
from tilewright.cost.model import CostModel
from tilewright.cost.network import LEVELS, STATEMENT
from tilewright.dataset.split import families, folds
from tilewright.dataset.store import read
from tilewright.dataset.tables import Table, tables_of
from tilewright.dataset.train import TrainingSettings, about, predicted, train
from tilewright.db.record import Key, Record
from tilewright.errors import CostModelWarning
from tilewright.space.candidates import Candidates
from tilewright.space.outcome import Outcome

PARTS = ("held-out", "ablation", "machine", "search", "speed")
FOLDS = 5
BATCH, GOAL = 4, 0.98

SETTINGS = TrainingSettings()

# What the attention model sees and has, step by step.
ABLATION: dict[str, dict[str, Any]] = {
    STATEMENTS: {"levels": ("terms", STATEMENT), "residual": False},  # with terms that are all zero
    "knobs and terms": {"levels": ("terms", "knob"), "residual": False},
    "+ task": {"levels": ("terms", "knob", "task"), "residual": False},
    "+ instruction": {"levels": ("terms", "knob", "task", "instruction"), "residual": False},
    "+ machine": {"levels": LEVELS, "residual": False},
    "+ analytical residual": {"levels": LEVELS},
    "+ trees": {"levels": LEVELS, "trees": SETTINGS.trees},
    "without ranking loss": {"levels": LEVELS, "ranking": 0.0},
    UNTRAINED: {},
}
assert tuple(ABLATION) == ABLATION_ROWS


# -- search -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Search:
    """`trials`: until a config within 2% of the best was measured; `reached`: whether one was. `thinking`: CPU seconds
    of the model; `building`: seconds that the builds of its trials took when they were recorded."""

    trials: int
    reached: bool
    thinking: float
    building: float


def searched(model: CostModel, table: Table) -> Search:
    """Four at a time, the most promising ones first."""
    outcomes = {
        config: Outcome(config, float(s) if math.isfinite(s) else None, "" if math.isfinite(s) else "build")
        for config, s in zip(table.configs, table.seconds, strict=True)
    }
    builds = dict(zip(table.configs, table.builds.tolist(), strict=True))
    best = float(np.nanmin(table.seconds))
    left, trials, thinking, building = list(table.configs), 0, 0.0, 0.0
    while left and trials < cost_report.MAX_TRIALS:
        begin = time.process_time()
        found = model.predict(left)
        scores = found.optimistic() / np.maximum(found.valid, 1e-3)
        chosen = [left[at] for at in np.argsort(scores, kind="stable")[:BATCH]]
        thinking += time.process_time() - begin
        for config in chosen:
            trials, building = trials + 1, building + builds[config]
            seconds = outcomes[config].seconds
            if seconds is not None and best / seconds >= GOAL:
                return Search(trials, True, thinking, building)
        begin = time.process_time()
        model.update([outcomes[config] for config in chosen])
        thinking += time.process_time() - begin
        left = [config for config in left if config not in set(chosen)]
    return Search(trials, False, thinking, building)


# -- jobs -------------------------------------------------------------------------------------------------------------

_TABLES: dict[str, list[Table]] = {}


@dataclass(frozen=True)
class Job:
    part: str
    method: str
    fold: int
    seed: int
    held_out: tuple[int, ...]
    training: tuple[int, ...]
    device: str
    cache: str
    steps: int
    save: str = ""
    data: tuple[str, ...] = ()  # the files that the tables are from


def run(job: Job) -> list[Score]:
    try:
        return _run(job)
    except Exception as error:  # one job less, and the others count
        print(
            f"{job.part} {job.method} {job.fold} {job.seed}: {type(error).__name__}: {error}", file=sys.stderr
        )
        return []


def _run(job: Job) -> list[Score]:
    if job.cache not in _TABLES:
        _TABLES[job.cache] = pickle.loads(Path(job.cache).read_bytes())
    tables = _TABLES[job.cache]
    tests, training = [tables[at] for at in job.held_out], [tables[at] for at in job.training]
    seed, where = job.seed, (job.part, job.method, job.fold, job.seed)
    if job.method == "random":
        return [at_random(job.part, job.fold, seed, table) for table in tests]
    if job.part == "search":
        return _search(job, tests, training)
    if job.method in ("analytical", UNTRAINED):
        found = [table.base for table in tests]
    elif job.method in ("boosted", "LambdaRank"):
        found = trees(job.method, training, tests, seed)
    elif job.method == "MLP":
        found = perceptron(training, tests, seed, job.device, 2 * job.steps + 100)
    else:
        return _attention(job, tests, training)
    return [judged(*where, table, scores) for table, scores in zip(tests, found, strict=True)]


def _attention(job: Job, tests: Sequence[Table], training: Sequence[Table]) -> list[Score]:
    settings = replace(SETTINGS, seed=job.seed, steps=job.steps)
    if job.part == "ablation":
        settings = replace(settings, **{"trees": 0, **ABLATION[job.method]})
    if job.method == STATEMENTS:
        tests, training = ([_without_terms(table) for table in some] for some in (tests, training))
    tensors = _trained(training, settings, job)
    found = {job.method: [predicted(tensors, table, settings) for table in tests]}
    if settings.trees and job.part != "ablation":
        network = {name: tensor for name, tensor in tensors.items() if not name.startswith(PREFIX)}
        found[NETWORK_ALONE] = [predicted(network, table, settings) for table in tests]
        forest = Forest.of(tensors)
        assert forest is not None
        found[TREES_ALONE] = [table.base + forest(flat_rows(table.tokens)) for table in tests]
    return [
        judged(job.part, name, job.fold, job.seed, table, scores)
        for name, some in found.items()
        for table, scores in zip(tests, some, strict=True)
    ]


def _without_terms(table: Table) -> Table:
    return replace(table, tokens=replace(table.tokens, terms=np.zeros_like(table.tokens.terms)))


def _trained(training: Sequence[Table], settings: TrainingSettings, job: Job) -> dict[str, np.ndarray]:
    if job.device == "cpu":
        import torch

        torch.set_num_threads(1)
    tensors = train(training, settings, device=job.device)
    if job.save:
        weights.save(
            Path(job.save),
            tensors,
            about(training, [Path(file) for file in job.data], settings.steps, settings.seed),
        )
    return tensors


def _search(job: Job, tests: Sequence[Table], training: Sequence[Table]) -> list[Score]:
    with tempfile.TemporaryDirectory() as folder:
        return _searches(job, tests, training, Path(folder) / "weights.safetensors")


def _searches(job: Job, tests: Sequence[Table], training: Sequence[Table], path: Path) -> list[Score]:
    """`path`: a file for the weights."""
    if job.method == "attention":
        tensors = _trained(training, replace(SETTINGS, seed=job.seed, steps=job.steps), job)
        weights.save(path, tensors, {})
    scores = []
    for table in tests:
        candidates, threads = Candidates.of(table.job.work()), table.job.threads
        model: CostModel
        if job.method == "attention":
            model = Attention(candidates, threads, seed=job.seed, path=path)
        elif job.method == f"attention, {UNTRAINED}":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", CostModelWarning)  # the weights are missing on purpose
                model = Attention(candidates, threads, seed=job.seed, path=path)
        else:
            model = Boosted(candidates, threads, seed=job.seed, prior=job.method == "boosted")
        found, nothing = searched(model, table), np.zeros(len(table.configs))
        score = judged(job.part, job.method, job.fold, job.seed, table, nothing)
        scores.append(replace(score, **asdict(found)))
    return scores


def jobs_of(
    tables: Sequence[Table],
    parts: Sequence[str],
    seeds: int,
    device: str,
    cache: str,
    steps: int,
    folds_each: int = FOLDS,
) -> list[Job]:
    """`folds_each`: of the folds, how many are held out, one after the other."""
    everything = set(range(len(tables)))
    jobs: list[Job] = []

    def add(part: str, methods: Sequence[str], fold: int, seed: int, held_out: Sequence[int]) -> None:
        rest = sorted(everything - set(held_out))
        if rest:
            both = tuple(held_out), tuple(rest)
            jobs.extend(Job(part, m, fold, seed, *both, device, cache, steps) for m in methods)

    kinds = sorted({kind_of(table) for table in tables})
    for seed in range(seeds):
        for fold, held_out in enumerate(folds(tables, FOLDS, seed)[:folds_each]):
            if "held-out" in parts:
                add("held-out", ["attention", "MLP", "boosted", "LambdaRank"], fold, seed, held_out)
                add("held-out", ["analytical", "random"], fold, seed, held_out)
            if "ablation" in parts:
                add("ablation", list(ABLATION), fold, seed, held_out)
        for number, kind in enumerate(kinds):
            if "machine" in parts and kind != "GPU":
                held_out = [at for at, table in enumerate(tables) if kind_of(table) == kind]
                add("machine", ["attention", "boosted", "analytical"], number, seed, held_out)
        for number, (_, held_out) in enumerate(sorted(families(tables).items())):
            if "search" in parts:
                add("search", SEARCHES, number, seed, held_out)
    return jobs


def in_order(jobs: Sequence[Job]) -> list[Job]:
    """What takes no time first, then seed by seed, all methods of a fold together."""
    order = ("weights", "held-out", "machine", "search", "ablation")
    return sorted(
        jobs, key=lambda j: (j.method not in ("analytical", "random"), j.seed, order.index(j.part), j.fold)
    )


def thinned(records: Sequence[Record], count: int, seed: int = 0) -> list[Record]:
    """At most `count` records of each task on each machine, drawn at random."""
    groups: dict[Key, list[Record]] = {}
    for record in records:
        groups.setdefault(record.key, []).append(record)
    found: list[Record] = []
    for some in groups.values():
        found += Random(seed).sample(
            sorted(some, key=lambda record: str(record.config)), min(count, len(some))
        )
    return found


class Log:
    """A file with the scores of every job that is done, so that a run can be interrupted and goes on."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._done: dict[str, list[Score]] = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                entry = json.loads(line)
                self._done[entry["job"]] = [Score(**score) for score in entry["scores"]]

    @staticmethod
    def _name(job: Job) -> str:
        """What its scores depend on but for the code and the data."""
        return (
            f"{job.part}; {job.method}; fold {job.fold}; seed {job.seed}; {job.steps} steps; {job.held_out}"
        )

    def of(self, job: Job) -> list[Score] | None:
        return self._done.get(self._name(job))

    def add(self, job: Job, scores: list[Score]) -> None:
        self._done[self._name(job)] = scores
        if self._path is not None and scores:
            with self._path.open("a") as file:
                entry = {"job": self._name(job), "scores": [asdict(score) for score in scores]}
                file.write(json.dumps(entry) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, nargs="*")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=SETTINGS.steps, help="of training")
    parser.add_argument("--parts", default="held-out,ablation,machine,search")
    parser.add_argument("--methods", default="", help="only these, separated by semicolons")
    parser.add_argument("--ablation-configs", type=int, default=40, help="of each table of the ablation")
    parser.add_argument("--ablation-folds", type=int, default=FOLDS, help="of the ablation, the first ones")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="jobs that are not done by then are left"
    )
    parser.add_argument("--log", type=Path, help="keep scores in this file, and do not run again what it has")
    parser.add_argument("--weights", type=Path, help="also train on everything, into this file")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--configs", type=int, default=1000, help="of speed")
    options = parser.parse_args()
    begin, parts = time.monotonic(), options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts must be some of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    texts: list[str] = []
    if "speed" in parts:
        texts.append(cost_speed.table(cost_speed.speed(options.configs)))
        parts.remove("speed")
        if not parts and options.weights is None:
            _write(options, [], texts, begin)
            return
    if not options.data:
        parser.error("DATA is needed: files of `tilewright dataset collect`; only --parts speed goes without")
    records = read(*options.data).records
    tables, left = tables_of(records, processes=options.jobs)
    print(
        f"{len(tables)} tables, {sum(len(t.configs) for t in tables)} configs, {time.monotonic() - begin:.0f} s",
        flush=True,
    )
    for reason, count in left.counts:
        print(f"{count} records {reason} are left out", flush=True)
    texts.append(cost_report.ceiling_table(cost_report.ceilings(records, tables)))
    with tempfile.TemporaryDirectory() as folder:
        cache = str(Path(folder) / "tables.pickle")
        Path(cache).write_bytes(pickle.dumps(tables))
        rest = [part for part in parts if part != "ablation"]
        jobs = jobs_of(tables, rest, options.seeds, options.device, cache, options.steps)
        if "ablation" in parts:
            few = thinned(records, options.ablation_configs)
            lowered, _ = tables_of(few, statements=True, processes=options.jobs)
            Path(f"{cache}.ablation").write_bytes(pickle.dumps(lowered))
            jobs += jobs_of(
                *(lowered, ["ablation"], options.seeds, options.device, f"{cache}.ablation", options.steps),
                folds_each=options.ablation_folds,
            )
        if methods := {method for method in options.methods.split(";") if method}:
            jobs = [job for job in jobs if job.method in methods]
        jobs = in_order(jobs)
        if options.weights:
            everything, files = tuple(range(len(tables))), tuple(map(str, options.data))
            own = Job("weights", "attention", 0, 0, (), everything, options.device, cache, options.steps)
            jobs.insert(0, replace(own, save=str(options.weights), data=files))
        scores, is_late = _scores(jobs, options, begin)
        _write(options, scores, texts, begin)
        if is_late:  # jobs that run cannot be interrupted otherwise
            sys.stdout.flush()
            os._exit(0)


def _scores(jobs: Sequence[Job], options: argparse.Namespace, begin: float) -> tuple[list[Score], bool]:
    """The scores of the jobs, and whether some were left because the time was over."""
    log, scores = Log(options.log), list[Score]()
    wanted = []
    for job in jobs:
        known = log.of(job) if not job.save else None
        if known is None:
            wanted.append(job)
        else:
            scores += known
    if not wanted:
        return scores, False
    is_late = False
    pool = ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn"))
    futures = [pool.submit(run, job) for job in wanted]
    for job, future in zip(wanted, futures, strict=True):
        rest = options.seconds - (time.monotonic() - begin)
        try:
            found = future.result(timeout=None if math.isinf(rest) else max(rest, 0.1))
        except TimeoutError:
            is_late = True
            future.cancel()
            print(
                f"no time was left for {job.part} {job.method}, fold {job.fold}, seed {job.seed}", flush=True
            )
            continue
        log.add(job, found)
        scores += found
    if not is_late:
        pool.shutdown()
    return scores, is_late


def _write(options: argparse.Namespace, scores: list[Score], texts: list[str], begin: float) -> None:
    text = "\n".join(filter(None, [report(scores), *texts]))
    print(text)
    print(f"\n{time.monotonic() - begin:.0f} s")
    if options.markdown:
        options.markdown.write_text(text + "\n")
    if options.json:
        options.json.write_text(json.dumps([asdict(score) for score in scores]) + "\n")


if __name__ == "__main__":
    main()
