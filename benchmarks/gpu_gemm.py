"""Matmuls, convolutions and attention of 16-bit floats on an NVIDIA GPU: our templates compared with the vendor's.

    python benchmarks/gpu_gemm.py [--json FILE] [--markdown FILE] [--only WORD] [--measured N] [--random N] [--compile]

Each row is one Tilewright kernel with epilogue. The baselines are PyTorch's: the library's call with what it can take
in (bias), then the rest as separate kernels; with --compile, torch.compile too. Times are medians of launches replayed
from a CUDA graph, alternating. Of our configs, the N that the analytical model ranks first are tried, and so many
random ones; every one is checked against float64 first. "Unmeasured" is the one that the model alone would take.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from tilewright.codegen.cuda.build import GpuKernel, GpuSource, build
from tilewright.codegen.cuda.tensor import tensor_source
from tilewright.dtypes import DType
from tilewright.graph.ir import Graph, Node, TensorType, input_node
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.hw.gpu import GpuMachine, detect
from tilewright.runtime.cuda.device import CudaFunction, Device
from tilewright.space.implementation import Implementation, Kernel
from tilewright.space.space import Config
from tilewright.space.template import Applied, GpuWork, Template
from tilewright.space.templates.cuda import TEMPLATES
from tilewright.tune.choose import ranked

LAUNCHES, TURNS = 20, 9
TOLERANCE = 2e-3


# -- what is computed -------------------------------------------------------------------------------------------------


class Inputs:
    """The inputs of a task: their nodes, and random tensors for them."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.tensors: list[torch.Tensor] = []

    def __call__(self, *shape: int, scale: float = 1.0) -> tuple[Node, torch.Tensor]:
        node = input_node(len(self.nodes), TensorType(shape, DType.F16), f"x{len(self.nodes)}")
        self.nodes.append(node)
        self.tensors.append((torch.randn(shape, device="cuda") * scale).half())
        return node, self.tensors[-1]

    def task(self, output: Node) -> Task:
        return Task(Graph(tuple(self.nodes), (output,)))


Torch = Callable[[Sequence[torch.Tensor]], torch.Tensor]


@dataclass(frozen=True)
class Case:
    name: str
    flops: float
    make: Callable[[], tuple[Task, list[torch.Tensor]]]
    alone: Torch  # the library's call
    whole: Torch  # and the rest


def product(m: int, n: int, k: int, epilogue: str = "residual") -> Case:
    """relu(x w' + b) + residual, or gelu(x w' + b)."""

    def make() -> tuple[Task, list[torch.Tensor]]:
        x = Inputs()
        a, weight = x(m, k)[0], x(n, k, scale=k**-0.5)[0]
        bias = x(n)[0]
        total = apply("matmul", a, apply("permute", weight, axes=(1, 0)))
        total = apply("add", total, apply("broadcast_to", apply("reshape", bias, shape=(1, n)), shape=(m, n)))
        if epilogue == "gelu":
            return x.task(apply("gelu", total, approximate="none")), x.tensors
        return x.task(apply("add", apply("relu", total), x(m, n)[0])), x.tensors

    def alone(t: Sequence[torch.Tensor]) -> torch.Tensor:
        return F.linear(t[0], t[1], t[2])

    def whole(t: Sequence[torch.Tensor]) -> torch.Tensor:
        total = F.linear(t[0], t[1], t[2])
        return F.gelu(total) if epilogue == "gelu" else torch.relu(total) + t[3]

    return Case(f"{m} x {n} x {k}, {epilogue}", 2.0 * m * n * k, make, alone, whole)


