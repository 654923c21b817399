"""Trained ONNX models of a folder against ONNX Runtime, at several batch sizes, each model in a process of its own.

    python -m tests.outside.trained_models FOLDER
    python -m tests.outside.trained_models FOLDER --match silero --batch 1 2 --numerics strict
    python -m tests.outside.trained_models FOLDER --json results.json
    python -m tests.outside.trained_models --table results.json more.json > table.md

The folder is searched for `.onnx` files (wheels on PyPI carry many). Dimensions that a model leaves open are given the
batch size where they come first, and otherwise the first of a few sizes that ONNX Runtime runs. The reference is ONNX
Runtime with graph optimisation disabled: every operator by itself, as the standard defines it. Each run ends as

    right     no output is further from the reference than the tolerance (one unit in the last place if it is of 16
              bits), or than 4 times what ONNX Runtime itself is, with its default optimisation or with inputs that
              differ in the last bit (quantised models round inside); or it is as close to ONNX Runtime in float64 as
              the reference is (whose STFT has errors of 1e-4)
    wrong     another value, type or shape
    refused   UnsupportedOpsError: the operators are named
    error     any other exception
    crash     the process died, or ran out of time
    skipped   ONNX Runtime runs none of the inputs that were tried, or the batch size is fixed

An error is the largest absolute one of an output, relative to the largest magnitude of that output (to 1e-3 if that is
more: probabilities of 1e-7 have no digits). The exit status is 0 if nothing is wrong, no error and no crash.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import re
import statistics
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

BATCHES = (1, 2, 4)
TOLERANCE = 1e-4
MIN = 1e-3  # magnitude that an output's error is related to
OWN = 4  # an error of this many times ONNX Runtime's own deviation is not counted
BAD = ("wrong", "error", "crash")
REFERENCE, COMPILING = "reference", "compiling"  # what a process is at, for the case that it dies
SIZES = {  # of open dimensions after the first, by rank: the first that ONNX Runtime runs
    2: (16, 64, 512, 1600, 16000),
    3: (16, 64, 128, 224, 400, 512, 1600, 16000),
    4: (64, 96, 160, 224, 320, 640),
}
HEIGHTS = (32, 48)
RATE = 16000  # of audio
WIDTHS = 24  # extents of weights that are tried for an open last axis
DETAIL = 160  # characters of a message in the table


@dataclass(frozen=True)
class Outcome:
    model: str
    batch: int
    status: str
    detail: str = ""
    error: float = 0.0
    own: float = (
        0.0  # of ONNX Runtime against itself: with optimisation, with inputs that differ in the last bit
    )
    compile_s: float = 0.0
    call_ms: float = 0.0
    theirs_ms: float = 0.0  # ONNX Runtime's, with its default optimisation


# -- inputs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Input:
    name: str
    dtype: np.dtype[Any]
    dims: tuple[int | str, ...]

    @property
    def open(self) -> bool:
        return any(isinstance(dim, str) for dim in self.dims)


def inputs_of(session: Any) -> list[Input]:
    """The inputs that a session takes; an open dimension without a name gets one of its own."""
    types = {
        "float": "float32",
        "double": "float64",
        "float16": "float16",
        **{f"{sign}int{bits}": f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
        "bool": "bool",
    }
    found = []
    for value in session.get_inputs():
        inner = value.type.removeprefix("tensor(").removesuffix(")")
        if inner not in types:
            raise ValueError(f"the input {value.name} is a {value.type}")
        dims = tuple(
            dim
            if isinstance(dim, int) and dim >= 0
            else f"{value.name} {axis}"
            if dim in (None, "", "?", -1)
            else f"{dim}"
            for axis, dim in enumerate(value.shape)
        )
        found.append(Input(value.name, np.dtype(types[inner]), dims))
    return found


def batch_names(inputs: Sequence[Input]) -> set[str]:
    """Names of dimensions that stand for the batch: those that come first, in inputs of two axes and more."""
    return {dim for item in inputs if len(item.dims) > 1 and isinstance(dim := item.dims[0], str)}


def choices(inputs: Sequence[Input], batch_size: int, widths: Sequence[int]) -> Iterator[dict[str, int]]:
    """Sizes to try for the open dimensions that are not the batch. `widths`: of weights, for the last axis."""
    batch = batch_names(inputs)
    names: dict[str, int] = {}
    for item in inputs:
        for dim in item.dims:
            if isinstance(dim, str) and dim not in batch:
                names[dim] = max(names.get(dim, 0), len(item.dims))
    if not names:
        yield {}
        return
    tables = {name: SIZES.get(rank, SIZES[2]) for name, rank in names.items()}
    for position in range(max(map(len, tables.values()))):
        yield {name: sizes[min(position, len(sizes) - 1)] for name, sizes in tables.items()}
    data = {dim for dim in inputs[0].dims if isinstance(dim, str)}
    for size in SIZES.get(
        len(inputs[0].dims), SIZES[2]
    ):  # a signal, and states that have the batch on any axis
        yield {name: size if name in data else batch_size for name in names}
    lines = [dim for dim in inputs[0].dims[2:] if isinstance(dim, str)]  # of text: low and wide
    for height in HEIGHTS if len(lines) == 2 else ():
        yield {name: height if name == lines[0] else 10 * height for name in names}
    last = {dim for item in inputs if item.dims and isinstance(dim := item.dims[-1], str)}
    for width in widths:
        yield {name: width if name in last else sizes[0] for name, sizes in tables.items()}


def widths_of(path: Path) -> list[int]:
    """Extents of the weights, in their order: one may be what the last axis of an input must have."""
    import onnx

    graph = onnx.load(path, load_external_data=False).graph
    found = [extent for tensor in graph.initializer for extent in tensor.dims if extent > 1]
    return list(dict.fromkeys(found))[:WIDTHS]


def values_of(
    inputs: Sequence[Input], sizes: Mapping[str, int], batch: int, seed: int, largest: int
) -> dict[str, np.ndarray]:
    """Random inputs: floats around 0 (images from 0 to 1), small whole numbers (up to `largest`), lengths, masks."""
    rng = np.random.default_rng(seed)
    first = batch_names(inputs)
    longest = max([1, *(size for name, size in sizes.items())])
    values = {}
    for item in inputs:
        shape = [
            dim if isinstance(dim, int) else batch if dim in first or len(item.dims) == 1 else sizes[dim]
            for dim in item.dims
        ]
        name = item.name.lower()
        if item.dtype.kind == "f":
            made = rng.random(shape) if len(shape) == 4 else rng.standard_normal(shape) * 0.3
        elif item.dtype.kind == "b" or "mask" in name:
            made = np.ones(shape)
        elif name in ("sr", "sample_rate", "rate"):
            made = np.full(shape, RATE)
        elif "len" in name:
            made = np.full(shape, longest)
        else:
            made = rng.integers(0, largest, shape)
        values[item.name] = np.asarray(made).astype(item.dtype)
    return values


# -- one model --------------------------------------------------------------------------------------------------------


def session_of(path: Path, threads: int, *, optimised: bool) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = threads
    options.log_severity_level = 4
    if not optimised:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def runnable(
    session: Any, inputs: Sequence[Input], batch: int, widths: Sequence[int]
) -> tuple[dict[str, Any], list[Any]] | str:
    """Inputs that ONNX Runtime runs, and its results; or what it says of the last that were tried."""
    message = ""
    for sizes, largest in itertools.product(choices(inputs, batch, widths), (9, 2)):
        feeds = values_of(inputs, sizes, batch, 0, largest)
        try:
            results = session.run(None, feeds)
            if all(np.asarray(result).size for result in results):
                return feeds, results
            message = "an output without elements"
        except Exception as error:  # its own classes, one for each status code
            message = str(error).splitlines()[0]
    return message


def deviation(got: Sequence[Any], wanted: Sequence[Any]) -> tuple[float, str]:
    """(largest error relative to its output, what is of another type or shape)."""
    worst = 0.0
    if len(got) != len(wanted):
        return np.inf, f"{len(got)} outputs for {len(wanted)}"
    for one, right in zip(got, wanted, strict=True):
        one, right = np.asarray(one), np.asarray(right)
        if one.shape != right.shape or one.dtype != right.dtype:
            return np.inf, f"{one.dtype}{list(one.shape)} for {right.dtype}{list(right.shape)}"
        if not right.size:
            continue
        a, b = one.astype(np.float64), right.astype(np.float64)
        with np.errstate(invalid="ignore"):
            same = (a == b) | (np.isnan(a) & np.isnan(b))
            apart = np.where(same, 0.0, np.abs(a - b))
        finite = np.abs(b[np.isfinite(b)])
        scale = max(float(finite.max()) if finite.size else 1.0, MIN)
        worst = max(worst, float(np.where(np.isnan(apart), np.inf, apart).max()) / scale)
    return worst, ""


def one_ulp(wanted: Sequence[Any]) -> float:
    """The largest distance of two neighbours in an output of 16-bit floats, relative to the larger; 0: it has none."""
    kinds = [np.asarray(array).dtype for array in wanted]
    return max(
        (float(np.finfo(kind).eps) for kind in kinds if kind.kind == "f" and kind.itemsize == 2), default=0.0
    )


def exactly(path: Path, feeds: Mapping[str, Any], got: Sequence[Any], wanted: Sequence[Any]) -> bool:
    """Whether the model is as close to float64 as the reference is: to ONNX Runtime with all floats widened."""
    import onnxruntime

    from tilewright.integrations.onnx_check import in_float64

    session = onnxruntime.InferenceSession(
        in_float64(path).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    exact = session.run(None, {name: widened(value) for name, value in feeds.items()})
    ours, theirs = (deviation([widened(x) for x in results], exact)[0] for results in (got, wanted))
    return ours <= theirs


def widened(value: Any) -> np.ndarray:
    array = np.asarray(value)
    return array.astype(np.float64) if array.dtype.kind == "f" else array


def nudged(feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The inputs with every float moved to the next one, up or down."""
    rng = np.random.default_rng(1)
    return {
        name: np.asarray(
            np.nextafter(value, np.where(rng.random(value.shape) < 0.5, -np.inf, np.inf), dtype=value.dtype)
        )
        if value.dtype.kind == "f"
        else value
        for name, value in feeds.items()
    }


