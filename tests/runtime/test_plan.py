"""A plan is checked before it runs: each way in which one can be wrong is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tests.runtime import toys
from tilewright.errors import VerificationError
from tilewright.runtime.plan import Place, Plan, Step, TensorSpec

replace = msgspec.structs.replace


def sound() -> Plan:
    return toys.chain(4).plan


def with_step(plan: Plan, number: int = 1, **changes: Any) -> Plan:
    steps = list(plan.steps)
    steps[number] = replace(steps[number], **changes)
    return replace(plan, steps=tuple(steps))


def with_argument(plan: Plan, position: int, place: Place) -> Plan:
    arguments = list(plan.steps[1].arguments)
    arguments[position] = place
    return with_step(plan, arguments=tuple(arguments))


def with_spec(plan: Plan, **changes: Any) -> Plan:
    return replace(plan, inputs=(replace(plan.inputs[0], **changes),))


def test_a_sound_plan_passes() -> None:
    sound().validate()


def test_it_survives_json() -> None:
    plan = sound()
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: with_step(p, kernel="none"), "no kernel 'none'"),
        (lambda p: with_step(p, task="none"), "no task 'none'"),
        (lambda p: with_step(p, extent=-1), "extent -1"),
        (lambda p: with_step(p, arguments=p.steps[1].arguments[:-1]), "2 arguments for a task with 3"),
        (lambda p: with_argument(p, 0, Place("moon")), "unknown memory 'moon'"),
        (lambda p: with_argument(p, 0, Place("input", 1)), "input 1 of 1"),
        (lambda p: with_argument(p, 0, Place("input", -1)), "input -1 of 1"),
        (lambda p: with_argument(p, 0, Place("constant", 7)), "constant 7 of 2"),
        (lambda p: with_argument(p, 0, Place("arena", 1)), "arena 1 of 1"),
        (lambda p: with_argument(p, 0, Place("arena", 0, -64)), "bytes -64"),
        (lambda p: with_argument(p, 0, Place("arena", 0, p.memory.arena_bytes)), "of arena 0, of"),
        (lambda p: with_argument(p, 0, Place("constant", 0, 64)), "of constant 0, of"),
        (lambda p: with_argument(p, 0, p.steps[1].arguments[2]), "overlaps one of its inputs"),
        (lambda p: with_argument(p, 2, Place("constant", 0)), "writes to constant"),
        (lambda p: with_argument(p, 2, Place("input", 0)), "writes to input"),
        (lambda p: with_argument(p, 2, Place("arena", 0, 8)), "multiple of 64"),
        (lambda p: with_argument(p, 0, Place("arena", 0, 8)), "multiple of 64"),
        (lambda p: with_argument(p, 0, Place("arena", 0, 2, 4096)), "multiple of 4"),
        (lambda p: with_argument(p, 2, Place("arena", 0, 64, 4096)), "a part of a value, where a whole one"),
        (lambda p: with_argument(p, 1, Place("constant", 0, 0, 4096)), "a part of a value, where a whole one"),
        (lambda p: replace(p, steps=p.steps[:-1]), "no step writes output 0"),
        (lambda p: with_spec(p, dtype="f31"), "unknown element type 'f31'"),
        (lambda p: with_spec(p, shape=(-1, 3)), "impossible shape"),
        (lambda p: with_spec(p, shape=(1 << 40, 1 << 40)), "impossible shape"),
        (lambda p: with_spec(p, shape=(1,)), "of input 0, of 4"),
        (lambda p: replace(p, memory=replace(p.memory, arena_bytes=-5)), "negative size"),
        (lambda p: replace(p, target={}), "lacks its triple"),
        (lambda p: replace(p, target={"triple": "x", "features": [1]}), "not names"),
        (lambda p: replace(p, input_tree={"kind": "?"}), "tree is broken"),
        (lambda p: replace(p, input_tree={"kind": "leaf", "index": 0}), "positional and a dict"),
        (lambda p: replace(p, inputs=(*p.inputs, p.inputs[0])), "for 2 inputs"),
        (lambda p: replace(p, output_tree={"kind": "leaf", "index": 1}), "for 1 outputs"),
    ],
)  # fmt: skip
def test_each_mistake_is_found(change: Callable[[Plan], Plan], words: str) -> None:
    with pytest.raises(VerificationError) as caught:
        change(sound()).validate()
    assert words in caught.value.message


def test_a_step_says_which_one_it_is() -> None:
    with pytest.raises(VerificationError, match=r"step 1 \(step1\)"):
        with_step(sound(), kernel="none").validate()


def test_specs_know_their_size() -> None:
    assert TensorSpec("x", "bf16", (3, 5)).bytes == 30
    assert TensorSpec("x", "i64", ()).bytes == 8
    assert str(TensorSpec("x", "f32", (2, 3))) == "f32[2,3]"
    assert isinstance(sound().steps[0], Step)
