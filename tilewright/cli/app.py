"""The commands."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import tilewright
from tilewright.cli import database as database_commands
from tilewright.cli import doctor as doctor_command
from tilewright.cli import report as report_command
from tilewright.cli.models import (
    TRUSTED,
    Source,
    is_artifact,
    load_artifact,
    load_source,
    refuse_trusted,
    require_torch,
)
from tilewright.cli.output import compile_progress, console, print_json, print_table
from tilewright.errors import OptionError, UnknownShapeError
from tilewright.runtime.model import CompiledModel
from tilewright.runtime.signing import signer

if TYPE_CHECKING:
    from tilewright.measure.passes import PassReport


def parse_seconds(text: str | float) -> float:
    """`"90"`, `"90s"`, `"1.5m"` -> 90.0"""
    from tilewright.tune.effort import parse_duration

    try:
        return parse_duration(text)
    except OptionError:
        raise typer.BadParameter("a time above 0, such as 120, 120s, 5m or 1h") from None


app = typer.Typer(
    name="tilewright",
    help="A tensor compiler: a PyTorch or ONNX model in, a compiled model out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(database_commands.app, name="db")
app.command()(report_command.report)

MODEL = Annotated[
    str,
    typer.Argument(
        help="a zoo model, a .pt2 or .onnx file, a .tw artifact (bench, explain), or package.module:function"
    ),
]
JSON = Annotated[bool, typer.Option("--json", help="print the result as JSON")]
THREADS = Annotated[
    int | None, typer.Option(help="threads of a call; default: as many as this process may use")
]
NUMERICS = Annotated[str | None, typer.Option(help="fast, strict, relaxed or tf32")]
EFFORT = Annotated[
    str,
    typer.Option(
        help="none: measure nothing; quick: candidates, for a minute; full: until no more than 1% is expected"
    ),
]
BUDGET = Annotated[
    float | None,
    typer.Option(parser=parse_seconds, metavar="SECONDS", help="of measuring, such as 120s or 5m"),
]
BATCH = Annotated[int, typer.Option(help="batch size of a zoo model")]
SMALL = Annotated[bool, typer.Option("--small", help="the zoo model's small version")]
SEED = Annotated[int, typer.Option(help="seed of a zoo model's weights and inputs, and of the search")]
LOCK = Annotated[
    Path | None,
    typer.Option("--lock", help="a file of choices: obeyed where it exists, otherwise written"),
]
DATABASE = Annotated[
    Path | None, typer.Option("--db", help="the database of measurements; default: in the cache folder")
]
INPUTS = Annotated[
    Path | None, typer.Option("--inputs", help="an .npz file: example inputs of an ONNX model, by name")
]


def _compiled(
    source: Source,
    numerics: str | None,
    threads: int | None,
    quiet: bool,
    **tuning: Any,
) -> tuple[CompiledModel, float]:
    begin = time.perf_counter()
    with compile_progress(quiet) as trace, _sizes_wanted():
        model = tilewright.compile(
            source.model, source.examples, numerics=numerics, threads=threads, trace=trace, **tuning
        )
    return model, time.perf_counter() - begin


@contextmanager
def _sizes_wanted() -> Iterator[None]:
    try:
        yield
    except UnknownShapeError as error:
        remedy = "pass example inputs of these sizes: --inputs FILE, written by numpy.savez(FILE, name=array)"
        raise UnknownShapeError(error.message, remedy=remedy) from None


@app.command()
def compile(
    model: MODEL,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="where to save; default: MODEL.tw")
    ] = None,
    sign: Annotated[
        Path | None,
        typer.Option(
            "--sign", metavar="KEYFILE", help="sign the artifact: 32 random bytes, or an Ed25519 PEM key"
        ),
    ] = None,
    effort: EFFORT = "none",
    budget: BUDGET = None,
    lock: LOCK = None,
    db: DATABASE = None,
    numerics: NUMERICS = None,
    threads: THREADS = None,
    batch: BATCH = 1,
    small: SMALL = False,
    seed: SEED = 0,
    inputs: INPUTS = None,
    json: JSON = False,
) -> None:
    """Compile a model and save it as an artifact."""
    if sign is not None:
        signer(sign)  # a key that cannot be read is found before the work
    source = load_source(model, batch=batch, small=small, seed=seed, inputs=inputs)
    compiled, seconds = _compiled(
        source, numerics, threads, json, effort=effort, budget=budget, lock=lock, db=db, seed=seed
    )
    path = output or Path(f"{source.name}.tw")
    compiled.save(path, sign=sign)
    plan, memory = compiled.plan, compiled.plan.memory
    result = {
        "model": source.name,
        "artifact": str(path),
        "bytes": path.stat().st_size,
        "seconds": seconds,
        "steps": len(plan.steps),
        "kernels": len(plan.kernels),
        "arena_bytes": memory.arena_bytes,
        "arena_lower_bound": memory.lower_bound,
        "constant_bytes": memory.constant_bytes,
    }
    if json:
        print_json(result)
        return
    console.print(
        f"{source.name}: {len(plan.steps)} steps, {len(plan.kernels)} kernels in {seconds:.1f} s; "
        f"arena {memory.arena_bytes / 2**20:.1f} MiB (lower bound {memory.lower_bound / 2**20:.1f}), "
        f"weights {memory.constant_bytes / 2**20:.1f} MiB"
    )
    console.print(f"saved to {path}; try: tilewright explain {path}")


@app.command()
def tune(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL...", help="what compile takes; several are tuned together")
    ],
    effort: EFFORT = "quick",
    budget: BUDGET = None,
    latency: Annotated[
        float | None,
        typer.Option(
            parser=parse_seconds,
            metavar="SECONDS",
            help="that a call of each model may take, such as 10ms: no more is done than that needs",
        ),
    ] = None,
    lock: LOCK = None,
    db: DATABASE = None,
    numerics: NUMERICS = None,
    threads: THREADS = None,
    batch: BATCH = 1,
    small: SMALL = False,
    seed: SEED = 0,
    json: JSON = False,
) -> None:
    """Measure candidates for the kernels of one or more models, and keep the winners for the next compilation."""
    from tilewright.tune.progress import Progress

    sources = [load_source(model, batch=batch, small=small, seed=seed) for model in models]
    progress = Progress()
    with compile_progress(json, progress) as trace, _sizes_wanted():
        tilewright.compile_all(
            [(source.model, source.examples) for source in sources],
            latency=None if latency is None else [latency] * len(sources),
            effort=effort,
            budget=budget,
            seed=seed,
            lock=lock,
            db=db,
            numerics=numerics,
            threads=threads,
            trace=trace,
        )
    if json:
        print_json({"models": [source.name for source in sources], **tuned(progress)})
        return
    rows = [
        (
            task["label"],
            str(task["calls"]),
            str(task["trials"]),
            f"{task['before'] * 1e6:.1f}",
            f"{task['best'] * 1e6:.1f}",
            f"{task['before'] / task['best']:.2f}x" if task["best"] else "",
            task["state"],
        )
        for task in tuned(progress)["tasks"]
    ]
    print_table("", ("task", "calls", "trials", "before us", "best us", "speed", ""), rows)


def tuned(progress: Any) -> dict[str, Any]:
    """What came of a tuning run, those tasks first that take most time."""
    tasks = sorted(progress.tasks.values(), key=lambda task: -task.seconds)
    return {
        "ended": progress.ended,
        "trials": progress.trials,
        "failures": dict(progress.failures),
        "before": progress.before,
        "best": progress.best,
        "tasks": [asdict(task) for task in tasks],
    }


@app.command()
def bench(
    model: MODEL,
    rounds: Annotated[int, typer.Option(help="turns of each contender")] = 5,
    numerics: NUMERICS = None,
    threads: THREADS = None,
    batch: BATCH = 1,
    small: SMALL = False,
    seed: SEED = 0,
    trusted: TRUSTED = None,
    json: JSON = False,
) -> None:
    """Time a model against PyTorch eager, taking turns; an artifact is timed alone."""
    refuse_trusted(model, trusted)
    if is_artifact(model):
        result = load_artifact(model, threads, trusted).bench()
        print_json(_plain(result)) if json else console.print(str(result))
        return
    source = load_source(model, batch=batch, small=small, seed=seed)
    compiled, seconds = _compiled(source, numerics, threads, json)
    figures = compare_with_eager(source, compiled, rounds)
    figures["compile_seconds"] = seconds
    if json:
        print_json(figures)
        return
    print_comparison(figures)


@app.command()
def explain(
    model: MODEL,
    numerics: NUMERICS = None,
    threads: THREADS = None,
    batch: BATCH = 1,
    small: SMALL = False,
    seed: SEED = 0,
    inputs: INPUTS = None,
    trusted: TRUSTED = None,
    json: JSON = False,
) -> None:
    """Show a compiled model's kernels: task, schedule, operations, bytes, measured time, error against the oracle."""
    from tilewright.measure.check import checked_kernel

    given: Any = None
    refuse_trusted(model, trusted)
    if is_artifact(model):
        compiled = load_artifact(model, threads, trusted)
        compiled.checker = checked_kernel
    else:
        source = load_source(model, batch=batch, small=small, seed=seed, inputs=inputs)
        compiled, _ = _compiled(source, numerics, threads, json)
        given = source.examples
    explanation = compiled.explain(given)
    print_json(explanation.to_dict()) if json else console.print(
        str(explanation), soft_wrap=True, markup=False
    )


