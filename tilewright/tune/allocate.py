"""Which task the next round of measurements goes to: where the objective is expected to fall by most, unless another
allocation is asked for.

    gradient        where one more round is expected to gain most (below)
    heaviest        the task that takes most of the time now, until its search is done
    round-robin     every task in turn

The last two are what the first is compared with (`benchmarks/ablations.py`).

The objective f of a model is the sum of w_i g_i over its tasks, w_i calls of the best time g_i so far. What one more
round for task i is worth is estimated from the task's own past and from tasks like it (the scheduler of Ansor):

    df/dt_i  ~  w_i ( alpha (g_i(t_i) - g_i(t_i - D)) / D
                      + (1 - alpha) (min(g_i - g_i / t_i, beta C_i / max V_k) - g_i) )

t_i rounds so far, C_i the task's operations, V_k the operations per second reached on a task k of the same kind. The
first term goes on as in the last D rounds; the second hopes for as much in one more round as in the average one so far,
and for at least half of the speed that a similar task has.
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
    """A model: how often it calls each task, and the seconds a call of it may take; None: as few as can be.
    `alternative_tasks`: the same of tasks that could take the place of others."""

    calls: Mapping[str, int]
    latency: float | None = None
    alternative_tasks: Mapping[str, int] = field(default_factory=dict)

    def seconds(self, best: Mapping[str, float]) -> float:
        return sum(count * best[task] for task, count in self.calls.items())

    def is_met(self, best: Mapping[str, float]) -> bool:
        return self.latency is not None and self.seconds(best) <= self.latency


OBJECTIVES = ("sum", "geomean")
Combine = Callable[[Sequence[float]], float]  # of the seconds of each model

_STEP = 1e-3  # by which a model's time is changed to see what a function of the user's makes of it


@dataclass(frozen=True)
class Objective:
    """What is to become small: the time of all models together, each counted down to its latency.

    `enough`: seconds at which a task is fast enough, whatever the model needs. `combine`: how the models' times make
    one number: their sum, their geometric mean, or a function of them."""

    goals: tuple[Goal, ...]
    enough: Mapping[str, float] = field(default_factory=dict)
    combine: str | Combine = "sum"

    def weight(self, task: str, best: Mapping[str, float]) -> float:
        """By how much the objective falls if the task takes a second less."""
        if best[task] <= self.enough.get(task, 0.0):
            return 0.0
        return sum(
            slope * (goal.calls.get(task) or goal.alternative_tasks.get(task, 0))
            for goal, slope in zip(self.goals, self._slopes(best), strict=True)
            if not goal.is_met(best)
        )

    def _slopes(self, best: Mapping[str, float]) -> list[float]:
        """By how much the objective falls with the time of each model."""
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


# Which of the tasks that are worth a round gets the next one. `weights`: of these, at least one, by how much the
# objective falls if the task takes a second less. `standings`: of all that are not being measured; those that are not
# in `weights` are done or fast enough.
Allocation = Callable[[Mapping[str, TaskStanding], Mapping[str, float]], str]


def steepest(standings: Mapping[str, TaskStanding], weights: Mapping[str, float]) -> str:
    """First each once, those that take most time first, then where the gradient is steepest."""
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
    """The task that the next round goes to; the earlier one where two are equal. None: no task is worth a round.
    `decided`: seconds of the tasks that get no round at all."""
    best = {**(decided or {}), **{task: standing.best for task, standing in standings.items()}}
    weights = {
        task: weight
        for task, standing in standings.items()
        if not standing.done and (weight := objective.weight(task, best))
    }
    return allocation(standings, weights) if weights else None


def kind_of(ops: Iterable[str]) -> str:
    """The kind of a task with these operators: which they are, not how many."""
    return "+".join(sorted(set(ops)))
