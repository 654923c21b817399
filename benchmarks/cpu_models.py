#!/usr/bin/env python3
"""Whole models on the CPU: Tilewright and what users would pick instead, alternating.

    python benchmarks/cpu_models.py                                    # the six models of the README's table
    python benchmarks/cpu_models.py --models resnet50,gpt2 --threads 4 --markdown table.md --json results.json
    python benchmarks/cpu_models.py --scaling --models resnet50,bert-base   # Tilewright: all threads against one
    python benchmarks/cpu_models.py --small --rounds 1 --models resnet18 --systems torch-eager,ours   # does it work?

One process per system. Rounds of turns are handed out with a pause after each turn; in its turn a system runs
the model once untimed, then for about a second. A figure is the median over all its turns, and a claim is a ratio
within one run: absolute times drift from hour to hour. The exit status is 1 where a system failed (not where it is
not available).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout that is not installed

from baselines import EAGER, OURS, RELAXED, SYSTEMS
from baselines.interleaved import Seat, SystemError, fix_threads, prepare_separately, run_interleaved
from baselines.job import Job, load_arrays
from baselines.machine import describe

DEFAULT_MODELS = ("resnet50", "mobilenetv2", "vgg16", "vit-b16", "bert-base", "gpt2")
BUSY_WHILE_IDLE = 0.05  # of a core, above which a system disturbed the others


# -- results ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timing:
    median_ms: float
    fastest_ms: float
    p90_ms: float
    runs: int
    setup_s: float  # from the start of the process to the first timed run: load, compile, warm up
    error: float  # relative L2 distance from torch eager
    idle_share: float  # of a core, burned during the turns of the others


@dataclass(frozen=True)
class Absence:
    reason: str
    failed: bool  # otherwise: not available here, or not for this model


@dataclass
class ModelResult:
    model: str
    batch: int
    small: bool
    timings: dict[str, Timing] = field(default_factory=dict)
    absences: dict[str, Absence] = field(default_factory=dict)

    @property
    def best_baseline(self) -> str | None:
        baselines = [name for name in self.timings if name not in (OURS, RELAXED)]
        return min(baselines, key=lambda name: self.timings[name].median_ms, default=None)

    def speedup_over(self, baseline: str | None) -> float | None:
        """How many times faster Tilewright is; under 1, slower."""
        if baseline not in self.timings or OURS not in self.timings:
            return None
        return self.timings[baseline].median_ms / self.timings[OURS].median_ms

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "batch": self.batch,
            "small": self.small,
            "best_baseline": self.best_baseline,
            "ours_over_best_baseline": self.speedup_over(self.best_baseline),
            "ours_over_torch_eager": self.speedup_over(EAGER),
            "systems": {name: asdict(timing) for name, timing in self.timings.items()},
            "absent": {name: asdict(absence) for name, absence in self.absences.items()},
        }


def relative_error(outputs: Path, reference: Path) -> float:
    """The largest relative L2 distance over the outputs; infinite where their number or shapes differ."""
    found, wanted = load_arrays(outputs), load_arrays(reference)
    if [a.shape for a in found] != [a.shape for a in wanted]:
        return math.inf
    distances = []
    for ours, theirs in zip(found, wanted, strict=True):
        ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
        distances.append(float(np.linalg.norm(ours - theirs)) / max(float(np.linalg.norm(theirs)), 1e-30))
    return max(distances, default=0.0)


# -- one model --------------------------------------------------------------------------------------------------------


def job_of(model: str, options: argparse.Namespace, folder: Path) -> Job:
    return Job(model, options.small, options.batch, options.threads, folder, options.effort, options.budget)


def measure(model: str, names: Sequence[str], options: argparse.Namespace, scratch: Path) -> ModelResult:
    """Every system set up one after the other, then all of them interleaved."""
    result = ModelResult(model, options.batch, options.small)
    folder = scratch / model
    folder.mkdir()
    job = job_of(model, options, folder)
    say(f"{model}: preparing")
    try:
        prepare_separately(job, with_onnx=any(SYSTEMS[name].needs_onnx for name in names))
    except SystemError as error:
        result.absences = {name: Absence(str(error), failed=True) for name in names}
        return result

    seats: list[Seat] = []
    try:
        for name in names:
            say(f"{model}: setting up {SYSTEMS[name].title}")
            try:
                seats.append(Seat(SYSTEMS[name], job, options.timeout))
            except SystemError as error:
                result.absences[name] = Absence(str(error), failed=error.available)
        say(f"{model}: {options.rounds} rounds")
        failed = run_interleaved(seats, options.rounds, options.turn, options.gap) if seats else {}
    finally:
        for seat in seats:
            seat.close()

    for seat in seats:
        name = seat.system.name
        if name in failed:
            result.absences[name] = Absence(str(failed[name]), failed=True)
        else:
            result.timings[name] = summary(seat, relative_error(job.outputs_file(name), job.reference_file))
    return result


def measure_scaling(model: str, options: argparse.Namespace, scratch: Path) -> float:
    """How many times faster Tilewright is on all threads than on one, interleaved."""
    folder = scratch / f"{model}-scaling"
    folder.mkdir()
    job = job_of(model, options, folder)
    prepare_separately(job, with_onnx=False)
    seats: list[Seat] = []
    try:
        for threads in (1, options.threads):
            system = replace(SYSTEMS[OURS], name=f"{OURS}-{threads}", title=f"{threads} thread(s)")
            seats.append(Seat(system, replace(job, threads=threads), options.timeout))
        if failed := run_interleaved(seats, options.rounds, options.turn, options.gap):
            raise next(iter(failed.values()))
        one, every = (statistics.median(seat.seconds) for seat in seats)
    finally:
        for seat in seats:
            seat.close()
    return one / every


def summary(seat: Seat, error: float) -> Timing:
    milliseconds = sorted(1000 * seconds for seconds in seat.seconds)
    return Timing(
        median_ms=statistics.median(milliseconds),
        fastest_ms=milliseconds[0],
        p90_ms=milliseconds[min(len(milliseconds) - 1, round(0.9 * len(milliseconds)))],
        runs=len(milliseconds),
        setup_s=seat.setup_seconds,
        error=error,
        idle_share=seat.idle_share,
    )


# -- tables -----------------------------------------------------------------------------------------------------------


def header(names: Sequence[str]) -> list[str]:
    titles = [SYSTEMS[name].title for name in names]
    return ["model", *titles, "best baseline", "vs best baseline", "vs torch eager", "error"]


def row(result: ModelResult, names: Sequence[str]) -> list[str]:
    cells = [result.model]
    for name in names:
        if name in result.timings:
            cells.append(f"{result.timings[name].median_ms:.2f}")
        else:
            cells.append("failed" if result.absences[name].failed else "-")
    best = result.best_baseline
    cells.append(SYSTEMS[best].title if best else "-")
    cells += [ratio(result.speedup_over(best)), ratio(result.speedup_over(EAGER))]
    cells.append(f"{result.timings[OURS].error:.1e}" if OURS in result.timings else "-")
    return cells


def ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def remarks(result: ModelResult) -> list[str]:
    """What a row cannot say."""
    lines = []
    for name, absence in result.absences.items():
        state = "failed" if absence.failed else "not available"
        lines.append(f"{result.model}, {SYSTEMS[name].title}: {state}: {absence.reason}")
    for name, timing in result.timings.items():
        if timing.idle_share > BUSY_WHILE_IDLE:
            busy = f"kept {timing.idle_share:.0%} of a core busy while the others ran"
            lines.append(f"{result.model}, {SYSTEMS[name].title}: {busy}")
    return lines


def means(results: Sequence[ModelResult]) -> str:
    """The geometric means of the two ratios, over the models where there are any."""
    over_best = [s for r in results if (s := r.speedup_over(r.best_baseline)) is not None]
    over_eager = [s for r in results if (s := r.speedup_over(EAGER)) is not None]
    parts = [
        f"{statistics.geometric_mean(values):.2f}x {text} ({len(values)} models)"
        for values, text in ((over_best, "the best baseline's speed"), (over_eager, "torch eager's"))
        if values
    ]
    return "geometric mean: " + ", ".join(parts) if parts else "no ratio to report"


def aligned(cells: Sequence[str]) -> str:
    return f"{cells[0]:<20}" + "".join(f"{cell:>15}" for cell in cells[1:])


def markdown(results: Sequence[ModelResult], names: Sequence[str], about: dict[str, Any], method: str) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items() if version)
    lines = [
        f"{about['cpu']}, {about['cores']} cores ({', '.join(about['features'])}), {about['memory_gib']} GiB, "
        f"{about['system']}, load {about['load_average']} at the start, {about['date']}.",
        f"Python {about['python']}, {versions}.",
        method,
        "",
        "| " + " | ".join(header(names)) + " |",
        "|" + " --- |" * len(header(names)),
        *("| " + " | ".join(row(result, names)) + " |" for result in results),
        "",
        means(results) + ".",
    ]
    notes = [line for result in results for line in remarks(result)]
    if notes:
        lines += ["", *(f"- {note}" for note in notes)]
    return "\n".join(lines) + "\n"


# -- the command line -------------------------------------------------------------------------------------------------


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=names_list, default=list(DEFAULT_MODELS), metavar="A,B")
    parser.add_argument("--all-zoo", action="store_true", help="every model of the zoo")
    parser.add_argument("--systems", type=names_list, default=list(SYSTEMS), metavar="A,B",
                        help=f"among {','.join(SYSTEMS)}")  # fmt: skip
    parser.add_argument("--threads", type=int, default=2, help="the same for all (default: 2)")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7, help="turns for each system (default: 7)")
    parser.add_argument(
        "--turn", type=float, default=None, metavar="S", help="seconds of a turn (default: 1)"
    )
    parser.add_argument(
        "--gap", type=float, default=0.25, metavar="S", help="pause after a turn (default: 0.25)"
    )
    parser.add_argument("--timeout", type=float, default=1800, metavar="S", help="for one answer of a system")
    parser.add_argument(
        "--effort", default="none", help="effort of Tilewright: none, quick or full (default: none)"
    )
    parser.add_argument("--budget", type=float, metavar="S", help="seconds of tuning for each model")
    parser.add_argument("--scaling", action="store_true", help="only Tilewright: all threads against one")
    parser.add_argument("--small", action="store_true", help="reduced models and short turns: a smoke test")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here, after each model")
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="write the table here, after each model"
    )
    options = parser.parse_args(argv)
    if unknown := [name for name in options.systems if name not in SYSTEMS]:
        parser.error(f"no system {', '.join(unknown)}; there are {', '.join(SYSTEMS)}")
    if min(options.threads, options.batch, options.rounds) < 1:
        parser.error("--threads, --batch and --rounds are at least 1")
    if options.turn is None:
        options.turn = 0.1 if options.small else 1.0

    from tilewright import zoo

    if options.all_zoo:
        options.models = zoo.names()
    if strange := [name for name in options.models if name not in zoo.names()]:
        parser.error(f"no model {', '.join(strange)}; the zoo has {', '.join(zoo.names())}")
    return options


def names_list(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def say(text: str) -> None:
    print(f"# {text}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    names = [name for name in SYSTEMS if name in options.systems]
    fix_threads(options.threads)
    about = describe()
    effort = "" if options.effort == "none" else f"Tilewright with effort {options.effort}, "
    method = (
        f"fp32, batch {options.batch}, {options.threads} threads, {effort}median milliseconds over "
        f"{options.rounds} turns of about {options.turn:g} s, one process per system"
        f"{', reduced models' if options.small else ''}."
    )
    say(f"{about['cpu']}, {about['cores']} cores, load {about['load_average']}; {method}")
    if options.scaling:
        return report_scaling(options, about, method)
    print(aligned(header(names)), flush=True)

    results: list[ModelResult] = []
    with tempfile.TemporaryDirectory(prefix="tilewright-bench-") as scratch:
        for model in options.models:
            result = measure(model, names, options, Path(scratch))
            results.append(result)
            print(aligned(row(result, names)), flush=True)
            for line in remarks(result):
                print(f"    {line}", flush=True)
            if options.json:
                data = {"machine": about, "method": method, "models": [r.as_json() for r in results]}
                options.json.write_text(json.dumps(data, indent=2) + "\n")
            if options.markdown:
                options.markdown.write_text(markdown(results, names, about, method))
    print(means(results))
    return int(any(absence.failed for result in results for absence in result.absences.values()))


def report_scaling(options: argparse.Namespace, about: dict[str, Any], method: str) -> int:
    ratios: dict[str, float] = {}
    print(aligned(["model", f"{options.threads} threads / 1"]), flush=True)
    with tempfile.TemporaryDirectory(prefix="tilewright-bench-") as scratch:
        for model in options.models:
            ratios[model] = measure_scaling(model, options, Path(scratch))
            print(aligned([model, ratio(ratios[model])]), flush=True)
    if options.json:
        data = {"machine": about, "method": method, "scaling": ratios}
        options.json.write_text(json.dumps(data, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
