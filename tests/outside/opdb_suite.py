"""PyTorch's own operator samples (`op_db`, float32, CPU) through the torch.compile backend.

    python -m tests.outside.opdb_suite                       every sample of every operator
    python -m tests.outside.opdb_suite --samples 3 --ops add softmax
    python -m tests.outside.opdb_suite --update              write the baseline anew
    python -m tests.outside.opdb_suite --json FILE           keep results, and go on from those that are there

Samples run in worker processes, so that a crash or a hang costs one sample; a hang is told by processor time, so that a
busy machine is not taken for one. Each sample is one of

    full     compiled by us from end to end
    view     its result is an argument or a view of one: PyTorch makes it, and there is nothing to compile
    part     some operators compiled, others left to PyTorch
    none     nothing compiled: unsupported, or no graph for it
    WRONG, CRASH, HANG

and an operator is the worst of its samples, except that views do not count where others do. A result is right if its
shapes, types, NaNs and infinities are PyTorch's, and its relative L2 error against PyTorch is at most 1e-5, or, against
PyTorch in float64, at most twice PyTorch's own.

The baseline (`opdb_baseline.txt`) holds what each operator reached on all samples. The command fails if any is WRONG,
CRASH or HANG, or is worse than there. On a subset of samples an operator can only look better than it is, so the
comparison holds for any subset.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import time
import types
import unittest
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

BASELINE = Path(__file__).with_name("opdb_baseline.txt")
SECONDS = 90.0  # of processor time that one sample may take
ASLEEP_SECONDS = 900.0  # without an answer, a process that does not use its processor is dead
RANK = {"view": 0, "full": 1, "part": 2, "none": 3, "HANG": 4, "CRASH": 5, "WRONG": 6}
BAD = ("WRONG", "CRASH", "HANG")

RANDOM = "random numbers"
MEMORY = "the result is uninitialised memory"
SIGNS = "the result is determined only up to signs or order"
EXCLUDED: dict[str, str] = {
    **dict.fromkeys(
        [
            "bernoulli",
            "cauchy",
            "exponential",
            "geometric",
            "log_normal",
            "multinomial",
            "normal",
            "normal_in_place",
            "normal_number_mean",
            "uniform",
            "rand_like",
            "randint",
            "randint_like",
            "randn",
            "randn_like",
            "randperm",
            "nn_functional_dropout",
            "nn_functional_dropout2d",
            "nn_functional_dropout3d",
            "nn_functional_alpha_dropout",
            "nn_functional_feature_alpha_dropout_with_train",
            "nn_functional_fractional_max_pool2d",
            "nn_functional_fractional_max_pool3d",
            "nn_functional_rrelu",
            "nn_functional_multi_head_attention_forward",
            "pca_lowrank",
            "svd_lowrank",
        ],
        RANDOM,
    ),
    **dict.fromkeys(
        [
            "empty",
            "empty_like",
            "empty_permuted",
            "empty_strided",
            "new_empty",
            "new_empty_strided",
            "resize_",
            "resize_as_",
        ],
        MEMORY,
    ),
    **dict.fromkeys(
        [
            "linalg_eig",
            "linalg_eigh",
            "linalg_svd",
            "svd",
            "linalg_qr",
            "qr",
            "geqrf",
            "linalg_lu",
            "lu",
            "ormqr",
            "linalg_householder_product",
            "linalg_ldl_factor",
            "linalg_ldl_factor_ex",
        ],
        SIGNS,
    ),
}


# -- in a worker --------------------------------------------------------------------------------------------------


def load_op_db() -> dict[str, Any]:
    if "expecttest" not in sys.modules:
        try:
            import expecttest  # noqa: F401
        except ImportError:  # only the base class of PyTorch's own tests
            stub: Any = types.ModuleType("expecttest")
            stub.TestCase = unittest.TestCase
            sys.modules["expecttest"] = stub
    import torch
    from torch.testing._internal.common_methods_invocations import op_db

    return {op.formatted_name: op for op in op_db if torch.float32 in op.supported_dtypes("cpu")}


def samples_of(op: Any, limit: int | None) -> list[Any]:
    import torch

    torch.manual_seed(0)
    samples = list(op.sample_inputs("cpu", torch.float32, requires_grad=False))
    if limit is None or len(samples) <= limit:
        return samples
    step = len(samples) / limit
    return [samples[int(i * step)] for i in range(limit)]


def copied(value: Any, dtype: Any = None) -> Any:
    """A copy in its own memory with the same strides; floats in `dtype` if that is given."""
    import torch
    from torch.utils import _pytree

    def copy(x: Any) -> Any:
        if isinstance(x, torch.Tensor) and x.layout is torch.strided:
            new = x.detach().clone()
            return new.to(dtype) if dtype is not None and x.dtype is torch.float32 else new
        return dtype if dtype is not None and x is torch.float32 else x

    return _pytree.tree_map(copy, value)


def run_sample(op: Any, sample: Any) -> tuple[str, str]:
    """(kind, detail) of one sample."""
    import torch

    from tilewright.integrations.torch_compile import RegionOutcome, backend

    outcomes: list[RegionOutcome] = []
    function = lambda *args, **kwargs: op(*args, **kwargs)  # noqa: E731
    arguments = (sample.input, *sample.args)
    torch._dynamo.reset()
    with torch.no_grad():
        try:
            torch.manual_seed(0)
            before = copied((arguments, sample.kwargs))
            expected = function(*before[0], **before[1])
        except Exception as error:
            return "none", f"eager raises {type(error).__name__}"
        given = copied((arguments, sample.kwargs))
        compiled = torch.compile(function, backend=_with_options(backend, outcomes.append), dynamic=False)
        try:
            torch.manual_seed(0)
            got = compiled(*given[0], **given[1])
        except Exception as error:
            return "WRONG", f"raises {type(error).__name__}: {str(error)[:300]}"
        problem = difference(got, expected) or difference(given, before)
        if problem:
            wide = copied((arguments, sample.kwargs), torch.float64)
            try:
                torch.manual_seed(0)
                exact = function(*wide[0], **wide[1])
            except Exception:
                return "WRONG", problem
            problem = worse(got, expected, exact)
            if problem:
                return "WRONG", problem
    failed = [o.error for o in outcomes if o.kind == "failed"]
    if failed:
        return "none", f"FAILED {failed[0][:300]}"
    left = {name: why for o in outcomes for name, why in o.left.items()}
    if not outcomes:
        return "none", "no graph"
    if not left:
        return "full", ""
    detail = "; ".join(sorted(set(left.values())))[:300]
    if all(why.startswith(("a view of memory", "nothing to compute")) for why in left.values()):
        return ("view" if all(o.regions == 0 for o in outcomes) else "full"), ""
    return ("part" if any(o.regions for o in outcomes) else "none"), detail


def _with_options(backend: Any, observe: Any) -> Any:
    return lambda module, inputs: backend(module, inputs, options={"observe": observe})


def leaves(value: Any) -> list[Any]:
    from torch.utils import _pytree

    return _pytree.tree_leaves(value)


def difference(got: Any, expected: Any) -> str:
    """What is wrong with `got`, in words; empty if nothing."""
    import torch

    ours, theirs = leaves(got), leaves(expected)
    if len(ours) != len(theirs):
        return f"{len(ours)} results instead of {len(theirs)}"
    for a, b in zip(ours, theirs, strict=True):
        if not isinstance(b, torch.Tensor) or b.layout is not torch.strided:
            if not isinstance(b, torch.Tensor) and a != b and not (a != a and b != b):
                return f"{a!r} instead of {b!r}"
            continue
        if a.dtype != b.dtype or a.shape != b.shape:
            return f"{a.dtype}{list(a.shape)} instead of {b.dtype}{list(b.shape)}"
        error = l2_error(a, b)
        if error > (
            1e-5
            if b.dtype in (torch.float32, torch.float64, torch.complex64)
            else 1e-2 * b.is_floating_point()
        ):
            return f"error {error:.3g}"
    return ""


def l2_error(a: Any, b: Any) -> float:
    import torch

    if not b.numel():
        return 0.0
    if not (b.is_floating_point() or b.is_complex()):
        return float((a != b).double().mean())
    wide = torch.complex128 if b.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    odd = ~torch.isfinite(b)
    if bool(odd.any()):
        same = (a[odd] == b[odd]) | (a[odd].isnan() & b[odd].isnan())
        if not bool(same.all()):
            return float("inf")
        a, b = a[~odd], b[~odd]
    if not bool(torch.isfinite(a).all()):
        return float("inf")
    size = float(torch.linalg.vector_norm(b))
    distance = float(torch.linalg.vector_norm(a - b))
    return distance / size if size else distance


def worse(got: Any, expected: Any, exact: Any) -> str:
    """Whether our error against float64 is more than twice PyTorch's."""
    import torch

    for ours, theirs, right in zip(leaves(got), leaves(expected), leaves(exact), strict=True):
        if not isinstance(right, torch.Tensor):
            continue
        if ours.dtype != theirs.dtype or ours.shape != right.shape:
            return "another type or shape"
        mine, framework = l2_error(ours, right), l2_error(theirs, right)
        if mine > max(2 * framework, 1e-5):
            return f"error {mine:.3g} against float64, PyTorch's is {framework:.3g}"
    return ""


