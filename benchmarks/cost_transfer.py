"""Transfer of the attention model to a GPU that it has not seen: kernels of other projects, described by their knobs.

    python benchmarks/cost_transfer.py FOLDER [--device cuda] [--jobs 8] [--seeds 5] [--log FILE] [--markdown FILE]
                                       [--json FILE]

FOLDER has files KERNEL-GPU.csv(.gz): a column for each knob and `time_ms`, empty where a config failed. One GPU at a
time is left out. The others are known by so many configs each, drawn at random; nothing of the new GPU is known but its
data sheet (the machine token). What is tried on it is judged by the best time that it has in the whole table:

    best of 10              max over the 10 configs chosen without measuring, of best / time
    16 random, then 10      16 configs at random are measured and learned from; the best of the next 10 and those 16
    best of 16              two rounds of 8 chosen and measured, the second after learning from the first

Boosted trees (LightGBM on the same knobs, and on the knobs and the same numbers of the machine) and a random choice
beside it.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import itertools
import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout that is not installed

from tilewright.cost.attention import NOTHING, Adaptation, portfolio, similarity_rows
from tilewright.cost.instructions import NONE
from tilewright.cost.network import AttentionNetwork
from tilewright.cost.tokens import (
    STATEMENT_WIDTH,
    TERMS,
    MachineNumbers,
    TokenRow,
    knobs_of,
    stacked,
    task_features,
)
from tilewright.dataset.tables import Table
from tilewright.dataset.train import TrainingSettings, train
from tilewright.measure.trial import TaskJob
from tilewright.space.space import Config, Knob, Space

KNOWN = (50, 100, 300)
TRIED, MEASURED = 10, 16

# Data sheets: units, clock, FMAs per clock and unit, bytes per second, last cache, shared memory and L1 of a unit,
# 32-bit registers of a unit, width of a warp, threads of a unit.
_KIB, _MIB = 1 << 10, 1 << 20
GPUS: dict[str, MachineNumbers] = {
    "A100": MachineNumbers(
        *("cuda", 108, 1.41e9, 64, 512, 1.555e12, 40 * _MIB, 164 * _KIB, 192 * _KIB, 65536, 32, 2048), 5120, True
    ),
    "A4000": MachineNumbers(
        *("cuda", 48, 1.56e9, 128, 256, 0.448e12, 4 * _MIB, 100 * _KIB, 128 * _KIB, 65536, 32, 1536), 1536, True
    ),
    "A6000": MachineNumbers(
        *("cuda", 84, 1.80e9, 128, 256, 0.768e12, 6 * _MIB, 100 * _KIB, 128 * _KIB, 65536, 32, 1536), 2560, True
    ),
    "MI250X": MachineNumbers(
        *("hip", 110, 1.70e9, 64, 512, 1.638e12, 8 * _MIB, 64 * _KIB, 16 * _KIB, 131072, 64, 2048), 2048,
        other_vendor=True,
    ),
    "W6600": MachineNumbers(
        *("hip", 28, 2.90e9, 64, 0, 0.224e12, 32 * _MIB, 64 * _KIB, 16 * _KIB, 131072, 32, 2048), 1024,
        other_vendor=True,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Kernel:
    """All configs of a kernel, and their seconds on each GPU (NaN: failed)."""

    name: str
    space: Space
    configs: tuple[Config, ...]
    seconds: dict[str, np.ndarray]

    @cached_property
    def rows(self) -> list[TokenRow]:
        nothing = np.zeros(len(TERMS)), NONE.features()
        empty = np.zeros((0, STATEMENT_WIDTH))
        return [TokenRow(*nothing, *knobs_of(self.space, config), empty) for config in self.configs]

    def table(self, gpu: str, at: np.ndarray, seconds: np.ndarray) -> Table:
        """Some configs on a GPU as a table; there is no analytical model, so that the base is one second for all."""
        machine = GPUS[gpu].features()
        tokens = stacked([self.rows[each] for each in at], task_features(None), machine)
        configs = tuple(self.configs[each] for each in at)
        job = TaskJob(self.name, (), gpu, "fast", 0)
        return Table(
            self.name,
            "kernel",
            "cuda",
            gpu,
            0.0,
            job,
            configs,
            tokens,
            np.zeros(len(at)),
            seconds,
            np.zeros(len(at)),
        )


def read(folder: Path) -> list[Kernel]:
    found: dict[str, dict[str, dict[tuple[int, ...], float]]] = {}
    knobs: dict[str, tuple[str, ...]] = {}
    for path in sorted([*folder.glob("*.csv"), *folder.glob("*.csv.gz")]):
        name, _, gpu = path.name.partition(".")[0].partition("-")
        if gpu not in GPUS:
            continue
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            rows = list(csv.DictReader(file))
        knobs[name] = tuple(key for key in rows[0] if key != "time_ms")
        found.setdefault(name, {})[gpu] = {
            tuple(int(row[key]) for key in knobs[name]): float(row["time_ms"] or "nan") / 1e3 for row in rows
        }
    kernels = []
    for name, by_gpu in found.items():
        values = sorted(set.intersection(*(set(times) for times in by_gpu.values())))
        columns = [sorted({each[at] for each in values}) for at in range(len(knobs[name]))]
        made = tuple(
            Knob(key, tuple(column))
            for key, column in zip(knobs[name], columns, strict=True)
            if len(column) > 1
        )
        names = [knob.name for knob in made]
        configs = tuple(
            Config.of(
                name, {key: value for key, value in zip(knobs[name], each, strict=True) if key in names}
            )
            for each in values
        )
        seconds = {gpu: np.array([times[each] for each in values]) for gpu, times in by_gpu.items()}
        kernels.append(Kernel(name, Space(name, made, lambda values: True), configs, seconds))
    return kernels


@dataclass(frozen=True)
class Trial:
    kernel: str
    gpu: str
    known: int
    seed: int
    method: str
    best_of: float  # without measuring
    after_random: float
    best_measured: float
    seconds: float = 0.0


def share(seconds: np.ndarray, chosen: list[int]) -> float:
    """The best of what is tried, over the best there is."""
    tried = seconds[chosen]
    return float(np.nanmin(seconds) / np.nanmin(tried)) if np.isfinite(tried).any() else 0.0


# -- what is known, and trees that learn it ---------------------------------------------------------------------------


class Known:
    """The configs of the other GPUs that a trial knows, and those of the new one that it measures at random."""

    def __init__(self, kernel: Kernel, gpu: str, known: int, seed: int) -> None:
        rng = np.random.default_rng((seed, known))
        self.kernel, self.gpu, self.seed = kernel, gpu, seed
        self.seconds = kernel.seconds[gpu]
        others = [other for other in kernel.seconds if other != gpu]
        self.others = {other: np.sort(rng.permutation(len(kernel.configs))[:known]) for other in others}
        self.random = rng.permutation(len(kernel.configs))[:MEASURED].tolist()

    def trees(self, measured: list[int], *, sees_machine: bool = False) -> np.ndarray:
        """Log seconds of all configs on the new GPU, up to a constant, by trees that also learn from those that were
        measured there."""
        import lightgbm

        everything = self._knobs
        query = self._rows(everything, self.gpu, sees_machine)
        parts = []
        for on, at in [*self.others.items(), (self.gpu, np.array(measured, int))]:
            at = at[np.isfinite(self.kernel.seconds[on][at])]
            if len(at):
                logs = np.log(self.kernel.seconds[on][at])
                weight = np.full(len(at), 8.0 if on == self.gpu else 1.0)
                parts.append((self._rows(everything[at], on, sees_machine), logs - logs.mean(), weight))
        rows, targets, weights = (np.concatenate(each) for each in zip(*parts, strict=True))
        options = {"objective": "regression", "num_leaves": 31, "learning_rate": 0.05, "min_data_in_leaf": 5,
                   "verbose": -1, "num_threads": 1, "seed": self.seed, "deterministic": True}  # fmt: skip
        data = lightgbm.Dataset(rows, targets, weight=weights)
        return np.asarray(lightgbm.train(options, data, 300).predict(query))

    @cached_property
    def _knobs(self) -> np.ndarray:
        names = [knob.name for knob in self.kernel.space.knobs]
        return np.array([[dict(config.values)[n] for n in names] for config in self.kernel.configs], float)

    def _rows(self, knobs: np.ndarray, on: str, sees_machine: bool) -> np.ndarray:
        return np.hstack([knobs, np.tile(GPUS[on].features(), (len(knobs), 1))]) if sees_machine else knobs


# -- the attention model ----------------------------------------------------------------------------------------------


def attention(kernel: Kernel, gpu: str, known: int, seed: int, device: str) -> list[Trial]:
    """The network averaged with trees, half and half, and the network alone."""
    begin = time.monotonic()
    what = Known(kernel, gpu, known, seed)
    tables = [kernel.table(other, at, kernel.seconds[other][at]) for other, at in what.others.items()]
    settings = TrainingSettings(
        steps=steps_of(known), tables=4, configs=min(known, 64), rate=2e-3, decay=0.05, dropout=0.0, ranking=1.0,
        absolute=0.0, seed=seed, levels=("machine", "terms", "knob"), residual=False,
        trees=0,
    )  # fmt: skip
    net = AttentionNetwork(train(tables, settings, device=device), settings.levels)
    everything = np.arange(len(kernel.configs))
    # How each config would do on the new GPU, and if this GPU were like each of the others.
    scenarios, rows, valid = [], None, None
    for like in (gpu, *what.others):
        tokens = kernel.table(like, everything, np.ones(len(everything))).tokens
        out = net(tokens)
        scenarios.append(out.members.mean(axis=0))
        if like == gpu:
            rows, valid = similarity_rows(tokens, out.members), out.valid
    assert rows is not None and valid is not None
    alone = np.array(scenarios) - 0.5 * np.log(np.clip(valid, 0.05, 1.0))
    emphasis = [len(what.others) * 1.0, *[1.0] * len(what.others)]

    def with_trees(predicted: np.ndarray, part: float, measured: list[int]) -> np.ndarray:
        centred = predicted - predicted.mean(axis=-1, keepdims=True)
        return centred + part * (what.trees(measured) - centred) if part else centred

    def chosen_next(part: float, measured: list[int], count: int) -> list[int]:
        own = np.average(alone, axis=0, weights=emphasis)
        own = with_trees(own + corrected(own, rows, what.seconds, measured), part, measured)
        return [int(at) for at in np.argsort(own, kind="stable") if at not in set(measured)][:count]

    trained, found = time.monotonic() - begin, []
    for method, part in (("attention", 0.5), ("attention: its network alone", 0.0)):
        begin = time.monotonic()
        zero = with_trees(alone, part, [])
        first, half = (portfolio(zero, emphasis, count) for count in (TRIED, MEASURED // 2))
        after, rest = chosen_next(part, what.random, TRIED), chosen_next(part, half, MEASURED // 2)
        found.append(
            Trial(
                kernel.name, gpu, known, seed, method, share(what.seconds, first),
                share(what.seconds, [*what.random, *after]), share(what.seconds, [*half, *rest]),
                trained + time.monotonic() - begin,
            )
        )  # fmt: skip
    return found


def steps_of(known: int) -> int:
    """The steps of training."""
    return 250 + known // 2


def corrected(
    predicted: np.ndarray, rows: np.ndarray, seconds: np.ndarray, measured: list[int]
) -> np.ndarray:
    """What the model corrects its predictions by, after it has adapted to the configs that were measured."""
    ran = [at for at in measured if np.isfinite(seconds[at])]
    adaptation = NOTHING
    if ran:
        errors = np.log(seconds[ran]) - predicted[ran]
        errors = errors - np.median(errors)
        adaptation = Adaptation.of(rows[ran], errors, np.ones(len(ran)), np.ones(len(ran), bool))
    return adaptation.correction(rows)[0]


# -- baselines --------------------------------------------------------------------------------------------------------


def boosted(kernel: Kernel, gpu: str, known: int, seed: int, sees_machine: bool) -> Trial:
    begin = time.monotonic()
    what = Known(kernel, gpu, known, seed)

    def chosen_next(measured: list[int], count: int) -> list[int]:
        order = np.argsort(what.trees(measured, sees_machine=sees_machine), kind="stable")
        return [int(at) for at in order if at not in set(measured)][:count]

    first = chosen_next([], TRIED)
    half = first[: MEASURED // 2]
    after, rest = chosen_next(what.random, TRIED), chosen_next(half, MEASURED // 2)
    return Trial(
        kernel.name, gpu, known, seed, TREES[sees_machine], share(what.seconds, first),
        share(what.seconds, [*what.random, *after]), share(what.seconds, [*half, *rest]),
        time.monotonic() - begin,
    )  # fmt: skip


def random_choice(kernel: Kernel, gpu: str, known: int, seed: int) -> Trial:
    seconds = kernel.seconds[gpu]
    draws = [np.random.default_rng((seed, n)).permutation(len(seconds)) for n in range(200)]
    means = [
        float(np.mean([share(seconds, d[:count].tolist()) for d in draws])) for count in (TRIED, 26, MEASURED)
    ]
    return Trial(kernel.name, gpu, known, seed, "random", *means)


def other_tables(kernel: Kernel, gpu: str) -> Trial:
    """Ranking by the other GPUs' complete tables, which nothing that learns from a part of them is given."""
    logs = [np.log(s) - np.nanmean(np.log(s)) for other, s in kernel.seconds.items() if other != gpu]
    order = np.argsort(np.nanmean(np.nan_to_num(np.array(logs), nan=3.0), axis=0), kind="stable").tolist()
    found = share(kernel.seconds[gpu], order[:TRIED])
    return Trial(
        kernel.name,
        gpu,
        0,
        0,
        ALL_TABLES,
        found,
        found,
        share(kernel.seconds[gpu], order[:16]),
    )


