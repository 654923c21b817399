"""Rounds go where they are worth most: the formula by hand, its laws, and objectives that leave tasks out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.tune.allocate import ALLOCATIONS, Goal, Objective, TaskStanding, gradient, kind_of, next_task


def standing(*times: float, kind: str = "conv", operations: float = 1e6, done: bool = False) -> TaskStanding:
    return TaskStanding(kind, operations, 1.0, list(times), done)


def test_the_gradient_by_hand() -> None:
    """g = 4, three rounds ago 10, four rounds; the similar task reaches 2e6 operations a second."""
    tasks = {"a": standing(10.0, 7.0, 5.0, 4.0, operations=4e6), "b": standing(1.0, operations=2e6)}
    past = (4.0 - 10.0) / 3
    own_hope, similar = 4.0 - 4.0 / 4, 2 * 4e6 / 2e6
    expected = 5 * (0.2 * past + 0.8 * (min(own_hope, similar) - 4.0))
    assert gradient("a", tasks, 5) == pytest.approx(expected)


def test_a_task_far_behind_one_of_its_kind_is_worth_more() -> None:
    slow = [8.0, 8.0, 8.0, 8.0]
    alternative_tasks = {"a": standing(*slow), "b": standing(1.0)}
    alone = {"a": standing(*slow), "b": standing(1.0, kind="softmax")}
    assert gradient("a", alternative_tasks, 1) < gradient("a", alone, 1) < 0


times = st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=8).map(lambda found: sorted(found, reverse=True))


@given(st.lists(times, min_size=1, max_size=5), st.integers(1, 50))
def test_more_rounds_never_make_it_worse(histories: list[list[float]], weight: int) -> None:
    tasks = {str(n): standing(*history) for n, history in enumerate(histories)}
    for task in tasks:
        slope = gradient(task, tasks, weight)
        assert slope < 0 and slope == pytest.approx(weight * gradient(task, tasks, 1))


def test_each_task_has_one_round_first_and_the_largest_goes_first() -> None:
    tasks = {name: standing() for name in "abc"}
    objective = Objective((Goal({"a": 1, "b": 7, "c": 3}),))
    order = []
    while (task := next_task(tasks, objective)) is not None and len(order) < 3:
        order.append(task)
        tasks[task].times.append(1.0)
    assert order == ["b", "c", "a"]


def test_rounds_follow_the_time_and_leave_what_does_not_move() -> None:
    """Two equal tasks; one gets faster each round, the other does not."""
    tasks = {"falling": standing(10.0), "flat": standing(10.0, kind="other")}
    objective = Objective((Goal({"falling": 1, "flat": 1}),))
    given = {"falling": 0, "flat": 0}
    for _ in range(20):
        task = next_task(tasks, objective)
        assert task is not None
        given[task] += 1
        tasks[task].times.append(tasks[task].best * (0.9 if task == "falling" else 1.0))
    assert given["falling"] > 5 and given["flat"] > 0


def test_done_tasks_get_nothing() -> None:
    tasks = {"a": standing(5.0, done=True), "b": standing(1.0)}
    objective = Objective((Goal({"a": 9, "b": 1}),))
    assert next_task(tasks, objective) == "b"
    tasks["b"].done = True
    assert next_task(tasks, objective) is None


def test_a_model_that_is_fast_enough_gets_nothing() -> None:
    tasks = {"mine": standing(5.0), "shared": standing(1.0), "theirs": standing(2.0)}
    goals = (Goal({"mine": 2, "shared": 1}, latency=20.0), Goal({"shared": 1, "theirs": 1}))
    best = {task: each.best for task, each in tasks.items()}
    objective = Objective(goals)
    assert [objective.weight(task, best) for task in tasks] == [0, 1, 1]
    assert next_task(tasks, objective) == "theirs"
    slower = Objective((Goal({"mine": 2, "shared": 1}, latency=10.0), goals[1]))
    assert [slower.weight(task, best) for task in tasks] == [2, 2, 1]


def test_a_task_that_is_fast_enough_gets_nothing() -> None:
    tasks = {"a": standing(5.0), "b": standing(1.0)}
    objective = Objective((Goal({"a": 1, "b": 1}),), enough={"a": 5.0})
    assert next_task(tasks, objective) == "b"
    assert next_task(tasks, Objective(objective.goals, enough={"a": 5.0, "b": 1.0})) is None


def test_equal_tasks_are_taken_in_order() -> None:
    tasks = {name: standing(1.0) for name in ("x", "y", "z")}
    assert next_task(tasks, Objective((Goal(dict.fromkeys(tasks, 1)),))) == "x"


@pytest.mark.parametrize("name", ALLOCATIONS)
def test_every_allocation_takes_one_of_the_tasks_that_are_worth_a_round(name: str) -> None:
    allocation = ALLOCATIONS[name]
    tasks = {"a": standing(5.0, done=True), "b": standing(1.0), "c": standing(), "d": standing(9.0)}
    objective = Objective((Goal({"a": 9, "b": 1, "c": 1, "d": 1}),), enough={"d": 9.0})
    taken = []
    while (task := next_task(tasks, objective, allocation=allocation)) is not None:
        taken.append(task)
        tasks[task].times.append(tasks[task].best)
        tasks[task].done = len(tasks[task].times) == 3
    assert sorted(taken) == ["b", "b", "c", "c", "c"]


def rounds_of(allocation: str, count: int) -> list[str]:
    """Three tasks that get faster by a tenth each round; b is called nine times."""
    tasks = {name: standing() for name in "abc"}
    objective = Objective((Goal({"a": 1, "b": 9, "c": 1}),))
    order = []
    for _ in range(count):
        task = next_task(tasks, objective, allocation=ALLOCATIONS[allocation])
        assert task is not None
        order.append(task)
        tasks[task].times.append(0.9 * tasks[task].best)
    return order


def test_round_robin_gives_every_task_a_round_in_turn() -> None:
    assert rounds_of("round-robin", 7) == ["a", "b", "c", "a", "b", "c", "a"]


def test_heaviest_stays_with_a_task_until_it_is_as_light_as_another() -> None:
    order = rounds_of("heaviest", 30)
    turn = order.index("a")  # b takes as long as one of the others after 21 rounds: 9 * 0.9**21 < 1
    assert set(order[:turn]) == {"b"} and turn == 21


def test_gradient_takes_every_task_once_and_then_the_one_that_is_worth_most() -> None:
    order = rounds_of("gradient", 12)
    assert sorted(order[:3]) == ["a", "b", "c"] and order[0] == "b"
    assert order.count("b") > 6


def test_round_robin_goes_on_with_the_others_while_one_is_measured() -> None:
    tasks = {"a": standing(1.0), "c": standing(1.0, 1.0)}
    objective = Objective((Goal({"a": 1, "b": 1, "c": 1}),))
    assert next_task(tasks, objective, {"b": 1.0}, ALLOCATIONS["round-robin"]) == "a"


def test_the_kind_of_a_task() -> None:
    assert kind_of(["conv", "add", "relu", "add"]) == kind_of(["relu", "conv", "add"]) == "add+conv+relu"
