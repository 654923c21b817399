"""The loops that multiply most keep their vectors in registers: depthwise convolutions and chains of two."""

from __future__ import annotations

import pytest

from tests.space.spills import stack_vectors_in_loops
from tests.space.templates.cpu.chains import Chain
from tilewright.graph.task import Task
from tilewright.hw import host
from tilewright.space.template import Work
from tilewright.tune.choose import choose


@pytest.mark.parametrize(
    ("template", "task"),
    [
        ("depthwise", Chain(1, 56, 56, None, 144, None).task()),
        ("depthwise", Chain(1, 14, 14, None, 40, None, stride=(2, 2)).task()),
        ("separable", Chain(1, 14, 14, 96, 576, None).task()),
        ("separable", Chain(1, 14, 14, None, 576, 96).task()),
    ],
)
def test_no_register_tile_spills(template: str, task: Task) -> None:
    choice = choose(Work(task, host()))
    assert choice.config.template == template
    assert stack_vectors_in_loops(choice.program, host()) == 0
