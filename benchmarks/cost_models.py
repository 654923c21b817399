"""Cost models on tasks that they have not seen: whole tasks held out, several folds and seeds.

    python benchmarks/cost_models.py DATA... [--device cuda] [--jobs 12] [--seeds 5] [--json FILE] [--markdown FILE]
                                     [--weights FILE] [--parts held-out,ablation,machine,search,speed]

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
import itertools
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
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout that is not installed

import cost_speed
from tilewright.cost import weights
from tilewright.cost.attention import Attention
from tilewright.cost.boosted import Boosted
from tilewright.cost.model import CostModel
from tilewright.cost.network import LEVELS, STATEMENT
from tilewright.cost.vocabulary import BUCKETS
from tilewright.dataset.split import families, folds
from tilewright.dataset.store import read
from tilewright.dataset.tables import Table, tables_of
from tilewright.dataset.train import TrainingSettings, about, predicted, train
from tilewright.errors import CostModelWarning
from tilewright.space.candidates import Candidates
from tilewright.space.outcome import Outcome

PARTS = ("held-out", "ablation", "machine", "search", "speed")
FOLDS = 5
BATCH, GOAL, MAX_TRIALS = 4, 0.98, 64

STATEMENTS, UNTRAINED = "statements alone", "without pre-training"

# What the attention model sees, step by step.
ABLATION: dict[str, dict[str, Any]] = {
    STATEMENTS: {"levels": ("terms", STATEMENT), "residual": False},  # with terms that are all zero
    "knobs and terms": {"levels": ("terms", "knob"), "residual": False},
    "+ task": {"levels": ("terms", "knob", "task"), "residual": False},
    "+ instruction": {"levels": ("terms", "knob", "task", "instruction"), "residual": False},
    "+ machine": {"levels": LEVELS, "residual": False},
    "+ analytical residual": {"levels": LEVELS},
    "without ranking loss": {"levels": LEVELS, "ranking": 0.0},
    UNTRAINED: {},
}
_STEPS = list(ABLATION)[1:6]  # each adds to the one before


# -- flat baselines ---------------------------------------------------------------------------------------------------


def flat(table: Table) -> np.ndarray:
    tokens = table.tokens
    slots = np.zeros((len(tokens), BUCKETS, 2), np.float32)
    rows = np.arange(len(tokens))[:, None]
    slots[rows, tokens.buckets, 0] = np.where(tokens.knob_mask, tokens.knobs[:, :, 0] + 0.5, 0.0)
    slots[rows, tokens.buckets, 1] = np.where(tokens.knob_mask, tokens.knobs[:, :, 2], 0.0)
    parts = [tokens.task, tokens.machine, tokens.terms, tokens.instruction, slots.reshape(len(tokens), -1)]
    return np.concatenate(parts, axis=1)


def _targets(table: Table) -> np.ndarray:
    found = table.residuals
    return found - np.nanmean(found)


def _trees(kind: str, training: Sequence[Table], tests: Sequence[Table], seed: int) -> list[np.ndarray]:
    import lightgbm

    rows = [flat(table)[table.known] for table in training]
    common: dict[str, Any] = {
        "verbose": -1,
        "num_threads": 2,
        "seed": seed,
        "learning_rate": 0.05,
        "num_leaves": 31,
    }
    if kind == "LambdaRank":
        labels = [
            np.floor(31 * np.exp(np.nanmin(np.log(t.seconds)) - np.log(t.seconds[t.known]))) for t in training
        ]
        options = {**common, "objective": "lambdarank", "label_gain": list(range(32))}
        given = [
            np.hstack([r, t.base[t.known][:, None] - t.base.mean()])
            for r, t in zip(rows, training, strict=True)
        ]
        data = lightgbm.Dataset(
            np.concatenate(given),
            np.concatenate(labels), group=[len(each) for each in labels],
        )  # fmt: skip
        grown = lightgbm.train(options, data, 300)
        return [
            -np.asarray(grown.predict(np.hstack([flat(t), t.base[:, None] - t.base.mean()]))) for t in tests
        ]
    data = lightgbm.Dataset(np.concatenate(rows), np.concatenate([_targets(t)[t.known] for t in training]))
    grown = lightgbm.train({**common, "objective": "huber", "alpha": 0.25, "min_data_in_leaf": 20}, data, 300)
    return [t.base + grown.predict(flat(t)) for t in tests]


def _perceptron(
    training: Sequence[Table], tests: Sequence[Table], seed: int, device: str, steps: int
) -> list[np.ndarray]:
    import torch

    torch.manual_seed(seed)
    rows = np.concatenate([flat(table)[table.known] for table in training])
    targets = np.concatenate([_targets(t)[t.known] for t in training])
    mean, scale = rows.mean(axis=0), 1 / np.maximum(rows.std(axis=0), 0.05)
    x = torch.tensor((rows - mean) * scale, dtype=torch.float32, device=device).clamp(-5, 5)
    y = torch.tensor(targets, dtype=torch.float32, device=device)
    net = torch.nn.Sequential(
        torch.nn.Linear(x.shape[1], 256), torch.nn.ReLU(), torch.nn.Linear(256, 256), torch.nn.ReLU(),
        torch.nn.Linear(256, 1),
    ).to(device)  # fmt: skip
    optimiser = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.02)
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = 1e-3 * 0.5 * (1 + math.cos(math.pi * step / steps))
        at = torch.randint(len(x), (512,), device=device)
        loss = torch.nn.functional.huber_loss(net(x[at])[:, 0], y[at], delta=0.25)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    found = []
    with torch.no_grad():
        for table in tests:
            given = torch.tensor((flat(table) - mean) * scale, dtype=torch.float32, device=device).clamp(
                -5, 5
            )
            found.append(table.base + net(given)[:, 0].cpu().numpy())
    return found


# -- judging ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Score:
    part: str
    method: str
    fold: int
    seed: int
    table: str
    kind: str
    family: str
    top1: float
    top8: float
    pairs: float
    best: float  # seconds
    first: float
    first8: float
    trials: int = 0
    reached: bool = True  # whether a config within 2% of the best is among them
    thinking: float = 0.0
    machine: str = ""


def judged(part: str, method: str, fold: int, seed: int, table: Table, scores: np.ndarray) -> Score:
    seconds = np.where(table.known, table.seconds, np.inf)
    best = float(seconds.min())
    order = np.argsort(scores, kind="stable")
    first, first8 = float(seconds[order[0]]), float(seconds[order[:8]].min())
    known = table.known
    t, s = np.log(table.seconds[known]), scores[known]
    distinct = t[:, None] - t[None, :] > 0.02
    right = float((s[:, None] > s[None, :])[distinct].mean()) if distinct.any() else 1.0
    return Score(
        part, method, fold, seed, table.name, _kind(table), table.family, best / first, best / first8, right, best,
        first, first8, machine=table.machine,
    )  # fmt: skip


def at_random(part: str, fold: int, seed: int, table: Table) -> Score:
    rng = np.random.default_rng(seed)
    seconds = np.where(table.known, table.seconds, np.inf)
    best = float(seconds.min())
    draws = [rng.permutation(len(seconds))[:8] for _ in range(400)]
    tops = [best / seconds[draw[0]] for draw in draws]
    eights = [best / seconds[draw].min() for draw in draws]
    firsts = [min(seconds[draw[0]], 100 * best) for draw in draws]
    return Score(
        part, "random", fold, seed, table.name, _kind(table), table.family, float(np.mean(tops)),
        float(np.mean(eights)), 0.5, best, float(np.mean(firsts)),
        float(np.mean([seconds[draw].min() for draw in draws])),
    )  # fmt: skip


def _kind(table: Table) -> str:
    return "GPU" if table.kind == "cuda" else f"CPU {8 * table.job.machine.vector_bytes} bit"  # type: ignore[attr-defined]


# -- search -----------------------------------------------------------------------------------------------------------


def searched(model: CostModel, table: Table) -> tuple[int, bool, float]:
    """(trials until a config within 2% of the best is measured, whether one was, seconds of thinking). Four at a time,
    the most promising ones first."""
    outcomes = {
        config: Outcome(config, float(s) if math.isfinite(s) else None, "" if math.isfinite(s) else "build")
        for config, s in zip(table.configs, table.seconds, strict=True)
    }
    best = float(np.nanmin(table.seconds))
    left, trials, spent = list(table.configs), 0, 0.0
    while left and trials < MAX_TRIALS:
        begin = time.perf_counter()
        found = model.predict(left)
        scores = found.optimistic() / np.maximum(found.valid, 1e-3)
        chosen = [left[at] for at in np.argsort(scores, kind="stable")[:BATCH]]
        spent += time.perf_counter() - begin
        for config in chosen:
            trials += 1
            seconds = outcomes[config].seconds
            if seconds is not None and best / seconds >= GOAL:
                return trials, True, spent
        begin = time.perf_counter()
        model.update([outcomes[config] for config in chosen])
        spent += time.perf_counter() - begin
        left = [config for config in left if config not in set(chosen)]
    return trials, False, spent


# -- jobs -------------------------------------------------------------------------------------------------------------

SETTINGS = TrainingSettings()
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
    cache = f"{job.cache}.statements" if job.method == STATEMENTS else job.cache
    if cache not in _TABLES:
        _TABLES[cache] = pickle.loads(Path(cache).read_bytes())
    tables = _TABLES[cache]
    tests, training = [tables[at] for at in job.held_out], [tables[at] for at in job.training]
    seed, where = job.seed, (job.part, job.method, job.fold, job.seed)
    if job.method == "random":
        return [at_random(job.part, job.fold, seed, table) for table in tests]
    if job.part == "search":
        return _search(job, tests, training)
    if job.method in ("analytical", UNTRAINED):
        found = [table.base for table in tests]
    elif job.method in ("boosted", "LambdaRank"):
        found = _trees(job.method, training, tests, seed)
    elif job.method == "MLP":
        found = _perceptron(training, tests, seed, job.device, job.steps)
    else:
        if job.method == STATEMENTS:
            tests, training = ([_without_terms(table) for table in some] for some in (tests, training))
        settings = replace(SETTINGS, seed=seed, steps=job.steps, **ABLATION.get(job.method, {}))
        tensors = _trained(training, settings, job)
        found = [predicted(tensors, table, settings) for table in tests]
    return [judged(*where, table, scores) for table, scores in zip(tests, found, strict=True)]


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
        trials, reached, spent = searched(model, table)
        nothing = np.zeros(len(table.configs))
        scores.append(
            replace(
                judged(job.part, job.method, job.fold, job.seed, table, nothing),
                trials=trials,
                reached=reached,
                thinking=spent,
            )
        )
    return scores


def jobs_of(
    tables: Sequence[Table], parts: Sequence[str], seeds: int, device: str, cache: str, steps: int
) -> list[Job]:
    everything = set(range(len(tables)))
    jobs: list[Job] = []

    def add(
        part: str, methods: Sequence[str], fold: int, seed: int, held_out: Sequence[int], rest: Sequence[int]
    ) -> None:
        jobs.extend(
            Job(part, m, fold, seed, tuple(held_out), tuple(rest), device, cache, steps) for m in methods
        )

    for seed in range(seeds):
        for fold, held_out in enumerate(folds(tables, FOLDS, seed)):
            rest = sorted(everything - set(held_out))
            if "held-out" in parts:
                add("held-out", ["attention", "MLP", "boosted", "LambdaRank"], fold, seed, held_out, rest)
                add("held-out", ["analytical", "random"], fold, seed, held_out, rest)
            if "ablation" in parts and seed < 2:
                add("ablation", list(ABLATION), fold, seed, held_out, rest)
        if "machine" in parts:
            kinds = sorted({_kind(table) for table in tables})
            for number, kind in enumerate(kinds):
                held_out = [at for at, table in enumerate(tables) if _kind(table) == kind]
                rest = sorted(everything - set(held_out))
                if rest and kind != "GPU":
                    add("machine", ["attention", "boosted", "analytical"], number, seed, held_out, rest)
    if "search" in parts:
        for seed in range(seeds):
            for number, (_, held_out) in enumerate(sorted(families(tables).items())):
                rest = sorted(everything - set(held_out))
                if rest:
                    add("search", _METHODS, number, seed, held_out, rest)
    # What takes no time first, then the parts in the order of their weight, all methods of a fold together.
    order = ("held-out", "machine", "search", "ablation")
    return sorted(
        jobs, key=lambda j: (j.method not in ("analytical", "random"), order.index(j.part), j.seed, j.fold)
    )


# -- report -----------------------------------------------------------------------------------------------------------


def _row(name: str, some: Sequence[Score]) -> str:
    top1, top8 = (np.array([getattr(score, key) for score in some]) for key in ("top1", "top8"))
    pairs = np.mean([score.pairs for score in some])
    sums = [sum(getattr(score, key) for score in some) for key in ("best", "first", "first8")]
    return (
        f"| {name} | {top1.mean():.3f} | {np.percentile(top1, 10):.3f} | {top1.min():.3f} | {top8.mean():.3f} |"
        f" {np.percentile(top8, 10):.3f} | {top8.min():.3f} | {sums[0] / sums[1]:.3f} | {sums[0] / sums[2]:.3f} |"
        f" {pairs:.3f} |"
    )


_HEAD = (
    "| {} | top-1 | 10th percentile | least | best of 8 | 10th percentile | least | TenSet's top-1 | TenSet's top-8 |"
    " pairs |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)


def report(scores: Sequence[Score]) -> str:
    lines: list[str] = []
    kinds = sorted({score.kind for score in scores})
    for part, title in (
        ("held-out", "Tasks held out"),
        ("machine", "A machine held out"),
        ("ablation", "Ablation"),
    ):
        for kind in kinds:
            found = [score for score in scores if score.part == part and score.kind == kind]
            if not found:
                continue
            count = len({score.table for score in found})
            lines += ["", f"## {title}: {kind}, {count} tasks", "", _HEAD.format("model")]
            methods = dict.fromkeys(score.method for score in found)
            order = list(ABLATION) if part == "ablation" else sorted(methods)
            lines += [_row(m, [s for s in found if s.method == m]) for m in order if m in methods]
            if part == "ablation":
                lines += ["", *_steps(found)]
    searches = [score for score in scores if score.part == "search"]
    if searches:
        lines += ["", "## Search: tasks of a family held out, trials until 98% of the best", ""]
        lines += [
            "| machine | family | " + " | ".join(_METHODS) + " |",
            "| --- | --- |" + " --- |" * len(_METHODS),
        ]
        groups = sorted({(score.kind, score.family) for score in searches})
        for kind, family in groups:
            cells = [
                _trials([s for s in searches if (s.kind, s.family, s.method) == (kind, family, m)])
                for m in _METHODS
            ]
            lines.append(f"| {kind} | {family} | {' | '.join(cells)} |")
        for kind in kinds:
            cells = [_trials([s for s in searches if (s.kind, s.method) == (kind, m)]) for m in _METHODS]
            lines.append(f"| {kind} | all | {' | '.join(cells)} |")
    return "\n".join(lines)


_METHODS = ("attention", f"attention, {UNTRAINED}", "boosted", "boosted, no prior")


def _trials(some: Sequence[Score]) -> str:
    """The mean of the trials and of the seconds of thinking. Searches that did not get there count with the trials they
    had, so that their mean is a lower bound."""
    if not some:
        return "-"
    missed = sum(not s.reached for s in some)
    trials, thinking = np.mean([s.trials for s in some]), np.mean([s.thinking for s in some])
    if not missed:
        return f"{trials:.1f} ({thinking:.2f} s)"
    return f">= {trials:.1f} ({thinking:.2f} s; {missed} of {len(some)} not within {MAX_TRIALS})"


def _steps(found: Sequence[Score]) -> list[str]:
    """The gain of each step in top-1, with the 95% interval over tables; the seeds of a table are averaged, since they
    are not independent."""
    lines = ["| step | gain in top-1 | 95% interval |", "| --- | --- | --- |"]
    for before, after in itertools.pairwise(_STEPS):
        a, b = (_by_table([s for s in found if s.method == method]) for method in (before, after))
        gains = np.array([b[key] - a[key] for key in a if key in b])
        if len(gains) > 1:
            half = 1.96 * gains.std(ddof=1) / math.sqrt(len(gains))
            lines.append(
                f"| {after} | {gains.mean():+.3f} | {gains.mean() - half:+.3f} to {gains.mean() + half:+.3f} |"
            )
    return lines


def _by_table(some: Sequence[Score]) -> dict[tuple[str, str], float]:
    """The mean top-1 over the seeds of each table: a task on a machine."""
    found: dict[tuple[str, str], list[float]] = {}
    for score in some:
        found.setdefault((score.table, score.machine), []).append(score.top1)
    return {key: float(np.mean(values)) for key, values in found.items()}


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
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="jobs that have not begun by then are left out"
    )
    parser.add_argument("--weights", type=Path, help="also train on everything, into this file")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--configs", type=int, default=1000, help="of speed")
    options = parser.parse_args()
    begin, parts = time.monotonic(), options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts must be some of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    options.speed = ""
    if "speed" in parts:
        options.speed = cost_speed.table(cost_speed.speed(options.configs))
        parts.remove("speed")
        if not parts and options.weights is None:
            _write(options, [], begin)
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
    with tempfile.TemporaryDirectory() as folder:
        cache = str(Path(folder) / "tables.pickle")
        Path(cache).write_bytes(pickle.dumps(tables))
        jobs = jobs_of(tables, parts, options.seeds, options.device, cache, options.steps)
        if "ablation" in parts:
            lowered = {t.job: t for t in tables_of(records, statements=True, processes=options.jobs)[0]}
            with_programs = [lowered.get(table.job, table) for table in tables]  # in the same order
            Path(f"{cache}.statements").write_bytes(pickle.dumps(with_programs))
        if options.weights:
            every = tuple(range(len(tables)))
            jobs.insert(
                0,
                Job(
                    "weights",
                    "attention",
                    0,
                    0,
                    (),
                    every,
                    options.device,
                    cache,
                    options.steps,
                    str(options.weights),
                    tuple(map(str, options.data)),
                ),
            )
        scores: list[Score] = []
        with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
            futures = [pool.submit(run, job) for job in jobs]
            for job, future in zip(jobs, futures, strict=True):
                rest = options.seconds - (time.monotonic() - begin)
                if rest <= 0 and not future.done():
                    future.cancel()
                    continue
                try:
                    scores += future.result(timeout=None if math.isinf(rest) else max(rest, 0.1))
                except TimeoutError:
                    print(f"no time was left for {job.part} {job.method}", flush=True)
            if options.seconds < math.inf:
                for future in futures:
                    future.cancel()
                _write(options, scores, begin)
                sys.stdout.flush()
                os._exit(0)
        _write(options, scores, begin)


def _write(options: argparse.Namespace, scores: list[Score], begin: float) -> None:
    text = "\n".join(filter(None, [report(scores), options.speed]))
    print(text)
    print(f"\n{time.monotonic() - begin:.0f} s")
    if options.markdown:
        options.markdown.write_text(text + "\n")
    if options.json:
        options.json.write_text(json.dumps([asdict(score) for score in scores]) + "\n")


if __name__ == "__main__":
    main()
