#!/usr/bin/env python3
"""The ten tile kernels on an NVIDIA GPU beside the same kernels in Triton, each tuned over the same space.

    python benchmarks/tile_gpu.py                          # all cases and configs; writes results/tile_gpu.md and .json
    python benchmarks/tile_gpu.py --seconds 500            # begins no further case after so many seconds
    python benchmarks/tile_gpu.py --configs 12             # a sample of each space, the same for both systems
    python benchmarks/tile_gpu.py --shapes attention       # only cases whose name contains this
    python benchmarks/tile_gpu.py --shapes                 # lists the cases and the sizes of the spaces

Shapes and spaces are those of `tile_cases.py`. Triton's side is `triton.autotune` over all configs; Tilewright's side
compiles the configs in threads and times each. Both choose by times with a cold L2. The winners are then timed again,
interleaved, with PyTorch eager: medians of CUDA events, L2 flushed before each call. Every result that counts is
compared with PyTorch in float64. A config that fails costs itself: failures are counted by kind. Memory-bound kernels
are given as a share of what a copy of as many bytes reaches. Elementwise, softmax and layer norm are in float32, the
others in float16.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout that is not installed

import torch
from torch import Tensor, nn

from baselines.machine import describe
from tile_cases import CASES, KERNELS, MEMORY_BOUND, SPACES, TileCase, configs, sizes
from tilewright.errors import TilewrightError

RESULTS = Path(__file__).resolve().parent / "results"
SINGLE = ("add_row", "softmax", "layer_norm")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3}
BUILDERS = 16
QUICK, FINAL = 7, 30  # timed calls of a config, and of a winner in a round
FLUSHED = 256 << 20  # bytes that are written between calls: more than L2 holds

Call = Callable[[], Any]
Config = dict[str, int]


@dataclass
class Side:
    """One system on one case."""

    config: Config | None = None
    seconds_of_tuning: float = 0.0
    ms: float = float("nan")
    error: float = float("nan")
    failures: dict[str, int] = field(default_factory=dict)


@dataclass
class Row:
    name: str
    kernel: str
    configs: int
    tile: Side
    triton: Side
    eager_ms: float = float("nan")
    copy_ms: float = float("nan")  # of a copy of as many bytes, for memory-bound kernels

    @property
    def ratio(self) -> float:
        """How much faster than Triton."""
        return self.triton.ms / self.tile.ms


class Timer:
    def __init__(self) -> None:
        self.flush = torch.empty(FLUSHED, dtype=torch.int8, device="cuda")

    def times(self, call: Call, count: int) -> list[float]:
        """Milliseconds of calls, each with a cold L2."""
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        for begin, end in events:
            self.flush.zero_()
            begin.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in events]

    def median(self, call: Call, count: int = QUICK) -> float:
        call()
        return statistics.median(self.times(call, count))


def element_type(case: TileCase) -> torch.dtype:
    return torch.float32 if case.kernel in SINGLE else torch.float16


def error_of(case: TileCase, tensors: dict[str, Tensor]) -> float:
    """The relative L2 error against PyTorch in float64."""
    operands = [each.double() if each.is_floating_point() else each for each in case.operands(tensors)]
    if case.kernel == "cross_entropy":
        truth = nn.functional.cross_entropy(*operands, reduction="none")
    elif case.kernel == "dequant_matmul":
        a, w, scales = operands
        truth = (a @ w.double()) * scales
    else:
        truth = case.reference()(*operands)
    return float((tensors["out"].double() - truth).norm() / truth.norm())


# -- Tilewright --------------------------------------------------------------------------------------------------------


def tile_call(case: TileCase, tensors: dict[str, Tensor], config: Config) -> Call:
    grid, arguments, constants = case.launch(tensors, config)
    options = {"warps": config["num_warps"]}
    if "num_stages" in config:
        options["stages"] = config["num_stages"]
    run = KERNELS[case.kernel][grid]
    return lambda: run(*arguments, **constants, options=options)


def compile_only(case: TileCase, tensors: dict[str, Tensor], config: Config) -> None:
    """Into the cache on disk, from which the first launch takes it."""
    from tilewright.codegen.cuda.tiles.executor import Executor
    from tilewright.tile.executors import executor_for
    from tilewright.tile.kernel import _facts

    _, arguments, constants = case.launch(tensors, config)
    kernel, executor = KERNELS[case.kernel], executor_for("cuda")
    assert isinstance(executor, Executor)
    options = {"warps": config["num_warps"]}
    if "num_stages" in config:
        options["stages"] = config["num_stages"]
    found = kernel._arguments(kernel._bind(tuple(arguments), constants))
    executor.build(kernel.program(*arguments, **constants), _facts(found, True), options)


def tune_tile(case: TileCase, tensors: dict[str, Tensor], space: Sequence[Config], timer: Timer) -> Side:
    side, failed = Side(), Counter[str]()
    begin, best = time.perf_counter(), float("inf")
    with ThreadPoolExecutor(BUILDERS) as pool:
        built = [pool.submit(compile_only, case, tensors, config) for config in space]
        for config, done in zip(space, built, strict=True):
            try:
                done.result()
                taken = timer.median(tile_call(case, tensors, config))
            except TilewrightError as error:
                failed[type(error).__name__] += 1
                continue
            if taken < best:
                best, side.config = taken, config
    side.seconds_of_tuning, side.failures = time.perf_counter() - begin, dict(failed)
    return side


# -- Triton ------------------------------------------------------------------------------------------------------------


def triton_launch(case: TileCase, tensors: dict[str, Tensor], space: Sequence[Config]) -> tuple[Call, Any]:
    """A call of the kernel under `triton.autotune`, and the autotuner."""
    import triton

    from tile_triton_kernels import TRITON_KERNELS

    knobs = [name for name in SPACES[case.kernel] if not name.startswith("num_")]
    made, actual = [], {}
    for config in space:
        _, arguments, constants = case.launch(tensors, config)
        values = {name: constants[name] for name in knobs}
        actual[tuple(values.values())] = config
        stages = {"num_stages": config["num_stages"]} if "num_stages" in config else {}
        made.append(triton.Config(values, num_warps=config["num_warps"], **stages))
    fixed = {name: value for name, value in constants.items() if name not in knobs}
    tuned = triton.autotune(configs=made, key=[])(TRITON_KERNELS[case.kernel])

    def grid(meta: dict[str, Any]) -> tuple[int, ...]:
        return case.launch(tensors, actual[tuple(meta[name] for name in knobs)])[0]

    return lambda: tuned[grid](*arguments, **fixed), tuned


def tune_triton(case: TileCase, tensors: dict[str, Tensor], space: Sequence[Config]) -> tuple[Side, Call]:
    side = Side()
    call, tuned = triton_launch(case, tensors, space)
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    side.seconds_of_tuning = time.perf_counter() - begin
    best = tuned.best_config
    side.config = {**best.kwargs, "num_warps": best.num_warps, "num_stages": best.num_stages}
    return side, call


# -- a case ------------------------------------------------------------------------------------------------------------


def measure(case: TileCase, options: argparse.Namespace, timer: Timer) -> Row:
    dtype = element_type(case)
    tensors = case.tensors("cuda", dtype)
    space = [dict(config) for config in configs(SPACES[case.kernel])]
    random.Random(0).shuffle(space)
    space = space[: options.configs or len(space)]
    tile = tune_tile(case, tensors, space, timer)
    triton, triton_call = tune_triton(case, tensors, space)
    calls: dict[str, Call] = {"triton": triton_call}
    if tile.config is not None:
        calls["tile"] = tile_call(case, tensors, tile.config)
    for name, side in (("tile", tile), ("triton", triton)):
        if name in calls:
            tensors["out"].fill_(float("nan"))
            calls[name]()
            side.error = error_of(case, tensors)
            if not side.error < TOLERANCE[dtype]:
                print(f"{case.name}: {name} has a relative error of {side.error:.1e}", flush=True)
                side.ms = float("nan")
                calls.pop(name)
    operands, reference = case.operands(tensors), case.reference()
    calls["eager"] = lambda: reference(*operands)
    if case.kernel in MEMORY_BOUND:
        half = torch.empty(case.bytes(tensors) // 2, dtype=torch.int8, device="cuda")
        other = torch.empty_like(half)
        calls["copy"] = lambda: other.copy_(half)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    for number in range(options.rounds):
        random.Random(number).shuffle(order)
        for name in order:
            calls[name]()
            samples[name] += timer.times(calls[name], FINAL)
    medians = {name: statistics.median(taken) for name, taken in samples.items()}
    tile.ms, triton.ms = (medians.get(name, float("nan")) for name in ("tile", "triton"))
    nothing = float("nan")
    return Row(
        case.name, case.kernel, len(space), tile, triton, medians["eager"], medians.get("copy", nothing)
    )


def geometric_mean(values: Sequence[float]) -> float:
    return statistics.geometric_mean(values) if values else float("nan")


def line(row: Row) -> list[str]:
    share = f"{100 * row.copy_ms / row.tile.ms:.0f}%" if row.kernel in MEMORY_BOUND else "-"
    chosen = " ".join(f"{name}={value}" for name, value in (row.tile.config or {}).items())
    failed = ", ".join(f"{count} {kind}" for kind, count in row.tile.failures.items())
    return [
        row.name,
        f"{1e3 * row.tile.ms:.1f}",
        f"{1e3 * row.triton.ms:.1f}",
        f"{1e3 * row.eager_ms:.1f}",
        f"{row.ratio:.2f}x",
        share,
        f"{row.tile.seconds_of_tuning:.0f} / {row.triton.seconds_of_tuning:.0f}",
        str(row.configs),
        chosen + (f" ({failed})" if failed else ""),
    ]


HEAD = [
    "us",
    "tile",
    "Triton",
    "eager",
    "Triton / tile",
    "of a copy",
    "tuning s",
    "configs",
    "chosen (failed)",
]


def markdown(rows: Sequence[Row], about: dict[str, Any], method: str) -> str:
    ratios = [row.ratio for row in rows if row.ratio == row.ratio]
    low = sum(ratio < 0.9 for ratio in ratios)
    lines = [
        "# Tile kernels on a GPU",
        "",
        f"{torch.cuda.get_device_name()}, {about['date']}. {method} Made with `python benchmarks/tile_gpu.py`.",
        "",
        "| " + " | ".join(HEAD) + " |",
        "|" + " --- |" * len(HEAD),
        *("| " + " | ".join(line(row)) + " |" for row in rows),
        "",
        f"Geometric mean of {len(ratios)} cases: {geometric_mean(ratios):.2f}x of Triton (asked: 1.0); {low} under 0.9x"
        " (asked: none).",
    ]
    return "\n".join(lines) + "\n"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="?", const="", default=None, metavar="TEXT",
                        help="only cases whose name contains this; without a text: list them")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=None, help="begin no further case after so many")
    parser.add_argument("--configs", type=int, default=None, help="so many of each space, at random")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--quick", action="store_true", help="the first shape of each kernel, 4 configs; writes nothing"
    )
    options = parser.parse_args()
    if options.quick:
        options.configs, options.rounds = options.configs or 4, 2
    return options


def main() -> int:
    options = arguments()
    if options.shapes == "":
        for case in CASES:
            print(case.name)
        print("configs:", ", ".join(f"{kernel} {count}" for kernel, count in sizes().items()))
        return 0
    if not torch.cuda.is_available():
        print("there is no NVIDIA GPU here")
        return 2
    import triton

    chosen = CASES[::3] if options.quick else CASES
    cases = [case for case in chosen if (options.shapes or "") in case.name]
    about, timer = describe(), Timer()
    rows: list[Row] = []
    begin = time.perf_counter()
    with torch.inference_mode():
        for case in cases:
            if options.seconds is not None and time.perf_counter() - begin > options.seconds:
                print(f"{len(cases) - len(rows)} cases are left out: {options.seconds:g} s are over")
                break
            rows.append(measure(case, options, timer))
            print("  ".join(line(rows[-1])), flush=True)
    method = f"Triton {triton.__version__}, torch {torch.__version__}, medians of {options.rounds} interleaved rounds."
    text = markdown(rows, about, method)
    print(text)
    if options.shapes is None and not options.quick:
        (RESULTS / "tile_gpu.md").write_text(text)
        data = {"machine": about, "gpu": torch.cuda.get_device_name(), "method": method}
        found = {**data, "cases": [asdict(row) for row in rows]}
        (RESULTS / "tile_gpu.json").write_text(json.dumps(found, indent=2) + "\n")
    return int(any(not row.ratio >= 0.9 for row in rows))


if __name__ == "__main__":
    sys.exit(main())