@app.command()
def check(
    model: MODEL,
    numerics: NUMERICS = None,
    threads: THREADS = None,
    batch: BATCH = 1,
    small: SMALL = False,
    seed: SEED = 0,
    inputs: INPUTS = None,
    passes: Annotated[
        bool, typer.Option(help="also run the graph after every pass by the oracle, in float64")
    ] = True,
    json: JSON = False,
) -> None:
    """Compare a compiled model with PyTorch, or with onnx's reference, in float64, and its graph after every pass with
    the graph as imported; on a mismatch, name the first task or pass that deviates."""
    source = load_source(model, batch=batch, small=small, seed=seed, inputs=inputs)
    compiled, _ = _compiled(source, numerics, threads, json)
    report = _checked(source, compiled, seed)
    rewrites = _passes_checked(source, compiled, seed) if passes else None
    ok = report.ok and (rewrites is None or rewrites.ok)
    if json:
        found = None if rewrites is None else asdict(rewrites)["passes"]
        print_json({**asdict(report), "passes": found, "ok": ok})
    else:
        console.print(str(report), markup=False)
        if rewrites is not None:
            console.print(f"rewrites: {rewrites}", markup=False)
    if not ok:
        raise typer.Exit(1)


def _passes_checked(source: Source, compiled: CompiledModel, seed: int) -> PassReport:
    from tilewright.driver import check_passes
    from tilewright.runtime.explain import random_inputs

    given = source.examples
    arrays = random_inputs(compiled.plan, seed) if given is None else compiled._arrays(given)
    return check_passes(source.model, given, arrays, numerics=compiled.plan.numerics)


