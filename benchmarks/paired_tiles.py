#!/usr/bin/env python3
"""Paired products beside the plain template: GEMMs with every register tile certified, and with none.

    python benchmarks/paired_tiles.py                                # the sizes of SIZES
    python benchmarks/paired_tiles.py --size 3136x64x576 --turns 60
    python benchmarks/paired_tiles.py --as znver4

`uncertified` runs the same kernel on rows with one large element each, so that every register tile runs the plain loop
on the paired panels. It should take at most 5% more time than the plain template, whose kernel is the one that the cost
model chooses without pairs. Sizes are rows x columns x K; `conv3/2:128>128@56` is a 3x3 convolution of stride 2 from
128 to 128 channels of an image of 56x56, channels last. `offered` says whether the template takes part at this size;
where it does not, the numbers show why. One thread; the three alternate call by call, and a time is the least of a
turn's median over all turns. `rows` is what the register tiles compute, partial ones included, for each row. The exit
status is 1 where an offered kernel is more than `--limit` slower, of its rows counted so.

With `--as znver4` a processor that adds on the ports that multiply takes the configs of one that does not: uncertified
tiles multiply and add as usual, so that their time says something there, and that of certified ones nothing.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout that is not installed

from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.hw import CpuMachine, host
from tilewright.loops.ir import Program
from tilewright.measure.single import SingleKernel
from tilewright.runtime.executor import aligned_empty
from tilewright.space.space import Config
from tilewright.space.template import Applied, Work
from tilewright.space.templates.cpu.contraction import Contraction
from tilewright.space.templates.cpu.fast_algebra.paired import AppliedPaired, Paired
from tilewright.space.templates.cpu.fast_algebra.row_gemm import row_gemm_of
from tilewright.space.templates.cpu.gemm import gemm_of
from tilewright.testing.problems import Inputs
from tilewright.tune.choose import descend

SIZES = (
    "128x768x768",
    "784x512x128",
    "784x256x128",
    "784x128x256",
    "784x128x64",
    "3136x64x64",
    "3136x64x576",
    "conv3/2:128>128@56",
    "conv3/2:512>512@14",
    "conv1/2:256>512@56",
    "conv3/1:256>256@14",
    "49x2048x512",
    "49x512x2048",
    "197x768x768",
)
CALLS = 5  # of each kernel in a turn


@dataclass(frozen=True)
class Row:
    size: str
    offered: bool
    plain: float
    certified: float
    uncertified: float
    flops: float
    computed: float  # rows of the register tiles, for each row
    config: str

    def line(self) -> str:
        seconds = self.plain, self.certified, self.uncertified
        cells = [f"{self.flops / each / 1e9:.1f}" for each in seconds]
        ratios = [f"{each / self.plain:.2f}" for each in seconds[1:]]
        ends = f"{self.computed:.3f}", "yes" if self.offered else "no"
        return f"| {self.size} | {' | '.join((*cells, *ratios, *ends))} |"


def task_of(size: str) -> Task:
    x = Inputs()
    found = re.fullmatch(r"conv(\d+)/(\d+):(\d+)>(\d+)@(\d+)", size)
    if found is None:
        m, n, k = map(int, size.split("x"))
        return x.task(apply("matmul", x(m, k), x(k, n, constant=True)))
    window, stride, channels, outputs, extent = map(int, found.groups())
    edge = (0, window // 2, window // 2, 0)
    image, weight = x(1, extent, extent, channels), x(window, window, channels, outputs, constant=True)
    if window > 1:
        image = apply("pad", image, low=edge, high=edge, interior=(0, 0, 0, 0), value=0.0)
    attrs: dict[str, Any] = {
        "stride": (stride, stride),
        "padding": ((0, 0), (0, 0)),
        "dilation": (1, 1),
        "groups": 1,
    }
    return x.task(apply("conv", image, weight, layout="channels_last", **attrs))


def paired(work: Work) -> AppliedPaired:
    """The template, also where it declines."""
    sums = row_gemm_of(gemm_of(work.formula))
    assert sums is not None
    return AppliedPaired(work, sums, max_uncertified=math.inf)


def best(applied: Applied, work: Work) -> Config:
    found = descend(applied, work)
    if found is None:
        raise SystemExit(f"{applied.space.template} has no config for {work.task.label}")
    return found[1]


def stored(program: Program, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Inputs as the program expects them, aligned."""
    packings = (*program.packings, *[None] * (len(arrays) - len(program.packings)))
    flat = [
        np.ascontiguousarray(array).reshape(-1) if packing is None else packing.pack(array)
        for array, packing in zip(arrays, packings, strict=True)
    ]
    return [_aligned(array) for array in flat]


