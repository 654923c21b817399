#!/usr/bin/env python3
"""The ten tile kernels on the CPU beside PyTorch eager and Tilewright's own programs of the same operators.

    python benchmarks/tile_kernels.py                        # all; writes results/tile_cpu.md and .json
    python benchmarks/tile_kernels.py --quick                # does it work? one shape each, short turns, writes nothing
    python benchmarks/tile_kernels.py --shapes "attention"   # only cases whose name contains this
    python benchmarks/tile_kernels.py --shapes               # lists the cases and the sizes of the spaces
    python benchmarks/tile_kernels.py --search --shapes bmm  # times every config of the CPU's space, best first
    python benchmarks/tile_kernels.py --cpu-time             # one thread's CPU time: for a machine that others use too

The systems run interleaved in one process: in every round each is called for a while, in another order each time. A
time is the median over all calls. `own` is `tilewright.compile` of the operators at effort none; of matmuls, with
numerics "strict", which leaves the plain contraction template. Every result is compared with float64 before it is
timed. First-call times are those of new processes with an empty kernel cache; the overhead of a warm call is that of
`kernel[grid](...)` over a launch of the same compiled code with its arguments packed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout that is not installed

import torch
from torch import Tensor, nn

import tilewright
from baselines.machine import describe
from tile_cases import (
    BERT_CASES,
    CASES,
    CPU,
    CPU_SPACES,
    KERNELS,
    MATMULS,
    MEMORY_BOUND,
    TileCase,
    configs,
    sizes,
)
from tilewright.tile.executors import Facts, executor_for

RESULTS = Path(__file__).resolve().parent / "results"
SYSTEMS = ("eager", "own", "tile")
# What is asked: of Tilewright's own program by kind of kernel, and of PyTorch's eager mode by kernel.
OF_OWN = {**dict.fromkeys(MEMORY_BOUND, 0.9), "matmul_gelu": 0.8, "attention": 0.7}
OF_EAGER = {"conv2d": 0.8, "batched_matmul": 0.8}
FIRST_CALL = 0.5
WARM_US = 10.0


class Composition(nn.Module):
    """A function of its inputs as a module."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


@dataclass
class Row:
    name: str
    kernel: str
    config: dict[str, int]
    ms: dict[str, float]
    error: float
    gflops: float
    gigabytes: float
    first_call_s: float | None = None
    missed: list[str] = field(default_factory=list)

    def of(self, other: str) -> float:
        return self.ms[other] / self.ms["tile"]

    def judge(self) -> None:
        wanted = {"own": OF_OWN.get(self.kernel), "eager": OF_EAGER.get(self.kernel, 1.0)}
        self.missed = [
            f"{self.of(name):.2f}x of {name}, asked {least}"
            for name, least in wanted.items()
            if least is not None and name in self.ms and self.of(name) < least
        ]
        if self.first_call_s is not None and self.first_call_s > FIRST_CALL:
            self.missed.append(f"first call {self.first_call_s:.2f} s, asked {FIRST_CALL}")


def launcher(
    case: TileCase, tensors: dict[str, Tensor], config: dict[str, int], threads: int
) -> Callable[[], None]:
    grid, arguments, constants = case.launch(tensors, config)
    run = KERNELS[case.kernel][grid]
    return lambda: run(*arguments, **constants, options={"threads": threads})


def error_of(case: TileCase, tensors: dict[str, Tensor]) -> float:
    """The relative L2 error against PyTorch in float64."""
    operands = [each.double() if each.is_floating_point() else each for each in case.operands(tensors)]
    if case.kernel == "cross_entropy":
        truth = nn.functional.cross_entropy(*operands, reduction="none")
    else:
        truth = case.reference()(*operands)
    return float((tensors["out"].double() - truth).norm() / truth.norm())


def turn(call: Callable[[], Any], seconds: float, clock: Callable[[], float]) -> list[float]:
    call()
    taken: list[float] = []
    begin = clock()
    while not taken or clock() - begin < seconds:
        start = clock()
        call()
        taken.append(clock() - start)
    return taken


def interleaved(
    calls: dict[str, Callable[[], Any]], rounds: int, seconds: float, clock: Callable[[], float], least: bool
) -> dict[str, float]:
    samples: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    for number in range(rounds):
        random.Random(number).shuffle(order)
        for name in order:
            samples[name] += turn(calls[name], seconds, clock)
    return {name: (min if least else statistics.median)(taken) for name, taken in samples.items()}