def _checked(source: Source, compiled: CompiledModel, seed: int) -> Any:
    if source.is_onnx:
        from tilewright.integrations.onnx_check import check_onnx

        return check_onnx(compiled, source.model, source.kwargs or None, seed=seed)
    from tilewright.measure.bisect import check_model

    return check_model(compiled, source.eager(), source.inputs or source.kwargs)


@app.command()
def doctor(
    json: JSON = False,
    measure: Annotated[
        bool, typer.Option(help="measure peak arithmetic, bandwidth and caches (a quarter of a minute)")
    ] = True,
) -> None:
    """Describe this machine, the threads runtime, the libraries, the cache, and every option with its value."""
    found = doctor_command.examine(measure=measure)
    print_json(found) if json else doctor_command.show(found)


@app.command()
def zoo(json: JSON = False) -> None:
    """List the models of the zoo."""
    require_torch()
    from tilewright import zoo as models

    names = models.names()
    print_json(names) if json else console.print("\n".join(names))


@app.command()
def demo(model: Annotated[str, typer.Argument(help="a zoo model")] = "resnet50", json: JSON = False) -> None:
    """Compile a real network for this CPU, run it, check it against PyTorch, and say what to try next."""
    source = load_source(model)
    compiled, seconds = _compiled(source, None, None, json)
    figures = compare_with_eager(source, compiled, rounds=4)
    figures["compile_seconds"] = seconds
    if json:
        print_json(figures)
        return
    print_comparison(figures)
    console.print(
        "\nTry next:\n"
        + "\n".join(
            f"  {command:<36} {what}"
            for command, what in (
                (f"tilewright explain {model}", "which kernels run, how long, how exact"),
                (f"tilewright compile {model} -o m.tw", "save it; tilewright.load('m.tw') needs no PyTorch"),
                ("tilewright doctor", "what this machine can do"),
                ("docs/01-quick-start.md", "your own model"),
            )
        )
    )


def compare_with_eager(source: Source, compiled: CompiledModel, rounds: int) -> dict[str, Any]:
    """Times of both, in turns with a pause between, and the error of our outputs."""
    from tilewright.measure.check import relative_error

    torch = require_torch()
    eager = source.eager()
    torch.set_num_threads(compiled.threads)
    contenders = {"PyTorch eager": eager, "Tilewright": compiled}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    with torch.no_grad():
        expected, got = (f(*source.inputs, **source.kwargs) for f in contenders.values())
        for _ in range(rounds):
            for name, run in contenders.items():
                time.sleep(0.1)  # let the other one's threads fall asleep
                run(*source.inputs, **source.kwargs)
                for _ in range(3):
                    begin = time.perf_counter()
                    run(*source.inputs, **source.kwargs)
                    times[name].append(time.perf_counter() - begin)
    flat = torch.utils._pytree.tree_leaves
    pairs = zip(flat(got), flat(expected), strict=True)
    error = max(relative_error(a.numpy(), b.numpy()) for a, b in pairs if isinstance(b, torch.Tensor))
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "model": source.name,
        "threads": compiled.threads,
        "eager_seconds": medians["PyTorch eager"],
        "tilewright_seconds": medians["Tilewright"],
        "speedup": medians["PyTorch eager"] / medians["Tilewright"],
        "relative_error": error,
    }


def print_comparison(figures: dict[str, Any]) -> None:
    print_table(
        f"{figures['model']}, {figures['threads']} thread(s), compiled in {figures['compile_seconds']:.1f} s",
        ("", "ms", "speed", "error"),
        [
            ("PyTorch eager", f"{figures['eager_seconds'] * 1e3:.2f}", "1.00x", ""),
            (
                "Tilewright",
                f"{figures['tilewright_seconds'] * 1e3:.2f}",
                f"{figures['speedup']:.2f}x",
                f"{figures['relative_error']:.1e}",
            ),
        ],
    )


def _plain(value: Any) -> Any:
    import msgspec

    return msgspec.to_builtins(value)
