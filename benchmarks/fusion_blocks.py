#!/usr/bin/env python3
"""Chains of convolutions and GEMMs on a CPU: every way to cut a block into kernels, measured and predicted.

    python benchmarks/fusion_blocks.py                                  # MobileNetV2's blocks, convolution pairs, FFNs
    python benchmarks/fusion_blocks.py --only mobile --configs 6 --turns 40
    ... [--json FILE] [--markdown FILE]

A block of n contractions has 2^(n-1) cuts into kernels. Of each kernel that a cut may have, the config that the cost
model chooses and those of its neighbourhood that are predicted best are measured: of every template that applies, so
many configs; of derived sketches where no template does. All kernels of a block are interleaved, one thread, processor
time, the least of all turns; a cut's time is the sum over its kernels. "Chosen" is the time of the configs that the
model chooses, "best" that of the fastest ones measured. Every kernel is compared with the oracle first.

The floor is the larger of the multiplications at the FMA ports' nominal rate, and of the bytes of the block's inputs
and outputs from L3. For a part that Winograd's algorithm or the inner-product trick computes it is no bound.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout that is not installed

from baselines.machine import describe
from tilewright.cost import cpu
from tilewright.dtypes import DType
from tilewright.graph.chain import Chain, chain_of
from tilewright.graph.ir import Graph, Node
from tilewright.graph.op import apply
from tilewright.graph.oracle import evaluate
from tilewright.graph.task import Task
from tilewright.hw import CpuMachine, host
from tilewright.loops.ir import Program
from tilewright.measure.check import relative_error
from tilewright.measure.single import Built, KernelRun, executor_of
from tilewright.runtime.executor import aligned_empty
from tilewright.space.candidates import Candidates
from tilewright.space.catalog import catalog
from tilewright.space.implementation import SubTask, cut
from tilewright.space.space import Config
from tilewright.space.template import Applied, Terms, Work
from tilewright.testing.problems import Inputs
from tilewright.tune.choose import counted, descend
from tilewright.tune.oracle import PredictedCosts

TOLERANCE = 1e-5
ATTRS: dict[str, Any] = {"padding": ((0, 0), (0, 0)), "dilation": (1, 1), "layout": "channels_last"}
CALLS = 0.002  # seconds of calls of a kernel in a turn
NEIGHBOURS = 400  # configs whose predicted times are compared


Stages = list[tuple[Sequence[Node], Node]]  # which nodes each computes, and which of them is its result


@dataclass(frozen=True)
class Case:
    """A block. `cut_after`: its nodes that end a stage, where that is not a contraction each."""

    name: str
    task: Task
    cut_after: tuple[Node, ...] = ()

    @property
    def stages(self) -> Stages:
        if not self.cut_after:
            chain = chain_of(self.task)
            assert isinstance(chain, Chain), chain
            return [(stage.members, stage.result) for stage in chain.stages]
        left = [node for node in self.task.graph.nodes() if not (node.is_input or node.is_constant)]
        found: Stages = []
        for end in (*self.cut_after, self.task.output):
            before = set(Graph(self.task.graph.inputs, (end,)).nodes())
            found.append(([node for node in left if node in before], end))
            left = [node for node in left if node not in before]
        return found


def convolved(
    x: Inputs, y: Node, window: int, channels: int, stride: int = 1, groups: int = 1, clamped: bool = True
) -> Node:
    edge, inside = window // 2, y.shape[-1] // groups
    if edge:
        ends = (0, edge, edge, 0)
        y = apply("pad", y, low=ends, high=ends, interior=(0, 0, 0, 0), value=0.0)
    weight = x(window, window, inside, channels, constant=True)
    y = apply("conv", y, weight, stride=(stride, stride), groups=groups, **ATTRS)
    y = apply("add", y, x(channels, constant=True))
    return apply("clamp", y, min=0.0, max=6.0) if clamped else y


def inverted_residual(size: int, channels: int, results: int, stride: int, expansion: int = 6) -> Case:
    x = Inputs()
    source = x(1, size, size, channels)
    wide = channels * expansion
    y = convolved(x, source, 1, wide) if expansion > 1 else source
    y = convolved(x, y, 3, wide, stride, groups=wide)
    y = convolved(x, y, 1, results, clamped=False)
    if stride == 1 and channels == results:
        y = apply("add", y, source)
    name = f"mobile {size}x{size}, {channels} -> {wide} -> {results}, stride {stride}"
    return Case(name, x.task(y))


def conv_pair(size: int, inside: int, channels: int, stride: int) -> Case:
    x = Inputs()
    y = convolved(x, x(1, size, size, inside), 3, channels, stride)
    y = convolved(x, y, 1, channels)
    return Case(f"pair {size}x{size}, 3x3 {inside} -> {channels}, stride {stride}, then 1x1", x.task(y))


def feed_forward(tokens: int, width: int = 768, inner: int = 3072) -> Case:
    x = Inputs()
    y = apply("linear", x(tokens, width), x(inner, width, constant=True))
    y = apply("gelu", apply("add", y, x(inner, constant=True)), approximate="none")
    y = apply("add", apply("linear", y, x(width, inner, constant=True)), x(width, constant=True))
    return Case(
        f"ffn {tokens} tokens, {width} -> {inner} -> {width}", x.task(apply("add", y, x(tokens, width)))
    )


def norm_then_linear(tokens: int, width: int, results: int) -> Case:
    x = Inputs()
    scale, shift = x(width, constant=True), x(width, constant=True)
    y = apply("layer_norm", x(tokens, width), scale, shift, dims=1, eps=1e-5)
    z = apply("add", apply("linear", y, x(results, width, constant=True)), x(results, constant=True))
    return Case(f"norm {tokens} tokens of {width}, then linear {results}", x.task(z), (y,))


def linear_then_norm(tokens: int, width: int, results: int) -> Case:
    x = Inputs()
    y = apply("linear", x(tokens, width), x(results, width, constant=True))
    y = apply("add", apply("add", y, x(results, constant=True)), x(tokens, results))
    scale, shift = x(results, constant=True), x(results, constant=True)
    z = apply("layer_norm", y, scale, shift, dims=1, eps=1e-5)
    return Case(f"linear {width} -> {results} and residual, then norm, {tokens} tokens", x.task(z), (y,))


def gemm_pair(rows: int, k: int, n: int, last: int) -> Case:
    x = Inputs()
    y = apply("relu", apply("linear", x(rows, k), x(n, k, constant=True)))
    return Case(
        f"gemm {rows} rows, {k} -> {n} -> {last}",
        x.task(apply("relu", apply("linear", y, x(last, n, constant=True)))),
    )


def cases() -> list[Case]:
    return [
        inverted_residual(112, 32, 16, 1, expansion=1),
        inverted_residual(112, 16, 24, 2),
        inverted_residual(56, 24, 24, 1),
        inverted_residual(56, 24, 32, 2),
        inverted_residual(28, 32, 32, 1),
        inverted_residual(28, 32, 64, 2),
        inverted_residual(14, 64, 64, 1),
        inverted_residual(14, 64, 96, 1),
        inverted_residual(14, 96, 96, 1),
        inverted_residual(14, 96, 160, 2),
        inverted_residual(7, 160, 160, 1),
        inverted_residual(7, 160, 320, 1),
        *(conv_pair(224, 3, n, 2) for n in (48, 64)),
        *(conv_pair(112, n, n, 2) for n in (48, 64)),
        *(conv_pair(56, n, n, 1) for n in (48, 64)),
        *(gemm_pair(*sizes) for sizes in ((16384, 256, 64, 16), (32768, 576, 128, 64), (128320, 96, 32, 96))),
        *(norm_then_linear(tokens, 768, 2304) for tokens in (128, 512)),
        *(norm_then_linear(*sizes) for sizes in ((3136, 96, 288), (16384, 64, 64))),
        *(linear_then_norm(tokens, 768, 768) for tokens in (128, 512)),
        *(linear_then_norm(*sizes) for sizes in ((100, 256, 256), (3136, 96, 96))),
        *(feed_forward(tokens) for tokens in (128, 197, 512)),
    ]


# -- the kernels of a block -------------------------------------------------------------------------------------------


@dataclass
class Kernel:
    """A candidate of a group of stages. `run` calls it `calls` times."""

    config: str
    chosen: bool  # by the cost model, of all templates
    predicted: float  # seconds with one thread
    run: Callable[[], None]
    calls: int
    seconds: float = math.inf


@dataclass(frozen=True)
class Group:
    """Stages `first` to `last` as one kernel."""

    first: int
    last: int
    priced: float
    kernels: list[Kernel]

    @property
    def best(self) -> Kernel:
        return min(self.kernels, key=lambda kernel: kernel.seconds)

    @property
    def chosen(self) -> Kernel:
        return next(kernel for kernel in self.kernels if kernel.chosen)


@dataclass(frozen=True)
class CutRow:
    """One cut of a block: its kernels' configs, and microseconds."""

    kernels: tuple[str, ...]
    best: float
    chosen: float
    predicted: float  # with one thread, as it is measured
    priced: float  # as the partition compares: all threads, and their starts
    configs: tuple[str, ...]