def measure(case: TileCase, options: argparse.Namespace) -> Row:
    tensors = case.tensors("cpu", torch.float32)
    operands = case.operands(tensors)
    config = dict(CPU[case.kernel])
    reference = case.reference()
    call = launcher(case, tensors, config, options.threads)
    call()
    wrong = error_of(case, tensors)
    if not wrong < 1e-5:
        raise SystemExit(f"{case.name}: a relative error of {wrong:.1e}")
    calls: dict[str, Callable[[], Any]] = {"eager": lambda: reference(*operands), "tile": call}
    if "own" in options.systems:
        numerics = "strict" if case.kernel in MATMULS else "fast"
        own = tilewright.compile(
            Composition(reference).eval(), operands, numerics=numerics, threads=options.threads
        )
        calls["own"] = lambda: own(*operands)
    calls = {name: each for name, each in calls.items() if name in options.systems}
    clock = time.thread_time if options.cpu_time else time.perf_counter
    seconds = interleaved(calls, options.rounds, options.turn, clock, options.cpu_time)
    best = seconds["tile"]
    row = Row(
        case.name, case.kernel, config, {name: 1e3 * seconds[name] for name in calls}, wrong,
        case.flops / best / 1e9, case.bytes(tensors) / best / 1e9,
    )  # fmt: skip
    if not options.quick and not options.cpu_time:
        row.first_call_s = first_call(case)
    row.judge()
    return row


