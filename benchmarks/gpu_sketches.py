"""Sketches on an NVIDIA GPU alongside the templates and the vendor: products and convolutions, in fp16 and fp32.

    python benchmarks/gpu_sketches.py [--json FILE] [--markdown FILE] [--only WORD] [--ranked N] [--random N]
                                      [--seconds N]

Of each sketch, and of the templates, the N configs that the analytical model ranks first are tried, and so many random
ones, each checked against float64 first; the best of each kind then race with the library's call. Before that, odd
shapes, transpositions and dtypes are checked alone. All of it is done by child processes: one that hangs or dies costs
the task that it was at.
"""

from __future__ import annotations

import argparse
import json
import queue
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout that is not installed

AHEAD = 2  # tasks whose kernels are compiled while one is measured
QUIET_SECONDS = 45.0  # of a child, after which it counts as hanging
MAX_ERROR = {"f16": 1e-3, "bf16": 8e-3, "f32": 2e-6, "tf32": 1e-3}
KINDS = ("templates", "tensorised", "tiled", "default", "block-reduction")


# -- odd shapes -------------------------------------------------------------------------------------------------------


def checks() -> list[tuple[str, Any, str]]:
    """(name, task, numerics) of products and convolutions whose sizes divide nothing."""
    from tests.loops.gpu.products import PRODUCTS
    from tests.space.sketches.cuda.tasks import CONVOLUTIONS, product_task
    from tilewright.dtypes import DType

    single = [replace(case, dtype=DType.F32) for case in PRODUCTS[1:8:2]]
    return [
        *((case.name, product_task(case), "fast") for case in (*PRODUCTS, *single)),
        *((f"{case.name}, rounded", product_task(case), "tf32") for case in single),
        *((case.name, case.task(), "fast") for case in CONVOLUTIONS),
    ]


def check(number: int, name: str, task: Any, numerics: str, configs: int) -> dict[str, Any]:
    """Random configs of each sketch: the oracle's result, and the same bits each time."""
    from gpu_gemm import Ranked
    from tests.rewrites.helpers import array
    from tilewright.codegen.cuda.tensor import tensor_source
    from tilewright.graph.oracle import evaluate
    from tilewright.hw.gpu import detect
    from tilewright.measure.check import relative_error
    from tilewright.measure.gpu import GpuProgram
    from tilewright.runtime.cuda.device import Device
    from tilewright.space.sketches.cuda import SKETCHES
    from tilewright.space.template import GpuWork

    machine, device = detect(), Device()
    arrays = [array(*n.shape, seed=i, dtype=n.dtype) for i, n in enumerate(task.graph.inputs)]
    (reference,) = evaluate(task.graph, arrays, precise=True)
    most = MAX_ERROR[numerics if numerics == "tf32" else task.graph.inputs[0].dtype.short]
    rng = random.Random(number)
    found: dict[str, Any] = {"check": name, "wrong": [], "errors": {}}
    for sketch in SKETCHES:
        applied = sketch.apply(GpuWork(task, machine, numerics))
        if applied is None:
            continue
        for _ in range(configs):
            config = applied.space.sample(rng)
            if config is None:
                found["wrong"].append(f"{sketch.name}: nothing is legal")
                break
            source = tensor_source(Ranked(0.0, config, applied).kernel)
            kernel = GpuProgram(source, machine, device)
            results = [kernel.run(arrays) for _ in range(3)]
            kernel.close()
            error = relative_error(results[0].astype(np.float64).reshape(reference.shape), reference)
            found["errors"][str(config)] = error
            same = all(result.tobytes() == results[0].tobytes() for result in results)
            if not error < most or not same:
                found["wrong"].append(f"{config}: error {error}{'' if same else ', bits differ'}")
    return found


# -- speed ------------------------------------------------------------------------------------------------------------


def cases() -> list[Any]:
    import gpu_gemm as half

    return [
        half.product(4096, 4096, 4096),
        half.convolution(32, 28, 128, 128, 3),
        half.product(2048, 2048, 2048),
        single(4096, 4096, 4096),
        half.convolution(32, 56, 64, 64, 3),
        half.product(512, 3072, 768, "gelu"),
        half.product(1023, 1021, 1019),
        half.convolution(32, 14, 256, 256, 3),
        half.convolution(32, 224, 3, 64, 7, 2),
        single(1024, 1024, 1024),
        single(4096, 4096, 4096, "tf32"),
        summed(16384, 512),
        summed(100_000, 64),
    ]


def single(m: int, n: int, k: int, kind: str = "fp32") -> Any:
    """A product in fp32, or "tf32"; the library computes in the same."""
    import torch

    def product(t: Sequence[Any]) -> Any:
        torch.backends.cuda.matmul.allow_tf32 = kind == "tf32"
        result = t[0] @ t[1]
        torch.backends.cuda.matmul.allow_tf32 = False
        return result

    shapes = ((m, k), (k, n))
    return plain_case(f"{m} x {n} x {k}, {kind}", 2.0 * m * n * k, shapes, "matmul", product)