def milliseconds(call: Any, least: float = 0.3) -> float:
    call()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < least and len(times) < 100):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times)


def run_model(
    path: Path, batches: Sequence[int], numerics: str, threads: int, tolerance: float
) -> Iterator[Outcome]:
    import tilewright
    from tilewright.errors import TilewrightError, UnsupportedOpsError

    name = path.name
    try:
        plain = session_of(path, threads, optimised=False)
        inputs, widths = inputs_of(plain), widths_of(path)
    except Exception as error:  # ONNX Runtime's own classes, for models that it refuses
        yield Outcome(name, 0, "skipped", str(error).splitlines()[0])
        return
    is_open = any(isinstance(item.dims[0], str) for item in inputs if item.dims)
    for batch in batches if is_open else batches[:1]:
        yield Outcome(name, batch, REFERENCE)
        found = runnable(plain, inputs, batch, widths)
        if isinstance(found, str):
            yield Outcome(name, batch, "skipped", found)
            continue
        yield Outcome(name, batch, COMPILING)
        feeds, wanted = found
        began = time.perf_counter()
        try:
            model = tilewright.compile(path, feeds, numerics=numerics, threads=threads)
            fixed = [model.plan.inputs[entry.index].name for entry in model.plan.pinned]
            note = f"fixed: {', '.join(fixed)}" if fixed else ""
            took = time.perf_counter() - began
            arguments = [feeds[item.name] for item in inputs]
            got = model(*arguments)
            results = [got] if len(wanted) == 1 else list(got)
            error, reason = deviation(results, wanted)
            quick = session_of(path, threads, optimised=True)
            own, _ = deviation(quick.run(None, feeds), wanted)
            own = max(own, deviation(plain.run(None, nudged(feeds)), wanted)[0])
            right = not reason and error <= max(tolerance, one_ulp(wanted), OWN * own)
            if not right and not reason:
                with contextlib.suppress(Exception):  # operators that ONNX Runtime has for float32 alone
                    if exactly(path, feeds, results, wanted):
                        right, note = True, "closer to float64 than ONNX Runtime"
            yield Outcome(
                name,
                batch,
                "right" if right else "wrong",
                reason or note,
                error,
                own,
                took,
                milliseconds(lambda run=model, given=arguments: run(*given)),
                milliseconds(lambda run=quick.run, given=feeds: run(None, given)),
            )
        except UnsupportedOpsError as error:
            yield Outcome(name, batch, "refused", "; ".join(dict.fromkeys(op for op, _ in error.uses)))
        except TilewrightError as error:
            yield Outcome(name, batch, "error", f"{type(error).__name__}: {error.message}")
        except Exception as error:
            import traceback

            last = traceback.extract_tb(error.__traceback__)[-1]
            slot = f"{Path(last.filename).name}:{last.lineno}"
            yield Outcome(name, batch, "error", f"{type(error).__name__}: {error} ({slot})")


