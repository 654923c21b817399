#!/usr/bin/env python3
"""Two builds of Tilewright against each other on this CPU: did anything get slower?

    git worktree add ../before COMMIT
    python benchmarks/before_after.py ../before                       # models, operators, compile time, trials a second
    python benchmarks/before_after.py ../before --parts models --rounds 9 --markdown FILE

Each build has a process of its own, with the same inputs and weights. Turns alternate, and the first to go changes from
round to round. A row has the medians, and their ratio with a 95% interval (bootstrap over rounds): above 1, this build
is faster. Compile times are of processes with an empty cache each. Nothing is tuned, and no tuning database is read.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent))  # where a test imports this

from baselines.intervals import interval

HERE = Path(__file__).resolve().parent
BUILDS = ("before", "after")
MODELS = ("resnet50", "mobilenetv2", "vgg16", "vit-b16", "bert-base", "gpt2")
COMPILED = ("resnet50", "mobilenetv2", "bert-base")
PARTS = ("models", "operators", "compile", "trials")
_WITHIN = 1.02  # the ratio of geometric means that counts as equal


# -- in the process of a build: only PyTorch, and the tilewright of its checkout ---------------------------------------


def operators() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Modules and inputs, the same in both builds."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Of(nn.Module):
        def __init__(self, function: Callable[..., Any]) -> None:
            super().__init__()
            self.function = function

        def forward(self, *inputs: Any) -> Any:
            return self.function(*inputs)

    torch.manual_seed(0)
    x = torch.randn
    image, heads = (1, 64, 56, 56), (1, 12, 197, 64)
    made: dict[str, tuple[Any, tuple[Any, ...]]] = {
        f"linear {m}x{n}x{k}": (nn.Linear(k, n), (x(m, k),))
        for m, n, k in ((1, 4096, 4096), (128, 768, 768), (128, 3072, 768), (197, 2304, 768), (127, 769, 511))
    }
    for name, layer, shape in (
        ("conv 3x3 64>64 at 56", nn.Conv2d(64, 64, 3, padding=1), image),
        ("conv 1x1 64>256 at 56", nn.Conv2d(64, 256, 1), image),
        ("conv 3x3/2 128>256 at 28", nn.Conv2d(128, 256, 3, stride=2, padding=1), (1, 128, 28, 28)),
        ("conv 7x7/2 3>64 at 224", nn.Conv2d(3, 64, 7, stride=2, padding=3), (1, 3, 224, 224)),
        ("depthwise 3x3 of 144 at 56", nn.Conv2d(144, 144, 3, padding=1, groups=144), (1, 144, 56, 56)),
        ("max pool 3x3/2 at 112", nn.MaxPool2d(3, 2, 1), (1, 64, 112, 112)),
        ("layer norm 512x768", nn.LayerNorm(768), (512, 768)),
        ("GELU 512x3072", nn.GELU(), (512, 3072)),
    ):
        made[name] = layer, (x(shape),)
    for name, function, inputs in (
        ("softmax 12x512x512", lambda a: F.softmax(a, -1), (x(12, 512, 512),)),
        ("attention 12x197x64", F.scaled_dot_product_attention, (x(heads), x(heads), x(heads))),
        ("add 4096x1024", torch.add, (x(4096, 1024), x(4096, 1024))),
        ("rows / their maximum 4096x512", lambda a: a / a.amax(1, keepdim=True), (x(4096, 512),)),
        ("mean of rows 4096x1024", lambda a: a.mean(1), (x(4096, 1024),)),
        ("transpose 2048x2048", lambda a: a.t().contiguous(), (x(2048, 2048),)),
        ("batched matmul 12x197x64x197", torch.matmul, (x(12, 197, 64), x(12, 64, 197))),
    ):
        made[name] = Of(function), inputs
    return made


def serve() -> None:
    """Lines of JSON: {"load": [part, name]}, then {"run": seconds} for as many calls as fit; answered by seconds."""
    import torch

    import tilewright
    from tilewright import zoo

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else is printed is not an answer
    call: Callable[[], Any] = lambda: None  # noqa: E731 - until something is loaded
    for line in sys.stdin:
        asked = json.loads(line)
        if "load" in asked:
            part, name = asked["load"]
            model, inputs = (
                (zoo.build(name, seed=0), zoo.example_inputs(name)) if part == "models" else operators()[name]
            )
            compiled: Any = tilewright.compile(model.eval(), tuple(inputs), effort="none")
            call = lambda: compiled(*inputs)  # noqa: B023, E731 - called before the next is loaded
            call()
            out.write(json.dumps(0.0) + "\n")
            continue
        times: list[float] = []
        end = time.perf_counter() + asked["run"]
        call()
        while len(times) < 3 or time.perf_counter() < end:
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
        out.write(json.dumps(statistics.median(times)) + "\n")


_COMPILE = """
import sys, time, torch, tilewright
from tilewright import zoo
program = torch.export.export(zoo.build(sys.argv[1]), zoo.example_inputs(sys.argv[1]))
begin = time.perf_counter()
tilewright.compile(program, effort="none")
print(time.perf_counter() - begin)
"""


# -- in the parent's --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    part: str
    name: str
    before: tuple[float, ...]
    after: tuple[float, ...]

    @property
    def ratio(self) -> float:
        return statistics.median(self.before) / statistics.median(self.after)


def environment(root: Path, cache: Path, threads: int) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(root),
        "XDG_CACHE_HOME": str(cache),
        "XDG_DATA_HOME": str(cache),
        "HOME": str(cache),
        "OMP_NUM_THREADS": str(threads),
        "TILEWRIGHT_THREADS": str(threads),
    }


class Build:
    """The process of one of the builds."""

    def __init__(self, root: Path, cache: Path, threads: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "before_after.py"), "--serve"],
            env=environment(root, cache, threads),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **question: Any) -> float:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"the process of a build ended with {self._process.wait()} at {question}")
        return float(json.loads(answer))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def orders(rounds: int) -> list[tuple[str, ...]]:
    return [BUILDS if number % 2 == 0 else BUILDS[::-1] for number in range(rounds)]


def timed(part: str, names: Sequence[str], roots: dict[str, Path], options: argparse.Namespace) -> list[Row]:
    rows = []
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            builds = {which: Build(roots[which], Path(folder, which), options.threads) for which in BUILDS}
            times: dict[str, list[float]] = {which: [] for which in BUILDS}
            try:
                for build in builds.values():
                    build.ask(load=[part, name])
                for order in orders(options.rounds):
                    for which in order:
                        times[which].append(builds[which].ask(run=options.turn))
                        time.sleep(0.05)
            finally:
                for build in builds.values():
                    build.close()
        rows.append(said(Row(part, name, tuple(times["before"]), tuple(times["after"]))))
    return rows


def compiled(roots: dict[str, Path], options: argparse.Namespace) -> list[Row]:
    rows = []
    for name in COMPILED:
        times: dict[str, list[float]] = {which: [] for which in BUILDS}
        for order in orders(options.compilations):
            for which in order:
                with tempfile.TemporaryDirectory() as folder:
                    given = environment(roots[which], Path(folder), options.threads)
                    done = subprocess.run(
                        [sys.executable, "-c", _COMPILE, name],
                        env=given,
                        capture_output=True,
                        text=True,
                        check=True,
                    )
                    times[which].append(float(done.stdout.split()[-1]))
        rows.append(said(Row("compile", name, tuple(times["before"]), tuple(times["after"]))))
    return rows


def trials(roots: dict[str, Path], options: argparse.Namespace) -> list[Row]:
    """Seconds of a trial, by each build's own `throughput.py`."""
    times: dict[str, dict[str, list[float]]] = {which: {} for which in BUILDS}
    for order in orders(options.compilations):
        for which in order:
            with tempfile.TemporaryDirectory() as folder:
                report = Path(folder, "report.json")
                script = roots[which] / "benchmarks" / "throughput.py"
                command = [
                    sys.executable,
                    str(script),
                    "--threads",
                    str(options.threads),
                    "--json",
                    str(report),
                ]
                given = environment(roots[which], Path(folder), options.threads)
                subprocess.run(command, env=given, capture_output=True, check=True)
                for each in json.loads(report.read_text()):
                    times[which].setdefault(each["task"], []).append(1.0 / each["trials_per_second"])
    both = [task for task in times["before"] if task in times["after"]]
    return [
        said(Row("trials", task, tuple(times["before"][task]), tuple(times["after"][task]))) for task in both
    ]


