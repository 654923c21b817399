"""Every legal config of every sketch computes its task: any class of tasks, odd sizes, one thread and two."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.space.checked import Inputs
from tests.space.sketches.meaning import check_meaning, some_configs
from tests.space.sketches.tasks import EXAMPLES, matmul, tasks, two_convs
from tilewright.graph.ir import constant
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.hw import host
from tilewright.loops.verify import verify_program
from tilewright.space.sketches import derive
from tilewright.space.template import Work


@given(task=tasks(), seed=st.integers(0, 10_000))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_task_and_any_config(task: Task, seed: int) -> None:
    """Interpreted: thousands more, by the command in `meaning.py`."""
    rng = random.Random(seed)
    found = list(some_configs(task, rng, 1))
    assert found, "every one of these tasks has a sketch"
    check_meaning(*rng.choice(found), task, native=False)


@pytest.mark.parametrize("name", EXAMPLES)
def test_machine_code(name: str) -> None:
    """Any sketch of each, and any config of it."""
    task = EXAMPLES[name]()
    rng = random.Random(name)
    found = list(some_configs(task, rng, 1))
    assert found
    check_meaning(*rng.choice(found), task)


@pytest.mark.parametrize("name", EXAMPLES)
def test_legal_configs_have_programs(name: str) -> None:
    """What `legal` lets through, no primitive refuses."""
    task = EXAMPLES[name]()
    for applied, config in some_configs(task, random.Random(1), 1):
        verify_program(applied.program(config))


def test_partial_sums() -> None:
    """Blocks of a sum that are added up in memory, with blocks that do not divide the rows."""
    task = matmul(50, 192, 40)
    (applied, *_) = derive(Work(task, host()))
    configs = [config for config in applied.space.configs() if config["k_block"] and config["block"]]
    assert configs
    for config in random.Random(0).sample(configs, 2):
        check_meaning(applied, config, task)


def test_lanes_are_combined_inside_a_border() -> None:
    """A product in the lanes of a vector, computed where a padded window reads it: beyond the border there is none."""
    task = two_convs(4, 2, 1, 1)
    found = [
        (applied, config)
        for applied, config in some_configs(task, random.Random(1), 1)
        if config.template.endswith("rfactor")
    ]
    assert found
    for applied, config in found:
        check_meaning(applied, config, task)


def test_a_stage_that_nothing_reads_any_more() -> None:
    """What is looked up in an axis of one element is known without the index."""
    x = Inputs()
    looked_up = apply("take", x(1, 3, 20), constant(np.array([-1])), axis=0)
    task = x.task(looked_up)
    ((applied, config),) = some_configs(task, random.Random(0), 1)
    check_meaning(applied, config, task)
