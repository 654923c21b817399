"""The commands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import tilewright
from tilewright.cli import bench as bench_command
from tilewright.cli import codesign as codesign_command
from tilewright.cli import database as database_commands
from tilewright.cli import dataset as dataset_commands
from tilewright.cli import doctor as doctor_command
from tilewright.cli import pool as pool_commands
from tilewright.cli import report as report_command
from tilewright.cli.baselines import chosen
from tilewright.cli.group import App, show_help
from tilewright.cli.models import (
    TRUSTED,
    ModelSource,
    compiled_source,
    is_artifact,
    load_artifact,
    load_source,
    refuse_trusted,
    sizes_wanted,
)
from tilewright.cli.options import (
    JSON,
    MODEL,
    BuildOptions,
    check_output,
    compiling,
    complete_model,
    one_of,
    parse_seconds,
    parse_task_latencies,
)
from tilewright.cli.output import compile_progress, console, print_json, print_table
from tilewright.cli.tuned import show_tuned, tuned
from tilewright.errors import OptionError

if TYPE_CHECKING:
    from tilewright.measure.passes import PassReport
    from tilewright.runtime.model import CompiledModel

app = App(name="tilewright")


def _version(asked: bool) -> None:
    if asked:
        console.print(f"tilewright {tilewright.__version__}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", "-V", callback=_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """A tensor compiler: a PyTorch or ONNX model in, a compiled model out."""
    show_help(context)


@app.command()
@compiling
def compile(
    model: MODEL,
    build: BuildOptions,
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
    from tilewright.runtime.signing import signer

    if sign is not None:
        signer(sign)  # report an unreadable key before compiling
    if output is not None:
        check_output(output)
    source = load_source(model, build)
    path = output or Path(f"{source.name}.tw")
    check_output(path)
    compiled, seconds = compiled_source(source, build, json)
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
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="what compile takes; several are tuned together",
            autocompletion=complete_model,
        ),
    ],
    build: BuildOptions,
    latency: Annotated[
        float | None,
        typer.Option(
            parser=parse_seconds,
            metavar="SECONDS",
            help="stop tuning a model once a call of it takes at most this long, such as 10ms",
        ),
    ] = None,
    task_latency: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LABEL=TIME",
            help="the same for a task, by the label that `explain --wide` shows, such as linear+relu=50us; repeatable",
        ),
    ] = None,
    objective: Annotated[
        str,
        typer.Option(
            help="what to minimise over several models: sum or geomean of their times",
            autocompletion=one_of("sum", "geomean"),
        ),
    ] = "sum",
    pool: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="measure on the machines of a pool: tilewright pool")
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LABEL[=TIME]",
            help="a device of the pool to tune for, as `pool ls` shows it, and the time that devices of that label may "
            "work, such as 5m; repeatable: all are tuned at once",
        ),
    ] = None,
    token_file: Annotated[Path | None, typer.Option("--token-file", help="the pool's token")] = None,
    json: JSON = False,
) -> None:
    """Measure candidates for the kernels of one or more models, and keep the winners for later compilations."""
    from tilewright.targets.options import resolve_objective
    from tilewright.tune.progress import Progress

    if pool is None and (device or token_file):
        raise OptionError(
            "--device and --token-file require --pool", remedy="give its address: --pool ADDRESS"
        )
    resolve_objective(objective)
    task_latencies = parse_task_latencies(task_latency)
    sources = [load_source(model, build) for model in models]
    pairs = [(source.model, source.examples) for source in sources]
    latencies = None if latency is None else [latency] * len(sources)
    wanted = pool_commands.budgets(device)
    if pool is not None and len(wanted) > 1:
        if task_latencies:
            raise OptionError(
                "--task-latency is for one device", remedy="leave --task-latency out, or name one --device"
            )
        pool_commands.tune_devices(
            [source.name for source in sources],
            pairs,
            tilewright.Pool(pool, token_file=token_file),
            wanted,
            json,
            objective=objective,
            latency=latencies,
            **build.compiling,
        )
        return
    progress = Progress()
    label, seconds = next(iter(wanted.items()), (None, None))
    with compile_progress(json, progress) as trace, sizes_wanted():
        tilewright.compile_all(
            pairs,
            objective=objective,
            latency=latencies,
            task_latency=task_latencies,
            pool=None if pool is None else tilewright.Pool(pool, label, token_file, seconds),
            trace=trace,
            **build.compiling,
        )
    if json:
        print_json({"models": [source.name for source in sources], **tuned(progress)})
    else:
        show_tuned(progress)


app.command()(bench_command.bench)


@app.command()
@compiling
def explain(
    model: MODEL,
    build: BuildOptions,
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
    from tilewright.runtime.explain import WIDTH

    given: Any = None
    refuse_trusted(model, trusted)
    if is_artifact(model):
        build.check_loaded(model)
        compiled = load_artifact(model, build.threads, trusted)
        compiled.checker = checked_kernel
    else:
        source = load_source(model, build)
        compiled, _ = compiled_source(source, build, json)
        given = source.examples
    explanation = compiled.explain(given)
    if json:
        print_json(explanation.to_dict())
        return
    width = None if wide else console.width if console.is_terminal else WIDTH
    console.print(explanation.table(width, hashes=hashes), soft_wrap=True, markup=False)


@app.command()
@compiling
def advise(
    model: MODEL,
    build: BuildOptions,
    layers: Annotated[int, typer.Option(min=1, help="how many layers to look at, the slowest first")] = 5,
    within: Annotated[
        float, typer.Option(parser=parse_seconds, metavar="SECONDS", help="of measuring, such as 60s or 5m")
    ] = 120.0,
    json: JSON = False,
) -> None:
    """Measure what would make a model's layers faster here: channels, activations, a 1x1 convolution more."""
    if build.effort != "none" or build.lock is not None:
        raise OptionError(
            "advice measures variations and tunes nothing",
            remedy="leave --effort and --lock out; --within limits how long it measures",
        )
    source = load_source(model, build)
    with compile_progress(json) as trace, sizes_wanted():
        found = tilewright.advise(
            source.model,
            source.examples,
            target=build.target,
            layers=layers,
            budget=within,
            numerics=build.numerics,
            threads=build.threads,
            partition=build.partition,
            db=build.db,
            trace=trace,
        )
    if json:
        print_json(found.to_dict())
        return
    console.print(str(found), markup=False, soft_wrap=True)


