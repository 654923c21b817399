"""How long the compiler itself takes: import, cold and warm compile, and what a call adds to its kernels.

    python benchmarks/compile_time.py [--model resnet50] [--json FILE]

Each figure comes from a fresh process. "Cold" is with an empty cache folder, "warm" the same again; both start from an
ExportedProgram, since exporting is PyTorch's work.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

IMPORT = "import time; t = time.perf_counter(); import tilewright; print(time.perf_counter() - t)"

COMPILE = """
import sys, time, torch, tilewright
from tilewright import zoo
import tilewright.driver
program = torch.export.export(zoo.build(sys.argv[1]), zoo.example_inputs(sys.argv[1]))
begin = time.perf_counter()
tilewright.compile(program, effort="none")
print(time.perf_counter() - begin)
"""

# One kernel that does nothing worth mentioning: what remains is the cost of a call.
CALL = """
import statistics, sys, time
import torch, tilewright

class AddOne(torch.nn.Module):
    def forward(self, x):
        return x + 1

x = torch.zeros(16)
fast = tilewright.compile(AddOne().eval(), (x,))
x = x.numpy() if sys.argv[1] == "numpy" else x
kernel = fast.explain((x,), repeats=200).seconds
times = []
for _ in range(5000):
    begin = time.perf_counter()
    fast(x)
    times.append(time.perf_counter() - begin)
print(statistics.median(times) - kernel)
"""


def run(script: str, *arguments: str, cache: str | None = None) -> float:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if cache is not None:
        environment["TILEWRIGHT_CACHE_DIR"] = cache
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        figures = {
            "import_seconds": statistics.median(run(IMPORT) for _ in range(5)),
            "model": options.model,
            "cold_compile_seconds": run(COMPILE, options.model, cache=cache),
            "warm_compile_seconds": run(COMPILE, options.model, cache=cache),
            "call_overhead_numpy_seconds": run(CALL, "numpy", cache=cache),
            "call_overhead_torch_seconds": run(CALL, "torch", cache=cache),
        }
    for name, value in figures.items():
        print(f"{name:30} {value if isinstance(value, str) else f'{value:.6f}'}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