def first_call(case: TileCase) -> float:
    """The time of the first launch, in a new process with empty caches, behind the imports."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TILEWRIGHT_CACHE_DIR": folder}
        command = [sys.executable, __file__, "--first-call", case.name]
        found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(found.stdout)


def print_first_call(name: str) -> None:
    (case,) = (each for each in (*CASES, *BERT_CASES) if each.name == name)
    call = launcher(case, case.tensors("cpu", torch.float32), dict(CPU[case.kernel]), 2)
    begin = time.perf_counter()
    call()
    print(time.perf_counter() - begin)


def warm_overhead() -> dict[str, float]:
    """Microseconds of a launch of an almost empty kernel, of the bare launch inside it, and their difference."""
    case = TileCase("add_row", (("rows", 1), ("columns", 16)))
    tensors = case.tensors("cpu", torch.float32)
    grid, arguments, constants = case.launch(tensors, {"BM": 1, "BN": 16})
    kernel = KERNELS["add_row"]
    run, options = kernel[grid], {"threads": 1}
    run(*arguments, **constants, options=options)
    executor = executor_for("cpu")
    assert executor is not None
    bare = executor.compile(kernel.program(*arguments, **constants), Facts(disjoint=True), options)
    assert bare is not None
    values = [each.data_ptr() if isinstance(each, Tensor) else each for each in arguments]
    x, y = grid
    calls: dict[str, Callable[[], Any]] = {
        "warm": lambda: run(*arguments, **constants, options=options),
        "bare": lambda: bare((x, y, 1), values),
    }
    taken = interleaved(calls, 20, 0.01, time.perf_counter, least=False)
    found = {name: 1e6 * seconds for name, seconds in taken.items()}
    return {**found, "added": found["warm"] - found["bare"]}


def search(cases: Sequence[TileCase], options: argparse.Namespace) -> None:
    clock = time.thread_time if options.cpu_time else time.perf_counter
    for case in cases:
        tensors = case.tensors("cpu", torch.float32)
        found = []
        for config in configs(CPU_SPACES[case.kernel]):
            try:
                call = launcher(case, tensors, config, options.threads)
                found.append((min(turn(call, options.turn, clock)), config))
            except tilewright.errors.TilewrightError as error:
                print(f"{case.name} {config}: {error}")
        found.sort(key=lambda pair: pair[0])
        print(f"{case.name}, {len(found)} configs:")
        for seconds, config in found[:8]:
            print(f"  {1e3 * seconds:9.3f} ms  {config}")
        at = [config for _, config in found].index(dict(CPU[case.kernel]))
        print(f"  {1e3 * found[at][0]:9.3f} ms  {dict(CPU[case.kernel])}, the default, number {at + 1}")


def line(row: Row) -> list[str]:
    times = [f"{row.ms[name]:.3f}" if name in row.ms else "-" for name in SYSTEMS]
    ratios = [f"{row.of(name):.2f}x" if name in row.ms else "-" for name in ("eager", "own")]
    rate = f"{row.gflops:.0f} GFLOP/s" if row.gflops else f"{row.gigabytes:.1f} GB/s"
    first = "-" if row.first_call_s is None else f"{row.first_call_s:.2f}"
    blocks = ", ".join(f"{name} {value}" for name, value in row.config.items() if value)
    return [
        row.name,
        *times,
        *ratios,
        rate,
        f"{row.error:.0e}",
        first,
        blocks or "a row",
        "; ".join(row.missed),
    ]


def markdown(rows: Sequence[Row], warm: dict[str, float], about: dict[str, Any], method: str) -> str:
    head = [
        "ms",
        *SYSTEMS,
        "tile vs eager",
        "tile vs own",
        "rate",
        "error",
        "first call s",
        "blocks",
        "missed",
    ]
    lines = [
        "# Tile kernels on a CPU",
        "",
        f"{about['cpu']}, {about['cores']} cores, load {about['load_average']} at the start, {about['date']}.",
        f"{method} Made with `python benchmarks/tile_kernels.py`.",
        "",
        "| " + " | ".join(head) + " |",
        "|" + " --- |" * len(head),
        *("| " + " | ".join(line(row)) + " |" for row in rows),
        "",
        f"A warm launch takes {warm['warm']:.1f} us, of which the bare launch is {warm['bare']:.1f} us: it adds"
        f" {warm['added']:.1f} us (asked: at most {WARM_US:g}).",
        "",
        f"{sum(not row.missed for row in rows)} of {len(rows)} meet what is asked: of Tilewright's own program 0.9 for"
        " memory-bound kernels, 0.8 for matmul + bias + GELU, 0.7 for attention; of PyTorch eager 1.0, and 0.8 for"
        " convolution and batched matmul.",
    ]
    return "\n".join(lines) + "\n"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="?", const="", default=None, metavar="TEXT",
                        help="only cases whose name contains this; without a text: list them")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="the first shape of each kernel, short turns")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--turn", type=float, default=0.15, help="seconds of a system in a round")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help=f"among {', '.join(SYSTEMS)}")
    parser.add_argument(
        "--cpu-time", action="store_true", help="the least CPU time of one thread instead; writes nothing"
    )
    parser.add_argument("--search", action="store_true", help="time the configs of the CPU's spaces instead")
    parser.add_argument("--first-call", metavar="CASE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.turn = 2, 0.02
    if options.cpu_time:
        options.threads = 1
    options.systems = options.systems.split(",")
    return options


def main() -> int:
    options = arguments()
    if options.first_call:
        print_first_call(options.first_call)
        return 0
    if options.shapes == "":
        for case in (*CASES, *BERT_CASES):
            print(case.name)
        print("configs:", ", ".join(f"{kernel} {count}" for kernel, count in sizes().items()))
        return 0
    torch.set_num_threads(options.threads)
    chosen = CASES[::3] if options.quick else (*CASES, *BERT_CASES)
    cases = [case for case in chosen if (options.shapes or "") in case.name]
    if options.search:
        search(cases, options)
        return 0
    about = describe()
    rows: list[Row] = []
    with torch.inference_mode():
        for case in cases:
            rows.append(measure(case, options))
            print(
                "  ".join([f"{rows[-1].name:<42}", *(f"{cell:>9}" for cell in line(rows[-1])[1:])]),
                flush=True,
            )
    warm = warm_overhead()
    print(f"a warm launch adds {warm['added']:.1f} us to a bare one of {warm['bare']:.1f} us")
    whole = options.shapes is None and not options.quick and not options.cpu_time
    if whole:
        method = (
            f"float32, {options.threads} threads, effort none, medians over {options.rounds} interleaved turns of "
            f"{options.turn:g} s in one process."
        )
        (RESULTS / "tile_cpu.md").write_text(markdown(rows, warm, about, method))
        data = {"machine": about, "method": method, "warm_us": warm, "cases": [asdict(row) for row in rows]}
        (RESULTS / "tile_cpu.json").write_text(json.dumps(data, indent=2) + "\n")
    return int(any(row.missed for row in rows) or warm["added"] > WARM_US)


if __name__ == "__main__":
    sys.exit(main())
