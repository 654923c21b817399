"""Pipelining on this processor, of loops that no template knows: CPU time without and with it, and the roofline share.

    python benchmarks/pipelining_cpu.py [--rounds N] [--markdown FILE]

Each loop is written with schedule primitives and compiled for one thread. The pass `loops/passes/cpu_pipeline.py`
prefetches what its loads need in later iterations, 2, 8 or 32 of them ahead; where it finds nothing worth a prefetch
the program is the same and no ratio is shown. Times are minima of CPU time over interleaved rounds. The roofline is the
larger of bytes over the bandwidth of a long sum, and FLOPs over those of a loop of FMAs in registers
(`measure/calibrate.py`).
Besides, it prints what the compiler itself spends: the pass on GPU kernels, and the GPU's model on a thousand configs.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout that is not installed

from tilewright import te
from tilewright.dtypes import DType
from tilewright.hw import host
from tilewright.loops.ir import Program
from tilewright.loops.passes.cpu_pipeline import loads_ahead, prefetched
from tilewright.loops.schedule import Schedule
from tilewright.measure.calibrate import peak_kernel
from tilewright.measure.single import Built
from tilewright.runtime.loader import load_objects, object_digest

F32, I64, I8 = DType.F32, DType.I64, DType.I8
AHEAD = (2, 8, 32)


@dataclass(frozen=True)
class Loop:
    name: str
    schedule: Schedule
    inputs: tuple[np.ndarray, ...]
    want: Callable[[], np.ndarray]
    bytes: int
    flops: int


def stencil(rows: int = 2050, columns: int = 4096) -> Loop:
    """Sums of three rows, computed down the columns."""
    x = te.Tensor("x", (rows, columns), F32)
    out = te.compute("out", (rows - 2, columns), F32, lambda i, j: x[i, j] + x[i + 1, j] + x[i + 2, j])
    lanes = host().vector_bytes // 4
    schedule = Schedule.of(out, [x]).split("out.i1", lanes).reorder("out.i1.o", "out.i0", "out.i1.i")
    schedule = schedule.vectorise("out.i1.i").parallel("out.i1.o")
    data = np.random.default_rng(0).standard_normal((rows, columns), np.float32)
    moved = (rows + rows - 2) * columns * 4
    return Loop(
        "stencil, three rows",
        schedule,
        (data,),
        lambda: data[:-2] + data[1:-1] + data[2:],
        moved,
        2 * data.size,
    )


def dequantising(k: int = 4096, n: int = 8192) -> Loop:
    """A vector times int8 weights with a scale of each column."""
    x, w, scale = te.Tensor("x", (k,), F32), te.Tensor("w", (k, n), I8), te.Tensor("scale", (n,), F32)
    (r,) = te.reduce_axes([k])
    total = te.compute("total", (n,), F32, lambda j: te.reduce_over("sum", x[r] * te.cast(w[r, j], F32), [r]))
    out = te.compute("out", (n,), F32, lambda j: total[j] * scale[j])
    lanes = host().vector_bytes // 4
    schedule = Schedule.of(out, [x, w, scale]).split("out.i0", 4 * lanes).compute_at("total", "out.i0.o")
    schedule = schedule.set_scope("total", "register").split("total.i0", lanes).split("out.i0.i", lanes)
    schedule = schedule.reorder("total.r0", "total.i0.o", "total.i0.i")
    for stage in ("total.i0", "out.i0.i"):
        schedule = schedule.unroll(f"{stage}.o").vectorise(f"{stage}.i")
    schedule = schedule.parallel("out.i0.o")
    rng = np.random.default_rng(0)
    data = rng.standard_normal(k, np.float32), rng.integers(-127, 128, (k, n), np.int8)
    scales = rng.random(n, np.float32)
    return Loop(
        "dequantising GEMM",
        schedule,
        (*data, scales),
        lambda: (data[0] @ data[1].astype(np.float32)) * scales,
        data[1].nbytes,
        2 * k * n,
    )


def gather_and_reduce(rows: int = 400_000, columns: int = 64, bags: int = 4096, items: int = 32) -> Loop:
    """Sums of table rows at data-dependent addresses."""
    table, index = te.Tensor("table", (rows, columns), F32), te.Tensor("index", (bags, items), I64)
    (r,) = te.reduce_axes([items])

    def element(i: te.Expr, j: te.Expr) -> te.Expr:
        row = te.call("min", te.call("max", index[i, r], 0), rows - 1)
        return te.reduce_over("sum", table[row, j], [r])

    total = te.compute("total", (bags, columns), F32, element)
    out = te.compute("out", (bags, columns), F32, lambda i, j: total[i, j] * (1.0 / items))
    lanes = host().vector_bytes // 4
    schedule = Schedule.of(out, [table, index]).compute_at("total", "out.i0").set_scope("total", "register")
    schedule = schedule.split("total.i1", lanes).reorder("total.r0", "total.i1.o", "total.i1.i")
    schedule = schedule.split("out.i1", lanes)
    for stage in ("total.i1", "out.i1"):
        schedule = schedule.unroll(f"{stage}.o").vectorise(f"{stage}.i")
    schedule = schedule.parallel("out.i0")
    rng = np.random.default_rng(0)
    values = rng.standard_normal((rows, columns), np.float32)
    named = rng.integers(0, rows, (bags, items))
    moved = bags * items * columns * 4
    return Loop(
        "gather and reduce",
        schedule,
        (values, named),
        lambda: values[named].sum(1) * (1.0 / items),
        moved,
        bags * items * columns,
    )


def depthwise(size: int = 58, channels: int = 512) -> Loop:
    """3 x 3, channels last."""
    x, w = te.Tensor("x", (size, size, channels), F32), te.Tensor("w", (3, 3, channels), F32)
    p, q = te.reduce_axes([3, 3])
    total = te.compute(
        "total",
        (size - 2, size - 2, channels),
        F32,
        lambda i, j, c: te.reduce_over("sum", x[i + p, j + q, c] * w[p, q, c], [p, q]),
    )
    out = te.compute("out", total.shape, F32, lambda i, j, c: te.call("max", total[i, j, c], 0.0))
    lanes = host().vector_bytes // 4
    schedule = (
        Schedule.of(out, [x, w]).split("out.i2", lanes).reorder("out.i2.o", "out.i0", "out.i1", "out.i2.i")
    )
    schedule = schedule.compute_at("total", "out.i1").set_scope("total", "register")
    schedule = schedule.reorder("total.r0", "total.r1", "total.i2").unroll("total.r0").unroll("total.r1")
    schedule = schedule.vectorise("total.i2").vectorise("out.i2.i").parallel("out.i2.o")
    rng = np.random.default_rng(0)
    data = rng.standard_normal((size, size, channels), np.float32)
    weights = rng.standard_normal((3, 3, channels), np.float32)

    def want() -> np.ndarray:
        parts = [data[a : a + size - 2, b : b + size - 2] * weights[a, b] for a in range(3) for b in range(3)]
        return np.maximum(np.sum(parts, axis=0), 0)

    moved = (data.size + (size - 2) ** 2 * channels) * 4
    return Loop("depthwise 3 x 3", schedule, (data, weights), want, moved, 18 * (size - 2) ** 2 * channels)


LOOPS = (stencil, dequantising, gather_and_reduce, depthwise)


class Native:
    """A program's machine code, on its arrays."""

    def __init__(self, program: Program, inputs: Sequence[np.ndarray]) -> None:
        (self.kernel,) = Built.of(program, host(), "fast").parts
        digest = object_digest(self.kernel.code)
        self.library = load_objects({digest: self.kernel.code}, {self.kernel.symbol: digest})
        kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
        self.entry = kind(self.library[self.kernel.symbol])
        output = program.params[-1]
        self.output = np.zeros(output.size, output.dtype.numpy)
        self.inputs = [np.ascontiguousarray(each) for each in inputs]
        addresses = [each.ctypes.data for each in (*self.inputs, self.output)]
        self.pointers = (ctypes.c_void_p * len(addresses))(*addresses)

    def __call__(self) -> float:
        """Milliseconds of CPU time."""
        begin = time.process_time_ns()
        self.entry(ctypes.addressof(self.pointers), 0, self.kernel.extent)
        return (time.process_time_ns() - begin) / 1e6


