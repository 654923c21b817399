"""A GEMM or convolution and the reduction of its results in two kernels: the same function, and legal configs only."""

from __future__ import annotations

import numpy as np
import pytest

from tests.space.implementations import computed, kernels_of, run_on_a_card
from tests.space.templates.cuda.test_matmul_reduction import over_columns, over_rows, pooled
from tests.space.templates.cuda.tiles import arrays_of
from tilewright.graph.oracle import evaluate
from tilewright.graph.task import Task
from tilewright.hw.gpu import H200, GpuMachine, detect
from tilewright.measure.check import relative_error
from tilewright.space.candidates import Candidates
from tilewright.space.decompositions.fused_reduction import NAME, FusedReduction
from tilewright.space.implementation import Implementation
from tilewright.space.space import Config
from tilewright.space.template import GpuWork
from tilewright.tune.choose import descend

CASES = {
    "mean of 400": lambda: pooled(20, 16, 40),
    "highest of 576": lambda: pooled(24, 8, 16, "amax", window=3),
    "sums of rows": lambda: over_rows(1024, 48, 32, "sum"),
    "sums of columns": lambda: over_columns(70, 512, 32, "sum"),
}


def fastest(task: Task, machine: GpuMachine = H200) -> tuple[Config, Implementation]:
    applied = FusedReduction().apply(GpuWork(task, machine))
    assert applied is not None
    best = descend(applied, GpuWork(task, machine))
    assert best is not None
    made = applied.program(best[1])
    assert isinstance(made, Implementation) and len(made.parts) == 2
    return best[1], made


@pytest.mark.parametrize("name", CASES)
def test_the_parts_mean_the_task(name: str) -> None:
    task = CASES[name]()
    arrays = arrays_of(task)
    _, implementation = fastest(task)
    (expected,) = evaluate(task.graph, arrays, precise=True)
    assert relative_error(computed(implementation, arrays), np.asarray(expected)) < 2e-3


def test_configs_come_back_and_others_are_not_legal() -> None:
    task = CASES["mean of 400"]()
    config, implementation = fastest(task)
    candidates = Candidates.of(GpuWork(task, H200))
    assert candidates.is_legal(config) and candidates.recalled(config) == config
    assert len(candidates.implementation(config).parts) == 2
    assert not any(kernel.resources.spilled_bytes for kernel in kernels_of(implementation, H200))
    for wrong in ({}, {"parts": 5}, {**dict(config.values), "bm": 48}, {**dict(config.values), "parts": 3}):
        assert not candidates.is_legal(Config.of(NAME, wrong))


def test_where_a_tile_has_all_of_it_one_kernel_does_it() -> None:
    """That is a config of the template for sums."""
    assert FusedReduction().apply(GpuWork(pooled(7, 24, 40), H200)) is None
    templates = {
        applied.space.template for applied in Candidates.of(GpuWork(pooled(7, 24, 40), H200)).applied
    }
    assert "tensor-core-matmul-reduction" in templates


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_it_is_right_on_a_card(name: str) -> None:
    task, machine = CASES[name](), detect()
    arrays = arrays_of(task)
    results = run_on_a_card(fastest(task, machine)[1], arrays, machine)
    (expected,) = evaluate(task.graph, arrays, precise=True)
    assert all(result.tobytes() == results[0].tobytes() for result in results)
    assert relative_error(results[0].reshape(task.output.shape), np.asarray(expected)) < 2e-3
