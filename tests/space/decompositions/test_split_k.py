"""Products summed in parts, on cards without clusters: the same function, and a choice like any other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.rewrites.helpers import array
from tests.space.checked import Inputs
from tilewright.codegen.cuda.pieces import build_piece
from tilewright.dtypes import DType
from tilewright.graph.op import apply
from tilewright.graph.oracle import evaluate
from tilewright.graph.task import Task
from tilewright.hw.gpu import A100, H200
from tilewright.measure.check import relative_error
from tilewright.space.space import Config
from tilewright.space.vendor import split
from tilewright.space.vendor.candidates import way_of
from tilewright.tune.gpu_rule import choose


def product(op: str, m: int = 6, k: int = 512, n: int = 24) -> Task:
    x = Inputs()
    weight = (n, k) if op == "linear" else (k, n)
    total = apply(op, x(2, m // 2, k, dtype=DType.F16), x(*weight, constant=True, dtype=DType.F16))
    return x.task(apply("relu", apply("add", total, x(n, constant=True, dtype=DType.F16))))


@pytest.mark.parametrize("op", ["matmul", "linear"])
@pytest.mark.parametrize("parts", [2, 4])
def test_the_pieces_mean_the_task(op: str, parts: int) -> None:
    task = product(op)
    way = split.way_in_parts(task, parts, None)
    arrays = [array(*n.shape, seed=i, dtype=n.dtype) for i, n in enumerate(task.graph.inputs)]
    values = dict(zip(way.inputs, arrays, strict=True))
    for piece in way.pieces:
        (values[piece.result],) = evaluate(
            piece.task.graph, [np.asarray(values[node]) for node in piece.operands], precise=True
        )
    (expected,) = evaluate(task.graph, arrays, precise=True)
    assert relative_error(np.asarray(values[way.pieces[-1].result]), np.asarray(expected)) < 1e-6


def test_it_is_chosen_where_it_pays_and_comes_back_from_its_config() -> None:
    long = product("matmul", 64, 8192, 256)
    way = choose(long, A100, "fast", ())
    assert way.config.template == split.NAME and len(way.pieces) == 2
    again = way_of(long, A100, "fast", (), way.config)
    assert again is not None and again.config == way.config
    assert all(build_piece(piece, A100, "fast", None).resources.spilled_bytes == 0 for piece in way.pieces)
    assert way_of(long, A100, "fast", (), Config.of(split.NAME, {"count": 3})) is None
    assert choose(long, H200, "fast", ()).config.template != split.NAME, "clusters add up faster"
    assert len(choose(product("matmul", 4096, 512, 4096), A100, "fast", ()).pieces) == 1


@pytest.mark.gpu
def test_it_is_right_on_a_card() -> None:
    from tilewright.hw.gpu import detect
    from tilewright.measure.gpu_ways import way_plan
    from tilewright.runtime.cuda.executor import GpuExecutor

    machine = replace(detect(), clusters=False)
    task = product("linear", 64, 4096, 200)
    arrays = [array(*n.shape, seed=i, dtype=n.dtype) for i, n in enumerate(task.graph.inputs)]
    way = choose(task, machine, "fast", ())
    assert way.config.template == split.NAME
    plan, constants, objects = way_plan(task, way, arrays, machine, "fast")
    executor = GpuExecutor(plan, constants, objects)
    results = [np.empty(task.output.shape, np.float16) for _ in range(5)]
    for result in results:
        executor.run([arrays[0]], [result])
    (expected,) = evaluate(task.graph, arrays, precise=True)
    assert all(result.tobytes() == results[0].tobytes() for result in results)
    assert relative_error(results[0], np.asarray(expected)) < 2e-3
