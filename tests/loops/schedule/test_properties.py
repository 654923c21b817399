"""Whatever sequence of primitives is accepted computes what the expressions say."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.loops.schedule.examples import TASKS, check_meaning, schedules
from tilewright.loops.schedule import Schedule, from_json, outer_product, replay, to_json
from tilewright.loops.text import print_program

QUICK = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
INTRINSICS = [outer_product(2, 1, 4), outer_product(4, 1, 4)]


def constants(data: st.DataObject, count: int) -> list[int]:
    return [number for number in range(count) if data.draw(st.booleans())]


def meaning_is_kept(name: str, effort: settings, *, native: bool) -> None:
    task = TASKS[name]()

    @effort
    @given(st.data())
    def run(data: st.DataObject) -> None:
        start = Schedule.of(*task, constants=constants(data, len(task[1])))
        check_meaning(data.draw(schedules(start)), task, native=native)

    run()


@pytest.mark.parametrize("name", TASKS)
def test_random_schedules_mean_the_expressions(name: str) -> None:
    meaning_is_kept(name, QUICK, native=False)


@pytest.mark.parametrize("name", TASKS)
def test_random_schedules_mean_the_expressions_in_machine_code(name: str) -> None:
    meaning_is_kept(name, settings(QUICK, max_examples=2), native=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_many_random_schedules(name: str) -> None:
    meaning_is_kept(name, settings(QUICK, max_examples=200), native=True)


@pytest.mark.parametrize("name", ["matmul", "conv2d", "softmax"])
def test_a_trace_replayed_gives_the_same_program(name: str) -> None:
    task = TASKS[name]()

    @QUICK
    @given(st.data())
    def run(data: st.DataObject) -> None:
        start = Schedule.of(*task, constants=[0])
        schedule = data.draw(schedules(start))
        again = replay(from_json(to_json(schedule.trace)), Schedule.of(*task, constants=[0]), INTRINSICS)
        assert print_program(again.program()) == print_program(schedule.program())
        assert again.trace == schedule.trace

    run()
