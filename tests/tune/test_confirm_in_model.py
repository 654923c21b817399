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
from tilewright.tune import confirm_in_model as room
from tilewright.tune.choose import Choice
from tilewright.tune.confirm_in_model import WHOLE, Confirmed, ModelRun, confirm_in_model

Seconds = Callable[
    [Mapping[str, int]], Mapping[str, float]
]  # of each task, by the alternatives in the assignment


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_MIN_SECONDS", 0.0)


def alternative(number: int) -> Choice:
    return Choice(Program("nothing", (), Block(())), Config.of("told", {"number": number}), None)


class Told:
    """Models whose speed is another in each turn, and the same for all within one."""

    by_task = True

    def __init__(self, seconds: Seconds) -> None:
        self.seconds = seconds
        self.assignments: list[dict[str, int]] = []
        self.speeds = Random(0)

    def __call__(self, assignment: Mapping[str, Choice]) -> ModelRun:
        numbers = {key: int(str(choice.config["number"])) for key, choice in assignment.items()}
        self.assignments.append(numbers)
        return lambda: {
            key: each * self.speeds.uniform(1, 1.0001) for key, each in self.seconds(numbers).items()
        }


def rehearsed(
    models: room.Models, sizes: Mapping[str, int], deadline: float = math.inf
) -> dict[str, Confirmed]:
    alternatives = {key: [alternative(number) for number in range(size)] for key, size in sizes.items()}
    confirmed_choices = confirm_in_model(models, {"known": alternative(7)}, alternatives, deadline=deadline)
    assert confirmed_choices is not None and list(confirmed_choices) == list(sizes)
    return confirmed_choices


def numbers_of(confirmed_choices: Mapping[str, Confirmed]) -> dict[str, int]:
    return {
        key: int(str(confirmed_choice.choice.config["number"]))
        for key, confirmed_choice in confirmed_choices.items()
    }


def test_each_task_is_computed_by_what_is_fastest_there() -> None:
    times = {"a": [2.0, 1.0, 3.0], "b": [1.0, 1.1], "c": [5.0]}
    told = Told(
        lambda assignment: {"known": 1.0, **{key: some[assignment[key]] for key, some in times.items()}}
    )
    confirmed_choices = rehearsed(told, {key: len(some) for key, some in times.items()})
    assert numbers_of(confirmed_choices) == {"a": 1, "b": 0, "c": 0}
    assert confirmed_choices["a"].seconds == pytest.approx(1.0, rel=1e-3)
    assert confirmed_choices["a"].before == pytest.approx(2.0, rel=1e-3)
    assert all(assignment["known"] == 7 for assignment in told.assignments)


def test_what_gains_at_the_expense_of_a_neighbour_is_not_taken() -> None:
    """The first task's other way is faster, and leaves the known one's inputs where they are read slowly."""
    told = Told(lambda assignment: {"a": 1.0 - 0.2 * assignment["a"], "known": 1.0 + 0.5 * assignment["a"]})
    assert numbers_of(rehearsed(told, {"a": 2})) == {"a": 0}


def test_what_gains_only_while_another_is_there_is_dropped_and_the_rest_stays() -> None:
    """Both are faster where they are tried first; together the second is not."""

    def seconds(assignment: Mapping[str, int]) -> dict[str, float]:
        slow = assignment["a"] == 1 and assignment["b"] == 2
        return {
            "a": 1.0 - 0.5 * (assignment["a"] == 1),
            "b": (0.9, 0.95, 1.2 if slow else 0.5)[assignment["b"]],
        }

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

    def seconds(assignment: Mapping[str, int]) -> dict[str, float]:
        following = zip(keys, keys[1:] + keys[:1], strict=True)
        found = {
            after: own[after, assignment[after]] * done[key, assignment[key]] for key, after in following
        }
        return {**found, "known": 1.0}

    chosen = numbers_of(rehearsed(Told(seconds), sizes))
    before = dict.fromkeys(keys, 0)
    assert sum(seconds(chosen).values()) <= 1.001 * sum(seconds(before).values())


def test_nothing_is_taken_that_there_is_no_time_to_confirm() -> None:
    told = Told(lambda assignment: {"a": 2.0 - assignment["a"], "known": 1.0})
    assert numbers_of(rehearsed(told, {"a": 2}, deadline=time.monotonic() - 1)) == {"a": 0}


def test_models_that_do_not_fit_into_memory_are_not_rehearsed() -> None:
    class TooLarge:
        by_task = True

        def __call__(self, assignment: Mapping[str, Choice]) -> None:
            return None

    assert (
        confirm_in_model(TooLarge(), {}, {"a": [alternative(0), alternative(1)]}, deadline=math.inf) is None
    )


# -- models of which only the whole has a time, as on a GPU ------------------------------------------------------------


class Whole(Told):
    by_task = False

    def __call__(self, assignment: Mapping[str, Choice]) -> ModelRun:
        run = super().__call__(assignment)
        return lambda: {WHOLE: sum(run().values())}


def changed(by: Mapping[str, float]) -> Whole:
    """Each winner changes the models' time by so much, of ten seconds."""
    return Whole(lambda assignment: {"all": 10.0 + sum(by[key] * assignment[key] for key in by)})


def test_one_harmful_winner_does_not_cost_the_others() -> None:
    by = {**{f"t{number}": -0.5 for number in range(7)}, "harmful": 9.0}
    assert numbers_of(rehearsed(changed(by), dict.fromkeys(by, 2))) == {key: int(by[key] < 0) for key in by}


def test_a_harmful_winner_is_found_wherever_it_is() -> None:
    for harmful in range(5):
        by = {str(number): 9.0 if number == harmful else -0.5 for number in range(5)}
        assert numbers_of(rehearsed(changed(by), dict.fromkeys(by, 2))) == {
            key: int(by[key] < 0) for key in by
        }


def test_the_comparisons_of_whole_models_are_bounded() -> None:
    by = {str(number): 0.5 for number in range(64)}
    told = changed(by)
    assert set(numbers_of(rehearsed(told, dict.fromkeys(by, 2))).values()) == {0}
    assert len(told.assignments) <= 2 * (1 + room._MAX_COMPARISONS)


def test_without_time_for_more_no_winner_is_kept_that_may_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_MAX_COMPARISONS", 0)
    by = {"a": -0.5, "b": 9.0}
    assert numbers_of(rehearsed(changed(by), dict.fromkeys(by, 2))) == {"a": 0, "b": 0}


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-1.0, 1.0), min_size=1, max_size=6))
def test_whole_models_are_never_slower_than_without_measuring(changes: list[float]) -> None:
    by = {str(number): change for number, change in enumerate(changes)}
    chosen = numbers_of(rehearsed(changed(by), dict.fromkeys(by, 2)))
    assert sum(by[key] * chosen[key] for key in by) <= 1e-2