def summed(rows: int, columns: int) -> Any:
    """The sums of a matrix' columns, in fp32."""
    shapes = ((rows, columns),)
    name = f"sums of {rows} x {columns}, fp32"
    return plain_case(
        name, 1.0 * rows * columns, shapes, "sum", lambda t: t[0].sum(0), axes=(0,), keepdims=False
    )


def plain_case(
    name: str, flops: float, shapes: Sequence[tuple[int, ...]], op: str, baseline: Any, **attrs: Any
) -> Any:
    import torch

    from gpu_gemm import Case
    from tilewright.dtypes import DType
    from tilewright.graph.ir import Graph, TensorType, input_node
    from tilewright.graph.op import apply
    from tilewright.graph.task import Task

    def make() -> tuple[Task, list[torch.Tensor]]:
        nodes = tuple(
            input_node(number, TensorType(shape, DType.F32), f"x{number}")
            for number, shape in enumerate(shapes)
        )
        tensors = [torch.randn(node.shape, device="cuda") for node in nodes]
        return Task(Graph(nodes, (apply(op, *nodes, **attrs),))), tensors

    return Case(name, flops, make, baseline, baseline)


def chosen(kind: str, task: Any, numerics: str, machine: Any, count: int, drawn: int) -> list[Any]:
    from gpu_gemm import Ranked, rank
    from tilewright.cost.gpu import seconds
    from tilewright.space.catalog import SKETCHED
    from tilewright.space.sketches.cuda import SKETCHES
    from tilewright.space.template import GpuWork
    from tilewright.space.templates.cuda import TEMPLATES
    from tilewright.space.templates.cuda.default import Default, is_hopeless

    work = GpuWork(task, machine, numerics)
    if kind == "default":
        return [] if is_hopeless(task) else rank(work, [Default()])
    makers = TEMPLATES if kind == "templates" else [s for s in SKETCHES if s.name == SKETCHED + kind]
    found = rank(work, makers)[:count]
    rng = random.Random(0)
    for _ in range(drawn if found else 0):
        applied = found[0].applied
        config = applied.space.sample(rng)
        if config is not None and config not in {each.config for each in found}:
            terms = applied.terms(config)
            assert terms is not None
            found.append(Ranked(seconds(terms, machine), config, applied))
    return found


def made(applied: Any, config: Any, machine: Any) -> Any:
    from tilewright.codegen.cuda.build import build
    from tilewright.codegen.cuda.tensor import tensor_source

    return build(tensor_source(applied.program(config)), machine, "fast", None)


def measure(case: Any, planned: dict[str, tuple[list[Any], list[Future[Any]]]]) -> dict[str, Any]:
    import torch

    from gpu_gemm import race, replayed, timed
    from tilewright.runtime.cuda.device import Device

    device = Device()
    torch.manual_seed(0)
    _, tensors = case.make()
    exact = case.whole([t.double() for t in tensors])
    out = torch.empty_like(exact, dtype=tensors[0].dtype).contiguous()
    addresses = [t.data_ptr() for t in (*tensors, out)]
    most = 1e-5 if tensors[0].dtype is torch.float32 and not case.name.endswith("tf32") else 2e-3
    kept = []
    row: dict[str, Any] = {"task": case.name, "flops": case.flops, "wrong": [], "trials": {}}
    best: dict[str, tuple[float, Any, dict[str, Any]]] = {}
    for kind, (configs, futures) in planned.items():
        trials = []
        for each, future in zip(configs, futures, strict=True):
            kernel = future.result()
            function = device.load(kernel.cubin, kernel.symbol, kernel.shared_bytes)
            kept.append(function)

            def launch(function: Any = function, kernel: Any = kernel) -> None:
                stream = torch.cuda.current_stream().cuda_stream
                function.launch(kernel.blocks, kernel.threads, addresses, stream)

            out.fill_(float("nan"))
            launch()
            torch.cuda.synchronize()
            error = float(torch.linalg.vector_norm(out.double() - exact) / torch.linalg.vector_norm(exact))
            if not error < most:
                row["wrong"].append(f"{each.config}: error {error}")
                continue
            graph = replayed(launch, 5)
            timed(graph, 5)
            taken = statistics.median(timed(graph, 5) for _ in range(3))
            used = kernel.resources
            trials.append(
                {
                    "config": dict(each.config.values),
                    "us": taken,
                    "predicted_us": each.seconds * 1e6,
                    "error": error,
                    "registers": used.registers,
                    "spilled": used.spilled_bytes,
                }
            )
            if kind not in best or taken < best[kind][0]:
                best[kind] = (taken, launch, dict(each.config.values))
        row["trials"][kind] = sorted(trials, key=lambda trial: trial["us"])
    graphs = {kind: replayed(launch) for kind, (_, launch, _) in best.items()}
    final = race({"library": replayed(lambda: case.alone(tensors)), **graphs}, turns=7)
    row["us"] = final
    row["configs"] = {kind: config for kind, (_, _, config) in best.items()}
    return row