@dataclass(frozen=True)
class BlockRow:
    name: str
    floor: float
    bound: str
    cuts: tuple[CutRow, ...]

    @property
    def separate(self) -> CutRow:
        return max(self.cuts, key=lambda row: len(row.kernels))

    @property
    def fused(self) -> CutRow | None:
        """The fastest with a chain."""
        some = [row for row in self.cuts if len(row.kernels) < len(self.separate.kernels)]
        return min(some, key=lambda row: row.best, default=None)

    @property
    def picked(self) -> CutRow:
        """By predicted times alone. The partition also keeps greedy chains unless another cut gains 5%."""
        return min(self.cuts, key=lambda row: row.priced)


def one_thread(applied: Applied, config: Config, machine: CpuMachine) -> float:
    terms, _ = counted(applied, config, machine)
    assert isinstance(terms, Terms)
    return float(cpu.seconds(terms, machine, threads=1, rates=cpu.rates_of(machine)))


def neighbourhood(applied: Applied, work: Work, count: int) -> list[Config]:
    """The config that a descent finds, and the best predicted of others near it."""
    found = descend(applied, work)
    if found is None:
        return []
    rng, best = Random(0), found[1]
    others: dict[Config, float] = {}
    for _ in range(NEIGHBOURS if count > 1 else 0):
        config = best
        for _ in range(rng.randint(1, 3)):
            config = applied.space.mutate(config, rng)
        if config != best and config not in others:
            others[config] = one_thread(applied, config, work.machine)
    return [best, *sorted(others, key=others.__getitem__)[: count - 1]]


