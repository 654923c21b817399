"""`tilewright report`: one HTML file about a compiled model, or about the tuning database."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import tilewright
from tilewright.cli.models import (
    TRUSTED,
    ModelSource,
    is_artifact,
    load_artifact,
    load_source,
    refuse_trusted,
    sizes_wanted,
)
from tilewright.cli.options import JSON, BuildOptions, OutputFileError, check_output, compiling
from tilewright.cli.output import compile_progress, console, print_json

if TYPE_CHECKING:
    from tilewright.runtime.model import CompiledModel

if TYPE_CHECKING:
    from tilewright.report.data import Baseline

_ROUNDS = 4  # rounds that alternate PyTorch and Tilewright


@compiling
def report(
    build: BuildOptions,
    model: Annotated[
        str | None, typer.Argument(help="a .tw artifact, or what compile takes; none: the database alone")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="the HTML file")] = Path("report.html"),
    trusted: TRUSTED = None,
    json: JSON = False,
) -> None:
    """Write one HTML file, which needs no network: time and schedule of each task, its code, how tuning went."""
    import msgspec

    from tilewright.db.database import Database
    from tilewright.report.gather import report_on_database, report_on_model
    from tilewright.report.html import render

    refuse_trusted(model, trusted)
    if not json:
        check_output(output)
    if model is None:
        with Database.open(build.db) as database:
            data = report_on_database(database)
    else:
        found, source, name, events = _model(model, build, json, trusted)
        baseline = None if source is None else _pytorch_baseline(source, found)
        given = None if source is None else source.examples
        with Database.open(build.db) as database:
            data = report_on_model(found, name, database, inputs=given, events=events, baseline=baseline)
    if json:
        print_json(msgspec.to_builtins(data))
        return
    page = render(data)
    try:
        output.write_text(page, encoding="utf-8")
    except OSError as error:
        raise OutputFileError(f"cannot write {output}: {error.strerror}") from None
    console.print(
        f"{output}: {len(data.tasks)} tasks, {len(data.trials)} trials, {len(page.encode()) / 1e6:.2f} MB"
    )


def _model(
    model: str, build: BuildOptions, quiet: bool, trusted: list[Path] | None
) -> tuple[CompiledModel, ModelSource | None, str, list[dict[str, Any]]]:
    """Return the model, its source if known, its name, and the trace of its compilation."""
    from tilewright.measure.check import checked_kernel
    from tilewright.runtime.model import CompiledModel

    if is_artifact(model):
        build.check_loaded(model, also=("db",))
        loaded = load_artifact(model, build.threads, trusted)
        found = loaded if isinstance(loaded, CompiledModel) else loaded.variants[0]
        found.checker = checked_kernel
        return found, None, Path(model).stem, []
    source = load_source(model, build)
    with compile_progress(quiet) as trace, sizes_wanted():
        found = tilewright.compile(source.model, source.examples, trace=trace, **build.compiling)
    return found, source, source.name, trace.chrome()["traceEvents"]


def _pytorch_baseline(source: ModelSource, compiled: CompiledModel) -> Baseline | None:
    """Time PyTorch on the same model, interleaved with Tilewright; None for an ONNX model."""
    from tilewright.cli.baselines import chosen
    from tilewright.cli.bench import compare
    from tilewright.report.data import Baseline

    if source.is_onnx:
        return None
    found = compare(source, compiled, chosen("eager")[0], _ROUNDS, quiet=True)
    eager = next(iter(found.rows), None)
    if eager is None or eager.seconds is None or found.seconds is None:
        return None
    return Baseline("PyTorch", eager.seconds, found.seconds)
