"""`tilewright report`: one HTML file about a compiled model, or about the tuning database."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

import tilewright
from tilewright.cli.models import TRUSTED, is_artifact, load_artifact, load_source, refuse_trusted
from tilewright.cli.output import compile_progress, console, print_json
from tilewright.db.database import Database
from tilewright.errors import TilewrightError
from tilewright.runtime.model import CompiledModel


class ReportFileError(TilewrightError):
    """The report cannot be written there."""

    remedy = "name a file that you can write: -o report.html"


def report(
    model: Annotated[
        str | None, typer.Argument(help="a .tw artifact, or what compile takes; none: the database alone")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="the HTML file")] = Path("report.html"),
    threads: Annotated[int | None, typer.Option(help="threads of a call")] = None,
    numerics: Annotated[str | None, typer.Option(help="fast, strict, relaxed or tf32")] = None,
    effort: Annotated[str, typer.Option(help="of compiling, where MODEL is no artifact")] = "none",
    batch: Annotated[int, typer.Option(help="batch size of a zoo model")] = 1,
    small: Annotated[bool, typer.Option("--small", help="the zoo model's small version")] = False,
    db: Annotated[Path | None, typer.Option("--db", help="the tuning database")] = None,
    trusted: TRUSTED = None,
    json: Annotated[bool, typer.Option("--json", help="print the data of the report, write no file")] = False,
) -> None:
    """Write one HTML file, which needs no network: time and schedule of each task, its code, how tuning went."""
    from tilewright.report.gather import report_on_database, report_on_model
    from tilewright.report.html import render

    refuse_trusted(model, trusted)
    if model is None:
        with Database.open(db) as database:
            data = report_on_database(database)
    else:
        found, inputs, name, events = _model(
            model, threads, numerics, effort, db, batch, small, json, trusted
        )
        with Database.open(db) as database:
            data = report_on_model(found, name, database, inputs=inputs, events=events)
    if json:
        print_json(msgspec.to_builtins(data))
        return
    page = render(data)
    try:
        output.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ReportFileError(f"cannot write {output}: {error.strerror}") from None
    console.print(
        f"{output}: {len(data.tasks)} tasks, {len(data.trials)} trials, {len(page.encode()) / 1e6:.2f} MB"
    )


def _model(
    model: str,
    threads: int | None,
    numerics: str | None,
    effort: str,
    db: Path | None,
    batch: int,
    small: bool,
    quiet: bool,
    trusted: list[Path] | None,
) -> tuple[CompiledModel, Any, str, list[dict[str, Any]]]:
    """The model, inputs for it, its name, and what happened while it was compiled."""
    from tilewright.measure.check import checked_kernel

    if is_artifact(model):
        loaded = load_artifact(model, threads, trusted)
        found = loaded if isinstance(loaded, CompiledModel) else loaded.variants[0]
        found.checker = checked_kernel
        return found, None, Path(model).stem, []
    source = load_source(model, batch=batch, small=small)
    with compile_progress(quiet) as trace:
        found = tilewright.compile(
            source.model,
            source.examples,
            effort=effort,
            numerics=numerics,
            threads=threads,
            db=db,
            trace=trace,
        )
    return found, source.examples, source.name, trace.chrome()["traceEvents"]
