"""Reductions of many rows in two passes: the same function, and a candidate like any other."""

from __future__ import annotations

import numpy as np
import pytest

from tests.rewrites.helpers import array
from tests.space.checked import Inputs
from tests.space.implementations import computed, kernels_of, run_on_a_card
from tilewright.dtypes import DType
from tilewright.graph.combined import combined_of
from tilewright.graph.op import apply
from tilewright.graph.oracle import evaluate
from tilewright.graph.task import Task
from tilewright.hw.gpu import H200, GpuMachine, detect
from tilewright.measure.check import relative_error
from tilewright.space.candidates import Candidates
from tilewright.space.decompositions.two_pass_reduction import NAME, TwoPassReduction, in_parts
from tilewright.space.implementation import Implementation
from tilewright.space.sketches.cuda.block_reduction import BlockReduction
from tilewright.space.space import Config
from tilewright.space.template import GpuWork
from tilewright.tune.choose import choose, descend


def reduced(op: str, rows: int, columns: int, dtype: DType = DType.F16, images: int = 1) -> Task:
    """And something behind it."""
    x = Inputs()
    return x.task(apply("tanh", apply(op, x(images, rows, columns, dtype=dtype), axes=(1,), keepdims=True)))


def implementation(task: Task, count: int | None = None, machine: GpuMachine = H200) -> Implementation:
    applied = TwoPassReduction().apply(GpuWork(task, machine))
    assert applied is not None
    config = next(config for config in applied.space.configs() if count in (None, config["count"]))
    made = applied.program(config)
    assert isinstance(made, Implementation)
    return made


@pytest.mark.parametrize("op", ["sum", "mean", "amax", "amin"])
@pytest.mark.parametrize("count", [2, 8])
def test_the_parts_mean_the_task(op: str, count: int) -> None:
    task = reduced(op, 256, 24, images=3)
    arrays = [array(3, 256, 24, dtype=DType.F16)]
    (expected,) = evaluate(task.graph, arrays, precise=True)
    found = computed(implementation(task, count), arrays)
    assert relative_error(found, np.asarray(expected)) < 1e-3


def test_groups_of_columns_in_parts_mean_the_task() -> None:
    x = Inputs()
    groups = apply("reshape", apply("relu", x(6, 96)), shape=(6, 3, 32))
    highest = apply("amax", groups, axes=(2,), keepdims=False)
    task, of = x.task(apply("tanh", highest)), combined_of(highest)
    assert of is not None and of.parts == 3
    values = {task.graph.inputs[0]: array(6, 96)}
    (expected,) = evaluate(task.graph, list(values.values()))
    subtasks = in_parts(task, highest, of, 4)
    for subtask in subtasks:
        (values[subtask.result],) = evaluate(subtask.task.graph, [values[node] for node in subtask.operands])
    np.testing.assert_array_equal(values[subtasks[-1].result], expected)


def test_integers_are_not_summed_in_floats() -> None:
    for dtype in (DType.I8, DType.I64, DType.F64):
        x = Inputs()
        task = x.task(apply("sum", x(65_536, 2_048, dtype=dtype), axes=(0,), keepdims=False))
        assert TwoPassReduction().apply(GpuWork(task, H200)) is None


def test_it_is_chosen_where_it_pays_and_comes_back_from_its_config() -> None:
    long = reduced("sum", 65_536, 2_048)
    choice = choose(GpuWork(long, H200))
    assert choice.config.template == NAME and len(choice.implementation.parts) == 2
    assert "group" in dict(choice.config.values), "few results of many parts, which threads share"
    candidates = Candidates.of(GpuWork(long, H200))
    assert candidates.is_legal(choice.config) and candidates.recalled(choice.config) == choice.config
    assert all(kernel.resources.spilled_bytes == 0 for kernel in kernels_of(choice.implementation, H200))
    for wrong in ({"count": 3}, {"count": 512, "group": 5, "results": 1, "lanes": 1}, {}):
        assert not candidates.is_legal(Config.of(NAME, wrong))
    assert len(choose(GpuWork(reduced("sum", 1_000, 64, images=4_096), H200)).implementation.parts) == 1


def test_it_is_no_use_where_one_kernel_fills_the_card_or_the_work_is_short() -> None:
    assert TwoPassReduction().apply(GpuWork(reduced("sum", 1_000, 64, images=4_096), H200)) is None
    short = GpuWork(reduced("sum", 512, 512), H200)
    one = descend(found, short) if (found := BlockReduction().apply(short)) is not None else None
    two = descend(found, short) if (found := TwoPassReduction().apply(short)) is not None else None
    assert one is not None and two is not None and two[0] > 0.9 * one[0], "as good as the same"


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["mean", "amax"])
def test_it_is_right_on_a_card(op: str) -> None:
    machine, task = detect(), reduced(op, 16_384, 520, images=2)
    arrays = [array(2, 16_384, 520, dtype=DType.F16)]
    results = run_on_a_card(implementation(task, machine=machine), arrays, machine)
    (expected,) = evaluate(task.graph, arrays, precise=True)
    assert all(result.tobytes() == results[0].tobytes() for result in results)
    assert relative_error(results[0].reshape(task.output.shape), np.asarray(expected)) < 2e-3
