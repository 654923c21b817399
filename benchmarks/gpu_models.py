"""Whole models on an NVIDIA GPU in half precision: Tilewright, PyTorch's eager kernels in a CUDA graph,
torch.compile with CUDA graphs, and its max-autotune mode, in one run.

    python benchmarks/gpu_models.py                              all twelve rows
    python benchmarks/gpu_models.py --only resnet50 --batch 1    one of them
    python benchmarks/gpu_models.py --baselines eager max-autotune --effort none --json FILE --markdown FILE
    python benchmarks/gpu_models.py --together FOLDER            one process per row: baselines are compiled at the same
                                                                 time; Tilewright and all timings run in sequence

The systems are interleaved; a turn is a series of calls between two CUDA events, long enough to be timed. A row has
the medians, the speedup over the best baseline with a 95% interval (bootstrap over turns), and the errors of Tilewright
and PyTorch against the same weights in float64. Tilewright starts with an empty cache and database, and is then
compiled again from what it stored: a row has the seconds of GPU measurements, of both compilations, and the number of
measurements in the second one. PyTorch's convolutional networks are channels-last, which is fastest for it; Tilewright
takes the model unchanged.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import fcntl
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tilewright
from baselines.intervals import interval
from tilewright.hw.gpu import detect
from tilewright.knobs import DEPENDENT_LAUNCHES
from tilewright.runtime.cuda.model import GpuModel
from tilewright.runtime.model import CompiledModel
from tilewright.support.trace import Trace
from tilewright.zoo import registry

TURNS = 15
THREADS = 3  # with which each of several processes compiles its baselines
PATIENCE_SECONDS = 300.0  # that a process waits for others to be ready
TURN_SECONDS = 0.02
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "ResNet-50": ("resnet50", {}),
    "MobileNetV2": ("mobilenetv2", {}),
    "VGG-16": ("vgg16", {}),
    "ViT-B/16": ("vit-b16", {}),
    "BERT-base, 512 tokens": ("bert-base", {"tokens": 512}),
    "GPT-2, 512 tokens": ("gpt2", {"tokens": 512}),
}
CONVOLUTIONAL = ("resnet50", "mobilenetv2", "vgg16")
BASELINES = {
    "eager": "eager in a CUDA graph",
    "compile": "torch.compile + graphs",
    "max-autotune": "max-autotune",
}


@dataclass(frozen=True)
class Row:
    model: str
    batch: int
    milliseconds: dict[str, float]
    ratio: float  # speedup over the best baseline
    interval: tuple[float, float]
    error: float
    eager_error: float
    compile_seconds: dict[str, float]
    steps: dict[str, int]
    tuning: dict[str, float]  # seconds of races, of both compilations, and how many trials each made


def in_graph(model: nn.Module, inputs: Sequence[torch.Tensor]) -> Callable[[], object]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            model(*inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(*inputs)
    return graph.replay


def compiled(model: nn.Module, inputs: Sequence[torch.Tensor], mode: str) -> Callable[[], object]:
    torch._dynamo.reset()
    fast = torch.compile(model, mode=mode, dynamic=False)
    for _ in range(3):
        fast(*inputs)

    def call() -> object:
        torch.compiler.cudagraph_mark_step_begin()
        return fast(*inputs)

    return call


def timed(call: Callable[[], object], calls: int) -> float:
    """Milliseconds of one call, in a run of several."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / calls


