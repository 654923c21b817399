"""The commands."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
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
    sizes_wanted,
)
from tilewright.cli.options import JSON, MODEL, Build, check_output, compiling, parse_seconds
from tilewright.cli.output import compile_progress, console, print_json, print_table
from tilewright.runtime.explain import WIDTH
from tilewright.runtime.model import CompiledModel
from tilewright.runtime.signing import signer

if TYPE_CHECKING:
    from tilewright.measure.passes import PassReport

app = typer.Typer(
    name="tilewright",
    help="A tensor compiler: a PyTorch or ONNX model in, a compiled model out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(database_commands.app, name="db")
app.command()(report_command.report)


def _compiled(source: Source, build: Build, quiet: bool) -> tuple[CompiledModel, float]:
    begin = time.perf_counter()
    with compile_progress(quiet) as trace, sizes_wanted():
        model = tilewright.compile(source.model, source.examples, trace=trace, **build.compiling)
    return model, time.perf_counter() - begin


@app.command()
@compiling
def compile(
    model: MODEL,
    build: Build,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="where to save; default: MODEL.tw")
    ] = None,
    sign: Annotated[
        Path | None,
        typer.Option(
            "--sign", metavar="KEYFILE", help="sign the artifact: 32 random bytes, or an Ed25519 PEM key"
        ),
    ] = None,
    json: JSON = False,
) -> None:
    """Compile a model and save it as an artifact."""
    if sign is not None:
        signer(sign)  # a key that cannot be read is found before the work
    if output is not None:
        check_output(output)
    source = load_source(model, build)
    path = output or Path(f"{source.name}.tw")
    check_output(path)
    compiled, seconds = _compiled(source, build, json)
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
@compiling(effort="quick")
def tune(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL...", help="what compile takes; several are tuned together")
    ],
    build: Build,
    latency: Annotated[
        float | None,
        typer.Option(
            parser=parse_seconds,
            metavar="SECONDS",
            help="stop tuning a model once a call of it takes at most this long, such as 10ms",
        ),
    ] = None,
    json: JSON = False,
) -> None:
    """Measure candidates for the kernels of one or more models, and keep the winners: every later compilation uses
    them."""
    from tilewright.tune.progress import Progress

    sources = [load_source(model, build) for model in models]
    progress = Progress()
    with compile_progress(json, progress) as trace, sizes_wanted():
        tilewright.compile_all(
            [(source.model, source.examples) for source in sources],
            latency=None if latency is None else [latency] * len(sources),
            trace=trace,
            **build.compiling,
        )
    _show_tuned(sources, progress, json)
    if progress.ended == "interrupted":  # all that was measured is kept
        raise typer.Exit(130)


def _show_tuned(sources: Sequence[Source], progress: Any, json: bool) -> None:
    if json:
        print_json({"models": [source.name for source in sources], **tuned(progress)})
        return
    rows = [
        (
            task["layer"] or task["label"],
            str(task["calls"]),
            str(task["trials"]),
            f"{task['before'] * 1e6:.1f}",
            f"{task['best'] * 1e6:.1f}",
            f"{task['before'] / task['best']:.2f}x" if task["best"] else "",
            task["state"],
        )
        for task in tuned(progress)["tasks"]
    ]
    print_table("", ("layer", "calls", "trials", "before us", "best us", "speed", ""), rows)


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
@compiling
def bench(
    model: MODEL,
    build: Build,
    rounds: Annotated[int, typer.Option(min=1, help="turns of each contender")] = 5,
    trusted: TRUSTED = None,
    json: JSON = False,
) -> None:
    """Time a model against PyTorch eager, interleaved; an artifact or an ONNX model is timed alone."""
    refuse_trusted(model, trusted)
    if is_artifact(model):
        build.check_loaded(model)
        _print_bench(load_artifact(model, build.threads, trusted).bench(), json)
        return
    source = load_source(model, build)
    compiled, seconds = _compiled(source, build, json)
    if source.is_onnx:
        _print_bench(compiled.bench(source.examples), json)
        return
    figures = compare_with_eager(source, compiled, rounds)
    figures["compile_seconds"] = seconds
    if json:
        print_json(figures)
        return
    print_comparison(figures)


def _print_bench(result: Any, json: bool) -> None:
    print_json(_plain(result)) if json else console.print(str(result))


@app.command()
@compiling
def explain(
    model: MODEL,
    build: Build,
    trusted: TRUSTED = None,
    wide: Annotated[
        bool, typer.Option("--wide", help="every column, however wide: operators, schedule, bytes, and so on")
    ] = False,
    hashes: Annotated[
        bool, typer.Option("--hashes", help="also the names of the machine code and the keys of the tasks")
    ] = False,
    json: JSON = False,
) -> None:
    """Show a compiled model's kernels by layer: time, speed, and error against float64."""
    from tilewright.measure.check import checked_kernel

    given: Any = None
    refuse_trusted(model, trusted)
    if is_artifact(model):
        build.check_loaded(model)
        compiled = load_artifact(model, build.threads, trusted)
        compiled.checker = checked_kernel
    else:
        source = load_source(model, build)
        compiled, _ = _compiled(source, build, json)
        given = source.examples
    explanation = compiled.explain(given)
    if json:
        print_json(explanation.to_dict())
        return
    width = None if wide else console.width if console.is_terminal else WIDTH
    console.print(explanation.table(width, hashes=hashes), soft_wrap=True, markup=False)


