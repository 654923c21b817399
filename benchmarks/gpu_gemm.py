"""Matrix products of 16-bit floats with their epilogue on an NVIDIA GPU: ours beside cuBLAS and torch.compile.

    python benchmarks/gpu_gemm.py [--json FILE] [--markdown FILE]

Each row is relu(a @ b + bias) + residual: ours in one kernel; PyTorch's as the library's product with the bias, then
the rest as separate kernels, and by torch.compile. Times are of launches replayed from a CUDA graph, taking turns,
medians. Every tile of the list is tried and checked first; the best one is shown.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from tests.loops.gpu.products import Product
from tilewright.codegen.cuda.build import build
from tilewright.codegen.cuda.tensor import tensor_source
from tilewright.hw.gpu import GpuMachine, detect
from tilewright.loops.formula import formula_of
from tilewright.loops.gpu.tensor import MatrixTiles
from tilewright.runtime.cuda.device import Device, Function
from tilewright.space.templates.cuda.matmul import is_legal, matrix_work, product

LAUNCHES, TURNS = 20, 9
SHAPES = [
    *((4096, 4096, 4096), (2048, 2048, 2048), (8192, 8192, 8192)),
    *((512, 3072, 768), (512, 768, 3072), (1280, 3072, 768), (1024, 64, 2048)),
    *((1023, 1021, 1019), (16, 8192, 8192), (100352, 256, 64), (25088, 512, 128)),
]
TILES = [
    *(
        MatrixTiles(128, 256, 64, 2, 4, 3),
        MatrixTiles(128, 256, 32, 2, 4, 4),
        MatrixTiles(256, 128, 64, 4, 2, 3),
    ),
    *(
        MatrixTiles(128, 128, 64, 2, 4, 3),
        MatrixTiles(128, 128, 64, 2, 2, 4),
        MatrixTiles(128, 128, 32, 2, 4, 4),
    ),
    *(MatrixTiles(128, 64, 64, 4, 1, 4), MatrixTiles(64, 128, 64, 1, 4, 4), MatrixTiles(64, 64, 64, 2, 2, 5)),
    *(MatrixTiles(32, 64, 64, 1, 2, 6), MatrixTiles(16, 64, 64, 1, 2, 8), MatrixTiles(64, 32, 64, 2, 1, 6)),
]


@dataclass(frozen=True)
class Row:
    shape: tuple[int, int, int]
    product_us: float  # of the library, alone
    eager_us: float  # and the rest
    compiled_us: float
    ours_us: float
    error: float
    decisions: str


def replayed(launch: Callable[[], object]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            launch()
    return graph


def timed(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / LAUNCHES


def race(graphs: dict[str, torch.cuda.CUDAGraph]) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for graph in graphs.values():
        timed(graph)
    for _ in range(TURNS):
        for name, graph in graphs.items():
            times[name].append(timed(graph))
    return {name: statistics.median(taken) for name, taken in times.items()}


def measure(shape: tuple[int, int, int], machine: GpuMachine, device: Device) -> Row:
    m, n, k = shape
    torch.manual_seed(0)
    a, residual = torch.randn(m, k).cuda().half(), torch.randn(m, n).cuda().half()
    weight, bias = (torch.randn(n, k) / k**0.5).cuda().half(), torch.randn(n).cuda().half()
    exact = torch.relu(a.double() @ weight.double().t() + bias.double()) + residual.double()
    out = torch.empty(m, n, device="cuda", dtype=torch.half)
    output, inputs = Product(m, n, k, turned_b=False).expression()
    work = matrix_work(formula_of(output, inputs))
    assert work is not None
    addresses = [x.data_ptr() for x in (a, weight, bias, residual, out)]

    def eager() -> torch.Tensor:
        return torch.relu(torch.nn.functional.linear(a, weight, bias)) + residual

    kept: list[Function] = []
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    errors: dict[str, float] = {}
    for tiles in TILES:
        if not is_legal(work, tiles, machine):
            continue
        made = product(work, tiles)
        kernel = build(tensor_source(made), machine, "fast", None)
        function = device.load(kernel.cubin, kernel.symbol, kernel.shared_bytes)
        kept.append(function)

        def launch(
            function: Function = function, blocks: int = kernel.blocks, threads: int = kernel.threads
        ) -> None:
            function.launch(blocks, threads, addresses, torch.cuda.current_stream().cuda_stream)

        out.fill_(float("nan"))
        launch()
        torch.cuda.synchronize()
        error = float(torch.linalg.vector_norm(out.double() - exact) / torch.linalg.vector_norm(exact))
        if not error < 1e-3:
            print(f"WRONG {shape} {made.decisions}: error {error}", flush=True)
            continue
        name = f"{made.decisions} ({kernel.resources.registers} registers)"
        errors[name] = error
        graphs[name] = replayed(launch)
    ours = race(graphs)
    best = min(ours, key=lambda name: ours[name])
    for name, taken in sorted(ours.items(), key=lambda item: item[1])[:4]:
        print(f"  {taken:9.1f} us  {2e-6 * m * n * k / taken:6.1f} TFLOP/s  {name}", flush=True)
    compiled = torch.compile(eager)
    compiled()
    final = race(
        {
            "product": replayed(lambda: torch.nn.functional.linear(a, weight, bias)),
            "eager": replayed(eager),
            "compiled": replayed(compiled),
            "ours": graphs[best],
        }
    )
    return Row(shape, final["product"], final["eager"], final["compiled"], final["ours"], errors[best], best)


def table(rows: Sequence[Row], machine: GpuMachine) -> str:
    lines = [
        f"{machine.describe()}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}; fp16, microseconds.",
        "",
        "| M, N, K | cuBLAS + bias | and the rest | torch.compile | Tilewright, all in one | of cuBLAS' speed"
        " | vs best peer | error | tiles |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        peers = min(row.eager_us, row.compiled_us)
        lines.append(
            f"| {', '.join(map(str, row.shape))} | {row.product_us:.1f} | {row.eager_us:.1f} | {row.compiled_us:.1f}"
            f" | {row.ours_us:.1f} | {row.product_us / row.ours_us:.0%} | {peers / row.ours_us:.2f}x"
            f" | {row.error:.1e} | {row.decisions} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    torch.empty(1, device="cuda")
    device, machine = Device(), detect()
    rows = []
    for shape in SHAPES:
        rows.append(measure(shape, machine, device))
        print(table(rows[-1:], machine).splitlines()[-1], flush=True)
        text = table(rows, machine)
        if options.markdown:
            options.markdown.write_text(text)
        if options.json:
            options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
