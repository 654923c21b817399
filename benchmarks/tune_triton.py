#!/usr/bin/env python3
"""`tilewright.tune_triton` beside an exhaustive search: how near it comes to the best in a fifth of the trials.

    python benchmarks/tune_triton.py --collect FILE [--seconds 100]      (with an NVIDIA GPU and Triton)
    python benchmarks/tune_triton.py --from FILE [--markdown FILE]       (anywhere)

`--collect` times every config of the spaces in `tile_cases.py` once: compiled by several processes, then medians of
calls with a cold L2 in interleaved rounds; a config's result is compared with PyTorch in float64 before it counts. The
file has the times, and what the tuner knows of a config without measuring it. `--from` runs the tuner itself on these
times, with five seeds, and prints the time of the best config over that of the one it chose.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout that is not installed

from tilewright.cost.tiles import TileCounts
from tilewright.hw import Machine
from tilewright.hw.machine import from_text, to_text
from tilewright.measure.jobs import Job
from tilewright.measure.measurement import Measurement
from tilewright.space.space import Config
from tilewright.space.terms import Counted
from tilewright.support.trace import Trace
from tilewright.tune.effort import Tuning
from tilewright.tune.kernel_space import kernel_space
from tilewright.tune.kernel_tunable import LaunchFacts, TunableKernel
from tilewright.tune.triton_kernels import OPTIONS, triton_terms
from tilewright.tune.tuner import tune

# (kernel, which of its shapes); the first five are the table, the others are timed if there is time.
CHOSEN = (("matmul_gelu", 0), ("attention", 2), ("conv2d", 0), ("layer_norm", 2), ("add_row", 2))
FURTHER = (
    ("dequant_matmul", 1), ("softmax", 2), ("cross_entropy", 1), ("batched_matmul", 2), ("grouped_matmul", 0),
)  # fmt: skip
SHARE = 0.2  # of the configs, which the search may measure
SEEDS = 5
COMPILERS = 14
ROUNDS, CALLS = 5, 9
TOLERANCE = 5e-3


# -- with a GPU --------------------------------------------------------------------------------------------------------


class OnGpu:
    """One kernel at one shape, and its configs as calls."""

    def __init__(self, kernel: str, shape: int) -> None:
        import torch

        from tile_cases import CASES, SPACES, configs
        from tile_gpu import element_type
        from tile_triton_kernels import TRITON_KERNELS

        self.case = [case for case in CASES if case.kernel == kernel][shape]
        self.space = SPACES[kernel]
        self.configs = [dict(each) for each in configs(self.space)]
        self.tensors = self.case.tensors("cuda", element_type(self.case))
        self.kernel = TRITON_KERNELS[kernel]
        self.torch = torch

    def call(self, config: Mapping[str, int]) -> Any:
        grid, arguments, constants = self.case.launch(self.tensors, config)
        options = {name: value for name, value in config.items() if name.startswith("num_")}
        run = self.kernel[grid]
        return lambda: run(*arguments, **constants, **options)

    def bound(self, config: Mapping[str, int]) -> dict[str, Any]:
        _, arguments, constants = self.case.launch(self.tensors, config)
        names = [name for name in self.kernel.arg_names if name not in constants]
        return {**dict(zip(names, arguments, strict=True)), **constants}

    def failure(self, config: Mapping[str, int]) -> str:
        """Why a config does not count; "" if it does."""
        from tile_gpu import error_of

        self.tensors["out"].fill_(float("nan"))
        try:
            self.call(config)()
            self.torch.cuda.synchronize()
        except Exception as error:
            return type(error).__name__
        return "" if error_of(self.case, self.tensors) < TOLERANCE else "wrong"


def compile_share(which: Sequence[tuple[str, int]], number: int, count: int) -> None:
    """Into Triton's cache on disk: every `count`-th config."""
    at = 0
    for kernel, shape in which:
        one = OnGpu(kernel, shape)
        for config in one.configs:
            if at % count == number:
                try:
                    one.call(config)()
                except Exception as error:  # told by the process that measures
                    print(kernel, config, type(error).__name__, flush=True)
            at += 1


def compile_all(which: Sequence[tuple[str, int]], seconds: float) -> None:
    named = ",".join(f"{kernel}:{shape}" for kernel, shape in which)
    command = [sys.executable, __file__, "--compile", named]
    workers = [
        subprocess.Popen([*command, f"{number}/{COMPILERS}"], stdout=subprocess.DEVNULL)
        for number in range(COMPILERS)
    ]
    deadline = time.monotonic() + seconds
    for worker in workers:
        try:
            worker.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.kill()


