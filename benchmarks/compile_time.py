"""How long the compiler itself takes: import, cold and warm compile, and what a call adds to its kernels.

    python benchmarks/compile_time.py [--model resnet50 mobilenetv2 bert-base] [--json FILE]

Each figure comes from a fresh process. "Cold" is with an empty cache folder, "warm" the same again; both start from an
ExportedProgram, since exporting is PyTorch's work. Of a cold compile the table shows the stages, the CPU time of the
process and of its workers, and the time without workers.
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
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

IMPORT = "import time; t = time.perf_counter(); import tilewright; print(time.perf_counter() - t)"

COMPILE = """
import json, resource, sys, time, torch, tilewright
from tilewright import zoo
from tilewright.support.trace import Trace
import tilewright.driver
program = torch.export.export(zoo.build(sys.argv[1]), zoo.example_inputs(sys.argv[1]))

def cpu(who):
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime

here, workers = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
trace = Trace()
begin, cpu_here, cpu_workers = time.perf_counter(), cpu(here), cpu(workers)
tilewright.compile(program, effort="none", trace=trace)
seconds = time.perf_counter() - begin
stages = {name: 0.0 for name in ("import", "rewrite", "choose", "build", "link", "load")}
for event in trace.events:
    if event.name in stages:
        stages[event.name] += event.seconds
built = [event for event in trace.events if event.name == "kernel" and not event.notes["cached"]]
print(json.dumps({
    "seconds": seconds,
    "stages": stages,
    "cpu_seconds": cpu(here) - cpu_here,
    "cpu_seconds_of_workers": cpu(workers) - cpu_workers,
    "kernels_built": len(built),
}))
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


def run(script: str, *arguments: str, cache: str | None = None, **variables: str) -> Any:
    """What a script prints last."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    if cache is not None:
        environment["TILEWRIGHT_CACHE_DIR"] = cache
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def compile_times(model: str) -> dict[str, Any]:
    """Of one model: a cold compile, a warm one, and a cold one without workers."""
    with tempfile.TemporaryDirectory() as cache:
        cold = run(COMPILE, model, cache=cache)
        warm = run(COMPILE, model, cache=cache)
    with tempfile.TemporaryDirectory() as cache:
        alone = run(COMPILE, model, cache=cache, TILEWRIGHT_BUILD_PROCESSES="0")
    return {"cold": cold, "warm": warm, "cold_without_workers": alone}


def show(model: str, times: dict[str, Any]) -> None:
    print(f"{model}: {times['cold']['kernels_built']} kernels")
    for name, result in times.items():
        stages = "  ".join(f"{stage} {seconds:.2f}" for stage, seconds in result["stages"].items())
        used = f"CPU {result['cpu_seconds']:.2f} + {result['cpu_seconds_of_workers']:.2f} in workers"
        print(f"  {name.replace('_', ' '):22} {result['seconds']:6.2f} s   {stages}   ({used})")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="+", default=["resnet50", "mobilenetv2", "bert-base"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    models = {}
    for model in options.model:
        models[model] = compile_times(model)
        show(model, models[model])
    with tempfile.TemporaryDirectory() as cache:
        result = {
            "import_seconds": statistics.median(run(IMPORT) for _ in range(5)),
            "call_overhead_numpy_seconds": run(CALL, "numpy", cache=cache),
            "call_overhead_torch_seconds": run(CALL, "torch", cache=cache),
        }
    for name, value in result.items():
        print(f"{name:30} {value:.6f}")
    if options.json:
        options.json.write_text(json.dumps({**result, "models": models}, indent=2) + "\n")


if __name__ == "__main__":
    main()