def convolution(batch: int, size: int, inside: int, outside: int, window: int, stride: int = 1) -> Case:
    """relu(conv(x, w) + b + residual), channels last."""
    edge, out = window // 2, -(-size // stride)
    attrs: dict[str, Any] = {"stride": (stride, stride), "padding": ((0, 0), (0, 0)), "dilation": (1, 1)}

    def make() -> tuple[Task, list[torch.Tensor]]:
        x = Inputs()
        image = x(batch, size, size, inside)[0]
        weight = x(window, window, inside, outside, scale=(window * window * inside) ** -0.5)[0]
        bias, residual = x(outside)[0], x(batch, out, out, outside)[0]
        if edge:
            pad = (0, edge, edge, 0)
            image = apply("pad", image, low=pad, high=pad, interior=(0, 0, 0, 0), value=0.0)
        total = apply("conv", image, weight, bias, groups=1, layout="channels_last", **attrs)
        return x.task(apply("relu", apply("add", total, residual))), x.tensors

    def alone(t: Sequence[torch.Tensor]) -> torch.Tensor:
        weight = t[1].permute(3, 2, 0, 1)
        if weight.dtype is torch.half:
            weight = kept(weight)
        return F.conv2d(t[0].permute(0, 3, 1, 2), weight, t[2], stride, edge)

    memory: dict[int, torch.Tensor] = {}

    def kept(weight: torch.Tensor) -> torch.Tensor:
        """As the library wants it: a model's weight is put into that order once."""
        if weight.data_ptr() not in memory:
            memory[weight.data_ptr()] = weight.contiguous(memory_format=torch.channels_last)
        return memory[weight.data_ptr()]

    def whole(t: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.relu(alone(t).permute(0, 2, 3, 1) + t[3])

    flops = 2.0 * batch * out * out * outside * window * window * inside
    name = f"conv {window} x {window} / {stride}: {batch} x {size} x {size}, {inside} -> {outside}"
    return Case(name, flops, make, alone, whole)


def gated(m: int, n: int, k: int) -> Case:
    """(silu(gate) * x) w': what is before the product is computed on the way to it."""

    def make() -> tuple[Task, list[torch.Tensor]]:
        x = Inputs()
        data, gate, weight = x(m, k)[0], x(m, k)[0], x(n, k, scale=k**-0.5)[0]
        both = apply("mul", apply("silu", gate), data)
        return x.task(apply("matmul", both, apply("permute", weight, axes=(1, 0)))), x.tensors

    def alone(t: Sequence[torch.Tensor]) -> torch.Tensor:
        return F.linear(t[0], t[2])

    def whole(t: Sequence[torch.Tensor]) -> torch.Tensor:
        return F.linear(F.silu(t[1]) * t[0], t[2])

    return Case(f"silu gate, {m} x {n} x {k}", 2.0 * m * n * k, make, alone, whole)


def scaled(batch: int, size: int, inside: int, outside: int) -> Case:
    """A pointwise convolution of an image whose channels are weighted, each image's by itself, with a residual."""

    def make() -> tuple[Task, list[torch.Tensor]]:
        x = Inputs()
        image, weights = x(batch, size, size, inside)[0], x(batch, 1, 1, inside)[0]
        weight = x(inside, outside, scale=inside**-0.5)[0]
        total = apply("matmul", apply("mul", image, weights), weight)
        return x.task(apply("add", total, x(batch, size, size, outside)[0])), x.tensors

    def alone(t: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.matmul(t[0], t[2])

    def whole(t: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.matmul(t[0] * t[1], t[2]) + t[3]

    flops = 2.0 * batch * size * size * inside * outside
    return Case(
        f"weighted channels, {batch} x {size} x {size}, {inside} -> {outside}", flops, make, alone, whole
    )


def pooled(batch: int, size: int, inside: int, outside: int) -> Case:
    """The mean of each image behind relu(x w + residual), as at the end of a network: the image is never written."""

    def make() -> tuple[Task, list[torch.Tensor]]:
        x = Inputs()
        image, weight = x(batch, size, size, inside)[0], x(inside, outside, scale=inside**-0.5)[0]
        total = apply("add", apply("matmul", image, weight), x(batch, size, size, outside)[0])
        return x.task(apply("mean", apply("relu", total), axes=(1, 2), keepdims=False)), x.tensors

    def alone(t: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.matmul(t[0], t[1])

    def whole(t: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.relu(alone(t) + t[2]).mean((1, 2))

    flops = 2.0 * batch * size * size * inside * outside
    return Case(
        f"mean of images, {batch} x {size} x {size}, {inside} -> {outside}", flops, make, alone, whole
    )


def attention(
    batch: int, heads: int, length: int, width: int, causal: bool = False, mask: bool = False
) -> Case:
    """Of projections [batch, length, heads * width], back to the same order."""
    whole_width = heads * width

    def make() -> tuple[Task, list[torch.Tensor]]:
        x = Inputs()

        def by_head(node: Node) -> Node:
            split = apply("reshape", node, shape=(batch, length, heads, width))
            return apply("permute", split, axes=(0, 2, 1, 3))

        operands = [by_head(x(batch, length, whole_width)[0]) for _ in range(3)]
        if mask:
            operands.append(x(batch, 1, length, length)[0])
        out = apply("attention", *operands, scale=width**-0.5, causal=causal)
        out = apply("permute", out, axes=(0, 2, 1, 3))
        return x.task(apply("reshape", out, shape=(batch, length, whole_width))), x.tensors

    def alone(t: Sequence[torch.Tensor]) -> torch.Tensor:
        q, k, v = (x.view(batch, length, heads, width).transpose(1, 2) for x in t[:3])
        added = t[3] if mask else None
        return F.scaled_dot_product_attention(q, k, v, attn_mask=added, is_causal=causal)

    def whole(t: Sequence[torch.Tensor]) -> torch.Tensor:
        return alone(t).transpose(1, 2).reshape(batch, length, whole_width)

    words = ", causal" * causal + ", mask" * mask
    flops = 4.0 * batch * heads * length * length * width / (2 if causal else 1)
    return Case(f"attention {batch} x {heads} x {length} x {width}{words}", flops, make, alone, whole)


CASES = [
    product(4096, 4096, 4096),
    product(2048, 2048, 2048),
    product(8192, 8192, 8192),
    product(512, 3072, 768, "gelu"),
    product(512, 768, 3072),
    product(1280, 3072, 768, "gelu"),
    product(1024, 64, 2048),
    product(1023, 1021, 1019),
    product(1023, 1021, 1019, "gelu"),
    product(1022, 1022, 1022),
    product(16, 8192, 8192),
    product(1, 4096, 4096),
    product(100352, 256, 64),
    product(25088, 512, 128),
    convolution(32, 56, 64, 64, 3),
    convolution(32, 28, 128, 128, 3),
    convolution(32, 14, 256, 256, 3),
    convolution(32, 7, 512, 512, 3),
    convolution(32, 56, 128, 128, 3, 2),
    convolution(32, 56, 64, 256, 1),
    convolution(32, 28, 512, 256, 1, 2),
    convolution(32, 224, 3, 64, 7, 2),
    gated(4096, 1024, 4096),
    gated(16384, 256, 1024),
    scaled(32, 56, 144, 24),
    scaled(32, 14, 672, 112),
    pooled(32, 7, 512, 2048),
    pooled(256, 14, 256, 256),
    attention(8, 12, 512, 64),
    attention(1, 12, 512, 64),
    attention(32, 12, 197, 64),
    attention(4, 16, 1024, 64, causal=True),
    attention(2, 32, 2048, 128, causal=True),
    attention(8, 12, 512, 64, mask=True),
]


# -- timing -----------------------------------------------------------------------------------------------------------


@dataclass
class Trial:
    config: dict[str, Any]
    predicted_us: float
    us: float
    error: float
    registers: int
    spilled: int


@dataclass
class Row:
    name: str
    flops: float
    library_us: float
    whole_us: float
    compiled_us: float | None
    ours_us: float
    unmeasured_us: float
    error: float
    decisions: str
    trials: list[Trial] = field(default_factory=list)


def replayed(launch: Callable[[], object], launches: int = LAUNCHES) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            launch()
    return graph


def timed(graph: torch.cuda.CUDAGraph, launches: int = LAUNCHES) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / launches


def race(graphs: dict[str, torch.cuda.CUDAGraph], turns: int = TURNS) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for graph in graphs.values():
        timed(graph)
    for _ in range(turns):
        for name, graph in graphs.items():
            times[name].append(timed(graph))
    return {name: statistics.median(taken) for name, taken in times.items()}


def built(source: GpuSource, machine: GpuMachine) -> GpuKernel:
    return build(source, machine, "fast", None)


@dataclass(frozen=True)
class Ranked:
    """A config with its predicted time."""

    seconds: float
    config: Config
    applied: Applied

    @property
    def kernel(self) -> Kernel:
        made = self.applied.program(self.config)
        assert not isinstance(made, Implementation), "templates of one kernel alone are ranked here"
        return made


def rank(work: GpuWork, templates: Sequence[Template] = TEMPLATES) -> list[Ranked]:
    """Every config of these templates, the fastest by prediction first."""
    found = [
        Ranked(seconds, config, applied)
        for template in templates
        if (applied := template.apply(work)) is not None
        for seconds, config in ranked(applied, work)
    ]
    return sorted(found, key=lambda each: each.seconds)


def candidates(task: Task, machine: GpuMachine, measured: int, drawn: int) -> list[Ranked]:
    found = rank(GpuWork(task, machine))
    first = found[:measured]
    rest = found[measured:]
    return first + random.Random(0).sample(rest, min(drawn, len(rest)))


def measure(
    case: Case, chosen: list[Ranked], kernels: list[GpuKernel], device: Device, compiled: bool
) -> Row:
    torch.manual_seed(0)
    _, tensors = case.make()
    exact = case.whole([t.double() for t in tensors])
    out = torch.empty_like(exact, dtype=torch.half).contiguous()
    addresses = [t.data_ptr() for t in (*tensors, out)]
    kept: list[CudaFunction] = []
    launches: dict[str, Callable[[], None]] = {}
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    trials: dict[str, Trial] = {}
    for each, kernel in zip(chosen, kernels, strict=True):
        function = device.load(kernel.cubin, kernel.symbol, kernel.shared_bytes)
        kept.append(function)

        def launch(
            function: CudaFunction = function, blocks: int = kernel.blocks, threads: int = kernel.threads
        ) -> None:
            function.launch(blocks, threads, addresses, torch.cuda.current_stream().cuda_stream)

        out.fill_(float("nan"))
        launch()
        torch.cuda.synchronize()
        error = float(torch.linalg.vector_norm(out.double() - exact) / torch.linalg.vector_norm(exact))
        if not error < TOLERANCE:
            print(f"WRONG {case.name} {kernel.decisions}: error {error}", flush=True)
            continue
        name = kernel.decisions
        used = kernel.resources
        trials[name] = Trial(
            dict(each.config.values), each.seconds * 1e6, 0.0, error, used.registers, used.spilled_bytes
        )
        launches[name] = launch
        graphs[name] = replayed(launch, 5)
    for name, graph in graphs.items():
        timed(graph, 5)
        trials[name].us = statistics.median(timed(graph, 5) for _ in range(3))
    order = sorted(trials, key=lambda name: trials[name].us)
    for name in order[:3]:
        rate = 1e-6 * case.flops / trials[name].us
        print(
            f"  {trials[name].us:9.1f} us  {rate:6.1f} TFLOP/s  {name} ({trials[name].registers} registers)",
            flush=True,
        )
    baselines = {"library": partial(case.alone, tensors), "whole": partial(case.whole, tensors)}
    if compiled:
        fused = torch.compile(case.whole)
        baselines["compiled"] = partial(fused, tensors)
    first = kernels[0].decisions if kernels[0].decisions in trials else order[0]
    finals = {name: replayed(launches[name]) for name in dict.fromkeys([*order[:3], first])}
    final = race({**{name: replayed(baseline) for name, baseline in baselines.items()}, **finals})
    best = min(finals, key=lambda name: final[name])
    return Row(
        case.name, case.flops, final["library"], final["whole"], final.get("compiled"), final[best], final[first],
        trials[best].error, best, list(trials.values()),
    )  # fmt: skip


def table(rows: Sequence[Row], heading: str) -> str:
    compiled = any(row.compiled_us for row in rows)
    titles = [
        *("task", "library", "and the rest", *(["torch.compile"] if compiled else [])),
        *(
            "Tilewright, all in one",
            "of the library's speed",
            "vs best baseline",
            "unmeasured",
            "error",
            "config",
        ),
    ]
    lines = [heading, "", f"| {' | '.join(titles)} |", "| --- " * len(titles) + "|"]
    for row in rows:
        baseline = min(row.whole_us, row.compiled_us or row.whole_us)
        cells = [
            *(row.name, f"{row.library_us:.1f}", f"{row.whole_us:.1f}"),
            *([f"{row.compiled_us:.1f}" if row.compiled_us else "-"] if compiled else []),
            *(f"{row.ours_us:.1f}", f"{row.library_us / row.ours_us:.0%}", f"{baseline / row.ours_us:.2f}x"),
            *(f"{row.unmeasured_us:.1f}", f"{row.error:.1e}", row.decisions),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--measured", type=int, default=16)
    parser.add_argument("--random", type=int, default=0)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    device, machine = Device(), detect()
    heading = (
        f"{machine.describe()}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}; fp16, microseconds."
    )
    cases = [case for case in CASES if options.only in case.name]
    rows = []
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        planned = []
        for case in cases:  # the compiler works ahead on all cores
            chosen = candidates(case.make()[0], machine, options.measured, options.random)
            sources = [tensor_source(each.kernel) for each in chosen]
            planned.append((case, chosen, [pool.submit(built, source, machine) for source in sources]))
        for case, chosen, futures in planned:
            rows.append(measure(case, chosen, [f.result() for f in futures], device, options.compile))
            print(table(rows[-1:], heading).splitlines()[-1], flush=True)
            if options.markdown:
                options.markdown.write_text(table(rows, heading))
            if options.json:
                options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