def work(pipe: Any, *arguments: Any) -> None:
    warnings.simplefilter("ignore")
    for outcome in run_model(*arguments):
        pipe.send(outcome)
    pipe.send(None)


def isolated(path: Path, batches: Sequence[int], options: argparse.Namespace) -> Iterator[Outcome]:
    """The outcomes of a model, from a process that may die or hang."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    settings = (path, batches, options.numerics, options.threads, options.tolerance)
    process = context.Process(target=work, args=(theirs, *settings), daemon=True)
    process.start()
    theirs.close()
    current: Outcome | None = Outcome(path.name, 0, REFERENCE)
    reason = f"more than {options.timeout:.0f} s"
    with contextlib.suppress(EOFError):
        while pipe.poll(options.timeout):
            current = pipe.recv()
            if current is None:
                break
            if current.status not in (REFERENCE, COMPILING):
                yield current
    if current is not None:
        process.join(0.5)
        if process.exitcode is not None:
            reason = f"exit {process.exitcode}"
        process.kill()
        status = "crash"
        if current.status == REFERENCE:
            status, reason = "skipped", f"ONNX Runtime: {reason}"
        yield Outcome(path.name, current.batch, status, reason)
    process.join()


# -- the command ------------------------------------------------------------------------------------------------------


def line(outcome: Outcome, width: int) -> str:
    head = f"{outcome.model[:width]:{width}} {outcome.batch:5} {outcome.status:8}"
    if outcome.status in ("right", "wrong"):
        head += (
            f" {outcome.error:8.1e} {outcome.own:8.1e} {outcome.compile_s:9.1f} {outcome.call_ms:9.2f}"
            f" {outcome.theirs_ms:9.2f}"
        )
    return f"{head}  {outcome.detail[:DETAIL]}".rstrip()


def summary(outcomes: Sequence[Outcome]) -> list[str]:
    counts = {
        status: sum(o.status == status for o in outcomes) for status in ("right", "refused", "skipped", *BAD)
    }
    models = len({outcome.model for outcome in outcomes})
    lines = [f"{models} models, {len(outcomes)} runs: " + ", ".join(f"{n} {s}" for s, n in counts.items())]
    ratios = [o.theirs_ms / o.call_ms for o in outcomes if o.status == "right" and o.call_ms]
    if ratios:
        lines.append(
            f"ONNX Runtime's time over ours, geometric mean: {statistics.geometric_mean(ratios):.2f}"
        )
    return lines


def table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """One row for each model, in Markdown: how each batch size ended, and the largest error of them."""
    yield "| model | outcome by batch size | largest error | ONNX Runtime's own | notes |"
    yield "| --- | --- | ---: | ---: | --- |"
    for model, of_model in itertools.groupby(
        sorted(outcomes, key=lambda outcome: (outcome.model, outcome.batch)),
        key=lambda outcome: outcome.model,
    ):
        runs = list(of_model)
        ends = ", ".join(f"{run.batch}: {run.status}" for run in runs)
        compared = [run for run in runs if run.status in ("right", "wrong")]
        errors = (max((getattr(run, name) for run in compared), default=None) for name in ("error", "own"))
        cells = ["" if each is None else f"{each:.1e}" for each in errors]
        notes = "; ".join(
            dict.fromkeys(run.detail[:DETAIL].replace("|", "\\|") for run in runs if run.detail)
        )
        yield f"| {model.removesuffix('.onnx')} | {ends} | {' | '.join(cells)} | {notes} |"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="trained_models", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument(
        "--table", type=Path, nargs="+", help="print results of --json as one table; run nothing"
    )
    parser.add_argument("--batch", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--match", default="", help="only files whose path this regular expression finds")
    parser.add_argument("--numerics", default="fast", choices=("fast", "strict"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tolerance", type=float, default=TOLERANCE)
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one batch size")
    parser.add_argument("--json", type=Path, help="write the results there too")
    options = parser.parse_args(arguments)
    if options.table:
        stored = [Outcome(**each) for path in options.table for each in json.loads(path.read_text())]
        print(*table(stored), "", *summary(stored), sep="\n")
        return int(any(outcome.status in BAD for outcome in stored))
    if options.folder is None:
        parser.error("a folder, or --table, is needed")

    found = sorted(path for path in options.folder.rglob("*.onnx") if re.search(options.match, str(path)))
    if not found:
        raise SystemExit(f"no .onnx file in {options.folder}")
    width = min(44, max(len(path.name) for path in found))
    print(
        f"{'model':{width}} {'batch':>5} {'status':8} {'error':>8} {'own':>8} {'compile s':>9} {'ms':>9}"
        f" {'ORT ms':>9}"
    )
    outcomes: list[Outcome] = []
    for path in found:
        for outcome in isolated(path, options.batch, options):
            outcomes.append(outcome)
            print(line(outcome, width), flush=True)
    print(*summary(outcomes), sep="\n")
    if options.json:
        options.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
    return int(any(outcome.status in BAD for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