def kernels_of(sub: SubTask, machine: CpuMachine, configs: int) -> list[Kernel]:
    work = Work(sub.task, machine)
    found: list[tuple[float, Kernel]] = []
    rng = np.random.default_rng(0)
    arrays = [
        rng.standard_normal(node.shape).astype(np.float32) / math.sqrt(node.shape[-1] if node.shape else 1)
        for node in sub.task.graph.inputs
    ]
    (expected,) = evaluate(sub.task.graph, arrays, precise=True)
    templates = catalog(machine.kind).trusted(work)
    others = [each for each in Candidates.of(work).applied if each.space.template != "default"]
    for applied in templates or others:
        for number, config in enumerate(neighbourhood(applied, work, configs)):
            program = applied.program(config)
            assert isinstance(program, Program)
            seconds = one_thread(applied, config, machine)
            built = Built.of(program, machine, "fast")
            stored = [
                _aligned(array.reshape(-1) if packing is None else packing.pack(array))
                for array, packing in zip(
                    arrays, (*program.packings, *[None] * (len(arrays) - len(program.packings))), strict=True
                )
            ]
            output = _aligned(np.empty(program.params[-1].size, np.float32))
            once = executor_of(
                [KernelRun(built, range(len(stored)), 0)], machine, 1, inputs=len(stored), outputs=1
            )
            once.run(stored, [output])
            error = relative_error(output.reshape(expected.shape), expected)
            if error > TOLERANCE:
                raise SystemExit(f"{sub.task.label}, {config}: relative error {error:.1e}")
            calls = max(1, int(CALLS / _timed(_bound(once, stored, output))))
            many = executor_of(
                [KernelRun(built, range(len(stored)), 0)] * calls, machine, 1, inputs=len(stored), outputs=1
            )
            run = _bound(many, stored, output)
            predicted = descend(applied, work)
            assert predicted is not None
            found.append(
                (predicted[0] if number == 0 else math.inf, Kernel(str(config), False, seconds, run, calls))
            )
    if found:
        min(found, key=lambda each: each[0])[1].chosen = True
    return [kernel for _, kernel in found]


def _bound(executor: Any, inputs: list[np.ndarray], output: np.ndarray) -> Callable[[], None]:
    return lambda: executor.run(inputs, [output])


