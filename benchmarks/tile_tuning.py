"""How well tile kernels are tuned: an exhaustive search, Tilewright's in a fifth of its time, and random search in the
same.

    python benchmarks/tile_tuning.py --threads 1 --seeds 3                  # all; --markdown FILE writes the table
    python benchmarks/tile_tuning.py --kernels matmul_gelu softmax

For each of the ten kernels of `tests/tile/kernels.py`, on this processor: all configs of its space are measured, which
takes so many seconds; then each search has a fifth of them, with a database of its own and without object code of
before. The processes that measure are shared and run already. At the end the winners run interleaved: the table has the
time of the exhaustive winner over that of the search's, 1.00 being as good.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import tilewright
from tests.tile.kernels import KERNELS, random
from tilewright import knobs
from tilewright.hw import host
from tilewright.measure.shared_runner import shared_runner
from tilewright.space.space import Config
from tilewright.tune.autotune import Autotuned

Grid = Callable[[dict[str, Any]], tuple[int, ...]]
_SHARE = 5  # of the time of the exhaustive search, one part of so many
_RACE_SECONDS = 2.0

MATMUL = {"BM": (8, 16, 32, 64), "BN": (16, 32, 64, 128), "BK": (16, 32, 64)}


@dataclass(frozen=True)
class Case:
    """A kernel, its arguments without knobs, and its space."""

    arguments: tuple[Any, ...]
    grid: Grid
    space: dict[str, tuple[int, ...]]
    key: tuple[str, ...]


def over(extent: int, block: int) -> int:
    return -(-extent // block)


def matmul_grid(meta: dict[str, Any]) -> tuple[int, ...]:
    return over(meta["M"], meta["BM"]), over(meta["N"], meta["BN"])


def cases() -> dict[str, Case]:
    """At shapes that a few cores compute in well under a millisecond."""
    rows, columns, m, n, k = 512, 1000, 128, 256, 256
    labels = np.random.default_rng(0).integers(0, 20000, 16)
    ends = np.array([20, 60, 61, 128], np.int32)
    weights = np.random.default_rng(1).integers(-128, 128, (k, n), np.int8)

    def empty(*shape: int) -> np.ndarray:
        return np.zeros(shape, np.float32)

    return {
        "add_row": Case(
            (random(rows, columns), random(columns), empty(rows, columns), rows, columns),
            lambda meta: (over(rows, meta["BM"]), over(columns, meta["BN"])),
            {"BM": (1, 2, 4, 8, 16, 32), "BN": (32, 64, 128, 256, 512, 1024)},
            ("rows", "columns"),
        ),
        "softmax": Case(
            (random(rows, columns), empty(rows, columns), columns, columns),
            lambda meta: (rows,),
            {"BLOCK": (1024, 2048, 4096), "threads": (1, 2)},
            ("columns",),
        ),
        "layer_norm": Case(
            (random(rows, columns), random(rows, columns, seed=1), random(columns), random(columns),
             empty(rows, columns), columns, 1e-5),
            lambda meta: (rows,),
            {"BLOCK": (16, 32, 64, 128, 256, 512, 1024), "threads": (1, 2)},
            ("columns",),
        ),
        "matmul_gelu": Case(
            (random(m, k), random(k, n), random(n), empty(m, n), m, n, k), matmul_grid, MATMUL, ("M", "N", "K")
        ),
        "batched_matmul": Case(
            (random(4, m, k), random(4, k, n), empty(4, m, n), m, n, k),
            lambda meta: (*matmul_grid(meta), 4),
            MATMUL,
            ("M", "N", "K"),
        ),
        "attention": Case(
            (random(4, 256, 64), random(4, 256, 64, seed=1), random(4, 256, 64, seed=2), empty(4, 256, 64),
             256, 0.125, 64),
            lambda meta: (over(256, meta["BM"]), 4),
            {"BM": (8, 16, 32, 64, 128), "BN": (16, 32, 64, 128, 256), "threads": (1, 2)},
            ("length",),
        ),
        "conv2d": Case(
            (random(30, 30, 32), random(3, 3, 32, 64), empty(28, 28, 64), 32, 30, 30, 64, 3, 3),
            lambda meta: (over(784, meta["BP"]), over(64, meta["BO"])),
            {"BP": (8, 16, 32, 64), "BO": (16, 32, 64), "BC": (8, 16, 32)},
            ("C", "H", "W", "F"),
        ),
        "dequant_matmul": Case(
            (random(m, k), weights, random(n), empty(m, n), m, n, k), matmul_grid, MATMUL, ("M", "N", "K")
        ),
        "grouped_matmul": Case(
            (random(m, k), random(4, k, n), empty(m, n), ends, 4, n, k),
            lambda meta: (8, over(n, meta["BN"])),
            MATMUL,
            ("N", "K"),
        ),
        "cross_entropy": Case(
            (random(16, 20000), labels, empty(16), 20000),
            lambda meta: (16,),
            {"BLOCK": (32, 64, 128, 256, 512, 1024, 2048, 4096), "threads": (1, 2)},
            ("classes",),
        ),
    }  # fmt: skip


def fixed(case: Case, name: str) -> dict[str, Any]:
    """Constexprs that are no knobs: attention's last."""
    return {"CAUSAL": False} if name == "attention" else {}


