"""The state of a tuning run as plain data, built from trace events, for display.

progress = Progress() tilewright.compile(model, inputs, effort="quick", trace=Trace(listener=progress))
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tilewright.support.trace import Event


@dataclass
class TaskProgress:
    label: str
    calls: int
    before: float  # seconds of the unmeasured choice: predicted, later measured
    best: float
    trials: int = 0
    gain: float | None = None  # expected from further trials, as a share of `best`
    state: str = "waiting"  # then "measuring", "measured", "done", "confirmed"; or "known" from the start
    layer: str = ""  # the layers that it computes

    @property
    def name(self) -> str:
        """The name that the user knows."""
        return self.layer or self.label

    @property
    def seconds(self) -> float:
        """In one call of the models."""
        return self.calls * self.best


@dataclass
class Progress:
    """A trace listener. `failures`: trials without a time, by kind."""

    clock: Callable[[], float] = time.monotonic
    tasks: dict[str, TaskProgress] = field(default_factory=dict)
    failures: Counter[str] = field(default_factory=Counter)
    budget: float = 0.0
    devices: dict[str, dict[str, float]] = field(
        default_factory=dict
    )  # of a pool: trials and busy seconds of each
    aside: dict[str, str] = field(default_factory=dict)  # workers of a pool that were left out, and why
    given_again: int = 0  # work items that went to another node of a pool
    seconds: float = 0.0  # that the run took
    ended: str = ""  # why: "known", "converged", "budget", "trials", "exhausted", "met", "interrupted"
    _began: float = 0.0

    def __call__(self, kind: str, event: Event) -> None:
        notes = event.notes
        if event.name == "tune.begin":
            self.budget, self._began = notes["budget"], self.clock()
            self.tasks = {
                task["key"]: TaskProgress(
                    task["label"],
                    task["calls"],
                    task["seconds"],
                    task["seconds"],
                    state="known" if task["known"] else "waiting",
                    layer=task["layer"],
                )
                for task in notes["tasks"]
            }
        elif event.name == "pool.end":
            self.devices, self.aside = dict(notes["use"]), dict(notes["aside"])
            self.given_again = notes["given_again"]
        elif event.name == "tune.end":
            self.ended, self.seconds = notes["why"], self.clock() - self._began
            for task in self.tasks.values():
                if task.state == "measuring":  # interrupted
                    task.state = "measured" if task.trials else "waiting"
        elif event.name in ("tune.round", "tune.confirm"):
            task = self.tasks[notes["task"]]
            if kind == "begin":
                task.state = "measuring"
            elif "best" in notes:  # an interrupted round has no results
                task.best, task.before = notes["best"], notes["before"]
                if event.name == "tune.confirm":
                    task.state = "confirmed"
                    return
                task.trials += notes["trials"]
                task.gain = notes["gain"]
                task.state = "done" if notes["done"] else "measured"
                self.failures.update(notes["failures"])

    @property
    def trials(self) -> int:
        return sum(task.trials for task in self.tasks.values())

    @property
    def before(self) -> float:
        """Seconds of one call of the models with the unmeasured choices."""
        return sum(task.calls * task.before for task in self.tasks.values())

    @property
    def best(self) -> float:
        return sum(task.seconds for task in self.tasks.values())

    @property
    def gain(self) -> float | None:
        """The expected gain from continuing, as a share of the time; None while tasks are unmeasured."""
        expected = 0.0
        for task in self.tasks.values():
            if task.state in ("known", "done", "confirmed"):
                continue
            if task.gain is None:
                return None
            expected += task.gain * task.seconds
        return expected / self.best if self.best else 0.0

    @property
    def left(self) -> float:
        """Seconds left of the budget."""
        return max(0.0, self.budget - (self.clock() - self._began))