def collect(path: Path, seconds: float) -> None:
    begin = time.monotonic()
    found: list[dict[str, Any]] = []
    for which in (CHOSEN, FURTHER):
        left = seconds - (time.monotonic() - begin)
        if left < 0.45 * seconds and found:
            print(f"left out: {', '.join(kernel for kernel, _ in which)}")
            break
        compile_all(which, left - 10)
        print(f"compiled {len(which)} kernels, {time.monotonic() - begin:.0f} s", flush=True)
        for kernel, shape in which:
            found.append(timed(OnGpu(kernel, shape)))
            path.write_text(json.dumps(found))
            unread = sum(row["counts"] is None for row in found[-1]["rows"])
            print(f"{found[-1]['case']}: {time.monotonic() - begin:.0f} s, {unread} not read", flush=True)


def timed(one: OnGpu) -> dict[str, Any]:
    from tile_gpu import Timer
    from tilewright.hw.gpu import detect
    from tilewright.tune.launches import LaunchCall
    from tilewright.tune.triton_kernels import LaunchedTriton

    timer = Timer()
    failures = [one.failure(config) for config in one.configs]
    samples: list[list[float]] = [[] for _ in one.configs]
    order = [number for number, failure in enumerate(failures) if not failure]
    for turn in range(ROUNDS):
        random.Random(turn).shuffle(order)
        for number in order:
            call = one.call(one.configs[number])
            call()
            samples[number] += timer.times(call, CALLS)
    launched = LaunchedTriton(one.kernel)
    knobs = kernel_space(one.space, (), list(one.kernel.arg_names))
    bound = one.bound(one.configs[0])
    fixed = {name: value for name, value in bound.items() if name not in one.space}
    facts = LaunchCall(launched, knobs, (1,), fixed, ()).facts
    rows = []
    for config, failure, times in zip(one.configs, failures, samples, strict=True):
        full = Config.of("triton", config)
        grid = one.case.launch(one.tensors, config)[0]
        told = LaunchFacts(
            {},
            facts.scalars,
            facts.shapes,
            facts.dtypes,
            facts.constants,
            facts.options,
            lambda *_, g=grid: g,
        )
        actual = Config.of(
            "triton", {**config, **{n: v for n, v in one.bound(config).items() if n in config}}
        )
        counts = launched.counts(told, actual)
        rows.append({
            "config": dict(full.values),
            "failure": failure,
            "seconds": statistics.median(times) * 1e-3 if times else None,
            "grid": [*grid, 1, 1][:3],
            "counts": None if counts is None else asdict(counts),
        })  # fmt: skip
    return {
        "case": one.case.name,
        "kernel": one.case.kernel,
        "machine": to_text(detect(0)),
        "device": one.torch.cuda.get_device_name(),
        "space": {name: list(choices) for name, choices in one.space.items()},
        "scalars": dict(facts.scalars),
        "shapes": {name: list(shape) for name, shape in facts.shapes.items()},
        "dtypes": dict(facts.dtypes),
        "rows": rows,
    }


# -- replays -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recorded:
    """A kernel whose configs were timed elsewhere, as the tuner sees it."""

    data: dict[str, Any]
    source = "recorded"

    @property
    def name(self) -> str:
        return str(self.data["kernel"])

    def toolchain(self) -> str:
        return "recorded"

    def row(self, config: Config) -> dict[str, Any]:
        wanted = dict(config.values)
        return next(row for row in self.data["rows"] if row["config"] == wanted)

    def grid(self, facts: LaunchFacts, config: Config) -> tuple[int, int, int]:
        x, y, z = self.row(config)["grid"]
        return x, y, z

    def terms(
        self, launch: LaunchFacts, config: Config, machine: Machine
    ) -> tuple[Counted, dict[str, float]]:
        found = self.row(config)["counts"]
        return triton_terms(launch, config, machine, None if found is None else TileCounts(**found))

    def tunable(self) -> TunableKernel:
        data = self.data
        shapes = {name: tuple(shape) for name, shape in data["shapes"].items()}
        options = tuple(name for name in data["space"] if name in OPTIONS)
        facts = LaunchFacts({}, data["scalars"], shapes, data["dtypes"], {}, options, self.grid)
        knobs = kernel_space({name: tuple(choices) for name, choices in data["space"].items()}, (), [])
        space = knobs.space(self.name, {}, list(data["space"]))
        machine = from_text(data["machine"])
        return TunableKernel(self, facts, space, machine, 0, lambda _: None)  # type: ignore[arg-type,return-value]


class Replay:
    """A runner that answers with the times of a file, and counts the requests."""

    ahead = 0
    devices = 1
    spent = False

    def __init__(self, recorded: Recorded) -> None:
        self.recorded, self.measured = recorded, dict[Config, None]()

    def __call__(self, threads: int) -> Replay:
        return self

    def __enter__(self) -> Replay:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def expect(self, job: Job) -> None:
        pass

    def prepare(self, job: Job, configs: Sequence[Config], *, best: float | None = None) -> None:
        pass

    def prepared(self, job: Job, configs: Sequence[Config]) -> list[Measurement]:
        return []

    def acknowledge(self, job: Job, measured: Sequence[Measurement]) -> None:
        pass

    def measure(
        self, job: Job, configs: Sequence[Config], *, best: float | None, deadline: float | None
    ) -> list[Measurement]:
        self.measured.update(dict.fromkeys(configs))
        rows = [self.recorded.row(config) for config in configs]
        return [
            Measurement(config, (row["seconds"],))
            if not row["failure"]
            else Measurement(config, failure="run")
            for config, row in zip(configs, rows, strict=True)
        ]

    def race(
        self, job: Job, configs: Sequence[Config], seconds: float, *, deadline: float | None = None
    ) -> list[list[float]]:
        return [[self.recorded.row(config)["seconds"]] for config in configs]