def tuned(name: str, case: Case, folder: Path, search: str, seed: int) -> Autotuned:
    for each in knobs.get("cache_dir").rglob("*"):  # object code is made anew by each
        if each.is_file():
            each.unlink()
    made = tilewright.autotune(
        case.space, key=case.key, search=search, seed=seed, db=folder / f"{search}-{seed}.db"
    )
    return made(KERNELS[name])


@dataclass(frozen=True)
class Row:
    kernel: str
    configs: int
    exhaustive_seconds: float
    seconds: float  # of a search
    best_us: float
    ours: float  # time of the best config over that of the winner: 1 is as good
    random: float
    ours_trials: float
    random_trials: float


def measured(name: str, seeds: int) -> Row:
    case = cases()[name]
    with tempfile.TemporaryDirectory() as folder:
        every = tuned(name, case, Path(folder), "exhaustive", 0)
        warm_up(every, case, name)
        begin = time.monotonic()
        result = every.tune(case.grid, *case.arguments, effort="full", budget=3600, **fixed(case, name))
        spent = time.monotonic() - begin
        winners: list[tuple[str, dict[str, Any]]] = [("exhaustive", result.config)]
        trials: dict[str, list[int]] = {"guided": [], "random": []}
        taken: list[float] = []
        for search, counts in trials.items():
            for seed in range(seeds):
                one = tuned(name, case, Path(folder), search, seed)
                begin = time.monotonic()
                found = one.tune(
                    case.grid, *case.arguments, effort="quick", budget=spent / _SHARE, **fixed(case, name)
                )
                if search == "guided":
                    taken.append(time.monotonic() - begin)
                winners.append((search, found.config))
                counts.append(found.trials)
        times = interleaved(every, case, name, [config for _, config in winners])
        best = times[0]
        ratio = {
            search: statistics.mean(best / t for (s, _), t in zip(winners, times, strict=True) if s == search)
            for search in trials
        }
        return Row(
            name,
            result.trials,
            spent,
            statistics.mean(taken),
            best * 1e6,
            ratio["guided"],
            ratio["random"],
            statistics.mean(trials["guided"]),
            statistics.mean(trials["random"]),
        )


def warm_up(kernel: Autotuned, case: Case, name: str) -> None:
    """Start the processes that measure."""
    call = kernel._call(case.grid, kernel._bound(case.arguments, fixed(case, name)))
    try:
        tunable = call.tunable()
        with shared_runner(max(1, tunable.threads)) as runner:
            runner.race(tunable.job, [tunable.space.default()], 0.0)
    finally:
        call.close()


