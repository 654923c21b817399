"""Show tuning progress: a live table on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import math
import time

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from tilewright.cli.output import milliseconds
from tilewright.support.trace import Event
from tilewright.tune.progress import Progress, TaskProgress

_ROWS = 12  # tasks shown, the slowest first
_LINE_EVERY = 5.0  # seconds


class Watch:
    """A listener of the trace that shows a tuning run on `console`."""

    def __init__(self, console: Console, progress: Progress) -> None:
        self.progress, self._console = progress, console
        self._live: Live | None = None
        self._said = -math.inf

    def __call__(self, kind: str, event: Event) -> None:
        self.progress(kind, event)
        if event.name == "tune.begin":
            self._begin()
        elif event.name == "tune.end":
            self.close()
            self._console.print(summary(self.progress), markup=False, soft_wrap=True)
        elif event.name in ("tune.round", "tune.confirm") and kind == "end":
            self._show()

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _begin(self) -> None:
        tasks = self.progress.tasks.values()
        known = sum(task.state == "known" for task in tasks)
        self._console.print(f"tuning {len(tasks)} tasks, {known} of them known already", markup=False)
        if self._console.is_terminal and known < len(tasks):
            self._live = Live(
                get_renderable=lambda: drawn(self.progress),
                console=self._console,
                transient=True,
                refresh_per_second=2,
            )
            self._live.start()

    def _show(self) -> None:
        if self._console.is_terminal or time.monotonic() - self._said < _LINE_EVERY:
            return
        self._said = time.monotonic()
        self._console.print(line(self.progress), markup=False, soft_wrap=True)


def line(progress: Progress) -> str:
    tried = sum(task.trials > 0 for task in progress.tasks.values())
    parts = [
        f"{progress.trials} trials of {tried} tasks",
        f"{_milliseconds(progress.best)}, before {_milliseconds(progress.before)}",
        "gain left: " + _share(progress.gain),
    ]
    if progress.failures:
        parts.append("failed: " + _failures(progress))
    if math.isfinite(progress.left):
        parts.append(f"{progress.left:.0f} s left")
    return "; ".join(parts)


def summary(progress: Progress) -> str:
    reasons = {
        "known": "all from the database, nothing measured",
        "converged": "no more than 1% is expected",
        "budget": "the budget is spent",
        "trials": "trial limit reached",
        "exhausted": "every task's search is at its end",
        "met": "fast enough",
        "interrupted": "interrupted; what was measured is kept, and the best so far is used",
    }
    text = f"tuned ({reasons[progress.ended]}): {progress.trials} trials"
    if progress.failures:
        text += f", {progress.failures.total()} failed ({_failures(progress)})"
    if progress.trials and progress.best:
        speed = progress.before / progress.best
        text += f"; kernels {_milliseconds(progress.best)}, before {_milliseconds(progress.before)} ({speed:.2f}x)"
    return text


def drawn(progress: Progress) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("layer", overflow="ellipsis", no_wrap=True, max_width=44)
    for column in ("calls", "trials", "before us", "best us", "gain left", ""):
        table.add_column(column, justify="right")
    shown = sorted(progress.tasks.values(), key=lambda task: -task.seconds)
    for task in shown[:_ROWS]:
        table.add_row(*_row(task))
    if len(shown) > _ROWS:
        table.add_row(f"{len(shown) - _ROWS} more")
    return Group(Text(line(progress)), table)


def _row(task: TaskProgress) -> tuple[str, ...]:
    return (
        escape(task.name),
        str(task.calls),
        str(task.trials or ""),
        f"{task.before * 1e6:.1f}",
        f"{task.best * 1e6:.1f}",
        "" if task.state in ("known", "waiting") else _share(task.gain),
        task.state,
    )


def _milliseconds(seconds: float) -> str:
    return f"{milliseconds(seconds)} ms"


def _share(gain: float | None) -> str:
    return "?" if gain is None else f"{gain:.1%}"


def _failures(progress: Progress) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(progress.failures.items()))
