"""`tilewright bench`: time one model, interleaved with other systems that can run it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewright import knobs
from tilewright.cli.baselines import BASELINES, BaselineSystem, NotPossible, Run, TimedCall, chosen
from tilewright.cli.models import (
    TRUSTED,
    ModelSource,
    compiled_source,
    is_artifact,
    load_artifact,
    load_source,
    refuse_trusted,
)
from tilewright.cli.options import JSON, MODEL, BuildOptions, compiling
from tilewright.cli.output import INTERRUPTED, console, err, milliseconds, print_json, print_table, working

if TYPE_CHECKING:
    import numpy as np

    from tilewright.runtime.model import CompiledModel

_BUSY = 0.5  # processes per core above which times are doubtful
_CALLS = 3  # timed calls per turn, after one warm-up call
_PAUSE = 0.1  # seconds, for the threads of other systems to go to sleep


@dataclass
class SystemTimes:
    """The measurements of one system, or the reason why there are none."""

    name: str
    label: str
    seconds: float | None = None  # median of one call
    fastest: float | None = None
    speedup: float | None = None  # of Tilewright over this system
    error: float | None = None  # relative error between Tilewright's results and this system's
    setup_seconds: float | None = None
    reason: str = ""


@dataclass
class Comparison:
    model: str
    threads: int
    compile_seconds: float
    seconds: float | None = None
    fastest: float | None = None
    load: float = 0.0  # other processes per core that wanted to run before this command started
    rows: list[SystemTimes] = field(default_factory=list)
    interrupted: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON: `baselines` in the order given by the user, `best` is the fastest of them."""
        best = min((row for row in self.rows if row.seconds), key=lambda row: row.seconds or 0, default=None)
        return {
            "model": self.model,
            "threads": self.threads,
            "compile_seconds": self.compile_seconds,
            "tilewright_seconds": self.seconds,
            "tilewright_fastest": self.fastest,
            "load": self.load,
            "best": None if best is None else best.name,
            "speedup": None if best is None else best.speedup,
            "relative_error": max((row.error for row in self.rows if row.error is not None), default=None),
            "baselines": [asdict(row) for row in self.rows],
        }


@compiling
def bench(
    model: MODEL,
    build: BuildOptions,
    against: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help=f"what to compare with: a list of {', '.join(BASELINES)}; all (that are installed); or none",
            autocompletion=lambda incomplete: [
                n for n in (*BASELINES, "all", "none") if n.startswith(incomplete)
            ],
        ),
    ] = "all",
    rounds: Annotated[int, typer.Option(min=1, help="how often each system has its turn")] = 5,
    trusted: TRUSTED = None,
    json: JSON = False,
) -> None:
    """Time a model against PyTorch, Inductor, ONNX Runtime and OpenVINO, interleaved. An artifact is timed alone."""
    refuse_trusted(model, trusted)
    baselines, named = chosen(against)
    load = _load()
    if is_artifact(model):
        build.check_loaded(model)
        _print_alone(load_artifact(model, build.threads, trusted).bench(), json)
        return
    source = load_source(model, build)
    compiled, seconds = compiled_source(source, build, json)
    comparison = compare(source, compiled, baselines, rounds, quiet=json, named=named)
    comparison.compile_seconds, comparison.load = seconds, load
    print_json(comparison.to_dict()) if json else show(comparison)
    if comparison.interrupted:  # show the medians so far
        raise typer.Exit(INTERRUPTED)


def _load() -> float:
    try:
        return os.getloadavg()[0] / knobs.usable_cores()
    except OSError:  # this system has no load average
        return 0.0


def _print_alone(result: Any, json: bool) -> None:
    import msgspec

    print_json(msgspec.to_builtins(result)) if json else console.print(str(result))


def compare(
    source: ModelSource,
    compiled: CompiledModel,
    baselines: Sequence[BaselineSystem],
    rounds: int,
    *,
    quiet: bool = False,
    named: bool = True,
) -> Comparison:
    """Time all systems that can run the model, interleaved with pauses, and compare their results.

    `named`: whether the user named the baselines, so that a missing one gets a row.
    """
    import statistics
    import tempfile

    from tilewright.runtime.explain import random_inputs

    result = Comparison(source.name, compiled.threads, 0.0)
    given = source.examples
    arrays = random_inputs(compiled.plan) if given is None else compiled._arrays(given)
    with tempfile.TemporaryDirectory() as folder:
        call = TimedCall(source, arrays, list(compiled.inputs), compiled.threads or 1, Path(folder))
        own = _own_run(source, compiled, arrays)
        runs: dict[str, Run] = {"": own}
        times: dict[str, list[float]] = {"": []}
        outputs = _arrays_of(own())
        try:
            _prepare(result, call, baselines, runs, outputs, quiet, named)
            times = {name: [] for name in runs}
            with working(f"timing {rounds} rounds", quiet):
                for _ in range(rounds):
                    for name, run in runs.items():
                        times[name] += _turn(run)
        except KeyboardInterrupt:
            result.interrupted = True
    medians = {name: statistics.median(values) for name, values in times.items() if values}
    if times[""]:
        result.seconds, result.fastest = medians[""], min(times[""])
    for row in result.rows:
        if row.name in medians:
            row.seconds, row.fastest = medians[row.name], min(times[row.name])
            row.speedup = row.seconds / result.seconds if result.seconds else None
    return result