def _timed(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return max(time.process_time() - began, 1e-7)


def _aligned(array: np.ndarray) -> np.ndarray:
    copy = aligned_empty(array.nbytes).view(np.float32).reshape(array.shape)
    copy[...] = array
    return copy


def groups_of(case: Case, machine: CpuMachine, configs: int) -> list[Group]:
    task, stages = case.task, case.stages
    constants = [task.graph.inputs[number] for number in task.constants]
    found = []
    for first in range(len(stages)):
        for last in range(first, len(stages)):
            members = [node for stage, _ in stages[first : last + 1] for node in stage]
            (sub,) = cut(task.graph, constants, [(members, stages[last][1])])
            kernels = kernels_of(sub, machine, configs)
            if kernels:
                price = PredictedCosts(machine).price(sub.task)
                found.append(Group(first, last, price.seconds if price else math.inf, kernels))
    return found


def cuts_of(groups: Sequence[Group], stages: int) -> Iterator[list[Group]]:
    """Every way to cover the stages, in order."""

    def rest(first: int) -> Iterator[list[Group]]:
        if first == stages:
            yield []
        for group in groups:
            if group.first == first:
                for others in rest(group.last + 1):
                    yield [group, *others]

    return rest(0)


def measured(case: Case, machine: CpuMachine, configs: int, turns: int) -> BlockRow:
    groups = groups_of(case, machine, configs)
    kernels = [kernel for group in groups for kernel in group.kernels]
    for _ in range(turns):
        for kernel in kernels:
            began = time.process_time()
            kernel.run()
            kernel.seconds = min(kernel.seconds, (time.process_time() - began) / kernel.calls)
    stages = max(group.last for group in groups) + 1
    cuts = []
    for some in cuts_of(groups, stages):
        names = tuple("+".join(str(n + 1) for n in range(group.first, group.last + 1)) for group in some)
        cuts.append(
            CutRow(
                names,
                1e6 * sum(group.best.seconds for group in some),
                1e6 * sum(group.chosen.seconds for group in some),
                1e6 * sum(group.chosen.predicted for group in some),
                1e6 * sum(group.priced for group in some),
                tuple(group.best.config for group in some),
            )
        )
    core = machine.throughput
    multiplying = case.task.flops / (2 * core.fmas * machine.lanes(DType.F32) * core.hertz)
    moving = case.task.bytes / (core.l3 * core.hertz)
    bound = "multiplications" if multiplying > moving else "bytes"
    return BlockRow(case.name, 1e6 * max(multiplying, moving), bound, tuple(cuts))


# -- tables -----------------------------------------------------------------------------------------------------------


def line(row: BlockRow) -> str:
    separate, fused, picked = row.separate, row.fused, row.picked
    cells = [row.name, f"{separate.best:.1f}", f"{separate.chosen:.1f}", f"{separate.predicted:.1f}"]
    if fused is None:
        cells += ["no kernel", "", "", "", ""]
    else:
        cells += [
            " ".join(fused.kernels),
            f"{fused.best:.1f}",
            f"{fused.chosen:.1f}",
            f"{fused.predicted:.1f}",
            f"{separate.best / fused.best:.2f}x",
        ]
    fastest = min(row.cuts, key=lambda each: each.best)
    cells += [
        " ".join(picked.kernels),
        f"{picked.best / fastest.best:.2f}x",
        f"{row.floor:.1f} ({row.bound})",
    ]
    return f"| {' | '.join(cells)} |"


def table(rows: Sequence[BlockRow]) -> list[str]:
    lines = [
        "| block | separate, best us | chosen | predicted | fastest with a chain | best us | chosen | predicted"
        " | separate / chain | the model's cut | its time to the fastest | floor us |",
        "| --- " * 12 + "|",
        *map(line, rows),
    ]
    gains = [row.separate.best / row.fused.best for row in rows if row.fused is not None]
    if gains:
        mean = math.exp(sum(map(math.log, gains)) / len(gains))
        lines += ["", f"Geometric mean of separate / chain over {len(gains)} blocks: {mean:.3f}x."]
    return lines


def details(rows: Sequence[BlockRow]) -> list[str]:
    lines = [
        "",
        "All cuts; microseconds.",
        "",
        "| block | kernels | best | chosen | predicted | compared by the partition |",
        "| --- " * 6 + "|",
    ]
    for row in rows:
        for each in row.cuts:
            kernels = " ".join(each.kernels)
            lines.append(
                f"| {row.name} | {kernels} | {each.best:.1f} | {each.chosen:.1f} | {each.predicted:.1f}"
                f" | {each.priced:.1f} |"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="blocks whose name has this word")
    parser.add_argument("--configs", type=int, default=4, help="measured for each kernel and template")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no block after this many")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    machine, began = host(), time.monotonic()
    rows: list[BlockRow] = []
    for case in cases():
        if options.only and options.only not in case.name:
            continue
        if time.monotonic() - began > options.seconds:
            print(f"No time for {case.name} and what follows.")
            break
        rows.append(measured(case, machine, options.configs, options.turns))
        print(line(rows[-1]), flush=True)
    seen = describe()
    head = [
        f"{seen['cpu']}, load {seen['load_average']}, {seen['date']}. `python benchmarks/fusion_blocks.py --configs"
        f" {options.configs} --turns {options.turns}`: one thread, processor time, the least of the turns.",
        "",
    ]
    text = "\n".join([*head, *table(rows), *details(rows)]) + "\n"
    print(text)
    if options.markdown:
        options.markdown.write_text(text)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