ALL_TABLES = "all tables of the others"
TREES = ("boosted trees on knobs", "boosted trees on knobs and machine")


def _one(job: tuple[Path, str, str, int, int, str, str]) -> list[Trial]:
    folder, name, gpu, known, seed, method, device = job
    kernel = next(kernel for kernel in _kernels(folder) if kernel.name == name)
    if method == "attention":
        if device == "cpu":
            import torch

            torch.set_num_threads(1)
        return attention(kernel, gpu, known, seed, device)
    if method in TREES:
        return [boosted(kernel, gpu, known, seed, method == TREES[True])]
    if method == "random":
        return [random_choice(kernel, gpu, known, seed)]
    return [other_tables(kernel, gpu)]


_CACHE: dict[Path, list[Kernel]] = {}


def _kernels(folder: Path) -> list[Kernel]:
    if folder not in _CACHE:
        _CACHE[folder] = read(folder)
    return _CACHE[folder]


def report(trials: list[Trial]) -> str:
    lines = [
        "| kernel | configs of each other GPU | method | trials | best of 10, no measurement: mean | 10th percentile |"
        " least | 16 random, then 10 | best of 16 |",
        "| --- |" + " --- |" * 8,
    ]
    groups = itertools.groupby(
        sorted(trials, key=lambda t: (t.kernel, t.known, t.method)),
        key=lambda t: (t.kernel, t.known, t.method),
    )
    for (kernel, known, method), some in groups:
        found = list(some)
        first = np.array([trial.best_of for trial in found])
        after = np.mean([trial.after_random for trial in found])
        measured = np.mean([trial.best_measured for trial in found])
        lines.append(
            f"| {kernel} | {known or 'all'} | {method} | {len(found)} |"
            f" {first.mean():.3f} | {np.percentile(first, 10):.3f} |"
            f" {first.min():.3f} | {after:.3f} | {measured:.3f} |"
        )
    lines += [
        "",
        "Best of 10 without measuring, by the GPU that is left out (300 configs of each other GPU):",
        "",
    ]
    gpus = sorted({trial.gpu for trial in trials})
    lines += [f"| kernel | method | {' | '.join(gpus)} |", f"| --- | --- |{' --- |' * len(gpus)}"]
    for kernel, method in sorted({(t.kernel, t.method) for t in trials if t.known == 300}):
        means = [
            np.mean(
                [
                    t.best_of
                    for t in trials
                    if (t.kernel, t.method, t.gpu, t.known) == (kernel, method, gpu, 300)
                ]
            )
            for gpu in gpus
        ]
        lines.append(f"| {kernel} | {method} | {' | '.join(f'{mean:.3f}' for mean in means)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--known", default=",".join(map(str, KNOWN)))
    parser.add_argument("--kernels", help="names, separated by commas; all")
    parser.add_argument("--gpus", help="names, separated by commas; all")
    parser.add_argument("--methods", default=",".join(["attention", *TREES, "random", ALL_TABLES]))
    parser.add_argument(
        "--seconds", type=float, default=1e6, help="trials that are not done by then are left out"
    )
    parser.add_argument("--log", type=Path, help="keep trials in this file, and do not run again what it has")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    kernels = _kernels(options.folder)
    if not kernels:
        parser.error(f"{options.folder} has no file KERNEL-GPU.csv of a GPU among {', '.join(GPUS)}")
    jobs = []
    for kernel in kernels:
        if options.kernels and kernel.name not in options.kernels.split(","):
            continue
        for gpu in kernel.seconds if not options.gpus else options.gpus.split(","):
            for method in options.methods.split(","):
                if method == ALL_TABLES:
                    jobs.append((options.folder, kernel.name, gpu, 0, 0, method, options.device))
                    continue
                for known in map(int, options.known.split(",")):
                    seeds = range(options.seeds)
                    jobs += [
                        (options.folder, kernel.name, gpu, known, n, method, options.device) for n in seeds
                    ]
    jobs.sort(key=lambda job: (job[5] == "attention", job[4], -job[3]))
    begin = time.monotonic()
    trials = [Trial(**json.loads(line)) for line in _lines(options.log)]
    done_before = {(t.kernel, t.gpu, t.known, t.seed, t.method) for t in trials}
    jobs = [job for job in jobs if job[1:6] not in done_before]
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(_one, job) for job in jobs]
        try:
            done = as_completed(futures, timeout=options.seconds - (time.monotonic() - begin))
            for future in done:
                found = future.result()
                trials += found
                if options.log:
                    with options.log.open("a") as file:
                        file.write("".join(json.dumps(trial.__dict__) + "\n" for trial in found))
        except TimeoutError:
            print(f"{len(trials)} trials are done, and no time is left for the others", flush=True)
            _write(options, trials)
            os._exit(0)
    _write(options, trials)


def _lines(path: Path | None) -> list[str]:
    return path.read_text().splitlines() if path is not None and path.exists() else []


def _write(options: argparse.Namespace, trials: list[Trial]) -> None:
    text = report(trials)
    print(text)
    if options.markdown:
        options.markdown.write_text(text + "\n")
    if options.json:
        options.json.write_text(json.dumps([trial.__dict__ for trial in trials], indent=0) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
