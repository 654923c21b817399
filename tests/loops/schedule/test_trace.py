"""A trace is plain data, and doing it again gives the same schedule."""

from __future__ import annotations

import json

import pytest

from tests.loops import formulas
from tests.loops.schedule.examples import chain
from tilewright.errors import ScheduleError
from tilewright.loops.schedule import Schedule, from_json, outer_product, replay, to_json
from tilewright.loops.text import print_program


def test_it_is_a_list_of_names_and_numbers() -> None:
    schedule = Schedule.of(*chain()).inline("moved").split("out.i1", 4, tail="shift", into=("a", "b"))
    assert json.loads(to_json(schedule.trace)) == [
        {"primitive": "inline", "stage": "moved"},
        {"primitive": "split", "loop": "out.i1", "factor": 4, "tail": "shift", "into": ["a", "b"]},
    ]
    assert str(schedule.trace[0]) == "inline(stage='moved')"
    assert repr(schedule).startswith("<schedule of kernel: inline(stage='moved'); split(")


def test_replay_on_another_task_of_the_same_stages() -> None:
    """The trace names loops, not sizes: it fits wherever its steps are legal."""
    small = (
        Schedule.of(*formulas.matmul(6, 16, 4))
        .tile(["out.i0", "out.i1"], [3, 8])
        .compute_at("product", "out.i1.o")
    )
    large = replay(small.trace, Schedule.of(*formulas.matmul(12, 64, 9)))
    assert large.trace == small.trace
    with pytest.raises(ScheduleError, match=r"3 does not divide loop out\.i0"):
        replay(small.trace, Schedule.of(*formulas.matmul(7, 64, 9)))


def test_intrinsics_go_by_name() -> None:
    start = Schedule.of(*formulas.matmul(6, 16, 4))
    schedule = start.reorder("product.r0", "product.i0", "product.i1").tensorise(
        "product.i0", outer_product(6, 2, 8)
    )
    again = replay(from_json(to_json(schedule.trace)), start, [outer_product(6, 2, 8)])
    assert print_program(again.program()) == print_program(schedule.program())
    with pytest.raises(ScheduleError, match="no intrinsic outer_product_6x16 was declared; there are: none"):
        replay(schedule.trace, start)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[", "a trace is JSON"),
        ("{}", "a list of objects"),
        ('[{"loop": "i"}]', "a list of objects"),
        ('[{"primitive": "exec"}]', "the primitive must be one of .*, got exec"),
        ('[{"primitive": "split", "loop": "i"}]', "split needs an argument factor"),
        ('[{"primitive": "split", "loop": "i", "factor": "2"}]', "split: factor cannot be '2'"),
        ('[{"primitive": "split", "loop": "i", "factor": 2, "nest": 1}]', "split takes no argument nest"),
        ('[{"primitive": "pack", "tensor": "b", "blocks": [1, "2"]}]', "pack: blocks cannot be"),
        ('[{"primitive": "reorder", "loops": "ij"}]', "reorder: loops cannot be 'ij'"),
    ],
)
def test_what_is_no_trace_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ScheduleError, match=complaint):
        from_json(text)
