"""The last choice inside the models, on models whose tasks take the time that a function says."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.loops.ir import Block, Program
from tilewright.space.space import Config
from tilewright.tune import rehearse as room
from tilewright.tune.choose import Choice
from tilewright.tune.rehearse import Run, Verdict, rehearse

Seconds = Callable[
    [Mapping[str, int]], Mapping[str, float]
]  # of each task, by the contenders that are in the cast


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_LEAST_SECONDS", 0.0)


def contender(number: int) -> Choice:
    return Choice(Program("nothing", (), Block(())), Config.of("told", {"number": number}), None)


class Told:
    """Models whose speed is another in each turn, and the same for all within one."""

    by_task = True

    def __init__(self, seconds: Seconds) -> None:
        self.seconds = seconds
        self.casts: list[dict[str, int]] = []
        self.speeds = Random(0)

    def __call__(self, cast: Mapping[str, Choice]) -> Run:
        numbers = {key: int(str(choice.config["number"])) for key, choice in cast.items()}
        self.casts.append(numbers)
        return lambda: {
            key: each * self.speeds.uniform(1, 1.0001) for key, each in self.seconds(numbers).items()
        }


def rehearsed(
    models: room.Models, sizes: Mapping[str, int], deadline: float = math.inf
) -> dict[str, Verdict]:
    contenders = {key: [contender(number) for number in range(size)] for key, size in sizes.items()}
    verdicts = rehearse(models, {"known": contender(7)}, contenders, deadline=deadline)
    assert verdicts is not None and list(verdicts) == list(sizes)
    return verdicts


def numbers_of(verdicts: Mapping[str, Verdict]) -> dict[str, int]:
    return {key: int(str(verdict.choice.config["number"])) for key, verdict in verdicts.items()}


def test_each_task_is_computed_by_what_is_fastest_there() -> None:
    times = {"a": [2.0, 1.0, 3.0], "b": [1.0, 1.1], "c": [5.0]}
    told = Told(lambda cast: {"known": 1.0, **{key: some[cast[key]] for key, some in times.items()}})
    verdicts = rehearsed(told, {key: len(some) for key, some in times.items()})
    assert numbers_of(verdicts) == {"a": 1, "b": 0, "c": 0}
    assert verdicts["a"].seconds == pytest.approx(1.0, rel=1e-3)
    assert verdicts["a"].before == pytest.approx(2.0, rel=1e-3)
    assert all(cast["known"] == 7 for cast in told.casts)


def test_what_gains_at_the_expense_of_a_neighbour_is_not_taken() -> None:
    """The first task's other way is faster, and leaves the known one's inputs where they are read slowly."""
    told = Told(lambda cast: {"a": 1.0 - 0.2 * cast["a"], "known": 1.0 + 0.5 * cast["a"]})
    assert numbers_of(rehearsed(told, {"a": 2})) == {"a": 0}


def test_what_gains_only_while_another_is_there_is_dropped_and_the_rest_stays() -> None:
    """Both are faster where they are tried first; together the second is not."""

    def seconds(cast: Mapping[str, int]) -> dict[str, float]:
        slow = cast["a"] == 1 and cast["b"] == 2
        return {"a": 1.0 - 0.5 * (cast["a"] == 1), "b": (0.9, 0.95, 1.2 if slow else 0.5)[cast["b"]]}

    assert numbers_of(rehearsed(Told(seconds), {"a": 2, "b": 3})) == {"a": 1, "b": 0}


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_models_are_never_slower_than_without_measuring(data: st.DataObject) -> None:
    """Whatever the tasks take, and whatever one does to the next."""
    keys = ["a", "b", "c"]
    sizes = {key: data.draw(st.integers(1, 3)) for key in keys}
    shares = st.floats(0.5, 2.0)
    own = {(key, number): data.draw(shares) for key in keys for number in range(sizes[key])}
    done = {(key, number): data.draw(shares) for key in keys for number in range(sizes[key])}

    def seconds(cast: Mapping[str, int]) -> dict[str, float]:
        following = zip(keys, keys[1:] + keys[:1], strict=True)
        found = {after: own[after, cast[after]] * done[key, cast[key]] for key, after in following}
        return {**found, "known": 1.0}

    chosen = numbers_of(rehearsed(Told(seconds), sizes))
    before = dict.fromkeys(keys, 0)
    assert sum(seconds(chosen).values()) <= 1.001 * sum(seconds(before).values())


def test_nothing_is_taken_that_there_is_no_time_to_confirm() -> None:
    told = Told(lambda cast: {"a": 2.0 - cast["a"], "known": 1.0})
    assert numbers_of(rehearsed(told, {"a": 2}, deadline=time.monotonic() - 1)) == {"a": 0}


def test_models_that_do_not_fit_into_memory_are_not_rehearsed() -> None:
    class TooLarge:
        by_task = True

        def __call__(self, cast: Mapping[str, Choice]) -> None:
            return None

    assert rehearse(TooLarge(), {}, {"a": [contender(0), contender(1)]}, deadline=math.inf) is None
