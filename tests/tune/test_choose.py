"""A choice without measurement is legal, repeatable and the best of what the model sees."""

from __future__ import annotations

import pytest

from tests.space.checked import Inputs, error
from tilewright.cost import cpu
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.hw import host
from tilewright.space.template import Work
from tilewright.space.templates.cpu import TEMPLATES
from tilewright.tune.choose import choose, descend


def product(m: int, n: int, k: int) -> Task:
    x = Inputs()
    return x.task(apply("matmul", x(m, k), x(k, n, constant=True)))


@pytest.mark.parametrize("shape", [(1, 64, 64), (5, 33, 17), (40, 48, 30), (3, 2, 2), (64, 5, 9)])
def test_the_choice_is_right_and_the_same_each_time(shape: tuple[int, int, int]) -> None:
    task = product(*shape)
    first, second = choose(Work(task, host())), choose(Work(task, host()))
    assert first.config == second.config and first.config is not None
    assert error(first.program, task) < 1e-5


def test_descending_finds_what_enumerating_would() -> None:
    """On a space small enough to enumerate, within a few per cent of the best prediction."""
    work = Work(product(24, 48, 40), host())
    for template in TEMPLATES:
        applied = template.apply(work)
        if applied is None:
            continue
        found = descend(applied, work)
        best = min(cpu.seconds(applied.terms(c), work.machine) for c in applied.space.configs())
        assert found is not None and found[0] <= 1.1 * best


def test_what_no_template_computes_has_its_default_program() -> None:
    x = Inputs()
    task = x.task(apply("softmax", x(7, 19), axis=1))
    choice = choose(Work(task, host()))
    assert choice.config.template != "contraction"
    assert error(choice.program, task) < 1e-5
