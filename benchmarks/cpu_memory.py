#!/usr/bin/env python3
"""How much memory a model takes while it runs: Tilewright and ONNX Runtime, each in processes of its own.

    python benchmarks/cpu_memory.py
    python benchmarks/cpu_memory.py --models resnet50,bert-base --json memory.json --markdown memory.md
    python benchmarks/cpu_memory.py --quick                            # one small model: does it work?

`plan` is the size of Tilewright's plan: activations (the arena), and weights in packed order, which is the only copy.
`resident` is the growth of a process's memory from before loading the model's file to after running it, without inputs
and libraries; Tilewright loads a saved artifact, without torch.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout that is not installed

from baselines.interleaved import SystemError, fix_threads, prepare_separately, spawn
from baselines.job import Job, NotAvailable, load_arrays, onnx_model, torch_model, untuned
from baselines.machine import describe
from cpu_models import DEFAULT_MODELS, aligned, names_list, say

RUNS = 3
ARENA_OVER_BOUND = 1.1  # what is asked of the planner


@dataclass(frozen=True)
class Memory:
    """Bytes; None where there is no figure, with the reason in `absent`."""

    model: str
    arena: int
    lower_bound: int
    constants: int
    ours_resident: int
    onnx_runtime_resident: int | None
    absent: str = ""

    @property
    def planned(self) -> int:
        return self.arena + self.constants

    @property
    def over_onnx_runtime(self) -> float | None:
        """Our time over theirs; the goal is at most 1."""
        theirs = self.onnx_runtime_resident
        return self.planned / theirs if theirs else None

    @property
    def over_bound(self) -> float:
        return self.arena / self.lower_bound if self.lower_bound else 1.0

    @property
    def met(self) -> bool:
        ratio = self.over_onnx_runtime
        return self.over_bound <= ARENA_OVER_BOUND and (ratio is None or ratio <= 1)


# -- in processes of their own ----------------------------------------------------------------------------------------


def _resident() -> int:
    return int(psutil.Process().memory_info().rss)


def _artifact(job: Job) -> Path:
    return job.folder / "model.tw"


def save_ours(job: Job) -> dict[str, int]:
    import tilewright

    model, inputs = torch_model(job)
    compiled: Any = tilewright.compile(
        model, inputs, target="cpu", effort="none", threads=job.threads, db=untuned(job.folder)
    )
    compiled.save(_artifact(job))
    memory = compiled.plan.memory
    return {
        "arena": memory.arena_bytes,
        "lower_bound": memory.lower_bound,
        "constants": memory.constant_bytes,
    }


def run_ours(job: Job) -> int:
    import tilewright
    from tilewright.runtime import native

    inputs = load_arrays(job.inputs_file)
    native.native()  # LLVM and the launcher are the library's, not the model's
    before = _resident()
    compiled: Any = tilewright.load(_artifact(job), threads=job.threads)
    for _ in range(RUNS):
        compiled(*inputs)
    return _resident() - before


def run_onnx_runtime(job: Job) -> int:
    import onnxruntime

    inputs = load_arrays(job.inputs_file)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = job.threads
    options.log_severity_level = 3
    path = onnx_model(job)
    before = _resident()
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    feed = dict(zip((value.name for value in session.get_inputs()), inputs, strict=True))
    for _ in range(RUNS):
        session.run(None, feed)
    return _resident() - before


def _answer(function: Callable[[Job], Any], job: Job, pipe: Connection) -> None:
    try:
        pipe.send((True, function(job)))
    except (NotAvailable, ImportError) as reason:
        pipe.send((False, str(reason)))


def separate(function: Callable[[Job], Any], job: Job) -> Any:
    """What `function` gives in a process of its own. ContenderError where it cannot or the process dies."""
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_answer, args=(function, job, theirs))
    process.start()
    theirs.close()
    try:
        done, value = ours.recv()
    except EOFError:
        done, value = False, "its process died"
    process.join()
    if not done:
        raise SystemError(value)
    return value


# -- tables -----------------------------------------------------------------------------------------------------------


def measure(model: str, options: argparse.Namespace, scratch: Path) -> Memory:
    folder = scratch / model
    folder.mkdir()
    job = Job(model, options.quick, 1, options.threads, folder)
    say(model)
    prepare_separately(job, with_onnx=True)
    plan = separate(save_ours, job)
    ours = separate(run_ours, job)
    try:
        theirs, absent = separate(run_onnx_runtime, job), ""
    except SystemError as error:
        theirs, absent = None, str(error)
    return Memory(model, **plan, ours_resident=ours, onnx_runtime_resident=theirs, absent=absent)


HEADER = [
    "model",
    "arena",
    "lower bound",
    "arena/bound",
    "weights",
    "plan",
    "resident",
    "ONNX Runtime",
    "plan/ORT",
    "met",
]


def row(memory: Memory) -> list[str]:
    ratio = memory.over_onnx_runtime
    theirs = memory.onnx_runtime_resident
    return [
        memory.model,
        mebibytes(memory.arena),
        mebibytes(memory.lower_bound),
        f"{memory.over_bound:.2f}x",
        mebibytes(memory.constants),
        mebibytes(memory.planned),
        mebibytes(memory.ours_resident),
        "-" if theirs is None else mebibytes(theirs),
        "-" if ratio is None else f"{ratio:.2f}x",
        "yes" if memory.met else "NO",
    ]


def mebibytes(count: int) -> str:
    return f"{count / 2**20:.1f}"


def markdown(results: Sequence[Memory], about: dict[str, Any], method: str) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items() if version)
    lines = [
        f"{about['cpu']}, {about['cores']} cores, {about['system']}, {about['date']}.",
        f"Python {about['python']}, {versions}.",
        method,
        "",
        "| " + " | ".join(HEADER) + " |",
        "|" + " --- |" * len(HEADER),
        *("| " + " | ".join(row(memory)) + " |" for memory in results),
    ]
    if notes := [f"- {memory.model}: {memory.absent}" for memory in results if memory.absent]:
        lines += ["", *notes]
    return "\n".join(lines) + "\n"


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=names_list, metavar="A,B")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="reduced models: a smoke test")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    options.models = options.models or (["resnet18"] if options.quick else list(DEFAULT_MODELS))
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    fix_threads(options.threads)
    about = describe()
    method = (
        f"MiB, fp32, batch 1, {options.threads} threads; asked: plan at most ONNX Runtime's, arena at most "
        f"{ARENA_OVER_BOUND}x its lower bound{'; reduced models' if options.quick else ''}."
    )
    print(aligned(HEADER), flush=True)
    results: list[Memory] = []
    with tempfile.TemporaryDirectory(prefix="tilewright-memory-") as scratch:
        for model in options.models:
            results.append(measure(model, options, Path(scratch)))
            print(aligned(row(results[-1])), flush=True)
    if options.json:
        data = {"machine": about, "method": method, "models": [asdict(memory) for memory in results]}
        options.json.write_text(json.dumps(data, indent=2) + "\n")
    if options.markdown:
        options.markdown.write_text(markdown(results, about, method))
    return 0


if __name__ == "__main__":
    sys.exit(main())