def bandwidth() -> float:
    """Bytes a second of a long sum."""
    data = np.ones(32 << 20, np.float32)
    best = float("inf")
    for _ in range(7):
        begin = time.process_time()
        data.sum()
        best = min(best, time.process_time() - begin)
    return data.nbytes / best


def fma_speed() -> float:
    """FLOPs a second of a loop of FMAs in registers."""
    kernel, operands, operations = peak_kernel(host(), 1)
    output, best = kernel(operands), float("inf")
    for _ in range(7):
        begin = time.process_time()
        for _ in range(20):
            kernel(operands, output)
        best = min(best, (time.process_time() - begin) / 20)
    return operations / best


def measure(loop: Loop, rounds: int, bytes_a_second: float, flops: float) -> str:
    program = loop.schedule.program()
    variants = {0: program, **{ahead: prefetched(program, ahead) for ahead in AHEAD}}
    variants = {ahead: each for ahead, each in variants.items() if not ahead or each is not program}
    native = {ahead: Native(each, loop.inputs) for ahead, each in variants.items()}
    want = loop.want().reshape(-1)
    times: dict[int, list[float]] = {ahead: [] for ahead in native}
    for each in native.values():
        each()
        np.testing.assert_allclose(each.output, want, rtol=2e-3, atol=2e-3)
    for _ in range(rounds):
        for ahead, each in native.items():
            times[ahead].append(each())
    ms = {ahead: min(found) for ahead, found in times.items()}
    ideal = max(loop.bytes / bytes_a_second, loop.flops / flops) * 1e3
    cells = [loop.name, f"{ms[0]:.2f}", f"{ideal / ms[0]:.0%}"]
    cells += [f"{ms[ahead]:.2f}" if ahead in ms else "-" for ahead in AHEAD]
    best = min((ms[ahead] for ahead in AHEAD if ahead in ms), default=None)
    cells += ["-", "-"] if best is None else [f"{ms[0] / best:.2f}x", f"{ideal / best:.0%}"]
    print(
        f"{loop.name}: {len(loads_ahead(program))} loads that the pass prefetches",
        file=sys.stderr,
        flush=True,
    )
    return f"| {' | '.join(cells)} |"


