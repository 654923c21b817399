"""A matmul that is written with schedule primitives, on an NVIDIA GPU: no pipeline, shared memory, registers, both.

    python benchmarks/scheduled_matmul.py [--markdown FILE]

Every kernel is checked against float64 before it is timed; beside them is PyTorch's matmul (cuBLAS).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout that is not installed

SHAPES = [(1024, 1024, 1024), (512, 3072, 768), (512, 768, 3072), (256, 256, 8192), (4096, 4096, 4096)]
TILES = [
    ((128, 128, 32), (64, 32)),
    ((128, 64, 64), (32, 32)),
    ((64, 64, 64), (32, 32)),
    ((64, 64, 64), (32, 16)),
]
LEVELS = {"none": (1, 1), "shared": (3, 1), "registers": (1, 2), "both": (3, 2), "both, 4 stages": (4, 2)}


def made(shape: tuple[int, int, int], tile: Any, levels: tuple[int, int], machine: Any) -> Any:
    from tests.loops.schedule.gpu import tensorised
    from tilewright.codegen.cuda.build import build

    (block, warp), (stages, registers) = tile, levels
    schedule = tensorised(shape, block, warp, stages=stages, registers=registers)
    return build(schedule.program(), machine, "fast", None)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    import torch

    from gpu_gemm import race, replayed
    from tilewright.hw.gpu import detect
    from tilewright.runtime.cuda.device import Device

    machine, device = detect(), Device()
    titles = ("shape", "cuBLAS", *LEVELS, "both over none", "of cuBLAS")
    lines = [
        f"{machine.describe()}, {time.strftime('%Y-%m-%d')}; microseconds, the best of {len(TILES)} tilings each.",
        "",
        f"| {' | '.join(titles)} |",
        "| --- " * len(titles) + "|",
    ]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        kernels = {
            (shape, name, number): pool.submit(made, shape, tile, levels, machine)
            for shape in SHAPES
            for name, levels in LEVELS.items()
            for number, tile in enumerate(TILES)
        }
        for shape in SHAPES:
            m, n, k = shape
            a, b = ((torch.randn(rows, k, device="cuda") * k**-0.25).half() for rows in (m, n))
            exact, out = a.double() @ b.double().T, torch.empty(m, n, device="cuda", dtype=torch.half)
            addresses = [tensor.data_ptr() for tensor in (a, b, out)]
            graphs: dict[str, Any] = {"cuBLAS": replayed(partial(torch.matmul, a, b.T))}
            kept = []
            for name in LEVELS:
                for number in range(len(TILES)):
                    kernel = kernels[shape, name, number].result()
                    function = device.load(kernel.cubin, kernel.symbol, kernel.shared_bytes)
                    kept.append(function)
                    launch = launching(function, kernel, addresses)
                    out.fill_(float("nan"))
                    launch()
                    torch.cuda.synchronize()
                    error = float(
                        torch.linalg.vector_norm(out.double() - exact) / torch.linalg.vector_norm(exact)
                    )
                    assert error < 2e-3, (shape, name, number, error)
                    graphs[f"{name} {number}"] = replayed(launch)
            times = race(graphs, turns=5)
            best = {name: min(times[f"{name} {number}"] for number in range(len(TILES))) for name in LEVELS}
            both = min(best["both"], best["both, 4 stages"])
            cells = [f"{m} x {n} x {k}", f"{times['cuBLAS']:.1f}", *(f"{us:.1f}" for us in best.values())]
            cells += [f"{best['none'] / both:.2f}x", f"{times['cuBLAS'] / both:.0%}"]
            lines.append(f"| {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    text = "\n".join(lines) + "\n"
    print(text)
    if options.markdown:
        options.markdown.write_text(text)


def launching(function: Any, kernel: Any, addresses: list[int]) -> Callable[[], None]:
    import torch

    def launch() -> None:
        function.launch(kernel.blocks, kernel.threads, addresses, torch.cuda.current_stream().cuda_stream)

    return launch


if __name__ == "__main__":
    main()