def interleaved(kernel: Autotuned, case: Case, name: str, configs: Sequence[dict[str, Any]]) -> list[float]:
    call = kernel._call(case.grid, kernel._bound(case.arguments, fixed(case, name)))
    try:
        tunable = call.tunable()
        distinct = list(dict.fromkeys(Config.of(tunable.space.template, config) for config in configs))
        with shared_runner(max(1, tunable.threads)) as runner:
            raced = runner.race(tunable.job, distinct, _RACE_SECONDS)
        times = {
            config: statistics.median(each) if each else math.inf
            for config, each in zip(distinct, raced, strict=True)
        }
        return [times[Config.of(tunable.space.template, config)] for config in configs]
    finally:
        call.close()


HEAD = ("kernel", "configs", "exhaustive s", "search s", "best us", "ours", "random", "trials, ours / random")


def cells(row: Row) -> list[str]:
    return [
        row.kernel, str(row.configs), f"{row.exhaustive_seconds:.1f}", f"{row.seconds:.1f}", f"{row.best_us:.1f}",
        f"{row.ours:.3f}", f"{row.random:.3f}", f"{row.ours_trials:.1f} / {row.random_trials:.1f}",
    ]  # fmt: skip


def line(texts: Sequence[str]) -> str:
    return f"{texts[0]:16}" + "".join(f" {text:>12}" for text in texts[1:])


def markdown(rows: Sequence[Row], seeds: int, threads: int | None) -> str:
    def mean(values: Sequence[float]) -> float:
        return math.exp(statistics.mean(math.log(value) for value in values))

    return "\n".join([
        "# Tuning tile kernels on a CPU",
        "",
        f"{host().cpu}, {threads or 'all'} thread(s) a launch, {seeds} seeds. Made with"
        " `python benchmarks/tile_tuning.py`:"
        " an exhaustive search, then each search in a fifth of its time; the time of the exhaustive winner over that of"
        " the search's, interleaved.",
        "",
        "| " + " | ".join(HEAD) + " |",
        "|" + " --- |" * len(HEAD),
        *("| " + " | ".join(cells(row)) + " |" for row in rows),
        "",
        f"Geometric means: {mean([row.ours for row in rows]):.3f} of the exhaustive best (random search:"
        f" {mean([row.random for row in rows]):.3f}) in"
        f" {mean([row.seconds / row.exhaustive_seconds for row in rows]):.2f} of its time.",
        "",
    ])  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kernels", nargs="+", choices=list(KERNELS), default=list(KERNELS))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--threads", type=int, help="of a launch; the default is all cores")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    parser.add_argument(
        "--markdown", type=Path, help="also write a table, of these rows and of those in --json"
    )
    options = parser.parse_args(arguments)
    os.environ[knobs.variable("cache_dir")] = tempfile.mkdtemp()
    if options.threads:
        os.environ[knobs.variable("threads")] = str(options.threads)
    rows = []
    print(line([*HEAD]))
    for name in options.kernels:
        row = measured(name, options.seeds)
        rows.append(row)
        print(line(cells(row)), flush=True)
    for label, values in (("ours", [row.ours for row in rows]), ("random", [row.random for row in rows])):
        mean = math.exp(statistics.mean(math.log(value) for value in values))
        print(f"geometric mean, {label}: {mean:.3f} of the exhaustive best")
    if options.json:
        before = json.loads(options.json.read_text()) if options.json.exists() else []
        kept = [Row(**each) for each in before if each["kernel"] not in options.kernels]
        rows = sorted([*kept, *rows], key=lambda row: list(KERNELS).index(row.kernel))
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2))
    if options.markdown:
        options.markdown.write_text(markdown(rows, options.seeds, options.threads))
    return 0


if __name__ == "__main__":
    sys.exit(main())