def compiler(shapes: int = 8, kernels: int = 12) -> list[str]:
    """CPU time of the pass on generated GPU kernels, with what it says to `explain`, and of the GPU's analytical
    model."""
    from pipelining import SHAPES, task_of
    from tilewright.cost.predictor import all_seconds, nominal
    from tilewright.hw.gpu import H200
    from tilewright.loops.passes.load_and_use import ProgramAccesses, pipelines
    from tilewright.loops.passes.pipeline import planned
    from tilewright.space.sketches.cuda.pipeline import REGISTER_STAGES
    from tilewright.space.sketches.cuda.tensorised import Tensorised
    from tilewright.space.template import GpuWork

    spent: list[float] = []
    thousand: list[float] = []
    predictor = nominal(H200)
    for shape in SHAPES[:shapes]:
        applied = Tensorised().apply(GpuWork(task_of(shape), H200))
        assert applied is not None
        configs = random.Random(0).sample(list(applied.space.configs()), 1000)
        begin = time.process_time()
        all_seconds(applied, configs, predictor)
        thousand.append(time.process_time() - begin)
        piped = [each for each in configs if each.int("stages") > 1 and each["prefetch"]]
        for config in piped[:kernels]:
            made = applied.program(config)
            assert isinstance(made, Program) and made.unpipelined is not None
            tiles = ("left", "right")
            stages = {name: config.int("stages") for name in tiles}
            stages |= {f"{name}_held": REGISTER_STAGES for name in tiles}
            gc.collect()  # of what came before
            begin = time.process_time()
            known = ProgramAccesses(made.unpipelined)
            planned(known, stages, fused=bool(config["fused"]), synchronous=tiles).program()
            pipelines(known, stages)
            spent.append(time.process_time() - begin)
    return [
        "",
        f"The pass on {len(spent)} generated GPU kernels with both levels, and its reasons: median"
        f" {statistics.median(spent) * 1e3:.1f} ms of CPU time, at most {max(spent) * 1e3:.1f} ms.",
        f"The GPU's model on 1,000 configs of {shapes} tasks, terms counted anew: median"
        f" {statistics.median(thousand) * 1e3:.1f} ms of CPU time, at most {max(thousand) * 1e3:.1f} ms.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    speed = bandwidth()
    flops = fma_speed()
    lines = [
        "# Pipelining on a processor: loops that no template knows",
        "",
        f"{host().describe()}; one thread, {speed / 1e9:.1f} GB/s, {flops / 1e9:.0f} GFLOP/s; minimum CPU time of"
        f" {options.rounds} interleaved rounds, milliseconds.",
        "",
        f"| loop | without | of the roofline | {' | '.join(f'{n} ahead' for n in AHEAD)} | best | of the roofline |",
        "| --- " * (5 + len(AHEAD)) + "|",
        *(measure(make(), options.rounds, speed, flops) for make in LOOPS),
        *compiler(),
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.markdown:
        options.markdown.write_text(text)


if __name__ == "__main__":
    main()
