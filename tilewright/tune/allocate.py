"""Allocate rounds of measurements to tasks.

    gradient        the task with the largest expected gain from one more round (the default, see below)
    heaviest        the task that takes most of the time now, until its search is done
    round-robin     every task in turn

`benchmarks/ablations.py` compares them.

The objective f of a model is the sum of w_i g_i over its tasks, where w_i is the number of calls and g_i the best
time so far. The gain of one more round for task i is estimated from the task's own history and from similar tasks
(Ansor's scheduler):

    df/dt_i  ~  w_i ( alpha (g_i(t_i) - g_i(t_i - D)) / D
                      + (1 - alpha) (min(g_i - g_i / t_i, beta C_i / max V_k) - g_i) )

Here t_i is the number of rounds so far, C_i the task's operations, and V_k the operations per second reached on a
task k of the same kind. The first term extrapolates the last D rounds. The second assumes that one more round gains
as much as the average round so far, and that the task reaches at least half the speed of a similar one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

ALPHA = 0.2
BETA = 2.0
WINDOW = 3  # D, rounds


@dataclass
class TaskStanding:
    """The tuning history of one task. `times`: its best time after each round, in seconds, never rising."""

    kind: str  # tasks of one kind are similar
    operations: float
    predicted: float  # seconds, used until something is measured
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
    """A model: how often it calls each task, and the target seconds of a call; None: as few as possible.
    `alternative_tasks`: the same for tasks that could replace others."""

    calls: Mapping[str, int]
    latency: float | None = None
    alternative_tasks: Mapping[str, int] = field(default_factory=dict)

    def seconds(self, best: Mapping[str, float]) -> float:
        return sum(count * best[task] for task, count in self.calls.items())

    def is_met(self, best: Mapping[str, float]) -> bool:
        return self.latency is not None and self.seconds(best) <= self.latency


OBJECTIVES = ("sum", "geomean")
Combine = Callable[[Sequence[float]], float]  # a function of the seconds of each model

_STEP = 1e-3  # step for the numerical derivative of a user's objective


@dataclass(frozen=True)
class Objective:
    """The quantity that tuning minimises: the combined time of all models, each counted only down to its target
    latency. `enough`: seconds at which a task is fast enough, whatever the model needs. `combine`: how the models'
    times become one number: by their sum, their geometric mean, or a user's function."""

    goals: tuple[Goal, ...]
    enough: Mapping[str, float] = field(default_factory=dict)
    combine: str | Combine = "sum"

    def weight(self, task: str, best: Mapping[str, float]) -> float:
        """The reduction of the objective if the task takes one second less."""
        if best[task] <= self.enough.get(task, 0.0):
            return 0.0
        return sum(
            slope * (goal.calls.get(task) or goal.alternative_tasks.get(task, 0))
            for goal, slope in zip(self.goals, self._slopes(best), strict=True)
            if not goal.is_met(best)
        )

    def _slopes(self, best: Mapping[str, float]) -> list[float]:
        """The derivative of the objective with respect to each model's time."""
        if self.combine == "sum":
            return [1.0] * len(self.goals)
        seconds = [max(goal.seconds(best), 1e-12) for goal in self.goals]
        if self.combine == "geomean":
            mean = math.exp(sum(map(math.log, seconds)) / len(seconds))
            return [mean / (len(seconds) * each) for each in seconds]
        assert callable(self.combine)
        now = self.combine(seconds)
        return [
            max(0.0, now - self.combine([*seconds[:n], (1 - _STEP) * each, *seconds[n + 1 :]]))
            / (_STEP * each)
            for n, each in enumerate(seconds)
        ]


def gradient(task: str, standings: Mapping[str, TaskStanding], weight: float) -> float:
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


# Selects the task for the next round. `weights`: for each task that is worth a round, the reduction of the objective
# if the task takes one second less; at least one task. `standings`: all tasks that are not being measured; those not
# in `weights` are done or fast enough.
Allocation = Callable[[Mapping[str, TaskStanding], Mapping[str, float]], str]


def steepest(standings: Mapping[str, TaskStanding], weights: Mapping[str, float]) -> str:
    """Select each task once, the slowest first, then the one with the steepest gradient."""
    fresh = {task: weight for task, weight in weights.items() if not standings[task].times}
    if fresh:
        return heaviest(standings, fresh)
    return max(weights, key=lambda task: -gradient(task, standings, weights[task]))


def heaviest(standings: Mapping[str, TaskStanding], weights: Mapping[str, float]) -> str:
    return max(weights, key=lambda task: weights[task] * standings[task].best)


def round_robin(standings: Mapping[str, TaskStanding], weights: Mapping[str, float]) -> str:
    return min(weights, key=lambda task: len(standings[task].times))


ALLOCATIONS: dict[str, Allocation] = {
    "gradient": steepest,
    "heaviest": heaviest,
    "round-robin": round_robin,
}


def next_task(
    standings: Mapping[str, TaskStanding],
    objective: Objective,
    decided: Mapping[str, float] | None = None,
    allocation: Allocation = steepest,
) -> str | None:
    """Return the task for the next round, the earlier one on a tie, or None if no task is worth a round. `decided`:
    seconds of the tasks that get no rounds."""
    best = {**(decided or {}), **{task: standing.best for task, standing in standings.items()}}
    weights = {
        task: weight
        for task, standing in standings.items()
        if not standing.done and (weight := objective.weight(task, best))
    }
    return allocation(standings, weights) if weights else None


def kind_of(ops: Iterable[str]) -> str:
    """The kind of a task: its set of operators, regardless of how many there are of each."""
    return "+".join(sorted(set(ops)))
