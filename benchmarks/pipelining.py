"""Pipelining on an NVIDIA GPU: what each level and its stages gain, over 20 GEMMs and convolutions.

    python benchmarks/pipelining.py [--json FILE] [--markdown FILE] [--ranked N] [--random N] [--configs N]
                                    [--seconds N] [--only WORD]
    python benchmarks/pipelining.py --from FILE [--markdown FILE]
    python benchmarks/pipelining.py --joint [--markdown FILE]

Kernels are generated (`sketch:tensorised`, and on sm_90a `sketch:warpgroups`: tiles by the tensor copy engine, without
and with a producer of its own), without a hand-written template. Each variant of the pipeline gets an equal search, as
far as it has as many configs: the N that the analytical model ranks first among the variant's, and so many at random of
the next 200 or more. `--configs 500` is a search of 500 in all variants together. A run goes on where the one before
with the same `--json` ended. One command measures everything:

    python benchmarks/pipelining.py --json benchmarks/results/pipelining_roles.json --configs 500 --seconds 20000

Every kernel is checked against float64 before it is timed; times are medians of launches replayed from a CUDA graph.
The best config of both levels, fused, is then timed with 1 to 6 stages. Beside them: the library's call by PyTorch
(cuBLAS, cuDNN), XLA's where jax is installed, and our hand-written template for `mma.sync`. Child processes do all of
it: if one hangs, its current shape is lost, and the next child goes on with the following one.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import queue
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout that is not installed

QUIET_SECONDS = 60.0  # of a child, after which it counts as hanging
TOLERANCE = 2e-3
NEXT = 200  # configs behind the first ones of which some are drawn
STAGES = range(1, 7)
XLA_CALLS = 50  # in one program


@dataclass(frozen=True)
class Shape:
    name: str
    kind: str
    sizes: tuple[int, ...]


SHAPES = [
    Shape("BERT FC1: 512 x 3072 x 768", "matmul", (1, 512, 3072, 768)),
    Shape("BERT FC2: 512 x 768 x 3072", "matmul", (1, 512, 768, 3072)),
    Shape("BERT projection: 512 x 768 x 768", "matmul", (1, 512, 768, 768)),
    Shape("ResNet-50 FC: 1024 x 64 x 2048", "matmul", (1, 1024, 64, 2048)),
    Shape("GPT-2 FC1: 1024 x 3072 x 768", "matmul", (1, 1024, 3072, 768)),
    Shape("GPT-2 FC2: 1024 x 768 x 3072", "matmul", (1, 1024, 768, 3072)),
    Shape("1024 x 1024 x 1024", "matmul", (1, 1024, 1024, 1024)),
    Shape("2048 x 2048 x 2048", "matmul", (1, 2048, 2048, 2048)),
    Shape("4096 x 4096 x 4096", "matmul", (1, 4096, 4096, 4096)),
    Shape("long K: 256 x 256 x 8192", "matmul", (1, 256, 256, 8192)),
    Shape("few rows: 16 x 4096 x 4096", "matmul", (1, 16, 4096, 4096)),
    Shape("odd: 1023 x 1021 x 1019", "matmul", (1, 1023, 1021, 1019)),
    Shape("BERT QK: 96 of 512 x 512 x 64", "matmul", (96, 512, 512, 64)),
    Shape("BERT SV: 96 of 512 x 64 x 512", "matmul", (96, 512, 64, 512)),
    Shape("GPT-2 QK: 12 of 1024 x 1024 x 64", "matmul", (12, 1024, 1024, 64)),
    Shape("GPT-2 SV: 12 of 1024 x 64 x 1024", "matmul", (12, 1024, 64, 1024)),
    Shape("conv 3 x 3: 32 x 56 x 56, 64 -> 64", "conv", (32, 56, 64, 64, 3)),
    Shape("conv 3 x 3: 32 x 28 x 28, 128 -> 128", "conv", (32, 28, 128, 128, 3)),
    Shape("conv 3 x 3: 32 x 7 x 7, 512 -> 512", "conv", (32, 7, 512, 512, 3)),
    Shape("conv 1 x 1: 32 x 56 x 56, 64 -> 256", "conv", (32, 56, 64, 256, 1)),
]


@dataclass(frozen=True)
class Variant:
    """A form of the pipeline: which configs of which sketch have it."""

    sketch: str
    fits: Callable[[Mapping[str, Any]], bool]


VARIANTS: dict[str, Variant] = {
    "none": Variant("tensorised", lambda v: v["stages"] == 1 and not v["prefetch"]),
    "shared": Variant("tensorised", lambda v: v["stages"] > 1 and not v["prefetch"]),
    "registers": Variant("tensorised", lambda v: v["stages"] == 1 and v["prefetch"]),
    "both": Variant("tensorised", lambda v: v["stages"] > 1 and v["prefetch"] and not v["fused"]),
    "fused": Variant("tensorised", lambda v: v["stages"] > 1 and v["prefetch"] and v["fused"]),
    "ring": Variant("warpgroups", lambda v: not v["roles"]),
    "roles": Variant("warpgroups", lambda v: v["roles"]),
}
BASELINES = ("template", "library", "xla")


def task_of(shape: Shape) -> Any:
    from tilewright.dtypes import DType
    from tilewright.graph.ir import Graph, TensorType, input_node
    from tilewright.graph.op import apply
    from tilewright.graph.task import Task

    def inputs(*shapes: tuple[int, ...]) -> list[Any]:
        return [input_node(n, TensorType(s, DType.F16), f"x{n}") for n, s in enumerate(shapes)]

    if shape.kind == "matmul":
        batch, m, n, k = shape.sizes
        x = inputs((batch, m, k), (batch, n, k))
        return Task(Graph(tuple(x), (apply("matmul", x[0], apply("permute", x[1], axes=(0, 2, 1))),)))
    batch, size, inside, outside, window = shape.sizes
    x = inputs((batch, size, size, inside), (window, window, inside, outside))
    edge = (0, window // 2, window // 2, 0)
    image = x[0]
    if window > 1:
        image = apply("pad", image, low=edge, high=edge, interior=(0, 0, 0, 0), value=0.0)
    attrs: dict[str, Any] = {"stride": (1, 1), "padding": ((0, 0), (0, 0)), "dilation": (1, 1), "groups": 1}
    return Task(Graph(tuple(x), (apply("conv", image, x[1], layout="channels_last", **attrs),)))


def library(shape: Shape, tensors: Sequence[Any]) -> Callable[[], Any]:
    """The vendor's call; a convolution's weight is put into the library's order once."""
    import torch

    if shape.kind == "matmul":
        left, right = tensors[0], tensors[1].transpose(1, 2)
        if shape.sizes[0] == 1:
            left, right = left[0], right[0]
        return lambda: torch.matmul(left, right)
    image = tensors[0].permute(0, 3, 1, 2)
    weight = tensors[1].permute(3, 2, 0, 1).contiguous(memory_format=torch.channels_last)
    if tensors[0].dtype is torch.float64:
        weight = tensors[1].permute(3, 2, 0, 1)
    return lambda: torch.nn.functional.conv2d(image, weight, None, 1, shape.sizes[4] // 2).permute(0, 2, 3, 1)


def flops(shape: Shape) -> float:
    if shape.kind == "matmul":
        return 2.0 * math.prod(shape.sizes)
    batch, size, inside, outside, window = shape.sizes
    return 2.0 * batch * size * size * inside * outside * window * window


# -- choosing and building --------------------------------------------------------------------------------------------


def chosen(shape: Shape, machine: Any, count: int, drawn: int) -> dict[str, list[Any]]:
    """For each variant, and for the template, ranked configs."""
    from gpu_gemm import rank
    from tilewright.space.sketches.cuda.tensorised import Tensorised
    from tilewright.space.sketches.cuda.warpgroups import WarpgroupMatmul
    from tilewright.space.template import GpuWork
    from tilewright.space.templates.cuda.matmul import TensorCores

    work = GpuWork(task_of(shape), machine)
    everything = {"tensorised": rank(work, [Tensorised()]), "warpgroups": rank(work, [WarpgroupMatmul()])}
    found = {}
    for name, variant in VARIANTS.items():
        fitting = [each for each in everything[variant.sketch] if variant.fits(dict(each.config.values))]
        rest = fitting[count : count + max(NEXT, 2 * drawn)]
        found[name] = fitting[:count] + random.Random(0).sample(rest, min(drawn, len(rest)))
    found["template"] = rank(work, [TensorCores()])[: max(1, count // 2)]
    return found


def with_stages(each: Any, stages: int, machine: Any) -> Any | None:
    """The same config with another number of stages; None if it is not legal."""
    from gpu_gemm import Ranked
    from tilewright.cost.gpu import seconds
    from tilewright.space.space import Config

    config = Config.of(each.config.template, {**dict(each.config.values), "stages": stages})
    if config not in each.applied.space:
        return None
    return Ranked(seconds(each.applied.terms(config), machine), config, each.applied)


def made(applied: Any, config: Any, machine: Any) -> Any:
    from tilewright.codegen.cuda.build import build
    from tilewright.codegen.cuda.tensor import tensor_source

    return build(tensor_source(applied.program(config)), machine, "fast", None)


# -- measuring --------------------------------------------------------------------------------------------------------


def measure(shape: Shape, planned: Mapping[str, list[tuple[Any, Future[Any]]]], again: Any) -> dict[str, Any]:
    import torch

    from gpu_gemm import race, replayed, timed
    from tilewright.runtime.cuda.device import Device
    from tilewright.runtime.cuda.tensor_maps import of_arguments

    device = Device()
    torch.manual_seed(0)
    task = task_of(shape)
    tensors = [
        (torch.randn(node.shape, device="cuda") * node.shape[-1] ** -0.25).half()
        for node in task.graph.inputs
    ]
    exact = library(shape, [t.double() for t in tensors])()
    exact = exact.reshape(task.graph.outputs[0].shape).contiguous()
    norm = torch.linalg.vector_norm(exact)
    out = torch.empty_like(exact, dtype=torch.half)
    addresses = [t.data_ptr() for t in (*tensors, out)]
    kept = []  # loaded modules stay as long as their graphs
    row: dict[str, Any] = {"shape": shape.name, "flops": flops(shape), "wrong": [], "trials": {}}
    best: dict[str, tuple[float, Any, Any]] = {}

    def trial(each: Any, kernel: Any) -> tuple[dict[str, Any], Any] | None:
        function = device.load(kernel.cubin, kernel.symbol, kernel.shared_bytes)
        kept.append(function)
        maps = of_arguments(kernel.maps, addresses, ["f16"] * len(addresses))

        def launch() -> None:
            stream = torch.cuda.current_stream().cuda_stream
            function.launch(kernel.blocks, kernel.threads, addresses, stream, maps=maps)

        print("TRIAL", flush=True)  # it does not hang
        out.fill_(float("nan"))
        launch()
        torch.cuda.synchronize()
        error = float(torch.linalg.vector_norm(out.double() - exact) / norm)
        if not error < TOLERANCE:
            row["wrong"].append(f"{each.config}: error {error}")
            return None
        graph = replayed(launch, 5)
        timed(graph, 5)
        taken = statistics.median(timed(graph, 5) for _ in range(5))
        used = kernel.resources
        found = {
            "config": dict(each.config.values),
            "us": taken,
            "predicted_us": each.seconds * 1e6,
            "registers": used.registers,
            "spilled": used.spilled_bytes,
        }
        return found, launch

    for kind, candidates in planned.items():
        trials = []
        for each, future in candidates:
            try:
                kernel = future.result()
            except Exception as error:  # a kernel that does not build is one trial
                row["wrong"].append(f"{each.config}: {error}"[:300])
                continue
            done = trial(each, kernel)
            if done is None:
                continue
            trials.append(done[0])
            if kind not in best or done[0]["us"] < best[kind][0]:
                best[kind] = (done[0]["us"], done[1], each)
        row["trials"][kind] = trials
    if "fused" in best:
        row["stages"] = {}
        submitted = {stages: again(best["fused"][2], stages) for stages in STAGES}
        for stages, found in submitted.items():
            if found is not None and (done := trial(found[0], found[1].result())) is not None:
                row["stages"][stages] = done[0]["us"]
    graphs = {kind: replayed(launch) for kind, (_, launch, _) in best.items()}
    row["us"] = race({"library": replayed(library(shape, tensors)), **graphs}, turns=7)
    compiled = xla_microseconds(shape)
    if compiled is not None:
        row["us"]["xla"] = compiled
    return row


def xla_microseconds(shape: Shape) -> float | None:
    """XLA's time for one call; None where jax is not installed or has no GPU. Calls follow each other in one program,
    so that none waits for Python."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        jax: Any = importlib.import_module("jax")
        jnp: Any = importlib.import_module("jax.numpy")
    except ImportError:
        return None
    if jax.default_backend() != "gpu":
        return None

    def once(x: Any, y: Any) -> Any:
        if shape.kind == "matmul":
            return jnp.einsum("bmk,bnk->bmn", x, y)
        dimensions = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, y, (1, 1), "SAME", dimension_numbers=dimensions)

    @jax.jit
    def many(x: Any, y: Any) -> Any:
        def step(carry: Any, _: Any) -> tuple[Any, Any]:
            # Each call depends on the one before, so that none is left out or merged with another.
            return once(x + 0 * carry[:1, :1, :1].reshape((1,) * x.ndim), y).reshape(carry.shape), None

        first = once(x, y)
        return jax.lax.scan(step, first.reshape(first.shape[0], first.shape[1], -1), None, length=XLA_CALLS)[
            0
        ]

    shapes = [node.shape for node in task_of(shape).graph.inputs]
    x, y = (jnp.ones(each, jnp.float16) for each in shapes)
    many(x, y).block_until_ready()
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        many(x, y).block_until_ready()
        times.append((time.perf_counter() - begin) * 1e6 / (XLA_CALLS + 1))
    return statistics.median(times)


def wanted_shapes(options: argparse.Namespace) -> list[Shape]:
    """Those that are wanted and not measured yet."""
    return [shape for shape in SHAPES if options.only in shape.name and shape.name not in options.done]


# -- children ---------------------------------------------------------------------------------------------------------


def child(options: argparse.Namespace) -> None:
    """Prints a line of JSON for each shape from `--first` on."""
    from tilewright.hw.gpu import detect

    machine = detect()
    wanted = wanted_shapes(options)[options.first :]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:

        def submitted(each: Any) -> tuple[Any, Future[Any]]:
            return each, pool.submit(made, each.applied, each.config, machine)

        def again(each: Any, stages: int) -> tuple[Any, Future[Any]] | None:
            changed = with_stages(each, stages, machine)
            return None if changed is None else submitted(changed)

        plans = []
        for shape in wanted:  # the compiler works ahead on all cores
            found = chosen(shape, machine, options.ranked, options.random)
            plans.append((shape, {kind: [submitted(each) for each in some] for kind, some in found.items()}))
        for shape, plan in plans:
            print("RESULT", json.dumps(measure(shape, plan, again)), flush=True)


def answers(count: int, arguments: list[str], end: float) -> Iterator[dict[str, Any]]:
    """The results of children for `count` shapes; where one dies, the next child goes on with the following shape."""
    first = 0
    while first < count and time.monotonic() < end:
        command = [sys.executable, __file__, *arguments, "--child", "--first", str(first)]
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
                yield {"lost": first, "words": words.read()[-2000:]}
                first += 1


def _read(process: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
    """Every line that a child writes, then an empty one."""
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put("")


# -- the report -------------------------------------------------------------------------------------------------------


def mean(values: Sequence[float]) -> float:
    """The geometric mean."""
    return math.exp(statistics.fmean(map(math.log, values))) if values else math.nan


def report(rows: Sequence[dict[str, Any]], heading: str) -> str:
    kinds = list(VARIANTS)
    lines = [
        "# Pipelining: levels and stages",
        "",
        heading,
        "",
        "Microseconds of the best config of each variant, and speed over no pipeline.",
        "",
        f"| shape | {' | '.join((*kinds, *kinds[1:], *BASELINES))} |"
        + "".join(f" of the speed of {name} |" for name in BASELINES),
        "| --- " * (2 * len(kinds) + 2 * len(BASELINES)) + "|",
    ]
    gains: dict[str, list[float]] = {kind: [] for kind in kinds}
    against: dict[str, list[float]] = {name: [] for name in BASELINES}
    for row in rows:
        us = row["us"]
        cells = [row["shape"], *(f"{us[kind]:.1f}" if kind in us else "-" for kind in kinds)]
        for kind in kinds[1:]:
            ok = kind in us and "none" in us
            gains[kind] += [us["none"] / us[kind]] if ok else []
            cells.append(f"{us['none'] / us[kind]:.2f}x" if ok else "-")
        ours = min((us[kind] for kind in kinds if kind in us), default=math.nan)
        cells += [f"{us[kind]:.1f}" if kind in us else "-" for kind in BASELINES]
        for kind in against:
            against[kind] += [us[kind] / ours] if kind in us else []
            cells.append(f"{us[kind] / ours:.0%}" if kind in us else "-")
        lines.append(f"| {' | '.join(cells)} |")
    total = [f"{mean(gains[kind]):.2f}x" if gains[kind] else "-" for kind in kinds[1:]]
    shares = [f"{mean(against[kind]):.0%}" if against[kind] else "-" for kind in against]
    empty = " |" * len(BASELINES)
    lines.append(f"| geometric mean |{' |' * len(kinds)} {' | '.join(total)} |{empty} {' | '.join(shares)} |")
    lines += [
        "",
        "Stages of the best fused config, microseconds; - : not legal or does not fit.",
        "",
        f"| shape | {' | '.join(map(str, STAGES))} |",
        "| --- " * (len(STAGES) + 1) + "|",
    ]
    for row in rows:
        us = {int(stages): value for stages, value in row.get("stages", {}).items()}
        cells = [f"{us[stages]:.1f}" if stages in us else "-" for stages in STAGES]
        lines.append(f"| {row['shape']} | {' | '.join(cells)} |")
    lines += ["", *against_one_level(rows), "", *choice(rows)]
    wrong = [words for row in rows for words in row["wrong"]]
    spilled = sum(t["spilled"] > 0 for row in rows for some in row["trials"].values() for t in some)
    count = sum(len(some) for row in rows for some in row["trials"].values())
    lines += [
        "",
        f"{count} kernels measured; {len(wrong)} wrong or not built; {spilled} with spilled registers.",
    ]
    return "\n".join(lines) + "\n"


def choice(rows: Sequence[dict[str, Any]]) -> list[str]:
    """How good the choice of tiles and stages is by prediction alone, against the best that was measured."""
    first: list[float] = []
    ten: list[float] = []
    for row in rows:
        trials = [t for kind in VARIANTS for t in row["trials"].get(kind, [])]
        if not trials:
            continue
        best = min(t["us"] for t in trials)
        ordered = sorted(trials, key=lambda t: t["predicted_us"])
        first.append(best / ordered[0]["us"])
        ten.append(best / min(t["us"] for t in ordered[:10]))
    return [
        "Share of the best measured time that the model reached which chose these kernels, geometric means:",
        "",
        "| choice | share |",
        "| --- | --- |",
        f"| tiles, stages and levels together, nothing measured | {mean(first):.1%} |",
        f"| the same, best of the 10 first | {mean(ten):.1%} |",
    ]


def against_one_level(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Both levels beside the best single one: they should never be slower by more than 2%."""
    slower = []
    for row in rows:
        us = row["us"]
        both = min(us[kind] for kind in ("both", "fused") if kind in us)
        one = min(us[kind] for kind in ("shared", "registers") if kind in us)
        if both > 1.02 * one:
            slower.append(f"{row['shape']} ({both / one - 1:.1%})")
    words = ", ".join(slower) or "none"
    return [f"Both levels more than 2% slower than the best single one, of {len(rows)} shapes: {words}."]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--from", dest="before", type=Path, help="report what a file of --json has")
    parser.add_argument("--joint", action="store_true", help="judge the joint choice on earlier measurements")
    parser.add_argument("--only", default="")
    parser.add_argument("--ranked", type=int, default=6)
    parser.add_argument("--random", type=int, default=4)
    parser.add_argument("--configs", type=int, help="of a shape, in all variants together")
    parser.add_argument("--done", action="append", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options)
        return
    if options.joint:
        from pipelining_joint import joint

        print(joint())
        if options.markdown:
            options.markdown.write_text(joint() + "\n")
        return
    if options.before:
        found = json.loads(options.before.read_text())
        text = report(found["rows"], found["heading"])
        print(text)
        if options.markdown:
            options.markdown.write_text(text)
        return
    from tilewright.hw.gpu import detect

    end = time.monotonic() + options.seconds
    if options.configs:
        options.random = math.ceil(0.4 * options.configs / len(VARIANTS))
        options.ranked = math.ceil(options.configs / len(VARIANTS)) - options.random
    rows: list[dict[str, Any]] = []
    each = options.ranked + options.random
    searched = f"{each} configs of each variant and shape."
    if options.json and options.json.exists():
        before = json.loads(options.json.read_text())
        if not before["heading"].endswith(searched):
            sys.exit(f"{options.json} is of another search ({before['heading']}): name another file")
        rows = before["rows"]
        options.done = [row["shape"] for row in rows]
    arguments = ["--only", options.only, "--ranked", str(options.ranked), "--random", str(options.random)]
    arguments += [word for name in options.done for word in ("--done", name)]
    heading = f"{detect().describe()}, {time.strftime('%Y-%m-%d')}; {searched}"
    lost: list[dict[str, Any]] = []
    count = len(wanted_shapes(options))
    for answer in answers(count, arguments, end):
        (lost if "lost" in answer else rows).append(answer)
        print(json.dumps({k: v for k, v in answer.items() if k != "trials"}), flush=True)
        if options.json:
            options.json.write_text(json.dumps({"heading": heading, "rows": rows, "lost": lost}))
    text = report(rows, heading)
    if options.markdown:
        options.markdown.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
