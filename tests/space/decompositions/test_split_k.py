"""Split-K on cards without clusters: the same function, and a candidate like any other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.rewrites.helpers import array
from tests.space.checked import Inputs
from tests.space.implementations import computed, kernels_of, run_on_a_card
from tilewright.dtypes import DType
from tilewright.graph.op import apply
from tilewright.graph.oracle import evaluate
from tilewright.graph.task import Task
from tilewright.hw.gpu import A100, H200
from tilewright.measure.check import relative_error
from tilewright.space.candidates import Candidates
from tilewright.space.decompositions.split_k import NAME, SplitK
from tilewright.space.implementation import Implementation
from tilewright.space.space import Config
from tilewright.space.template import GpuWork
from tilewright.tune.choose import choose, ranked


def product(op: str, m: int = 6, k: int = 512, n: int = 24) -> Task:
    x = Inputs()
    weight = (n, k) if op == "linear" else (k, n)
    total = apply(op, x(2, m // 2, k, dtype=DType.F16), x(*weight, constant=True, dtype=DType.F16))
    return x.task(apply("relu", apply("add", total, x(n, constant=True, dtype=DType.F16))))


@pytest.mark.parametrize("op", ["matmul", "linear"])
@pytest.mark.parametrize("count", [2, 4])
def test_the_parts_mean_the_task(op: str, count: int) -> None:
    task = product(op, k=1024)
    implementation = split(task, count)
    assert [part.result.shape[0] for part in implementation.parts[:1]] == [count]
    arrays = [array(*n.shape, seed=i, dtype=n.dtype) for i, n in enumerate(task.graph.inputs)]
    (expected,) = evaluate(task.graph, arrays, precise=True)
    assert relative_error(computed(implementation, arrays), np.asarray(expected)) < 1e-6


def split(task: Task, count: int) -> Implementation:
    applied = SplitK().apply(GpuWork(task, A100))
    assert applied is not None
    config = next(config for config in applied.space.configs() if config["count"] == count)
    made = applied.program(config)
    assert isinstance(made, Implementation) and len(made.parts) == 2
    return made


def test_it_is_chosen_where_it_pays_and_comes_back_from_its_config() -> None:
    long = product("matmul", 64, 8192, 256)
    choice = choose(GpuWork(long, A100))
    assert choice.config.template == NAME and len(choice.implementation.parts) == 2
    candidates = Candidates.of(GpuWork(long, A100))
    assert candidates.is_legal(choice.config) and candidates.recalled(choice.config) == choice.config
    assert all(kernel.resources.spilled_bytes == 0 for kernel in kernels_of(choice.implementation, A100))
    for wrong in ({"count": 3}, {**dict(choice.config.values), "count": 3}, {}):
        assert not candidates.is_legal(Config.of(NAME, wrong))
    assert SplitK().apply(GpuWork(long, H200)) is None, "blocks of a cluster add up without a second kernel"
    assert len(choose(GpuWork(product("matmul", 4096, 512, 4096), A100)).implementation.parts) == 1


def test_the_number_of_parts_is_a_knob_like_any_other() -> None:
    applied = SplitK().apply(GpuWork(product("matmul", 64, 8192, 256), A100))
    assert applied is not None
    assert {config["count"] for config in applied.space.configs()} == {2, 4, 8}
    times = ranked(applied, GpuWork(product("matmul", 64, 8192, 256), A100))
    assert times[0][1]["count"] == 8, (
        "more parts, more blocks: 4 blocks of 108 multiprocessors have work otherwise"
    )


@pytest.mark.gpu
def test_it_is_right_on_a_card() -> None:
    from tilewright.hw.gpu import detect

    machine = replace(detect(), clusters=False)
    task = product("linear", 64, 4096, 200)
    arrays = [array(*n.shape, seed=i, dtype=n.dtype) for i, n in enumerate(task.graph.inputs)]
    choice = choose(GpuWork(task, machine))
    assert choice.config.template == NAME
    results = run_on_a_card(choice.implementation, arrays, machine)
    (expected,) = evaluate(task.graph, arrays, precise=True)
    assert all(result.tobytes() == results[0].tobytes() for result in results)
    assert relative_error(results[0].reshape(task.output.shape), np.asarray(expected)) < 2e-3
