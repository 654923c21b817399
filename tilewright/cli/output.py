"""What commands print: results to standard output (as text or JSON), progress and errors to standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tilewright.cli.watch import Watch
from tilewright.errors import InternalError, TilewrightError
from tilewright.support.trace import Event, Trace
from tilewright.tune.progress import Progress as TuningProgress

console = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def run_guarded(app: Callable[[], Any]) -> int:
    """Run the command line; our errors become messages and exit codes. (A wrong command line and an interrupt end in
    typer's own exits, 2 and 130.)"""
    try:
        app()
    except InternalError as error:
        err.print(f"[bold red]internal error[/]: {escape(str(error))}")
        return 3
    except TilewrightError as error:
        err.print(f"[bold red]error[/]: {escape(str(error))}")
        return 1
    return 0


def print_json(data: Any) -> None:
    sys.stdout.write(json.dumps(data, indent=2, default=str) + "\n")


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """The first column to the left, figures to the right."""
    if title:  # not the table's own, which would be wrapped to the table's width
        console.print(f"[italic]{escape(title)}[/]")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for position, column in enumerate(columns):
        table.add_column(column, justify="left" if position == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    console.print(table)


_STAGES = {
    "import": "importing the model",
    "rewrite": "rewriting the graph",
    "link": "linking",
    "load": "loading",
}


@contextmanager
def compile_progress(quiet: bool, tuning: TuningProgress | None = None) -> Iterator[Trace]:
    """A trace whose events are shown: a bar and a table on a terminal, plain lines elsewhere. `tuning` follows the
    tuning in it."""
    tuning = tuning or TuningProgress()
    if quiet:
        yield Trace(listener=tuning)
        return
    watch = Watch(err, tuning)
    if not err.is_terminal:

        def say(kind: str, event: Event) -> None:
            _plain_line(kind, event)
            watch(kind, event)

        yield Trace(listener=say)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True) as progress:
        bar = progress.add_task("starting", total=1)

        def show(kind: str, event: Event) -> None:
            if kind == "begin" and event.name in _STAGES:
                progress.update(bar, description=_STAGES[event.name])
            elif kind == "begin" and event.name == "build":
                progress.update(bar, total=event.notes["tasks"], completed=0)
            elif kind == "begin" and event.name == "kernel":
                progress.update(bar, description=escape(f"building {event.notes['label'][:40]}"))
            elif kind == "end" and event.name == "kernel":
                progress.advance(bar)
            elif event.name == "tune":
                progress.stop() if kind == "begin" else progress.start()
            watch(kind, event)

        try:
            yield Trace(listener=show)
        finally:
            watch.close()


def _plain_line(kind: str, event: Event) -> None:
    if kind == "begin" and event.name in _STAGES:
        err.print(_STAGES[event.name])
    elif kind == "begin" and event.name == "build":
        err.print(f"building {event.notes['tasks']} kernels")
