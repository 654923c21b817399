"""What a display is told, from the events of a run."""

from __future__ import annotations

import pytest

from tilewright.support.trace import Trace
from tilewright.tune.progress import Progress


def test_progress_follows_the_trace() -> None:
    now = 100.0
    progress = Progress(clock=lambda: now)
    trace = Trace(listener=progress)
    trace.mark(
        "tune.begin",
        budget=60.0,
        effort="quick",
        tasks=[
            {
                "key": "a",
                "label": "conv",
                "layer": "layer1.0.conv1",
                "calls": 3,
                "seconds": 2.0,
                "known": False,
            },
            {"key": "b", "label": "matmul", "layer": "", "calls": 1, "seconds": 4.0, "known": True},
        ],
    )
    assert progress.before == progress.best == 10.0 and progress.gain is None
    assert [task.state for task in progress.tasks.values()] == ["waiting", "known"]
    with trace.span("tune.round", task="a") as span:
        assert progress.tasks["a"].state == "measuring"
        span.note(best=1.0, before=1.5, trials=4, gain=0.2, done=False, failures={"wrong": 1, "crash": 1})
    assert progress.tasks["a"].state == "measured" and progress.trials == 4
    assert progress.before == 8.5 and progress.best == 7.0
    assert progress.gain == pytest.approx(0.2 * 3 / 7) and progress.failures == {"wrong": 1, "crash": 1}
    now = 120.0
    assert progress.left == 40.0
    with trace.span("tune.confirm", task="a") as span:
        span.note(best=1.1, before=1.6)
    assert progress.tasks["a"].state == "confirmed" and progress.gain == 0.0
    trace.mark("tune.end", why="converged")
    assert progress.ended == "converged"
    now = 500.0
    assert progress.left == 0.0


def test_an_interrupted_round_leaves_things_as_they_are() -> None:
    progress = Progress()
    trace = Trace(listener=progress)
    tasks = [
        {"key": "a", "label": "conv", "layer": "layer1.0.conv1", "calls": 1, "seconds": 2.0, "known": False}
    ]
    trace.mark("tune.begin", budget=60.0, effort="quick", tasks=tasks)
    with pytest.raises(KeyboardInterrupt), trace.span("tune.round", task="a"):
        raise KeyboardInterrupt
    assert progress.best == 2.0 and progress.trials == 0
    trace.mark("tune.end", why="interrupted")
    assert progress.tasks["a"].state == "waiting"
