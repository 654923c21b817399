"""The last choice, inside the models: what is faster alone need not be so between its neighbours.

Alone, a kernel finds its inputs where its last call left them; in a model the step before it has just written them, on
other threads, and what it writes is read by the next. So those that are fastest alone run where they will run: in each
turn the models are run with every contender of each task, all tasks at once, and the steps are timed. Then the models
with all winners run against those with what would have been chosen without measuring, and a winner that does not gain
there is dropped; all of them are, where the models as a whole do not gain.

On a GPU kernels of one model overlap, and a step has no time of its own. There whole models run: all winners against
all choices to beat, and then, the heaviest first, with one winner taken back at a time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from tilewright.tune.choose import Choice

_BETTER = 0.98  # of the time to beat: what a winner must stay under to be tried with the others
# Where one run of a model may take 15% longer than the next, so many turns tell shares apart that differ by 2%.
_TURNS, _LEAST_TURNS = 60, 8
_LEAST_SECONDS, _MOST_SECONDS = 0.5, 20.0  # of the turns of one comparison

Cast = Mapping[str, Choice]  # a choice for every task
# The models once: the seconds of each task, all its calls together; under WHOLE alone where steps overlap.
Run = Callable[[], Mapping[str, float]]
Turn = Sequence[Mapping[str, float]]  # the same for each of several casts, taking turns


WHOLE = ""  # instead of a task's key: all of them
_MOST_TAKEN_BACK = 12  # winners that are tried so
_TAKEN_BACK = 0.99  # of the time with a winner, that the models must take without it


class Models(Protocol):
    """The models that are tuned, with any cast. `by_task`: whether a run has a time for each task."""

    by_task: bool

    def __call__(self, cast: Cast) -> Run | None:
        """None where there is no memory for them."""


@dataclass(frozen=True)
class Verdict:
    """What a task is computed by, the seconds of all its calls in the models, and those of the choice to beat; None
    where they have no time of their own."""

    choice: Choice
    seconds: float | None
    before: float | None


def rehearse(
    models: Models,
    known: Cast,
    contenders: Mapping[str, Sequence[Choice]],
    *,
    deadline: float,
    seed: int = 0,
) -> dict[str, Verdict] | None:
    """A verdict for each task that has contenders, of which the first is the one to beat; `known`: of all others. None
    where the models cannot be run."""
    stage = _Stage(models, Random(seed), deadline)
    if not models.by_task:
        return _rehearse_whole(stage, known, contenders)
    default = {**known, **{key: some[0] for key, some in contenders.items()}}
    most = max(map(len, contenders.values()))
    casts = [
        {**default, **{key: some[number] for key, some in contenders.items() if number < len(some)}}
        for number in range(most)
    ]
    turns = stage.turns(casts)
    if turns is None:
        return None
    before = {key: statistics.median(turn[0][key] for turn in turns) for key in contenders}
    winners = {}
    for key, some in contenders.items():
        shares = [_share(turns, number, key) for number in range(len(some))]
        first = min(range(len(some)), key=lambda number: (shares[number], number))
        if shares[first] <= _BETTER:
            winners[key] = some[first]
    won = stage.confirmed(default, winners)
    return {
        key: Verdict(won[key][0], before[key] * won[key][1], before[key])
        if key in won
        else Verdict(some[0], before[key], before[key])
        for key, some in contenders.items()
    }


def _rehearse_whole(
    stage: _Stage, known: Cast, contenders: Mapping[str, Sequence[Choice]]
) -> dict[str, Verdict] | None:
    """`contenders`: of each task the choice to beat, then the fastest alone first; the heaviest task first."""
    default = {**known, **{key: some[0] for key, some in contenders.items()}}
    winners = {key: some[1] for key, some in contenders.items() if len(some) > 1}
    chosen = {**default, **winners}
    turns = stage.turns([default, chosen])
    if turns is None:
        return None
    if _share(turns, 1) >= 1.0:
        chosen, winners = default, {}
    for key in list(winners)[:_MOST_TAKEN_BACK]:
        if stage.is_late:
            break
        without = {**chosen, key: default[key]}
        turns = stage.turns([chosen, without])
        if turns is not None and _share(turns, 1) <= _TAKEN_BACK:
            chosen = without
    return {key: Verdict(chosen[key], None, None) for key in contenders}


def comparison_seconds(models_seconds: float, casts: int, *, hasty: bool = False) -> float:
    """About what it takes to compare so many casts of models that take so long."""
    turn = 2 * casts * models_seconds
    least = _LEAST_TURNS * turn
    return least if hasty else max(least, min(_TURNS * turn, _MOST_SECONDS), _LEAST_SECONDS)


class _Stage:
    def __init__(self, models: Models, random: Random, deadline: float) -> None:
        self._models, self._random, self._deadline = models, random, deadline

    @property
    def is_late(self) -> bool:
        return time.monotonic() >= self._deadline

    def turns(self, casts: Sequence[Cast]) -> list[Turn] | None:
        """Each cast once in every turn, in any order, for half of the time that is left at most. What another has left
        in the caches is gone by the second of two runs, which is the one that counts."""
        runs = []
        for cast in casts:
            run = self._models(cast)
            if run is None:
                return None
            runs.append(run)
        found: list[Turn] = []
        begin = time.monotonic()
        most = min(_MOST_SECONDS, (self._deadline - begin) / 2)
        while not _suffices(len(found), time.monotonic() - begin, most):
            turn: list[Mapping[str, float]] = [{}] * len(runs)
            for number in self._random.sample(range(len(runs)), len(runs)):
                runs[number]()
                turn[number] = runs[number]()
            found.append(turn)
        return found

    def confirmed(self, default: Cast, winners: Mapping[str, Choice]) -> dict[str, tuple[Choice, float]]:
        """Those that gain together, each with its share of the time to beat; none where there is no time to see it."""
        while winners and time.monotonic() < self._deadline:
            turns = self.turns([default, {**default, **winners}])
            if turns is None:
                break
            shares = {key: _share(turns, 1, key) for key in winners}
            gaining = {key: choice for key, choice in winners.items() if shares[key] < 1.0}
            if gaining == winners:
                together = _share(turns, 1) < 1.0
                return {key: (choice, shares[key]) for key, choice in winners.items()} if together else {}
            winners = gaining
        return {}


def _suffices(turns: int, seconds: float, most: float) -> bool:
    if turns < _LEAST_TURNS:
        return False
    return seconds > most or (turns >= _TURNS and seconds > _LEAST_SECONDS)


def _share(turns: Sequence[Turn], number: int, key: str | None = None) -> float:
    """The time of a cast, of one task or of all, in units of the first's."""
    return statistics.median(
        turn[number][key] / turn[0][key] if key else sum(turn[number].values()) / sum(turn[0].values())
        for turn in turns
    )