def interleaved(systems: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {system: [] for system in systems}
    calls = {}
    for system, call in systems.items():
        timed(call, 3)
        calls[system] = max(3, int(TURN_SECONDS * 1e3 / timed(call, 3)))
    for _ in range(TURNS):
        for system, call in systems.items():
            times[system].append(timed(call, calls[system]))
    return times


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    wide = result.double()
    if not torch.isfinite(wide).all():
        return math.nan
    return float(torch.linalg.vector_norm(wide - expected) / torch.linalg.vector_norm(expected))


@contextlib.contextmanager
def alone(folder: Path | None, rows: int) -> Iterator[None]:
    """Where several processes share the card: once all have prepared their baselines, one at a time."""
    if folder is None:
        yield
        return
    (folder / f"ready-{os.getpid()}").touch()
    end = time.monotonic() + PATIENCE_SECONDS
    while len(list(folder.glob("ready-*"))) < rows and time.monotonic() < end:
        time.sleep(0.2)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        torch.cuda.synchronize()


def compiled_twice(
    model: nn.Module, inputs: Sequence[torch.Tensor], effort: str
) -> tuple[CompiledModel, dict[str, float]]:
    """Tilewright's compilation without caches, and what it took; the second time with what the first has left."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TILEWRIGHT_CACHE_DIR"] = folder
        for prefix in ("", "warm "):
            trace = Trace()
            began = time.perf_counter()
            ours = tilewright.compile(model, tuple(inputs), effort=effort, trace=trace)
            ours(*inputs)
            torch.cuda.synchronize()
            found[f"{prefix}seconds"] = time.perf_counter() - began
            rounds = [event for event in trace.events if event.name == "tune.round"]
            found[f"{prefix}trials"] = sum(event.notes.get("trials", 0) for event in rounds)
            found[f"{prefix}races"] = sum(event.seconds or 0.0 for event in rounds)
    return ours, found


def launched_otherwise(
    ours: CompiledModel, inputs: Sequence[torch.Tensor]
) -> dict[str, Callable[[], object]]:
    """The same plan with each way to start its kernels; all give the same bits."""
    expected = ours(*inputs)
    found: dict[str, Callable[[], object]] = {}
    for way in DEPENDENT_LAUNCHES:
        os.environ["TILEWRIGHT_DEPENDENT_LAUNCH"] = way
        again = GpuModel(ours.plan, ours.executor.constants, ours.executor.objects)
        if not torch.equal(again(*inputs), expected):
            print(f"{way}: not the same bits", file=sys.stderr)
        found[f"ours, dependent launch {way}"] = lambda again=again: again(*inputs)  # type: ignore[misc]
    del os.environ["TILEWRIGHT_DEPENDENT_LAUNCH"]
    return found


def measure(
    title: str,
    batch: int,
    baselines: Sequence[str],
    effort: str,
    folder: Path | None = None,
    rows: int = 1,
    launches: bool = False,
) -> Row:
    name, config = MODELS[title]
    model = registry.build(name, **config).cuda().half()
    inputs = tuple(
        x.cuda().half() if x.is_floating_point() else x.cuda()
        for x in registry.example_inputs(name, batch, **config)
    )
    with torch.no_grad():
        exact = copy.deepcopy(model).double()
        expected = exact(*(x.double() if x.is_floating_point() else x for x in inputs))
        eager_error = relative_error(model(*inputs), expected)
        del exact
        seconds: dict[str, float] = {}
        theirs, given = model, inputs
        if name in CONVOLUTIONAL:
            theirs = copy.deepcopy(model).to(memory_format=torch.channels_last)
            given = tuple(x.to(memory_format=torch.channels_last) for x in inputs)
        makers: dict[str, Callable[[], Callable[[], object]]] = {
            "eager": lambda: in_graph(theirs, given),
            "compile": lambda: compiled(theirs, given, "reduce-overhead"),
            "max-autotune": lambda: compiled(theirs, given, "max-autotune"),
        }
        systems: dict[str, Callable[[], object]] = {}
        for baseline in baselines:
            began = time.perf_counter()
            try:
                systems[baseline] = makers[baseline]()
                torch.cuda.synchronize()
                timed(systems[baseline], 1)
            except Exception as failure:  # a baseline that cannot do it is left out
                print(f"{title}, {batch}: {baseline} left out: {failure}", file=sys.stderr)
                systems.pop(baseline, None)
            seconds[baseline] = time.perf_counter() - began
        with alone(folder, rows):
            ours, tuning = compiled_twice(model, inputs, effort)
            result = ours(*inputs)
            seconds["ours"] = tuning["seconds"]
            error = relative_error(result, expected)
            systems["ours"] = lambda: ours(*inputs)
            systems |= launched_otherwise(ours, inputs) if launches else {}
            times = interleaved(systems)
    medians = {system: statistics.median(taken) for system, taken in times.items()}
    best = min((p for p in baselines if p in systems), key=lambda p: medians[p], default="ours")
    plan = ours.plan
    steps = {"all": len(plan.steps), "of libraries": sum(step.vendor is not None for step in plan.steps)}
    return Row(
        title,
        batch,
        medians,
        medians[best] / medians["ours"],
        interval(times[best], times["ours"]),
        error,
        eager_error,
        seconds,
        steps,
        tuning,
    )


def table(rows: Sequence[Row], baselines: Sequence[str], effort: str) -> str:
    heads = "".join(f" {BASELINES[baseline]} |" for baseline in baselines)
    lines = [
        f"{detect().describe()}, torch {torch.__version__}, fp16, effort {effort!r}, {time.strftime('%Y-%m-%d')};"
        f" milliseconds, medians of {TURNS} turns.",
        "",
        f"| model | batch |{heads} Tilewright | vs best baseline | 95% | error (PyTorch's) | steps (of libraries)"
        " | seconds of races | seconds to compile | again, warm | measurements then |",
        "| --- " * (11 + len(baselines)) + "|",
    ]
    for row in rows:
        cells = "".join(
            f" {row.milliseconds[p]:.3f} |" if p in row.milliseconds else " - |" for p in (*baselines, "ours")
        )
        low, high = row.interval
        lines.append(
            f"| {row.model} | {row.batch} |{cells} {row.ratio:.2f}x | {low:.2f}-{high:.2f}"
            f" | {row.error:.1e} ({row.eager_error:.1e}) | {row.steps['all']} ({row.steps['of libraries']})"
            f" | {row.tuning.get('races', 0.0):.0f} | {row.tuning['seconds']:.0f}"
            f" | {row.tuning['warm seconds']:.1f} | {row.tuning.get('warm trials', 0):.0f} |"
        )
    if rows:
        mean = math.exp(statistics.fmean(math.log(row.ratio) for row in rows))
        lines += ["", f"Geometric mean of {len(rows)} rows: {mean:.2f}x."]
    return "\n".join(lines) + "\n"


def chosen(parts: Sequence[str]) -> list[str]:
    return [
        title for title, (name, _) in MODELS.items() if any(part in name or part in title for part in parts)
    ]


def in_processes(options: argparse.Namespace) -> None:
    """Every row in a process of its own, and one table of what they found."""
    folder: Path = options.together
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [(title, batch) for title in chosen(options.only) for batch in options.batch]
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": str(THREADS)}
    running = []
    for number, (title, batch) in enumerate(wanted):
        command = [
            sys.executable,
            __file__,
            "--only",
            title,
            "--batch",
            str(batch),
            "--effort",
            options.effort,
        ]
        command += ["--baselines", *options.baselines, "--json", str(folder / f"row{number:02}.json")]
        command += ["--together", str(folder), "--row-of", str(len(wanted))]
        running.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))
    for process in running:
        process.wait()
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("row*.json"))]
    rows = [Row(**each) for row in found for each in row]
    text = table(rows, options.baselines, options.effort)
    print(text)
    if options.markdown:
        options.markdown.write_text(text)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[""], help="models whose name has one of these in it")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 32])
    parser.add_argument("--baselines", nargs="*", default=["eager", "compile"], choices=list(BASELINES))
    parser.add_argument("--effort", default="quick")
    parser.add_argument(
        "--launches", action="store_true", help="also time Tilewright with each launch method (JSON)"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--together", type=Path, help="a folder for the processes to meet in")
    parser.add_argument("--row-of", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.together and not options.row_of:
        in_processes(options)
        return
    rows = []
    for title in chosen(options.only):
        for batch in options.batch:
            rows.append(
                measure(
                    title,
                    batch,
                    options.baselines,
                    options.effort,
                    options.together,
                    options.row_of,
                    options.launches,
                )
            )
            print(table(rows[-1:], options.baselines, options.effort).splitlines()[4], flush=True)
            torch.cuda.empty_cache()
            text = table(rows, options.baselines, options.effort)
            if options.markdown:
                options.markdown.write_text(text)
            if options.json:
                options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    print(table(rows, options.baselines, options.effort))


if __name__ == "__main__":
    main()