def said(row: Row) -> Row:
    print(f"{row.part}: {row.name}: {row.ratio:.3f}", file=sys.stderr, flush=True)
    return row


def table(rows: Sequence[Row]) -> str:
    lines = ["| part | case | before ms | after ms | before / after | 95% |", "|" + " --- |" * 6]
    for row in rows:
        low, high = interval(row.before, row.after)
        before, after = (1e3 * statistics.median(times) for times in (row.before, row.after))
        mark = " slower" if high < 1.0 / _WITHIN else ""
        lines.append(
            f"| {row.part} | {row.name} | {before:.3f} | {after:.3f} | {row.ratio:.3f}x{mark} | {low:.3f}-{high:.3f} |"
        )
    for part in dict.fromkeys(row.part for row in rows):
        ratios = [row.ratio for row in rows if row.part == part]
        mean = math.exp(statistics.mean(math.log(each) for each in ratios))
        lines.append(f"| {part} | geometric mean of {len(ratios)} | | | {mean:.3f}x | |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, nargs="?", help="a checkout of the other build")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--turn", type=float, default=0.7, metavar="SECONDS")
    parser.add_argument(
        "--compilations", type=int, default=3, help="of each build, also runs of throughput.py"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    if options.before is None or not (options.before / "tilewright" / "__init__.py").exists():
        parser.error("name a checkout of the other build: git worktree add ../before COMMIT")
    roots = {"before": options.before.resolve(), "after": HERE.parent}
    rows: list[Row] = []
    for part in options.parts:
        if part == "compile":
            rows += compiled(roots, options)
        elif part == "trials":
            rows += trials(roots, options)
        else:
            rows += timed(part, options.models if part == "models" else list(operators()), roots, options)
    text = table(rows)
    print(text)
    if options.markdown is not None:
        options.markdown.write_text(text)


if __name__ == "__main__":
    main()