@app.command()
@compiling
def check(
    model: MODEL,
    build: BuildOptions,
    passes: Annotated[
        bool, typer.Option(help="also run the graph after every pass by the oracle, in float64")
    ] = True,
    json: JSON = False,
) -> None:
    """Compare a compiled model with PyTorch or onnx's reference in float64, and name the first wrong task or pass.

    The graph after every pass is compared with the imported graph too, unless --no-passes is given.
    """
    source = load_source(model, build)
    compiled, _ = compiled_source(source, build, json)
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


def _passes_checked(source: ModelSource, compiled: CompiledModel, build: BuildOptions) -> PassReport:
    from tilewright.driver import check_passes
    from tilewright.runtime.explain import random_inputs

    given = source.examples
    arrays = random_inputs(compiled.plan, build.seed) if given is None else compiled._arrays(given)
    return check_passes(
        source.model,
        given,
        arrays,
        target=build.target,
        partition=build.partition,
        lock=build.lock,
        db=build.db,
        numerics=compiled.plan.numerics,
        threads=build.threads,
    )


def _checked(source: ModelSource, compiled: CompiledModel, seed: int) -> Any:
    if source.is_onnx:
        from tilewright.integrations.onnx_check import check_onnx

        return check_onnx(compiled, source.model, source.kwargs or None, seed=seed)
    from tilewright.measure.bisect import check_model

    return check_model(compiled, source.eager(), source.examples)


app.command()(report_command.report)
app.command()(codesign_command.codesign)
app.command()(doctor_command.doctor)
app.add_typer(database_commands.app, name="db")
app.add_typer(dataset_commands.app, name="dataset")
app.add_typer(pool_commands.app, name="pool")


@app.command()
def zoo(json: JSON = False) -> None:
    """List the models of the zoo, with their sizes and inputs."""
    from tilewright.zoo import CATALOG

    cards = CATALOG.values()
    if json:
        print_json([asdict(card) for card in cards])
        return
    rows = [
        (card.name, f"{card.parameters / 1e6:.1f}M", " ".join(_counted(card.inputs)), card.description)
        for card in cards
    ]
    print_table("", ("model", "weights", "inputs", "what it is"), rows, left=(0, 2, 3), clipped=(3,))
    console.print("\ntry: tilewright demo resnet18", markup=False)


def _counted(inputs: Sequence[str]) -> list[str]:
    """List each distinct input once, with its count: `2 x f32[1,1050,256]`."""
    return [
        each if inputs.count(each) == 1 else f"{inputs.count(each)} x {each}"
        for each in dict.fromkeys(inputs)
    ]


@app.command()
@compiling
def demo(
    build: BuildOptions,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="a zoo model", autocompletion=complete_model)
    ] = "resnet50",
    json: JSON = False,
) -> None:
    """Compile a real network for this machine, run it, check it against PyTorch, and say what to try next."""
    source = load_source(model, build)
    source.eager()  # before compiling, refuse a model that PyTorch cannot run
    compiled, seconds = compiled_source(source, build, json)
    against, _ = chosen("torch")
    comparison = bench_command.compare(source, compiled, against, rounds=4, quiet=json)
    comparison.compile_seconds = seconds
    if json:
        print_json(comparison.to_dict())
        return
    bench_command.show(comparison)
    steps = (
        (f"tilewright explain {model}", "which kernels run, how long, how exact"),
        (f"tilewright compile {model} -o m.tw", "save it; tilewright.load('m.tw') needs no PyTorch"),
        ("tilewright doctor", "what this machine can do"),
        ("docs/01-quick-start.md", "your own model"),
    )
    console.print()
    print_table("Try next:", ("", ""), steps, left=(0, 1), clipped=(1,))