def _aligned(array: np.ndarray) -> np.ndarray:
    copy = aligned_empty(array.nbytes).view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def measured(size: str, machine: CpuMachine, turns: int) -> Row:
    task = task_of(size)
    work = Work(task, machine)
    plain = Contraction().apply(work)
    assert plain is not None
    offered = Paired().apply(work)
    pairs = paired(work)
    config = best(offered or pairs, work)
    plain_program = plain.program(best(plain, work))
    assert isinstance(plain_program, Program)
    programs = plain_program, pairs.program(config)
    kernels = [SingleKernel(program, machine, threads=1) for program in programs]
    rng = np.random.default_rng(0)
    even, weight = (rng.standard_normal(node.shape).astype(np.float32) for node in task.graph.inputs)
    uneven = even.copy()
    uneven[..., rng.integers(0, even.shape[-1])] = 1e6  # nothing else of a row counts: no certificate
    runs = [
        (kernels[0], stored(programs[0], [even, weight])),
        (kernels[1], stored(programs[1], [even, weight])),
        (kernels[1], stored(programs[1], [uneven, weight])),
    ]
    outputs = [_aligned(np.empty(task.output.type.size, np.float32)) for _ in runs]
    least = [float("inf")] * len(runs)
    for _ in range(turns):
        times: list[list[float]] = [[] for _ in runs]
        for _ in range(CALLS):
            for number, (kernel, inputs) in enumerate(runs):
                began = time.perf_counter()
                kernel(inputs, outputs[number])
                times[number].append(time.perf_counter() - began)
        least = [min(a, statistics.median(b)) for a, b in zip(least, times, strict=True)]
    flops = 2.0 * task.output.type.size * pairs.k_axes
    plain_time, certified, uncertified = least
    shape = pairs.shape_of(dict(config.values))
    computed = shape.blocks * shape.tiles * shape.rows / pairs.row.extent
    return Row(size, offered is not None, plain_time, certified, uncertified, flops, computed, str(config))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", nargs="+", default=list(SIZES))
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--limit", type=float, default=1.05)
    parser.add_argument("--configs", action="store_true", help="print the paired template's configs too")
    parser.add_argument("--as", dest="cpu", help="a processor that adds in parallel: take its configs")
    options = parser.parse_args()
    machine = host()
    if options.cpu is not None and isinstance(machine, CpuMachine):
        machine = replace(machine, cpu=options.cpu)
    if not isinstance(machine, CpuMachine) or not machine.independent_adds:
        print("this processor adds on the ports that multiply: the paired template is not offered here")
        return 0
    print("| rows x columns x K | plain GFLOP/s | certified | uncertified | certified / plain time |", end="")
    print(" uncertified / plain time | rows | offered |\n| --- | --: | --: | --: | --: | --: | --: | --- |")
    slow = []
    for size in options.size:
        row = measured(size, machine, options.turns)
        print(row.line(), flush=True)
        if options.configs:
            print(f"<!-- {row.config} -->")
        if row.offered and row.uncertified > options.limit * row.computed * row.plain:
            slow.append(size)
    if slow:
        print(
            f"more than {options.limit:.2f} times the plain template's time, of as many rows: {', '.join(slow)}"
        )
    return bool(slow)


if __name__ == "__main__":
    sys.exit(main())
