"""Single operators on an NVIDIA GPU: Tilewright, PyTorch's eager kernels and torch.compile, in one run.

    python benchmarks/gpu_ops.py                        every case
    python benchmarks/gpu_ops.py --only softmax transpose --json FILE --markdown FILE
    python benchmarks/gpu_ops.py --eager                without torch.compile, which takes most of the time

Every case is larger than the card's L2; times are of the kernel alone (events around a run of launches, the
systems alternating, medians), and the yardstick is the copy of a buffer as large, measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from tilewright import frontend
from tilewright.codegen.cuda.tensor import tensor_source
from tilewright.graph.task import TaskCall
from tilewright.hw import host
from tilewright.hw.gpu import GpuMachine, detect
from tilewright.measure.gpu import GpuProgram
from tilewright.rewrites.pipeline import run_pipeline
from tilewright.runtime.cuda.device import Device
from tilewright.runtime.plan import VendorCall
from tilewright.space.template import Work
from tilewright.support.trace import Trace
from tilewright.tune.choose import choose
from tilewright.tune.oracle import PredictedCosts

LAUNCHES, TURNS = 10, 7


class Function(nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.function(*inputs)


@dataclass(frozen=True)
class Case:
    name: str
    function: Callable[..., torch.Tensor]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype = torch.float16


def _gelu(x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    return nn.functional.gelu(x + bias) + residual


def _layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return nn.functional.layer_norm(x, (x.shape[-1],), weight, bias)


def _normalised_sum(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return _layer_norm(x + y, w, b)


def _group_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return nn.functional.group_norm(x, 32, weight, bias)


def _gathered(x: torch.Tensor) -> torch.Tensor:
    return x[torch.arange(x.shape[0], device=x.device) * 4099 % x.shape[0]]


CASES = [
    Case("gelu(x + bias) + residual, 32768 x 3072", _gelu, ((32768, 3072), (3072,), (32768, 3072))),
    Case("relu(x) of 2^26, fp32", torch.relu, ((1 << 26,),), torch.float32),
    Case("x * y broadcast along rows, 16384 x 4099", torch.mul, ((16384, 4099), (16384, 1))),
    Case("softmax, 65536 x 1024", lambda x: torch.softmax(x, -1), ((65536, 1024),)),
    Case("softmax, 98304 x 197", lambda x: torch.softmax(x, -1), ((98304 * 4, 197),)),
    Case("softmax, 8192 x 16384", lambda x: torch.softmax(x, -1), ((8192, 16384),)),
    Case("softmax, 2048 x 65536", lambda x: torch.softmax(x, -1), ((2048, 65536),)),
    Case("layer norm, 131072 x 768", _layer_norm, ((131072, 768), (768,), (768,))),
    Case(
        "layer norm of x + y, 65536 x 1024", _normalised_sum, ((65536, 1024), (65536, 1024), (1024,), (1024,))
    ),
    Case("layer norm, 32768 x 4096, fp32", _layer_norm, ((32768, 4096), (4096,), (4096,)), torch.float32),
    Case("sum of rows, 65536 x 2048", lambda x: x.sum(-1), ((65536, 2048),)),
    Case("sum of columns, 65536 x 2048", lambda x: x.sum(0), ((65536, 2048),)),
    Case("group norm, 64 x 256 x 56 x 56", _group_norm, ((64, 256, 56, 56), (256,), (256,))),
    Case("rows gathered, 131072 x 768", _gathered, ((131072, 768),)),
    Case(
        "resize to twice the size, 32 x 128 x 56 x 56",
        lambda x: nn.functional.interpolate(x, scale_factor=2.0, mode="nearest"),
        ((32, 128, 56, 56),),
    ),
    Case("transpose, 8192 x 8192", lambda x: x.t().contiguous(), ((8192, 8192),)),
    Case("transpose, 8192 x 8192, fp32", lambda x: x.t().contiguous(), ((8192, 8192),), torch.float32),
    Case(
        "NCHW -> NHWC, 64 x 256 x 56 x 56",
        lambda x: x.permute(0, 2, 3, 1).contiguous(),
        ((64, 256, 56, 56),),
    ),
    Case("heads, 64 x 512 x 12 x 64", lambda x: x.permute(0, 2, 1, 3).contiguous(), ((64, 512, 12, 64),)),
    Case("concat along channels", lambda x, y: torch.cat([x, y], 1), ((64, 256, 56, 56), (64, 128, 56, 56))),
    Case(
        "max pool 3x3/2, 64 x 64 x 112 x 112",
        lambda x: nn.functional.max_pool2d(x, 3, 2, 1),
        ((64, 64, 112, 112),),
    ),
]


@dataclass(frozen=True)
class Row:
    name: str
    megabytes: float
    copy_us: float
    eager_us: float
    compiled_us: float | None
    ours_us: float
    error: float
    decisions: str

    @property
    def of_copy(self) -> float:
        return self.copy_us / self.ours_us

    @property
    def ratio(self) -> float:
        baselines = [self.eager_us] + ([self.compiled_us] if self.compiled_us else [])
        return min(baselines) / self.ours_us


def timed(launch: Callable[[], object]) -> float:
    """Microseconds of one launch, in a run of several."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(LAUNCHES):
        launch()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / LAUNCHES


