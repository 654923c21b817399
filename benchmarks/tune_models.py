#!/usr/bin/env python3
"""Whole models, tuned: what tuning gains over choosing without a measurement, and whether two tunings agree.

    python benchmarks/tune_models.py                                   # ResNet-50, two cold tunings of five minutes
    python benchmarks/tune_models.py --models bert-base --budget 2m --json results.json --markdown table.md
    python benchmarks/tune_models.py --left 20m                        # and how much is left: one of them goes on
    python benchmarks/tune_models.py --models resnet18 --small --budget 10s --rounds 2    # does it work?

Every tuning begins with an empty database. Afterwards the models run interleaved, in this process: as chosen without
measuring (twice: what these two differ by is what can be distinguished), as tuned by each run, and as tuned for longer.
A time is the median over all turns, a gain the median of the ratios within a turn, since the machine's speed changes
from one turn to the next. The same model is then compiled again from each database, which must measure nothing and give
the same kernels.

What is left: the first tuning goes on from its own database, at full effort, for as long as --left says and at least as
long as before. What it gains beyond the first is what a longer search of the same spaces would have found.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout that is not installed

import tilewright
from baselines.job import untuned
from baselines.machine import describe
from tilewright import zoo
from tilewright.runtime.model import CompiledModel
from tilewright.support.trace import Trace
from tilewright.tune.effort import parse_duration
from tilewright.tune.progress import Progress

GAIN = 1.10  # over no measurement, after five minutes
AGREEMENT = 1.03  # between two cold tunings
NONE, AGAIN = "none", "none again"
PAUSE = 0.05  # seconds between turns: threads of the other fall asleep


@dataclass(frozen=True)
class Tuned:
    """One tuning run."""

    name: str
    seconds: float  # that it took
    trials: int
    failures: dict[str, int]
    ended: str
    kernels_before: float  # seconds of all kernels inside the model, as the tuner saw them last
    kernels_best: float
    same_again: bool  # compiled again without a measurement, by the same kernels


@dataclass(frozen=True)
class Result:
    model: str
    small: bool
    budget: float
    medians: dict[str, float]  # seconds of a call
    gains: dict[str, float]  # times the speed of the model without measuring
    runs: list[Tuned]

    @property
    def agreement(self) -> float | None:
        """The slower cold tuning over the faster one."""
        cold = [gain for name, gain in self.gains.items() if name.startswith("tuned")]
        return max(cold) / min(cold) if len(cold) > 1 else None


def main() -> int:
    options = _options()
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        for model in options.models.split(","):
            results.append(measure(model, options, folder / model))
            print(markdown(results[-1:]), flush=True)
    data = {"machine": describe(), "results": [asdict(result) for result in results]}
    if options.json:
        options.json.write_text(json.dumps(data, indent=2) + "\n")
    if options.markdown:
        options.markdown.write_text(_head(data["machine"]) + markdown(results))
    return 0 if all(run.same_again for result in results for run in result.runs) else 1


def measure(name: str, options: argparse.Namespace, folder: Path) -> Result:
    folder.mkdir(parents=True, exist_ok=True)
    model = zoo.build(name, seed=0, small=options.small)
    inputs = zoo.example_inputs(name, batch=options.batch, seed=1, small=options.small)
    plain = {"threads": options.threads, "db": untuned(folder)}
    compiled = {name: tilewright.compile(model, inputs, **plain) for name in (NONE, AGAIN)}
    runs = []
    for number in range(options.tunings):
        tuning = {"effort": "quick", "budget": options.budget, "seed": number}
        run, fast = tuned(f"tuned {number + 1}", model, inputs, folder / f"{number}.sqlite", tuning, options)
        runs.append(run)
        compiled[run.name] = fast
    if options.left:
        more = max(options.left, 1.01 * options.budget)  # with no more than before it would be known already
        tuning = {"effort": "full", "budget": more, "seed": 0}
        run, fast = tuned("for longer", model, inputs, folder / "0.sqlite", tuning, options)
        runs.append(run)
        compiled[run.name] = fast
    times = interleaved(compiled, inputs, options.rounds)
    medians = {each: statistics.median(found) for each, found in times.items()}
    gains = {
        each: statistics.median(none / own for none, own in zip(times[NONE], found, strict=True))
        for each, found in times.items()
    }
    return Result(name, options.small, options.budget, medians, gains, runs)


def tuned(
    name: str,
    model: Any,
    inputs: Any,
    database: Path,
    tuning: Mapping[str, Any],
    options: argparse.Namespace,
) -> tuple[Tuned, CompiledModel]:
    progress = Progress()
    begun = 0.0

    def listen(kind: str, event: Any) -> None:
        nonlocal begun
        progress(kind, event)
        if event.name == "tune.round" and kind == "end" and not options.quiet:
            left = f"{progress.left:.0f} s left, {progress.trials} trials"
            print(f"  {name}: {left}, {progress.best * 1e3:.2f} ms", file=sys.stderr, flush=True)
        if event.name == "tune":
            begun = time.monotonic() if kind == "begin" else time.monotonic() - begun

    arguments = dict(tuning, threads=options.threads, db=database)
    fast = tilewright.compile(model, inputs, trace=Trace(listener=listen), **arguments)
    seconds = begun
    again = Progress()
    same = tilewright.compile(model, inputs, trace=Trace(listener=again), **arguments)
    unmeasured = again.ended == "known" and same.plan.kernels == fast.plan.kernels
    run = Tuned(
        name,
        seconds,
        progress.trials,
        dict(progress.failures),
        progress.ended,
        progress.before,
        progress.best,
        unmeasured,
    )
    return run, fast


def interleaved(
    models: Mapping[str, CompiledModel], inputs: Sequence[Any], rounds: int
) -> dict[str, list[float]]:
    """Seconds of a call in each turn, in which the models come in any order."""
    times: dict[str, list[float]] = {name: [] for name in models}
    order = Random(0)
    for model in models.values():
        model(*inputs)
    for _ in range(rounds):
        for name in order.sample(list(models), len(models)):
            time.sleep(PAUSE)
            models[name](*inputs)
            calls = []
            for _ in range(3):
                begin = time.perf_counter()
                models[name](*inputs)
                calls.append(time.perf_counter() - begin)
            times[name].append(statistics.median(calls))
    return times


def markdown(results: Sequence[Result]) -> str:
    lines = ["| model | | ms | gain | tuning | trials | kernels in the model, ms | |", "|" + " --- |" * 8]
    for result in results:
        for label, name in ((f"{result.model} | without measuring", NONE), (" | the same again", AGAIN)):
            lines.append(
                f"| {label} | {result.medians[name] * 1e3:.2f} | {result.gains[name]:.3f}x | | | | |"
            )
        for run in result.runs:
            failed = sum(run.failures.values())
            lines.append(
                f"| | {run.name} | {result.medians[run.name] * 1e3:.2f} | {result.gains[run.name]:.3f}x"
                f" | {run.seconds:.0f} s, {run.ended} | {run.trials}{f', {failed} failed' if failed else ''}"
                f" | {run.kernels_before * 1e3:.2f} -> {run.kernels_best * 1e3:.2f}"
                f" | {'same again, unmeasured' if run.same_again else 'MEASURED AGAIN'} |"
            )
    lines.append("")
    for result in results:
        if result.agreement is not None:
            verdict = "within" if result.agreement <= AGREEMENT else "NOT within"
            lines.append(
                f"{result.model}: two cold tunings differ by {result.agreement - 1:.1%}, {verdict} 3%."
            )
        best = max(gain for name, gain in result.gains.items() if name.startswith("tuned"))
        if "for longer" in result.gains:
            more = result.gains["for longer"] / best - 1
            lines.append(f"{result.model}: going on for longer gains {more:+.1%} more.")
        reached = "reached" if best >= GAIN else "not reached"
        lines.append(f"{result.model}: the best gain is {best - 1:+.1%}; 10% is {reached}.")
    return "\n".join(lines) + "\n"


def _head(machine: Any) -> str:
    where = f"{machine['cpu']}, {machine['cores']} cores, {machine['date']}"
    return f"# Tuning whole models\n\n{where}. By `python benchmarks/tune_models.py`.\n\n"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="resnet50")
    parser.add_argument("--budget", type=parse_duration, default=300.0)
    parser.add_argument("--tunings", type=int, default=2, help="cold ones")
    parser.add_argument(
        "--left", type=parse_duration, default=None, help="seconds that the first goes on for"
    )
    parser.add_argument("--rounds", type=int, default=100, help="turns of each")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument(
        "--folder", type=Path, default=None, help="keep the databases here; one that is there is used"
    )
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--markdown", type=Path, default=None)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