@dataclass(frozen=True)
class Result:
    case: str
    configs: int
    failed: int
    best_us: float
    worst: float  # time of the slowest config over that of the best
    unmeasured: float  # time of the best config over that of the predicted one
    found: dict[str, list[float]]  # by search: the same over the winner's, for each seed
    trials: dict[str, list[int]]


def replay(data: dict[str, Any], searches: Sequence[str], share: float) -> Result:
    recorded = Recorded(data)
    times = [row["seconds"] for row in data["rows"] if not row["failure"]]
    best = min(times)
    found: dict[str, list[float]] = {}
    trials: dict[str, list[int]] = {}
    start = recorded.row(recorded.tunable().start.config)
    for search in searches:
        for seed in range(SEEDS):
            with tempfile.TemporaryDirectory() as folder:
                runner = Replay(recorded)
                options = Tuning(
                    "quick", 600.0, seed, search, Path(folder) / "replay.db",
                    trials=max(1, math.floor(share * len(data["rows"]))),
                )  # fmt: skip
                chosen = tune(
                    {"kernel": (recorded.tunable(), 1)}, options, threads=1, trace=Trace.off(),
                    runner=runner,
                )["kernel"]  # fmt: skip
            row = recorded.row(chosen.config)
            found.setdefault(search, []).append(0.0 if row["failure"] else best / row["seconds"])
            trials.setdefault(search, []).append(len(runner.measured))
    first = 0.0 if start["failure"] else best / start["seconds"]
    return Result(
        data["case"], len(data["rows"]), len(data["rows"]) - len(times), best * 1e6, max(times) / best, first,
        found, trials,
    )  # fmt: skip


HEAD = ["kernel", "configs", "best us", "slowest / best", "predicted", "trials", "tune_triton", "worst seed",
        "random"]  # fmt: skip


def line(result: Result) -> list[str]:
    ours = result.found["guided"]
    return [
        result.case,
        f"{result.configs}" + (f" ({result.failed} fail)" if result.failed else ""),
        f"{result.best_us:.1f}",
        f"{result.worst:.1f}",
        f"{100 * result.unmeasured:.1f}%",
        f"{statistics.mean(result.trials['guided']):.1f}"
        f" ({100 * statistics.mean(result.trials['guided']) / result.configs:.0f}%)",
        f"{100 * statistics.mean(ours):.1f}%",
        f"{100 * min(ours):.1f}%",
        f"{100 * statistics.mean(result.found['random']):.1f}%",
    ]


def markdown(results: Sequence[Result], device: str) -> str:
    mean = statistics.mean(statistics.mean(each.found["guided"]) for each in results)
    share = statistics.mean(statistics.mean(each.trials["guided"]) / each.configs for each in results)
    return "\n".join([
        "# tune_triton beside an exhaustive search",
        "",
        f"{device}. Every config was timed once (`python benchmarks/tune_triton.py --collect FILE`); the tuner was then"
        f" run on these times with {SEEDS} seeds (`--from FILE`). Percentages are the time of the best config over that"
        " of the chosen one: of the config that is predicted without measuring, of tune_triton with at most a fifth of"
        " the trials (mean and worst of the seeds), and of random search with as many.",
        "",
        "| " + " | ".join(HEAD) + " |",
        "|" + " --- |" * len(HEAD),
        *("| " + " | ".join(line(each)) + " |" for each in results),
        "",
        f"Mean of {len(results)} kernels: {100 * mean:.1f}% of the exhaustive best with {100 * share:.0f}% of the"
        " measurements.",
        "",
    ])  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--collect", type=Path, metavar="FILE")
    parser.add_argument("--from", dest="file", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--share", type=float, default=SHARE)
    parser.add_argument("--compile", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile:
        which = [
            (name, int(shape)) for name, shape in (each.split(":") for each in options.compile[0].split(","))
        ]
        number, count = map(int, options.compile[1].split("/"))
        compile_share(which, number, count)
        return 0
    if options.collect:
        collect(options.collect, options.seconds)
        return 0
    if not options.file:
        parser.error("give --collect FILE or --from FILE")
    os.environ.setdefault("TILEWRIGHT_CACHE_DIR", tempfile.mkdtemp())
    found = json.loads(options.file.read_text())
    results = []
    for data in found:
        results.append(replay(data, ("guided", "random"), options.share))
        print("  ".join(line(results[-1])), flush=True)
    text = markdown(results, found[0]["device"])
    print(text)
    if options.markdown:
        options.markdown.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
