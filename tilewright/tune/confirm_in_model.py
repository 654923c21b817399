"""Confirm winners inside the models: a kernel that is faster alone may be slower next to its neighbours.

Alone, a kernel finds its inputs in the caches where its last call left them; in a model the previous step has just
written them, on other threads. So the fastest candidates run inside the models: each repetition runs the models with
every alternative of each task, all tasks at once, and times the steps. Then the models with all winners run against
those with the unmeasured choices. A winner that gains nothing there is dropped; if the models as a whole do not gain,
all of them are.

On a GPU the kernels of a model overlap, and a step has no time of its own. So whole models are timed: first all
winners against all unmeasured choices; if they do not gain together, halves of them, halves of those, and so on, each
added to what has gained so far; then with one winner reverted at a time, the heaviest task first. Their number is
bounded.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from tilewright.tune.choose import Choice

_BETTER = 0.98  # share of the time to beat that a winner must stay under to be tried together with the others
# If runs of a model vary by 15%, this many repetitions distinguish times that differ by 2%.
_REPETITIONS, _MIN_REPETITIONS = 60, 8
_MIN_SECONDS, _MAX_SECONDS = 0.5, 20.0  # of one comparison

Assignment = Mapping[str, Choice]  # a choice for every task
# One run of the models: the seconds of each task, summed over its calls; only under WHOLE if steps overlap.
ModelRun = Callable[[], Mapping[str, float]]
Repetition = Sequence[Mapping[str, float]]  # the same for each of several assignments


WHOLE = ""  # in place of a task's key: all tasks
_MAX_COMPARISONS = 12  # of whole models, after the first one
_TAKEN_BACK = 0.99  # a winner is reverted if the models take less than this share of the time without it


class Models(Protocol):
    """The models that are tuned, with any assignment. `by_task`: whether a run has a time for each task."""

    by_task: bool

    def __call__(self, assignment: Assignment) -> ModelRun | None:
        """Load the models with these choices; None if there is not enough memory."""


@dataclass(frozen=True)
class Confirmed:
    """The choice for a task, the seconds of all its calls in the models, and those of the choice to beat; None if
    steps cannot be timed separately."""

    choice: Choice
    seconds: float | None
    before: float | None


def confirm_in_model(
    models: Models,
    known: Assignment,
    alternatives: Mapping[str, Sequence[Choice]],
    *,
    deadline: float,
    seed: int = 0,
) -> dict[str, Confirmed] | None:
    """Return the confirmed choice of each task that has alternatives; the first alternative is the unmeasured choice.
    `known`: the choices of all other tasks. Returns None if the models cannot run."""
    comparison = _Comparison(models, Random(seed), deadline)
    if not models.by_task:
        return _confirm_whole_models(comparison, known, alternatives)
    default = {**known, **{key: some[0] for key, some in alternatives.items()}}
    most = max(map(len, alternatives.values()))
    assignments = [
        {**default, **{key: some[number] for key, some in alternatives.items() if number < len(some)}}
        for number in range(most)
    ]
    repetitions = comparison.repetitions(assignments)
    if repetitions is None:
        return None
    before = {
        key: statistics.median(repetition[0][key] for repetition in repetitions) for key in alternatives
    }
    winners = {}
    for key, some in alternatives.items():
        shares = [_share(repetitions, number, key) for number in range(len(some))]
        first = min(range(len(some)), key=lambda number: (shares[number], number))
        if shares[first] <= _BETTER:
            winners[key] = some[first]
    won = comparison.confirmed(default, winners)
    return {
        key: Confirmed(won[key][0], before[key] * won[key][1], before[key])
        if key in won
        else Confirmed(some[0], before[key], before[key])
        for key, some in alternatives.items()
    }


def _confirm_whole_models(
    comparison: _Comparison, known: Assignment, alternatives: Mapping[str, Sequence[Choice]]
) -> dict[str, Confirmed] | None:
    """`alternatives`: for each task the choice to beat, then the others, the fastest alone first; the heaviest task
    first."""
    default = {**known, **{key: some[0] for key, some in alternatives.items()}}
    winners = {key: some[1] for key, some in alternatives.items() if len(some) > 1}
    chosen = {**default, **winners}
    repetitions = comparison.repetitions([default, chosen])
    if repetitions is None:
        return None
    left = _MAX_COMPARISONS
    if _share(repetitions, 1) >= 1.0:
        chosen, groups = default, _halves(list(winners))
        while groups and left and not comparison.is_late:
            group, left = groups.pop(0), left - 1
            tried = {**chosen, **{key: winners[key] for key in group}}
            if comparison.gains(chosen, tried, 1.0):
                chosen = tried
            else:
                groups = [*_halves(group), *groups]
    for key in [key for key in winners if chosen[key] is winners[key]][:left]:
        if comparison.is_late:
            break
        without = {**chosen, key: default[key]}
        if comparison.gains(chosen, without, _TAKEN_BACK):
            chosen = without
    return {key: Confirmed(chosen[key], None, None) for key in alternatives}


def _halves(group: list[str]) -> list[list[str]]:
    middle = len(group) // 2
    return [group[:middle], group[middle:]] if middle else []


def comparison_seconds(models_seconds: float, assignments: int, *, hasty: bool = False) -> float:
    """The seconds that a comparison of this many assignments takes, for models that take `models_seconds`."""
    repetition = 2 * assignments * models_seconds
    least = _MIN_REPETITIONS * repetition
    return least if hasty else max(least, min(_REPETITIONS * repetition, _MAX_SECONDS), _MIN_SECONDS)


class _Comparison:
    def __init__(self, models: Models, random: Random, deadline: float) -> None:
        self._models, self._random, self._deadline = models, random, deadline

    @property
    def is_late(self) -> bool:
        return time.monotonic() >= self._deadline

    def repetitions(self, assignments: Sequence[Assignment]) -> list[Repetition] | None:
        """Run each assignment once per repetition, in random order, for at most half of the remaining time.

        Each assignment runs twice and the second run counts, so that the caches hold no data of another assignment.
        """
        runs = []
        for assignment in assignments:
            run = self._models(assignment)
            if run is None:
                return None
            runs.append(run)
        found: list[Repetition] = []
        begin = time.monotonic()
        most = min(_MAX_SECONDS, (self._deadline - begin) / 2)
        while not _suffices(len(found), time.monotonic() - begin, most):
            repetition: list[Mapping[str, float]] = [{}] * len(runs)
            for number in self._random.sample(range(len(runs)), len(runs)):
                runs[number]()
                repetition[number] = runs[number]()
            found.append(repetition)
        return found

    def gains(self, before: Assignment, after: Assignment, limit: float) -> bool:
        """Whether the models take less than `limit` of the time with `after`; False if they cannot run."""
        repetitions = self.repetitions([before, after])
        return repetitions is not None and _share(repetitions, 1) < limit

    def confirmed(
        self, default: Assignment, winners: Mapping[str, Choice]
    ) -> dict[str, tuple[Choice, float]]:
        """The winners that gain together, each with its share of the time to beat; none if there is no time to
        measure it."""
        while winners and time.monotonic() < self._deadline:
            repetitions = self.repetitions([default, {**default, **winners}])
            if repetitions is None:
                break
            shares = {key: _share(repetitions, 1, key) for key in winners}
            gaining = {key: choice for key, choice in winners.items() if shares[key] < 1.0}
            if gaining == winners:
                together = _share(repetitions, 1) < 1.0
                return {key: (choice, shares[key]) for key, choice in winners.items()} if together else {}
            winners = gaining
        return {}


def _suffices(repetitions: int, seconds: float, most: float) -> bool:
    if repetitions < _MIN_REPETITIONS:
        return False
    return seconds > most or (repetitions >= _REPETITIONS and seconds > _MIN_SECONDS)


def _share(repetitions: Sequence[Repetition], number: int, key: str | None = None) -> float:
    """The time of an assignment relative to the first one, for one task or for all."""
    return statistics.median(
        repetition[number][key] / repetition[0][key]
        if key
        else sum(repetition[number].values()) / sum(repetition[0].values())
        for repetition in repetitions
    )
