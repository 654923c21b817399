"""Innermost loops keep their vectors in registers: depthwise convolutions, chains of two and three, attention."""

from __future__ import annotations

import pytest

from tests.space.spills import spilled_vectors_in_loops
from tests.space.templates.cpu.chains import Chain
from tests.space.templates.cpu.test_attention import Problem
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
        ("separable", Chain(1, 14, 14, 96, 576, 96).task()),
        ("attention", Problem(12, 1, 128, 128, 64, 64, False, "none", "heads").task()),
        ("attention", Problem(2, 1, 160, 160, 64, 64, False, "none", "tokens").task()),
        ("attention", Problem(2, 1, 128, 128, 64, 64, True, "added", "heads").task()),
        ("attention", Problem(2, 1, 96, 96, 20, 20, False, "none", "heads").task()),
    ],
)
def test_no_register_tile_spills(template: str, task: Task) -> None:
    choice = choose(Work(task, host()))
    assert choice.config.template == template
    assert spilled_vectors_in_loops(choice.program, host()) == 0
