"""Which task the next round of measurements goes to: the one whose time the objective is expected to fall by most.

The objective f of a model is the sum of w_i g_i over its tasks, w_i calls of the best time g_i so far. What one more
round for task i is worth is estimated from the task's own past and from tasks like it (the scheduler of Ansor):

    df/dt_i  ~  w_i ( alpha (g_i(t_i) - g_i(t_i - D)) / D
                      + (1 - alpha) (min(g_i - g_i / t_i, beta C_i / max V_k) - g_i) )

t_i rounds so far, C_i the task's operations, V_k the operations per second reached on a task k of the same kind. The
first term goes on as in the last D rounds; the second hopes for as much in one more round as in the average one so far,
and for at least half of the speed that a similar task has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

ALPHA = 0.2
BETA = 2.0
WINDOW = 3  # D, rounds


@dataclass
class Standing:
    """How far one task is. `times`: its best time after each round, in seconds, never rising."""

    kind: str  # tasks of one kind are alike
    operations: float
    predicted: float  # seconds, while nothing is measured
    times: list[float] = field(default_factory=list)
    done: bool = False

    @property
    def best(self) -> float:
        return self.times[-1] if self.times else self.predicted

    @property
    def rate(self) -> float:
        """Operations per second."""
        return self.operations / self.best


@dataclass(frozen=True)
class Goal:
    """A model: how often it calls each task, and the seconds a call of it may take; None: as few as can be."""

    calls: Mapping[str, int]
    latency: float | None = None

    def seconds(self, best: Mapping[str, float]) -> float:
        return sum(count * best[task] for task, count in self.calls.items())

    def is_met(self, best: Mapping[str, float]) -> bool:
        return self.latency is not None and self.seconds(best) <= self.latency


@dataclass(frozen=True)
class Objective:
    """The time of all models together, each counted down to its latency. `enough`: seconds at which a task is fast
    enough, whatever the model needs."""

    goals: tuple[Goal, ...]
    enough: Mapping[str, float] = field(default_factory=dict)

    def weight(self, task: str, best: Mapping[str, float]) -> int:
        """By how much the objective falls if the task takes a second less."""
        if best[task] <= self.enough.get(task, 0.0):
            return 0
        return sum(goal.calls.get(task, 0) for goal in self.goals if not goal.is_met(best))


def gradient(task: str, standings: Mapping[str, Standing], weight: float) -> float:
    """df/dt_i of a task with at least one round: at most 0."""
    own = standings[task]
    rounds, best = len(own.times), own.best
    window = min(WINDOW, rounds - 1)
    past = (best - own.times[-1 - window]) / window if window else 0.0
    hoped = best - best / rounds
    fastest = max(
        (other.rate for other in standings.values() if other.kind == own.kind and other.times), default=0.0
    )
    if fastest > 0:
        hoped = min(hoped, BETA * own.operations / fastest)
    return weight * (ALPHA * past + (1 - ALPHA) * (hoped - best))


def next_task(
    standings: Mapping[str, Standing], objective: Objective, decided: Mapping[str, float] | None = None
) -> str | None:
    """The task that the next round goes to: first each once, those that take most time first, then where the gradient
    is steepest; the earlier one where two are equal. None: no task is worth a round. `decided`: seconds of the tasks
    that get no round at all."""
    best = {**(decided or {}), **{task: standing.best for task, standing in standings.items()}}
    weights = {
        task: weight
        for task, standing in standings.items()
        if not standing.done and (weight := objective.weight(task, best))
    }
    fresh = [task for task in weights if not standings[task].times]
    if fresh:
        return max(fresh, key=lambda task: weights[task] * best[task])
    slopes = {task: -gradient(task, standings, weight) for task, weight in weights.items()}
    return max(slopes, key=lambda task: slopes[task], default=None)


def kind_of(ops: Iterable[str]) -> str:
    """The kind of a task with these operators: which they are, not how many."""
    return "+".join(sorted(set(ops)))