# -- children ---------------------------------------------------------------------------------------------------------


def child(options: argparse.Namespace) -> None:
    """Prints a line of JSON for each task from `--first` on."""
    if options.child == "checks":
        for number, (name, task, numerics) in list(enumerate(checks()))[options.first :]:
            found = check(number, name, task, numerics, options.random // 2 or 1)
            print("RESULT", json.dumps(found), flush=True)
        return
    from tilewright.hw.gpu import detect

    machine = detect()
    wanted = [case for case in cases() if options.only in case.name][options.first :]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:

        def plan(case: Any) -> dict[str, tuple[list[Any], list[Future[Any]]]]:
            task = case.make()[0]
            numerics = "tf32" if case.name.endswith("tf32") else "fast"
            found = {}
            for kind in KINDS:
                configs = chosen(kind, task, numerics, machine, options.ranked, options.random)
                kernels = [pool.submit(made, each.applied, each.config, machine) for each in configs]
                found[kind] = (configs, kernels)
            return found

        ahead = deque(plan(case) for case in wanted[:AHEAD])  # the compiler works ahead on all cores
        for number, case in enumerate(wanted):
            if number + AHEAD < len(wanted):
                ahead.append(plan(wanted[number + AHEAD]))
            print("RESULT", json.dumps(measure(case, ahead.popleft())), flush=True)


def answers(kind: str, count: int, arguments: list[str], end: float) -> Iterator[dict[str, Any]]:
    """What children say of `count` tasks; after a death the next one goes on behind the task that it was at."""
    first = 0
    while first < count and time.monotonic() < end:
        command = [sys.executable, __file__, *arguments, "--child", kind, "--first", str(first)]
        with tempfile.TemporaryFile("w+") as words:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=words, text=True)
            lines: queue.Queue[str] = queue.Queue()
            threading.Thread(target=_read, args=(process, lines), daemon=True).start()
            while first < count:
                try:
                    line = lines.get(timeout=max(0.0, min(QUIET_SECONDS, end - time.monotonic())))
                except queue.Empty:
                    break
                if not line:
                    break
                if line.startswith("RESULT "):
                    first += 1
                    yield json.loads(line[len("RESULT ") :])
            process.kill()
            process.wait()
            if first < count:
                words.seek(0)
                yield {"lost": f"{kind} {first}", "words": words.read()[-2000:]}
                first += 1


def _read(process: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
    """Every line that a child writes, then an empty one."""
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put("")


def ratio(us: dict[str, float], a: str, b: str) -> str:
    return f"{us[a] / us[b]:.0%}" if a in us and b in us else "-"


def table(rows: list[dict[str, Any]], heading: str) -> str:
    titles = (
        "task",
        "library",
        *KINDS,
        "tensorised of the templates' speed",
        "tiled of the library's",
        "configs",
    )
    lines = [heading, "", f"| {' | '.join(titles)} |", "| --- " * len(titles) + "|"]
    for row in rows:
        us = row["us"]
        cells = [
            row["task"],
            *(f"{us[kind]:.1f}" if kind in us else "-" for kind in ("library", *KINDS)),
            ratio(us, "templates", "tensorised"),
            ratio(us, "library", "tiled"),
            "; ".join(
                f"{kind}: {' '.join(map(str, row['configs'][kind].values()))}"
                for kind in ("tensorised", "tiled", "block-reduction")
                if kind in row["configs"]
            ),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--ranked", type=int, default=12)
    parser.add_argument("--random", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options)
        return
    from tilewright.hw.gpu import detect

    end = time.monotonic() + options.seconds
    arguments = ["--only", options.only, "--ranked", str(options.ranked), "--random", str(options.random)]
    heading = f"{detect().describe()}, {time.strftime('%Y-%m-%d')}; microseconds."
    found: dict[str, list[dict[str, Any]]] = {"checks": [], "speed": [], "lost": []}
    counts = {"speed": len([case for case in cases() if options.only in case.name]), "checks": len(checks())}
    for kind, count in counts.items():
        for answer in answers(kind, count, arguments, end):
            found["lost" if "lost" in answer else kind].append(answer)
            print(json.dumps({k: v for k, v in answer.items() if k not in ("trials", "errors")}), flush=True)
            if options.json:
                options.json.write_text(json.dumps(found, indent=1))
            if options.markdown:
                options.markdown.write_text(table(found["speed"], heading))
    print(table(found["speed"], heading))


if __name__ == "__main__":
    main()