class Ours:
    """The kernels of a task, one after another, on the caller's tensors."""

    def __init__(self, call: TaskCall, machine: GpuMachine, device: Device) -> None:
        self.implementation = choose(Work(call.task, machine)).implementation
        self.given = call.inputs
        self.constants = {
            node: torch.from_numpy(node.data).cuda() for node in call.inputs if node.data is not None
        }
        bodies = [part.body for part in self.implementation.parts]
        self.programs = [
            GpuProgram(tensor_source(body), machine, device)
            for body in bodies
            if not isinstance(body, VendorCall)
        ]
        self.own = [program.addresses for program in self.programs]

    def bind(self, inputs: Sequence[torch.Tensor], result: torch.Tensor) -> None:
        positions = {
            node: (self.constants[x] if x in self.constants else inputs[x.attrs["index"]]).data_ptr()
            for node, x in zip(self.implementation.inputs, self.given, strict=True)
        }
        parts = self.implementation.parts
        for part, program in zip(parts, self.programs, strict=True):
            positions[part.result] = result.data_ptr() if part is parts[-1] else program.addresses[-1]
            program.addresses = [positions[node] for node in (*part.operands, part.result)]

    def launch(self, stream: int) -> None:
        for program in self.programs:
            program.launch(stream)

    def close(self) -> None:
        for program, own in zip(self.programs, self.own, strict=True):
            program.addresses = own
            program.close()

    @property
    def decisions(self) -> str:
        return "; ".join(program.kernel.decisions for program in self.programs)


def ours(case: Case, inputs: Sequence[torch.Tensor], machine: GpuMachine, device: Device) -> Ours:
    imported = frontend.import_model(Function(case.function).eval(), tuple(x.cpu() for x in inputs))
    partition = run_pipeline(
        imported.graph, Trace.off(), numerics="fast", oracle=PredictedCosts(host(), "fast")
    )
    if len(partition.calls) != 1:
        raise SystemExit(f"{case.name} became {len(partition.calls)} tasks")
    return Ours(partition.calls[0], machine, device)


def measure(case: Case, machine: GpuMachine, device: Device, eager_alone: bool = False) -> Row:
    torch.manual_seed(0)
    inputs = [torch.randn(shape, device="cuda").to(case.dtype) for shape in case.shapes]
    expected = case.function(*(x.double() for x in inputs))
    compiled = torch.compile(case.function)
    program = ours(case, inputs, machine, device)
    stream = torch.cuda.current_stream().cuda_stream
    result = torch.full(expected.shape, float("nan"), device="cuda", dtype=case.dtype)
    program.bind(inputs, result)
    program.launch(stream)
    torch.cuda.synchronize()
    wide = result.double()
    error = float(torch.linalg.vector_norm(wide - expected) / torch.linalg.vector_norm(expected))
    if not torch.isfinite(wide).all():
        error = float("nan")
    size = sum(x.nbytes for x in (*inputs, result)) // 2
    source, target = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    systems: dict[str, Callable[[], object]] = {
        "copy": lambda: target.copy_(source),
        "eager": lambda: case.function(*inputs),
        "compiled": lambda: compiled(*inputs),
        "ours": lambda: program.launch(stream),
    }
    if eager_alone:
        del systems["compiled"]
    times: dict[str, list[float]] = {name: [] for name in systems}
    for name, launch in list(systems.items()):
        try:
            timed(launch)
        except Exception as failure:  # a baseline that cannot do it is left out
            print(f"{case.name}: {name} left out: {failure}", file=sys.stderr)
            del systems[name]
    for _ in range(TURNS):
        for name, launch in systems.items():
            times[name].append(timed(launch))
    medians = {name: statistics.median(taken) for name, taken in times.items() if taken}
    program.close()
    return Row(
        case.name,
        2 * size / 1e6,
        medians["copy"],
        medians["eager"],
        medians.get("compiled"),
        medians["ours"],
        error,
        program.decisions,
    )


def table(rows: Sequence[Row], machine: GpuMachine) -> str:
    lines = [
        f"{machine.describe()}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}; microseconds, medians of"
        f" {TURNS} turns of {LAUNCHES} launches.",
        "",
        "| | MB | copy | eager | torch.compile | Tilewright | of copy | vs best baseline | error | schedule |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        compiled = "-" if row.compiled_us is None else f"{row.compiled_us:.1f}"
        lines.append(
            f"| {row.name} | {row.megabytes:.0f} | {row.copy_us:.1f} | {row.eager_us:.1f} | {compiled}"
            f" | {row.ours_us:.1f} | {row.of_copy:.0%} | {row.ratio:.2f}x | {row.error:.1e} | {row.decisions} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[""], help="cases whose name has one of these in it")
    parser.add_argument("--eager", action="store_true", help="leave torch.compile out")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    np.seterr(all="ignore")
    torch.cuda.init()
    torch.empty(1, device="cuda")
    device, machine = Device(), detect()
    rows = []
    for case in CASES:
        if any(part in case.name for part in options.only):
            rows.append(measure(case, machine, device, options.eager))
            print(table(rows[-1:], machine).splitlines()[-1], flush=True)
            torch.cuda.empty_cache()
    text = table(rows, machine)
    print(text)
    if options.markdown:
        options.markdown.write_text(text)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
