"""Two GEMMs or convolutions in one kernel on an NVIDIA GPU, compared with separate kernels and with the vendor's.

    python benchmarks/fusion_chains.py [--json FILE] [--markdown FILE] [--only WORD] [--measured N] [--random N]

"One kernel" is Tilewright's chain kernel, "two kernels" its best kernel for each of the two, both by measuring the N
configs that the analytical model ranks first (and so many random ones). The vendor's are PyTorch's calls with the
activation as a kernel of its own, and with the activation inside where a library has that. Times are medians of
launches replayed from a CUDA graph, interleaved; every config is checked against float64 first. "Unmeasured" is the
config that the model alone would take. The floor is the time of the fewest bytes at the memory's bandwidth on the data
sheet.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from gpu_gemm import Inputs, Ranked, built, race, rank, replayed, timed
from tilewright.codegen.cuda.build import GpuKernel
from tilewright.codegen.cuda.tensor import tensor_source
from tilewright.graph.chain import Chain, chain_of
from tilewright.graph.ir import Node
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.hw.gpu import GpuMachine, detect
from tilewright.runtime.cuda.device import CudaFunction, Device
from tilewright.space.chain import subtasks_of
from tilewright.space.template import GpuWork
from tilewright.space.templates.cuda.chain import TensorCoreChain
from tilewright.space.templates.cuda.matmul import TensorCores

TOLERANCE = 2e-3
Torch = Callable[[Sequence[torch.Tensor]], torch.Tensor]


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[], tuple[Task, list[torch.Tensor]]]
    separate: Torch  # the vendor's, the activation by itself
    inside: Torch  # the vendor's, the activation inside


def pair(m: int, k: int, n: int, last: int) -> Case:
    """relu(relu(x a') b')."""

    def make() -> tuple[Task, list[torch.Tensor]]:
        x = Inputs()
        data, one, two = x(m, k)[0], x(n, k, scale=k**-0.5)[0], x(last, n, scale=n**-0.5)[0]
        between = apply("relu", apply("linear", data, one))
        return x.task(apply("relu", apply("linear", between, two))), x.tensors

    def separate(t: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.relu(F.linear(torch.relu(F.linear(t[0], t[1])), t[2]))

    def inside(t: Sequence[torch.Tensor]) -> torch.Tensor:
        first = torch._addmm_activation(_zeros(t[1]), t[0], t[1].t())
        return torch._addmm_activation(_zeros(t[2]), first, t[2].t())

    return Case(f"GEMM {m} x {n} x {k}, {m} x {last} x {n}", make, separate, inside)


_kept: dict[tuple[int, str], torch.Tensor] = {}


def _zeros(weight: torch.Tensor) -> torch.Tensor:
    key = weight.data_ptr(), "zeros"
    if key not in _kept:
        _kept[key] = torch.zeros(weight.shape[0], device=weight.device, dtype=weight.dtype)
    return _kept[key]


def _filters(weight: torch.Tensor) -> torch.Tensor:
    """As the library wants them: a model's weights are put into that order once."""
    if weight.dtype is not torch.half:
        return weight.permute(3, 2, 0, 1)
    key = weight.data_ptr(), "filters"
    if key not in _kept:
        _kept[key] = weight.permute(3, 2, 0, 1).contiguous(memory_format=torch.channels_last)
    return _kept[key]


def conv_pair(size: int, inside_channels: int, channels: int, stride: int, batch: int = 32) -> Case:
    """relu(conv1x1(relu(conv3x3(x) + b)) + c), channels last."""
    attrs: dict[str, Any] = {
        "padding": ((0, 0), (0, 0)),
        "dilation": (1, 1),
        "groups": 1,
        "layout": "channels_last",
    }

    def make() -> tuple[Task, list[torch.Tensor]]:
        x = Inputs()
        image = x(batch, size, size, inside_channels)[0]
        one = x(3, 3, inside_channels, channels, scale=(9 * inside_channels) ** -0.5)[0]
        bias = x(channels)[0]
        two, last = x(1, 1, channels, channels, scale=channels**-0.5)[0], x(channels)[0]
        image = apply("pad", image, low=(0, 1, 1, 0), high=(0, 1, 1, 0), interior=(0, 0, 0, 0), value=0.0)
        y = apply("relu", apply("add", apply("conv", image, one, stride=(stride, stride), **attrs), bias))
        z = apply("conv", y, two, stride=(1, 1), **attrs)
        return x.task(apply("relu", apply("add", z, last))), x.tensors

    def separate(t: Sequence[torch.Tensor]) -> torch.Tensor:
        image = t[0].permute(0, 3, 1, 2)
        y = torch.relu(F.conv2d(image, _filters(t[1]), t[2], stride, 1))
        return torch.relu(F.conv2d(y, _filters(t[3]), t[4])).permute(0, 2, 3, 1)

    def inside(t: Sequence[torch.Tensor]) -> torch.Tensor:
        image, ones = t[0].permute(0, 3, 1, 2), (1, 1)
        y = torch.cudnn_convolution_relu(image, _filters(t[1]), t[2], (stride, stride), ones, ones, 1)
        return torch.cudnn_convolution_relu(y, _filters(t[3]), t[4], ones, (0, 0), ones, 1).permute(
            0, 2, 3, 1
        )

    name = f"conv {size} x {size}, {inside_channels} -> {channels}, stride {stride}, then 1x1"
    return Case(name, make, separate, inside)


CASES = [
    pair(16384, 256, 64, 16),
    pair(32768, 576, 128, 64),
    pair(128320, 96, 32, 96),
    conv_pair(224, 3, 48, 2),
    conv_pair(112, 48, 48, 2),
    conv_pair(56, 48, 48, 1),
    conv_pair(224, 3, 64, 2),
    conv_pair(112, 64, 64, 2),
    conv_pair(56, 64, 64, 1),
]


@dataclass
class Trial:
    config: dict[str, Any]
    predicted_us: float
    us: float
    registers: int
    spilled: int


@dataclass
class Row:
    name: str
    one_us: float
    two_us: float
    separate_us: float
    inside_us: float
    unmeasured_us: float
    predicted_us: float  # of the config that the model takes
    predicted_two_us: float
    floor_us: float
    error: float
    decisions: str
    trials: list[Trial] = field(default_factory=list)
    stages: list[list[Trial]] = field(default_factory=list)


@dataclass(frozen=True)
class Planned:
    """Configs of one kernel, and their builds."""

    ranked: list[Ranked]
    builds: list[Future[GpuKernel]]


def planned(
    found: list[Ranked], machine: GpuMachine, pool: ProcessPoolExecutor, first: int, drawn: int
) -> Planned:
    rest = found[first:]
    chosen = found[:first] + random.Random(0).sample(rest, min(drawn, len(rest)))
    return Planned(chosen, [pool.submit(built, tensor_source(each.kernel), machine) for each in chosen])


def launched(device: Device, kernel: GpuKernel, tensors: Sequence[torch.Tensor]) -> Callable[[], None]:
    function: CudaFunction = device.load(kernel.cubin, kernel.symbol, kernel.shared_bytes)
    addresses = [tensor.data_ptr() for tensor in tensors]

    def launch() -> None:
        function.launch(kernel.blocks, kernel.threads, addresses, torch.cuda.current_stream().cuda_stream)

    return launch


def fastest(
    plan: Planned, device: Device, tensors: Sequence[torch.Tensor], exact: torch.Tensor, name: str
) -> tuple[list[tuple[float, Callable[[], None], GpuKernel, float]], list[Trial]]:
    """The correct kernels, the fastest first, with their errors."""
    found, trials = [], []
    out = tensors[-1]
    for each, build in zip(plan.ranked, plan.builds, strict=True):
        kernel = build.result()
        launch = launched(device, kernel, tensors)
        out.fill_(float("nan"))
        launch()
        torch.cuda.synchronize()
        difference = out.double().reshape(exact.shape) - exact
        error = float(torch.linalg.vector_norm(difference) / torch.linalg.vector_norm(exact))
        if not error < TOLERANCE:
            print(f"WRONG {name} {kernel.decisions}: error {error}", flush=True)
            continue
        graph = replayed(launch, 5)
        timed(graph, 5)
        us = statistics.median(timed(graph, 5) for _ in range(3))
        found.append((us, launch, kernel, error))
        used = kernel.resources
        trials.append(
            Trial(dict(each.config.values), each.seconds * 1e6, us, used.registers, used.spilled_bytes)
        )
    return sorted(found, key=lambda each: each[0]), trials


def measure(
    case: Case, whole: Planned, stages: list[Planned], chain: Chain, device: Device, machine: GpuMachine
) -> Row:
    torch.manual_seed(0)
    _kept.clear()  # tensors of the case before
    task, tensors = case.make()
    exact = case.separate([t.double() for t in tensors])
    out = torch.empty(exact.shape, dtype=torch.half, device="cuda")
    first = whole.builds[0].result().decisions
    one, trials = fastest(whole, device, [*tensors, out], exact, case.name)
    known: dict[Node, torch.Tensor] = dict(zip(task.graph.inputs, tensors, strict=True))
    launches, stage_trials = [], []
    for stage, plan in zip(subtasks_of(chain), stages, strict=True):
        operands = [
            known[task.graph.inputs[node.attrs["index"]] if node.is_input else node]
            for node in stage.operands
        ]
        result = torch.empty(stage.result.shape, dtype=torch.half, device="cuda")
        truth = _stage_result(stage.task, operands)
        known[stage.result] = truth.half()
        found, tried = fastest(plan, device, [*operands, result], truth, stage.task.label)
        launches.append(launched(device, found[0][2], [*operands, result]))
        stage_trials.append(tried)

    def two() -> None:
        for launch in launches:
            launch()

    unmeasured = next((each[1] for each in one if each[2].decisions == first), one[0][1])
    graphs = {
        "one": replayed(one[0][1]), "two": replayed(two), "unmeasured": replayed(unmeasured),
        "separate": replayed(lambda: case.separate(tensors)),
    }  # fmt: skip
    try:
        graphs["inside"] = replayed(lambda: case.inside(tensors))
    except RuntimeError as error:
        print(f"no call with the activation inside for {case.name}: {str(error)[:200]}", flush=True)
    times = race(graphs)
    moved = sum(t.numel() * 2 for t in (*tensors, out))
    return Row(
        case.name, times["one"], times["two"], times["separate"], times.get("inside", math.inf), times["unmeasured"],
        whole.ranked[0].seconds * 1e6, sum(plan.ranked[0].seconds for plan in stages) * 1e6,
        moved / machine.memory_bytes_per_second * 1e6, one[0][3], one[0][2].decisions, trials, stage_trials,
    )  # fmt: skip


def _stage_result(task: Task, operands: Sequence[torch.Tensor]) -> torch.Tensor:
    """A stage in float64."""
    values: dict[Node, torch.Tensor] = {
        node: t.double() for node, t in zip(task.graph.inputs, operands, strict=True)
    }
    for node in task.graph.nodes():
        if node.is_input:
            continue
        x = [values[operand] for operand in node.inputs]
        if node.op == "linear":
            values[node] = F.linear(*x)
        elif node.op == "add":
            values[node] = x[0] + x[1]
        elif node.op == "relu":
            values[node] = torch.relu(x[0])
        elif node.op == "pad":
            values[node] = F.pad(x[0], (0, 0, 1, 1, 1, 1))
        else:
            assert node.op == "conv", node.op
            image, filters = x[0].permute(0, 3, 1, 2), x[1].permute(3, 2, 0, 1)
            values[node] = (
                F.conv2d(image, filters, stride=node.attrs["stride"]).permute(0, 2, 3, 1).contiguous()
            )
    return values[task.output]


def table(rows: Sequence[Row], heading: str) -> str:
    titles = (
        *("task", "one kernel", "two kernels", "gain", "vendor, separate activation", "gain"),
        *(
            "vendor, activation inside",
            "gain",
            "unmeasured",
            "predicted one / two",
            "floor",
            "error",
            "config",
        ),
    )
    lines = [heading, "", f"| {' | '.join(titles)} |", "| --- " * len(titles) + "|"]
    for row in rows:
        cells = [
            *(row.name, f"{row.one_us:.1f}", f"{row.two_us:.1f}", f"{row.two_us / row.one_us:.2f}x"),
            *(f"{row.separate_us:.1f}", f"{row.separate_us / row.one_us:.2f}x"),
            *(f"{row.inside_us:.1f}", f"{row.inside_us / row.one_us:.2f}x", f"{row.unmeasured_us:.1f}"),
            *(
                f"{row.predicted_us:.1f} / {row.predicted_two_us:.1f}",
                f"{row.floor_us:.1f}",
                f"{row.error:.1e}",
            ),
            row.decisions,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    gains = [
        statistics.geometric_mean(getattr(row, name) / row.one_us for row in rows)
        for name in ("two_us", "separate_us", "inside_us")
    ]
    two, separate, inside = (f"{gain:.2f}x" for gain in gains)
    lines.append(f"| geometric mean | | | {two} | | {separate} | | {inside} |" + " |" * (len(titles) - 8))
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--measured", type=int, default=24)
    parser.add_argument("--random", type=int, default=0)
    parser.add_argument(
        "--stages", type=int, default=12, help="configs that are measured of each separate kernel"
    )
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    device, machine = Device(), detect()
    heading = (
        f"{machine.describe()}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}; fp16, microseconds."
    )
    rows: list[Row] = []
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        waiting = []
        for case in CASES:  # the compiler works ahead on all cores
            if options.only not in case.name:
                continue
            task = case.make()[0]
            chain = chain_of(task)
            assert isinstance(chain, Chain)
            whole = planned(
                rank(GpuWork(task, machine), [TensorCoreChain()]),
                machine,
                pool,
                options.measured,
                options.random,
            )
            stages = [
                planned(rank(GpuWork(each.task, machine), [TensorCores()]), machine, pool, options.stages, 0)
                for each in subtasks_of(chain)
            ]
            waiting.append((case, whole, stages, chain))
        for case, whole, stages, chain in waiting:
            rows.append(measure(case, whole, stages, chain, device, machine))
            print(table(rows[-1:], heading).splitlines()[-2], flush=True)
            if options.markdown:
                options.markdown.write_text(table(rows, heading))
            if options.json:
                options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