@app.command()
@compiling
def check(
    model: MODEL,
    build: Build,
    passes: Annotated[
        bool, typer.Option(help="also run the graph after every pass by the oracle, in float64")
    ] = True,
    json: JSON = False,
) -> None:
    """Compare a compiled model with PyTorch, or with onnx's reference, in float64, and its graph after every pass with
    the graph as imported; on a mismatch, name the first task or pass that deviates."""
    source = load_source(model, build)
    compiled, _ = _compiled(source, build, json)
    report = _checked(source, compiled, build.seed)
    rewrites = _passes_checked(source, compiled, build) if passes else None
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


def _passes_checked(source: Source, compiled: CompiledModel, build: Build) -> PassReport:
    from tilewright.driver import check_passes
    from tilewright.runtime.explain import random_inputs

    given = source.examples
    arrays = random_inputs(compiled.plan, build.seed) if given is None else compiled._arrays(given)
    return check_passes(source.model, given, arrays, target=build.target, numerics=compiled.plan.numerics)


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
@compiling
def demo(
    build: Build,
    model: Annotated[str, typer.Argument(help="a zoo model")] = "resnet50",
    json: JSON = False,
) -> None:
    """Compile a real network for this machine, run it, check it against PyTorch, and say what to try next."""
    source = load_source(model, build)
    source.eager()  # refuses what PyTorch cannot run, before compiling
    compiled, seconds = _compiled(source, build, json)
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
    if compiled.threads:  # a GPU's model has none
        torch.set_num_threads(compiled.threads)
    wait = torch.cuda.synchronize if source.is_on_gpu else lambda: None
    contenders = {"PyTorch eager": eager, "Tilewright": compiled}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    with torch.no_grad():
        expected, got = (f(*source.inputs, **source.kwargs) for f in contenders.values())
        for _ in range(rounds):
            for name, run in contenders.items():
                time.sleep(0.1)  # let the other one's threads fall asleep
                run(*source.inputs, **source.kwargs)
                wait()
                for _ in range(3):
                    begin = time.perf_counter()
                    run(*source.inputs, **source.kwargs)
                    wait()
                    times[name].append(time.perf_counter() - begin)
    flat = torch.utils._pytree.tree_leaves
    pairs = zip(flat(got), flat(expected), strict=True)
    error = max(
        relative_error(a.cpu().numpy(), b.cpu().numpy()) for a, b in pairs if isinstance(b, torch.Tensor)
    )
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
