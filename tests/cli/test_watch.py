"""What a user sees of tuning: a table on a terminal, lines elsewhere."""

from __future__ import annotations

import io

from rich.console import Console

from tilewright.cli.watch import Watch, drawn, line, summary
from tilewright.support.trace import Trace
from tilewright.tune.progress import Progress


def shown(*, terminal: bool) -> tuple[str, Progress]:
    """A run of one round for each of two tasks, as it is shown."""
    screen = io.StringIO()
    progress = Progress(clock=lambda: 0.0)
    watch = Watch(Console(file=screen, force_terminal=terminal, width=100, highlight=False), progress)
    trace = Trace(listener=watch)
    tasks = [
        {"key": key, "label": label, "layer": "", "calls": 2, "seconds": 1e-3, "known": False}
        for key, label in (("a", "conv+relu"), ("b", "softmax[odd]"))
    ]
    trace.mark("tune.begin", budget=60.0, effort="quick", tasks=tasks)
    for key in "ab":
        with trace.span("tune.round", task=key) as span:
            span.note(best=5e-4, before=1e-3, trials=4, gain=0.25, done=False, failures={"crash": 1})
    trace.mark("tune.end", why="budget")
    return screen.getvalue(), progress


def test_plain_lines_where_there_is_no_terminal() -> None:
    text, _ = shown(terminal=False)
    assert text.splitlines() == [
        "tuning 2 tasks, 0 of them known already",
        "4 trials of 1 tasks; 3 ms, before 4 ms; gain left: ?; failed: 1 crash; 60 s left",
        "tuned (the budget is spent): 8 trials, 2 failed (2 crash); kernels 2 ms, before 4 ms (2.00x)",
    ]


def test_a_table_on_a_terminal() -> None:
    text, progress = shown(terminal=True)
    assert "tuned (the budget is spent)" in text
    console = Console(file=io.StringIO(), width=100)
    with console.capture() as captured:
        console.print(drawn(progress))
    table = captured.get()
    assert "softmax[odd]" in table and "25.0%" in table and "measured" in table
    assert "8 trials of 2 tasks" in line(progress)


def test_every_end_has_its_words() -> None:
    for why in ("known", "converged", "budget", "exhausted", "met", "interrupted"):
        assert summary(Progress(ended=why)).startswith("tuned (")
