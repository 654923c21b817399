"""Output of commands: results go to standard output (text or JSON), progress and errors to standard error.

With `--json`, standard output is one JSON document, even if the command fails: `{"error": {...}}`.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console, ConsoleDimensions
from rich.markup import escape

from tilewright.errors import DatabaseWarning, InternalError, TilewrightError, TilewrightWarning

if TYPE_CHECKING:
    from tilewright.support.trace import Event, Trace
    from tilewright.tune.progress import Progress as TuningProgress

_NO_WIDTH = 1 << 16  # columns, more than any line has
_MIN = 12  # minimum characters of a cut cell
# Some versions of typer bundle click; others use the installed package.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]
INTERRUPTED = 130


class _Console(Console):
    """A console that wraps lines on a terminal, and never in a pipe or a file."""

    @property  # type: ignore[misc]  # rich's can also be set
    def size(self) -> ConsoleDimensions:
        return super().size if self.is_terminal else ConsoleDimensions(_NO_WIDTH, 25)

    @property  # type: ignore[misc]
    def width(self) -> int:
        return self.size.width


console = _Console(highlight=False)
err = _Console(stderr=True, highlight=False)


# -- failures ---------------------------------------------------------------------------------------------------------


def run_guarded(app: Callable[..., Any]) -> int:
    """Run the command line and return the exit code; print a message for errors that a user can act on."""
    warnings.showwarning = _show_warning
    try:
        return app(standalone_mode=False, prog_name="tilewright") or 0
    except InternalError as error:
        return _failed("internal error", error, error.message, error.remedy, 3)
    except TilewrightError as error:
        return _failed("error", error, error.message, error.remedy, 1)
    except _UsageError as error:
        return _failed("error", error, *_usage(error), 2)
    except BrokenPipeError:  # the reader closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except Exception as error:
        err.print_exception() if err.is_terminal else sys.excepthook(type(error), error, error.__traceback__)
        return _failed("internal error", error, f"{type(error).__name__}: {error}", InternalError.remedy, 3)


def _usage(error: Any) -> tuple[str, str]:
    """Return what is wrong with the command line, and what to try."""
    if getattr(error, "option_name", None) == "--json" and (error.ctx is None or error.ctx.parent is None):
        return "--json belongs to a command", "put --json after the command: tilewright COMMAND ... --json"
    if possibilities := getattr(error, "possibilities", None):
        return error.message, f"did you mean {' or '.join(sorted(possibilities))}?"
    message, _, suggestion = error.format_message().partition(". Did you mean ")
    if suggestion:
        return message, f"did you mean {suggestion}"
    return message, f"{'tilewright' if error.ctx is None else error.ctx.command_path} --help"


def _failed(what: str, error: Exception, message: str, remedy: str, code: int) -> int:
    if "--json" in sys.argv:
        kind = "UsageError" if code == 2 else type(error).__name__
        print_json({"error": {"kind": kind, "message": message, "remedy": remedy, "exit_code": code}})
        return code
    text = f"{message}\n  try: {remedy}" if remedy else message
    err.print(f"[bold red]{what}[/]: {escape(text)}")
    return code


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: Any = None,
    line: Any = None,
) -> None:
    """Print warnings for users as one line, and others as Python does."""
    if issubclass(category, (TilewrightWarning, DatabaseWarning)):
        err.print(f"[yellow]warning[/]: {escape(str(message).removeprefix('tilewright: '))}")
    else:
        sys.stderr.write(warnings.formatwarning(message, category, filename, lineno, line))


# -- results ----------------------------------------------------------------------------------------------------------


def print_json(data: Any) -> None:
    sys.stdout.write(json.dumps(data, indent=2, default=str) + "\n")


def milliseconds(seconds: float) -> str:
    """Three significant digits, never with an exponent: `1260`, `33.6`, `0.053`."""
    value = seconds * 1e3
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    left: Sequence[int] = (0,),
    clipped: Sequence[int] = (),
) -> None:
    """Print a table with numbers right-aligned and the columns in `left` left-aligned.

    A narrow terminal cuts the columns in `clipped` short with an ellipsis, so that each row is one line. A pipe shows
    all.
    """
    if title:
        console.print(f"[italic]{escape(title)}[/]", soft_wrap=True)
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    excess = sum(widths) + 2 * (len(widths) - 1) - console.width
    for position in clipped:
        taken = min(max(excess, 0), max(widths[position] - _MIN, 0))
        widths[position] -= taken
        excess -= taken
    for number, row in enumerate((columns, *rows) if any(columns) else rows):
        cells = [
            cell.ljust(width) if position in left else cell.rjust(width)
            for position, (cell, width) in enumerate(
                (cell if len(cell) <= width else cell[: width - 1] + "…", width)
                for cell, width in zip(row, widths, strict=True)
            )
        ]
        line = escape("  ".join(cells).rstrip())
        console.print(f"[bold]{line}[/]" if number == 0 and any(columns) else line, soft_wrap=True)


# -- progress ---------------------------------------------------------------------------------------------------------

_STAGES = {
    "import": "importing the model",
    "rewrite": "rewriting the graph",
    "link": "linking",
    "load": "loading",
}


# Whether Ctrl-C ended the tuning of this command, which then continued with the best results so far.
_interrupted = False


@contextmanager
def interrupts_reported() -> Iterator[None]:
    """Exit with code 130 if tuning was interrupted, after the command finished with the best results so far."""
    global _interrupted  # noqa: PLW0603
    _interrupted = False
    yield
    if _interrupted:
        raise typer.Exit(INTERRUPTED)


@contextmanager
def compile_progress(quiet: bool, tuning: TuningProgress | None = None) -> Iterator[Trace]:
    """Return a trace that shows its events: a bar and a table on a terminal, plain lines elsewhere. `tuning` follows
    tuning runs in it."""
    from tilewright.tune.progress import Progress as TuningProgress

    global _interrupted  # noqa: PLW0603
    tuning = tuning or TuningProgress()
    with _shown(quiet, tuning) as trace:
        yield trace
    _interrupted |= tuning.ended == "interrupted"


@contextmanager
def _shown(quiet: bool, tuning: TuningProgress) -> Iterator[Trace]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from tilewright.cli.watch import Watch
    from tilewright.support.trace import Trace

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


@contextmanager
def working(what: str, quiet: bool = False) -> Iterator[None]:
    """Show a spinner on a terminal, or print a line elsewhere, during work that takes seconds."""
    if quiet:
        yield
    elif err.is_terminal:
        with err.status(escape(what)):
            yield
    else:
        err.print(what, markup=False)
        yield


def _plain_line(kind: str, event: Event) -> None:
    if kind == "begin" and event.name in _STAGES:
        err.print(_STAGES[event.name])
    elif kind == "begin" and event.name == "build":
        err.print(f"building {event.notes['tasks']} kernels")