def _prepare(
    result: Comparison,
    call: TimedCall,
    baselines: Sequence[BaselineSystem],
    runs: dict[str, Run],
    outputs: Sequence[np.ndarray],
    quiet: bool,
    named: bool,
) -> None:
    """Add a run and a row for each baseline; a baseline that cannot run gets a row without times."""
    if not call.source.is_onnx and result.threads:
        from tilewright.cli.models import require_torch

        require_torch().set_num_threads(result.threads)
    for baseline in baselines:
        row = SystemTimes(baseline.name, baseline.label, reason=baseline.obstacle(call))
        if row.reason and not named:
            continue
        result.rows.append(row)
        if row.reason:
            continue
        begin = time.perf_counter()
        try:
            with working(f"preparing {baseline.label}", quiet):
                runs[baseline.name] = baseline.prepare(call)
        except NotPossible as error:
            row.reason = str(error)
        else:
            row.setup_seconds = time.perf_counter() - begin
            row.error = _error(outputs, _arrays_of(runs[baseline.name]()))


def _own_run(source: ModelSource, compiled: CompiledModel, arrays: Sequence[np.ndarray]) -> Run:
    if source.is_onnx or not (source.inputs or source.kwargs):
        return lambda: compiled.flat(arrays)
    wait: Callable[[], None] = lambda: None  # noqa: E731
    if source.is_on_gpu:
        from tilewright.cli.models import require_torch

        wait = require_torch().cuda.synchronize

    def run() -> Any:
        result = compiled(*source.inputs, **source.kwargs)
        wait()
        return result

    return run


def _turn(run: Run) -> list[float]:
    time.sleep(_PAUSE)
    run()
    times = []
    for _ in range(_CALLS):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return times


def _arrays_of(results: Any) -> list[np.ndarray]:
    """Return the tensors among a call's results, in order, as arrays."""
    import numpy as np

    from tilewright.runtime import tree

    found = []
    for leaf in tree.flatten(results)[0]:
        if hasattr(leaf, "detach"):
            leaf = leaf.detach().cpu()
            leaf = leaf.float() if str(leaf.dtype) == "torch.bfloat16" else leaf
            found.append(leaf.numpy())
        elif isinstance(leaf, np.ndarray):
            found.append(leaf.astype(np.float32) if leaf.dtype.name == "bfloat16" else leaf)
    return found


def _error(own: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> float | None:
    """Return the relative error, or None if the results do not match one by one (an exporter may drop some)."""
    from tilewright.measure.check import relative_error

    if [each.shape for each in own] != [each.shape for each in others]:
        return None
    return max((relative_error(a, b) for a, b in zip(own, others, strict=True)), default=None)


def show(comparison: Comparison) -> None:
    title = (
        f"{comparison.model}, {comparison.threads} thread(s), compiled in {comparison.compile_seconds:.1f} s"
    )
    rows = [
        (
            row.label,
            milliseconds(row.seconds),
            milliseconds(row.fastest or 0.0),
            "" if row.speedup is None else f"{row.speedup:.2f}x",
            "" if row.error is None else f"{row.error:.1e}",
        )
        for row in comparison.rows
        if row.seconds is not None
    ]
    if comparison.seconds is not None:
        fastest = milliseconds(comparison.fastest or 0.0)
        rows.append(("Tilewright", milliseconds(comparison.seconds), fastest, "", ""))
    print_table(title, ("", "median ms", "fastest", "Tilewright's speedup", "difference"), rows)
    if comparison.load > _BUSY:
        err.print(
            f"other programs were running ({comparison.load:.1f} processes for each core): measure again when the"
            " machine is idle"
        )
    for row in comparison.rows:
        if row.reason:
            err.print(f"{row.label}: {row.reason}", markup=False)
    if comparison.interrupted:
        err.print("interrupted: these are the results so far")
