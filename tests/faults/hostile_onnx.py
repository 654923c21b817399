"""Hostile ONNX files: every one is refused with an error of Tilewright's, or compiles and gives the right result.

    python -m tests.faults.hostile_onnx                       # all: crafted, of every operator, mutated bytes
    python -m tests.faults.hostile_onnx --match RoiAlign -v
    python -m tests.faults.hostile_onnx --operators 2000 --seed 1
    python -m tests.faults.hostile_onnx --short               # some sixty of the crafted ones, in this process

Each file has a process of its own with 4 GB of address space and 60 s of the processor. It ends as

    refused      a TilewrightError, with its class
    right        compiled and run; the outputs are those of onnx's reference, or of the oracle where that cannot run it
    unchecked    compiled and run; neither could compute it within the limits
    bad          a MemoryError, any other exception, an InternalError, a wrong output, a crash, or out of time

and the exit status is 1 if one is bad.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import select
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import tilewright
from tests.faults.hostile import crafted
from tests.faults.hostile.building import Case, raw
from tests.faults.hostile.operators import operators
from tests.frontend.onnx.checking import expected_of
from tests.frontend.onnx.mutations import mutated
from tilewright.errors import InternalError, TilewrightError
from tilewright.frontend.onnx import import_onnx
from tilewright.graph.ir import Graph
from tilewright.graph.oracle import evaluate, evaluation_cost
from tilewright.runtime import tree

MEMORY = 4 << 30  # address space of a process
SECONDS = 60  # of the processor
_PATIENCE = 3  # times as long by the clock
_REFERENCE_SECONDS = 20  # beyond that a result is not compared
# Of names: these take seconds each, to be written, refused, compiled or compared.
_SLOW = (
    "million", "GB", "200 MB", "2000", "10000", "20000", "1048576", "67108864", "100000.0", "chain of", "shared",
    "activations", "Concat", "Scan of", "outputs", "inputs of", "sequence that", "loops of", "4096", "reads 6 MB",
    "folded",
    "antialias", "wide kernel", "outer sums", "needs", "without an end", "called 400", "long", "of many images",
    "ScatterND", "unknown field", "5,000 steps",
)  # fmt: skip
_ORACLE_WORK = 200_000_000
_CALL_BYTES = 256 << 20  # of inputs and outputs: likewise
_CALL_WORK = 20_000_000_000  # operations: a model of more is compiled and not called


@dataclass(frozen=True)
class Outcome:
    name: str
    status: str
    detail: str
    seconds: float


def cases(operator_count: int, byte_count: int, seed: int) -> Iterator[tuple[str, Case]]:
    yield from crafted().items()
    for name, content in operators(operator_count, seed):
        yield name, raw(lambda c=content: c)
    for number, (model, kind, content) in enumerate(mutated(byte_count, seed)):
        yield f"bytes {number}: {kind} of {model}", raw(lambda c=content: c)


# -- in the child -----------------------------------------------------------------------------------------------------


def attempt(path: Path) -> tuple[str, str, float]:
    """(status, detail, seconds without the comparison) of one file."""
    started = time.process_time()
    status, detail, compare = _compiled(path)
    seconds = time.process_time() - started
    return (*compare(), seconds) if compare is not None else (status, detail, seconds)


def _compiled(path: Path) -> tuple[str, str, Callable[[], tuple[str, str]] | None]:
    try:
        imported = import_onnx(path)
        fast = tilewright.compile(imported, numerics="strict", threads=1)
        rng = np.random.default_rng(0)
        given = sum(node.type.bytes for node in (*imported.graph.inputs, *imported.graph.outputs))
        if _work(imported.graph) > _CALL_WORK or given > _CALL_BYTES:
            return "unchecked", "compiled, and too large to be called here", None
        inputs = {node.name: _drawn(rng, node.shape, node.dtype.numpy) for node in imported.graph.inputs}
        got = tree.flatten(fast(*inputs.values()))[0]
    except InternalError as error:
        return "bad", f"{type(error).__name__}: {error.message}", None
    except TilewrightError as error:
        return "refused", f"{type(error).__name__}: {error.message}", None
    return "", "", lambda: _compared(path, imported.graph, inputs, got)


def _drawn(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    values = rng.standard_normal(shape, np.float32)
    return (values * 3).astype(dtype) if np.dtype(dtype).kind != "u" else np.abs(values * 3).astype(dtype)


def _work(graph: Graph) -> int:
    return sum(
        evaluation_cost(node)[0] for node in graph.nodes() if not node.is_constant and not node.is_input
    )


def _compared(
    path: Path, graph: Graph, inputs: dict[str, np.ndarray], got: list[np.ndarray]
) -> tuple[str, str]:
    model = onnx.load(path, load_external_data=False)
    signal.signal(signal.SIGALRM, _late)
    signal.alarm(_REFERENCE_SECONDS)
    try:
        wanted = tree.flatten(expected_of(onnx.load(path), inputs))[0]
        by = "reference"
    except BaseException as error:  # the reference is not made for models like these
        if _work(graph) > _ORACLE_WORK:
            return "unchecked", f"the reference: {type(error).__name__}"
        wanted, by = evaluate(graph, list(inputs.values()), precise=False), f"oracle ({type(error).__name__})"
    finally:
        signal.alarm(0)
    declared = [value.name for value in model.graph.output]
    singles = {v.name for v in model.graph.output if v.type.tensor_type.elem_type == onnx.TensorProto.FLOAT}
    if len(got) != len(wanted):
        return "bad", f"{len(got)} results, and by the {by} {len(wanted)}"
    names = [*declared, *[""] * (len(got) - len(declared))]
    for name, mine, right in zip(names, got, wanted, strict=False):
        right = np.asarray(right)
        if (
            right.dtype == np.float64 and name in singles
        ):  # some of the reference's formulas are wider than their type
            right = right.astype(np.float32)
        if mine.shape != right.shape or mine.dtype != right.dtype:
            return "bad", f"{mine.dtype}{list(mine.shape)}, by the {by} {right.dtype}{list(right.shape)}"
        with np.errstate(all="ignore"):
            close = np.allclose(
                mine.astype(np.float64), right.astype(np.float64), rtol=1e-3, atol=1e-4, equal_nan=True
            )
        if not close:
            return "bad", f"wrong, by the {by}"
    return "right", by


def _late(*_: Any) -> None:
    raise TimeoutError


def limit_memory(size: int = MEMORY) -> None:
    """Of this process, in which LLVM then runs too: limits and counted time do not reach worker processes."""
    os.environ["TILEWRIGHT_BUILD_PROCESSES"] = "0"
    resource.setrlimit(resource.RLIMIT_AS, (size, size))


def _child(case: Case, folder: Path, pipe: int) -> None:
    warnings.simplefilter("ignore")
    path = case(folder)
    limit_memory()
    limit = int(time.process_time()) + SECONDS + _REFERENCE_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    try:
        status, detail, seconds = attempt(path)
    except BaseException as error:
        status, detail, seconds = "bad", f"{type(error).__name__}: {str(error)[:300]}", 0.0
    os.write(pipe, json.dumps([status, detail[:600], seconds]).encode())


def run_alone(name: str, case: Case) -> Outcome:
    """One case in a forked process with limits."""
    with tempfile.TemporaryDirectory() as folder:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.close(read)
                silent = os.open(os.devnull, os.O_WRONLY)
                os.dup2(silent, 1)
                os.dup2(silent, 2)
                _child(case, Path(folder), write)
            finally:
                os._exit(0)
        os.close(write)
        begin = time.monotonic()
        # Time is that of the processor, since others may use it too. The file is written, and the reference runs, in
        # the same process: their time comes on top.
        ready, _, _ = select.select([read], [], [], _PATIENCE * (SECONDS + _REFERENCE_SECONDS))
        if not ready:
            os.kill(child, signal.SIGKILL)
        answer = os.read(read, 1 << 16) if ready else b""
        os.close(read)
        _, status = os.waitpid(child, 0)
    if not ready:
        return Outcome(name, "bad", "out of time", time.monotonic() - begin)
    if not answer:
        ending = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit status {status}"
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL):
            return Outcome(name, "bad", "out of time", SECONDS + _REFERENCE_SECONDS)
        return Outcome(name, "bad", f"crash: {ending}", time.monotonic() - begin)
    kind, detail, seconds = json.loads(answer)
    if seconds > SECONDS:
        return Outcome(name, "bad", f"{seconds:.0f} s, {kind}: {detail}", seconds)
    return Outcome(name, kind, detail, seconds)


def short() -> dict[str, Case]:
    """Some of every kind of crafted file, those that are quick to write and to refuse."""
    quick = [(name, case) for name, case in crafted().items() if not any(part in name for part in _SLOW)]
    return dict(quick[::5])


def run_here(chosen: Mapping[str, Case]) -> list[Outcome]:
    """The cases one after another in this process, which limits its own memory."""
    limit_memory()
    outcomes = []
    signal.signal(signal.SIGPROF, _late)
    for name, case in chosen.items():
        with tempfile.TemporaryDirectory() as folder:
            path = case(Path(folder))
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            try:
                outcome = Outcome(name, *attempt(path))
            except BaseException as error:
                outcome = Outcome(name, "bad", f"{type(error).__name__}: {str(error)[:300]}", 0.0)
            signal.setitimer(signal.ITIMER_PROF, 0)
        outcomes.append(outcome)
    return outcomes


# -- in the parent ----------------------------------------------------------------------------------------------------


def wanted(name: str, match: str, leave_out: str) -> bool:
    return match.lower() in name.lower() and not (leave_out and leave_out.lower() in name.lower())


def _print(outcome: Outcome, verbose: bool) -> None:
    if verbose or outcome.status == "bad":
        detail = " ".join(outcome.detail.split())[:300]
        print(f"{outcome.status:10}{outcome.seconds:6.1f} s  {outcome.name}: {detail}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--operators", type=int, default=400, help="files made of onnx's node tests")
    parser.add_argument("--bytes", type=int, default=100, help="files with changed bytes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--match", default="", help="only the cases whose name has this in it")
    parser.add_argument("--leave-out", default="", help="not those whose name has this in it")
    parser.add_argument("--short", action="store_true", help="a sample of the crafted ones, in this process")
    parser.add_argument("-v", action="store_true", help="print every case")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TILEWRIGHT_CACHE_DIR"] = cache
        outcomes = run_here(short()) if options.short else []
        for outcome in outcomes:
            _print(outcome, options.v)
        for name, case in () if options.short else cases(options.operators, options.bytes, options.seed):
            if not wanted(name, options.match, options.leave_out):
                continue
            outcome = run_alone(name, case)
            outcomes.append(outcome)
            _print(outcome, options.v)
    counts = Counter(outcome.status for outcome in outcomes)
    slowest = max(outcomes, key=lambda outcome: outcome.seconds, default=None)
    print(f"{len(outcomes)} files: {', '.join(f'{n} {status}' for status, n in counts.most_common())}")
    if slowest is not None:
        print(f"the slowest took {slowest.seconds:.1f} s: {slowest.name}")
    sys.exit(1 if counts["bad"] or not outcomes else 0)


if __name__ == "__main__":
    main()
