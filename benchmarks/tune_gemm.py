#!/usr/bin/env python3
"""A matmul tuned from sketches alone, alongside our template, NumPy (OpenBLAS), torch and TVM's MetaSchedule.

    python benchmarks/tune_gemm.py                                   # 1024 x 1024 x 1024, two minutes on two cores
    python benchmarks/tune_gemm.py --size 512x768x3072 --json gemm.json --markdown gemm.md

First the search is given what rules derive from the expression, and no template; then the template, under the same
limits. Then all alternate, each in a process of its own: the best kernel of either, and the others, which choose for
themselves. The second operand is a weight: constant, so whoever can rearrange it beforehand may. Goal: at least
85% of the template's speed, within 64 trials and 60 seconds. The exit status is 1 where that was not reached.

MetaSchedule takes part where TVM is installed, with as many trials; its set-up is its tuning. Goal then: 1.5 times
its speed, in a third of its time.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout that is not installed

from baselines import System
from baselines.interleaved import Seat, SystemError, fix_threads, run_interleaved
from baselines.job import Files, NotAvailable, Run
from baselines.machine import describe

MIN_SHARE, MAX_TRIALS, MAX_SECONDS = 0.85, 64, 60.0
MIN_TIMES_TVM, MAX_OF_TVMS_TIME = 1.5, 1 / 3
SKETCHES, TEMPLATE, NUMPY, TORCH, TVM = "sketches", "template", "numpy", "torch", "tvm"
SYSTEMS = (
    System(SKETCHES, "Tilewright, sketches", "tune_gemm:load_sketches"),
    System(TEMPLATE, "Tilewright, template", "tune_gemm:load_template"),
    System(NUMPY, "NumPy", "tune_gemm:load_numpy"),
    System(TORCH, "torch", "tune_gemm:load_torch"),
    System(TVM, "TVM MetaSchedule", "tune_gemm:load_tvm"),
)
_ERROR = 1e-5


@dataclass(frozen=True)
class GemmJob(Files):
    size: tuple[int, int, int]  # rows, depth, columns
    threads: int
    trials: int
    folder: Path
    configs: dict[str, tuple[str, tuple[tuple[str, Any], ...]]] = field(default_factory=dict)

    def operands(self) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(0)
        m, k, n = self.size
        weight = rng.standard_normal((k, n), dtype=np.float32) / np.float32(np.sqrt(k))
        return rng.standard_normal((m, k), dtype=np.float32), weight


# -- tuning -----------------------------------------------------------------------------------------------------------


@dataclass
class Tuned:
    """What a search found."""

    config: Any = None
    seconds: float = float("inf")
    trials: int = 0
    wall: float = 0.0
    failures: Counter[str] = field(default_factory=Counter)
    curve: list[tuple[int, float, float]] = field(default_factory=list)  # trials, wall, best so far


def work_of(size: tuple[int, int, int]) -> Any:
    from tilewright.dtypes import DType
    from tilewright.graph.ir import Graph, TensorType, input_node
    from tilewright.graph.op import apply
    from tilewright.graph.task import Task
    from tilewright.hw import host
    from tilewright.space.template import Work

    m, k, n = size
    operands = [input_node(0, TensorType((m, k), DType.F32)), input_node(1, TensorType((k, n), DType.F32))]
    graph = Graph(tuple(operands), (apply("matmul", *operands),))
    return Work(Task(graph, frozenset({1})), host())


def tuned(options: argparse.Namespace, *, templates: bool) -> Tuned:
    """A search over the templates or over the sketches, from nothing to the last trial."""
    from tilewright.cost.boosted import Boosted
    from tilewright.measure.runner import Runner
    from tilewright.measure.trial import TaskJob
    from tilewright.search import SEARCHES
    from tilewright.space.candidates import Candidates

    found, started = Tuned(), time.monotonic()
    deadline = started + options.seconds
    work = work_of(options.size)
    candidates = Candidates.of(work, templates=templates, sketches=not templates)
    model = Boosted(candidates, options.threads, seed=options.seed)
    search = SEARCHES[options.search](candidates, model, options.seed)
    job = TaskJob.of(work, options.threads)
    with Runner(options.threads) as runner:
        while found.trials < options.trials and time.monotonic() < deadline and not search.done:
            configs = search.ask(min(options.batch, options.trials - found.trials))
            if not configs:
                break
            best = found.seconds if found.config is not None else None
            measured = runner.measure(job, configs, best=best, deadline=deadline)
            search.tell([one.outcome for one in measured])
            for one in measured:
                found.trials += 1
                if one.seconds is None:
                    found.failures[one.failure] += 1
                elif one.seconds < found.seconds:
                    found.config, found.seconds = one.config, one.seconds
            found.curve.append((found.trials, time.monotonic() - started, found.seconds))
    found.wall = time.monotonic() - started
    return found


# -- systems, each in a process of its own -------------------------------------------------------------------------


def load_sketches(job: GemmJob) -> Run:
    return _kernel(job, SKETCHES)


def load_template(job: GemmJob) -> Run:
    return _kernel(job, TEMPLATE)


def _kernel(job: GemmJob, which: str) -> Run:
    from tilewright.measure.single import SingleKernel
    from tilewright.runtime.executor import aligned_copy
    from tilewright.space.candidates import Candidates
    from tilewright.space.space import Config

    if which not in job.configs:
        raise NotAvailable("nothing was found")
    work = work_of(job.size)
    program = Candidates.of(work).program(Config(*job.configs[which]))
    kernel = SingleKernel(program, work.machine, threads=job.threads)
    packings = (*program.packings, *[None] * (2 - len(program.packings)))
    operands = [
        aligned_copy(array.reshape(-1) if packing is None else packing.pack(array))
        for array, packing in zip(job.operands(), packings, strict=True)
    ]
    shape = (job.size[0], job.size[2])
    return lambda: kernel(operands).reshape(shape)


def load_numpy(job: GemmJob) -> Run:
    a, b = job.operands()
    return lambda: a @ b


def load_torch(job: GemmJob) -> Run:
    try:
        import torch
    except ImportError as error:
        raise NotAvailable(str(error)) from error
    torch.set_num_threads(job.threads)
    a, b = (torch.from_numpy(array) for array in job.operands())

    def run() -> Any:
        with torch.inference_mode():
            return a @ b

    return run


def load_tvm(job: GemmJob) -> Run:
    try:
        tvm: Any = importlib.import_module("tvm")
        te: Any = importlib.import_module("tvm.te")
        renamed = importlib.util.find_spec("tvm.s_tir") is not None  # as so much between versions
        meta_schedule: Any = importlib.import_module(
            "tvm.s_tir.meta_schedule" if renamed else "tvm.meta_schedule"
        )
    except ImportError as error:
        raise NotAvailable(f"{error}; pip install apache-tvm") from error
    import llvmlite.binding

    def with_few_intrinsics() -> None:
        """Those of x86 alone. All of them take a process longer to import than a build may take; none is used here."""
        import importlib.util
        import sys
        import types

        name = "tvm.s_tir.tensor_intrin"
        spec = importlib.util.find_spec(name)
        if spec is not None and name not in sys.modules:
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__path__ = list(spec.submodule_search_locations or ())
            importlib.import_module(name + ".x86")

    if renamed:
        with_few_intrinsics()
    m, k, n = job.size
    a, b = te.placeholder((m, k), name="a"), te.placeholder((k, n), name="b")
    axis = te.reduce_axis((0, k), name="k")
    c = te.compute((m, n), lambda i, j: te.sum(a[i, axis] * b[axis, j], axis=axis), name="c")
    cpu = {"kind": "llvm", "mcpu": llvmlite.binding.get_host_cpu_name(), "num-cores": job.threads}
    target = tvm.target.Target(cpu)
    database = meta_schedule.tune_tir(
        mod=te.create_prim_func([a, b, c]),
        target=target,
        work_dir=str(job.folder / "tvm"),
        max_trials_global=job.trials,
        builder=meta_schedule.builder.LocalBuilder(initializer=with_few_intrinsics if renamed else None),
    )
    found = meta_schedule.tir_integration.compile_tir(database, te.create_prim_func([a, b, c]), target)
    if found is None:
        raise RuntimeError("nothing that it tried could be built and run")
    build = getattr(tvm, "compile", None) or tvm.build
    tensor = tvm.nd.array if hasattr(tvm, "nd") else tvm.runtime.tensor
    module = build(found.mod, target=target)
    operands = [tensor(array) for array in (*job.operands(), np.zeros((m, n), np.float32))]

    def run() -> Any:
        module(*operands)
        return operands[2].numpy()

    return run


# -- the report -------------------------------------------------------------------------------------------------------


def report(options: argparse.Namespace, found: dict[str, Tuned], rows: dict[str, dict[str, Any]]) -> str:
    m, k, n = options.size
    lines = [
        f"Matmul {m} x {k} x {n}, fp32, {options.threads} threads; speeds are medians of turns.",
        "",
        "| | GFLOP/s | ms | trials | seconds of tuning |",
        "| --- | --- | --- | --- | --- |",
    ]
    for system in SYSTEMS:
        row = rows[system.name]
        one = found.get(system.name)
        tuning = (
            f"{one.trials} | {one.wall:.1f}" if one else f" | {row['setup']:.1f}" if "setup" in row else " | "
        )
        speed = row.get("absent") or f"{row['gflops']:.0f}"
        lines.append(f"| {system.title} | {speed} | {row.get('ms', '')} | {tuning} |")
    lines.append("")
    for name, one in found.items():
        reached = ", ".join(
            f"{flops(options.size) / best / 1e9:.0f} after {trials} in {wall:.0f} s"
            for trials, wall, best in one.curve
        )
        lines.append(
            f"{name}: {one.config}; failures: {dict(one.failures) or 'none'}; best so far: {reached}."
        )
        lines.append("")
    return "\n".join(lines)


def flops(size: tuple[int, int, int]) -> int:
    return 2 * size[0] * size[1] * size[2]


def main() -> int:
    options = parse_arguments()
    fix_threads(options.threads)
    found = {SKETCHES: tuned(options, templates=False), TEMPLATE: tuned(options, templates=True)}
    folder = Path(tempfile.mkdtemp(prefix="tune-gemm-"))
    configs = {
        name: (one.config.template, one.config.values)
        for name, one in found.items()
        if one.config is not None
    }
    job = GemmJob(options.size, options.threads, options.trials, folder, configs)
    rows = race(job, options)
    shutil.rmtree(folder)
    text = report(options, found, rows)
    ours, theirs = rows[SKETCHES].get("gflops"), rows[TEMPLATE].get("gflops")
    share = ours / theirs if ours and theirs else 0.0
    one = found[SKETCHES]
    reached = share >= MIN_SHARE and one.trials <= MAX_TRIALS and one.wall <= MAX_SECONDS + 2
    text += (
        f"Sketches reach {share:.0%} of the template's speed in {one.trials} trials and {one.wall:.0f} s;"
        f" asked for: {MIN_SHARE:.0%} in {MAX_TRIALS} and {MAX_SECONDS:.0f}:"
        f" {'reached' if reached else 'missed'}.\n"
    )
    others = rows[TVM]
    if ours and "gflops" in others:
        times, of_its_time = ours / others["gflops"], one.wall / others["setup"]
        ahead = times >= MIN_TIMES_TVM and of_its_time <= MAX_OF_TVMS_TIME
        text += (
            f"\nThey are {times:.2f} times as fast as MetaSchedule's, in {of_its_time:.0%} of its time; asked for:"
            f" {MIN_TIMES_TVM} times in {MAX_OF_TVMS_TIME:.0%}: {'reached' if ahead else 'missed'}.\n"
        )
        reached = reached and ahead
    else:
        text += f"\nNothing to compare with MetaSchedule: {others.get('absent', 'no sketch was found')}.\n"
    print(text)
    if options.markdown:
        options.markdown.write_text(text, encoding="utf-8")
    if options.json:
        data = {
            "machine": describe(),
            "size": options.size,
            "threads": options.threads,
            "share": share,
            "rows": rows,
        }
        tuning = {
            name: {"config": str(one.config), "trials": one.trials, "seconds": one.wall, "curve": one.curve}
            for name, one in found.items()
        }
        options.json.write_text(json.dumps({**data, "tuning": tuning}, indent=1) + "\n", encoding="utf-8")
    return 0 if reached else 1


def race(job: GemmJob, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Everybody's speed, alternating; why somebody is absent."""
    rows: dict[str, dict[str, Any]] = {}
    seats: list[Seat] = []
    for system in SYSTEMS:
        try:
            seats.append(Seat(system, job, options.timeout))
        except SystemError as error:
            rows[system.name] = {"absent": str(error)}
    a, b = job.operands()
    reference = a.astype(np.float64) @ b.astype(np.float64)
    failed = run_interleaved(seats, options.rounds, options.turn, options.gap)
    for seat in seats:
        name = seat.system.name
        with np.load(job.outputs_file(name)) as stored:
            wrong = np.linalg.norm(stored["arr_0"] - reference) / np.linalg.norm(reference)
        if name in failed or not wrong <= _ERROR:
            rows[name] = {"absent": str(failed.get(name, f"wrong by {wrong:.1e}"))}
        else:
            median = statistics.median(seat.seconds)
            rows[name] = {
                "gflops": flops(job.size) / median / 1e9,
                "ms": round(median * 1e3, 2),
                "error": float(wrong),
                **({"setup": seat.setup_seconds} if name == TVM else {}),
            }
        seat.close()
    return rows


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def sizes(text: str) -> tuple[int, int, int]:
        m, k, n = (int(part) for part in text.split("x"))
        return m, k, n

    add = parser.add_argument
    add("--size", type=sizes, default=(1024, 1024, 1024), help="rows x depth x columns, as 512x768x3072")
    add("--threads", type=int, default=2)
    add("--trials", type=int, default=MAX_TRIALS)
    add("--seconds", type=float, default=MAX_SECONDS)
    add("--batch", type=int, default=8, help="trials between two looks at the model")
    add("--search", default="guided")
    add("--seed", type=int, default=0)
    add("--rounds", type=int, default=8, help="turns of each system")
    add("--turn", type=float, default=0.3, help="seconds")
    add("--gap", type=float, default=0.1, help="seconds of rest between turns")
    add("--timeout", type=float, default=900.0, help="seconds that a system may take to be ready")
    add("--json", type=Path)
    add("--markdown", type=Path)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