def worker() -> None:
    """Reads "operator limit first" lines; writes one JSON line before and one after each sample."""
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    ops = load_op_db()
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what operators print goes elsewhere
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        name, limit, first = line.split()
        samples = samples_of(ops[name], None if limit == "all" else int(limit))
        for number, sample in enumerate(samples):
            if number < int(first):
                continue
            print(json.dumps({"begin": number}), file=out, flush=True)
            kind, detail = run_sample(ops[name], sample)
            print(json.dumps({"end": number, "kind": kind, "detail": detail}), file=out, flush=True)
        print(json.dumps({"done": True}), file=out, flush=True)


# -- in the parent ------------------------------------------------------------------------------------------------


class Worker:
    """A worker process and the thread that reads it."""

    def __init__(self) -> None:
        # Without the GPUs that some samples would ask for.
        alone = {"OMP_NUM_THREADS": "1", "TILEWRIGHT_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        environment = {**os.environ, **alone}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.outside.opdb_suite", "--worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
            cwd=Path(__file__).parents[2],
        )
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def ask(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def answer(self, seconds: float) -> dict[str, Any] | None:
        """The next message; None if the process died. TimeoutError after `seconds` of its processor time."""
        started, asked = self._processor_seconds(), time.monotonic()
        while True:
            try:
                line = self.lines.get(timeout=1.0)
            except queue.Empty:
                used, waited = self._processor_seconds() - started, time.monotonic() - asked
                if used > seconds or waited > ASLEEP_SECONDS:
                    raise TimeoutError from None
                continue
            return None if line is None else json.loads(line)

    def _processor_seconds(self) -> float:
        try:
            times = psutil.Process(self.process.pid).cpu_times()
        except psutil.NoSuchProcess:  # the end of its output says so too
            return 0.0
        return times.user + times.system

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.reader.join()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def run_operator(worker: Worker, name: str, limit: int | None) -> Iterator[tuple[str, str] | Worker]:
    """(kind, detail) of each sample; a new worker where the old one is gone."""
    first = 0
    while True:
        worker.ask(f"{name} {limit or 'all'} {first}")
        current = first - 1
        try:
            while True:
                message = worker.answer(SECONDS)
                if message is None:
                    kind, detail = "CRASH", f"sample {current}: exit status {worker.process.wait()}"
                    break
                if "begin" in message:
                    current = message["begin"]
                elif "end" in message:
                    yield (
                        message["kind"],
                        f"sample {current}: {message['detail']}" if message["detail"] else "",
                    )
                elif "done" in message:
                    return
        except TimeoutError:
            kind, detail = "HANG", f"sample {current}: more than {SECONDS:.0f} s"
        yield kind, detail
        worker.end()
        worker = Worker()
        worker.answer(300)
        yield worker
        first = current + 1


Result = tuple[str, Counter[str], str]  # kind, kinds of the samples, a detail of the worst


def run(
    names: Sequence[str], limit: int | None, jobs: int, verbose: bool, kept: Path | None = None
) -> dict[str, Result]:
    """The result of each operator. Those in the file `kept` are not run again, and new ones are written there."""
    results = read_results(kept) if kept is not None else {}
    results = {name: results[name] for name in names if name in results}
    waiting: queue.Queue[str] = queue.Queue()
    for name in names:
        if name not in results:
            waiting.put(name)
    writing = threading.Lock()

    def loop() -> None:
        worker = Worker()
        worker.answer(300)
        while True:
            try:
                name = waiting.get_nowait()
            except queue.Empty:
                worker.end()
                return
            counts: Counter[str] = Counter()
            details: dict[str, str] = {}
            for item in run_operator(worker, name, limit):
                if isinstance(item, Worker):
                    worker = item
                    continue
                kind, detail = item
                counts[kind] += 1
                details.setdefault(kind, detail)
            kind = max(counts, key=RANK.__getitem__, default="none")
            with writing:
                results[name] = (kind, counts, details.get(kind, ""))
                if kept is not None:
                    write_results(kept, results)
            if verbose or kind in BAD:
                tally = " ".join(f"{k}={n}" for k, n in counts.items())
                print(f"{kind:6} {name:45} {tally}  {details.get(kind, '')}", flush=True)

    threads = [threading.Thread(target=loop) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def read_results(path: Path) -> dict[str, Result]:
    if not path.exists():
        return {}
    return {
        n: (kind, Counter(counts), why) for n, (kind, counts, why) in json.loads(path.read_text()).items()
    }


def write_results(path: Path, results: dict[str, Result]) -> None:
    aside = path.with_suffix(".writing")
    aside.write_text(json.dumps(results, indent=1))
    aside.replace(path)


def read_baseline() -> dict[str, str]:
    if not BASELINE.exists():
        return {}
    lines = [line for line in BASELINE.read_text().splitlines() if line and not line.startswith("#")]
    return {name: kind for kind, name in (line.split() for line in lines)}


def write_baseline(results: dict[str, Result]) -> None:
    counts = Counter(kind for kind, _, _ in results.values())
    head = [
        "# What each operator of op_db reaches; see opdb_suite.py.",
        "# " + str(dict(sorted(counts.items()))),
    ]
    rows = [f"{kind:5} {name}" for name, (kind, _, _) in sorted(results.items())]
    BASELINE.write_text("\n".join(head + rows) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--ops", nargs="*", help="only these operators")
    parser.add_argument("--samples", type=int, help="at most so many samples of each, spread over all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--update", action="store_true", help="write the baseline")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument(
        "--json", type=Path, help="every operator's result is kept here, and not computed again"
    )
    options = parser.parse_args(arguments)
    if options.worker:
        worker()
        return 0
    names = options.ops or [name for name in load_op_db() if name not in EXCLUDED]
    began = time.time()
    results = run(names, options.samples, options.jobs, options.verbose, options.json)
    kinds = Counter(kind for kind, _, _ in results.values())
    samples = sum((counts for _, counts, _ in results.values()), Counter())
    print(f"{len(results)} operators: {dict(kinds)}; {len(EXCLUDED)} excluded")
    print(f"{samples.total()} samples: {dict(samples)}; {time.time() - began:.0f} s")
    baseline = read_baseline()
    regressions = [
        f"{name}: {kind}, was {baseline[name]}: {detail}"
        for name, (kind, _, detail) in results.items()
        if name in baseline and RANK[kind] > max(RANK[baseline[name]], RANK["full"])
    ]
    for line in regressions:
        print("REGRESSION", line)
    if options.update:
        write_baseline(results)
    return 1 if regressions or any(kind in BAD for kind in kinds) else 0


if __name__ == "__main__":
    sys.exit(main())
