#!/usr/bin/env python3
"""How near tuning of tile kernels on a CPU comes to the best of a space, on times that were measured once.

    python benchmarks/tile_replay.py --collect FILE [--kernels add_row matmul_gelu]     # times every config
    python benchmarks/tile_replay.py --from FILE                                        # runs the tuner on these times

The cases are those of `tile_tuning.py`, with one thread. `--collect` compiles all configs and takes the least CPU time
of each over interleaved rounds, so it may run beside other work. `--from` runs the tuner with a fifth of the trials and
five seeds, and random search in the same; `predicted` is the config that is chosen without measuring. All are the time
of the best config over that of the chosen one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout that is not installed

import tilewright
from tests.tile.kernels import KERNELS
from tile_tuning import Case, cases, fixed
from tilewright import knobs
from tilewright.errors import TilewrightError
from tilewright.space.space import Config
from tilewright.support.trace import Trace
from tilewright.tune.effort import Tuning
from tilewright.tune.tuner import tune
from tune_triton import Replay

ROUNDS, TURN = 6, 0.004  # seconds of a config in a round
SHARE, SEEDS = 0.2, 5
SEARCHES = ("guided", "random")


def space_of(case: Case) -> dict[str, tuple[int, ...]]:
    return {name: values for name, values in case.space.items() if name != "threads"}


def collect(name: str) -> dict[str, Any]:
    case, space = cases()[name], space_of(cases()[name])
    calls: list[tuple[dict[str, int], Callable[[], None]]] = []
    rows: list[dict[str, Any]] = []
    for values in itertools.product(*space.values()):
        config = dict(zip(space, values, strict=True))
        constants = {**fixed(case, name), **config}
        try:
            call = KERNELS[name].prepare(case.grid, *case.arguments, **constants, options={"threads": 1})
            assert call is not None
            call()
            calls.append((config, call))
        except TilewrightError as error:
            rows.append({"config": config, "seconds": None, "failure": str(error)})
    least = [math.inf] * len(calls)
    for _ in range(ROUNDS):
        for number, (_, call) in enumerate(calls):
            end = time.thread_time() + TURN
            while (begin := time.thread_time()) < end:
                call()
                least[number] = min(least[number], time.thread_time() - begin)
    rows += [
        {"config": config, "seconds": seconds, "failure": None}
        for (config, _), seconds in zip(calls, least, strict=True)
    ]
    return {"kernel": name, "rows": rows}


class Recorded:
    """What `Replay` asks for."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.rows = {tuple(sorted(row["config"].items())): row for row in data["rows"]}

    def row(self, config: Config) -> dict[str, Any]:
        return self.rows[tuple(sorted(config.values))]


def replay(data: dict[str, Any], shown: int) -> dict[str, float]:
    name = data["kernel"]
    case, recorded = cases()[name], Recorded(data)
    best = min(row["seconds"] for row in data["rows"] if row["seconds"] is not None)

    def share_of(config: Config) -> float:
        seconds = recorded.row(config)["seconds"]
        return 0.0 if seconds is None else best / seconds

    kernel = tilewright.autotune(space_of(case), key=case.key)(KERNELS[name])
    call = kernel._call(case.grid, kernel._bound(case.arguments, fixed(case, name)))
    found: dict[str, list[float]] = {search: [] for search in SEARCHES}
    try:
        tunable = call.tunable()
        for search, seed in itertools.product(SEARCHES, range(SEEDS)):
            with tempfile.TemporaryDirectory() as folder:
                options = Tuning(
                    "quick", 600.0, seed, search, Path(folder) / "replay.db",
                    trials=max(1, math.floor(SHARE * len(data["rows"]))),
                )  # fmt: skip
                runner = Replay(recorded)  # type: ignore[arg-type]
                chosen = tune({name: (tunable, 1)}, options, threads=1, trace=Trace.off(), runner=runner)
            found[search].append(share_of(chosen[name].config))
        if shown:
            show(tunable, data, shown)
        predicted = share_of(tunable.start.config)
    finally:
        call.close()
    return {"predicted": predicted, **{search: statistics.mean(each) for search, each in found.items()}}


def show(tunable: Any, data: dict[str, Any], count: int) -> None:
    """The best configs, with what the model says of them."""
    rows = sorted((row for row in data["rows"] if row["seconds"]), key=lambda row: row["seconds"])
    configs = [Config.of(tunable.space.template, row["config"]) for row in rows]
    seconds = [tunable.predict(config) for config in configs]
    for row, predicted in list(zip(rows, seconds, strict=True))[:count]:
        print(f"  {1e6 * row['seconds']:9.1f} us, predicted {1e6 * predicted:9.1f}  {row['config']}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--collect", type=Path, metavar="FILE")
    parser.add_argument("--from", type=Path, metavar="FILE", dest="source")
    parser.add_argument("--kernels", nargs="+", choices=list(KERNELS), default=list(KERNELS))
    parser.add_argument("--show", type=int, default=0, metavar="N", help="the N best configs as predicted")
    options = parser.parse_args(arguments)
    if (options.collect is None) == (options.source is None):
        parser.error("say --collect FILE or --from FILE")
    os.environ[knobs.variable("threads")] = "1"
    if options.collect:
        known = json.loads(options.collect.read_text()) if options.collect.exists() else {}
        for name in options.kernels:
            known[name] = collect(name)
            options.collect.write_text(json.dumps(known))
            print(f"{name}: {len(known[name]['rows'])} configs", flush=True)
        return 0
    for name, data in json.loads(options.source.read_text()).items():
        if name in options.kernels:
            found = replay(data, options.show)
            print(f"{name:16}" + "".join(f"  {search} {share:.3f}" for search, share in found.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
