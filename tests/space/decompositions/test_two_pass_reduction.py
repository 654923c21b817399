"""Reductions of many rows in parts: the same function, and a choice like any other."""

from __future__ import annotations

import numpy as np
import pytest

from tests.rewrites.helpers import array
from tests.space.checked import Inputs
from tilewright.codegen.cuda.pieces import build_piece
from tilewright.dtypes import DType
from tilewright.graph.op import apply
from tilewright.graph.oracle import evaluate
from tilewright.graph.task import Task
from tilewright.hw.gpu import H200
from tilewright.measure.check import relative_error
from tilewright.space.space import Config
from tilewright.space.templates.cuda.sums import combined_of
from tilewright.space.vendor import tall
from tilewright.space.vendor.candidates import way_of
from tilewright.tune.gpu_rule import choose


def reduced(op: str, rows: int, columns: int, dtype: DType = DType.F16, images: int = 1) -> Task:
    """And something behind it."""
    x = Inputs()
    return x.task(apply("tanh", apply(op, x(images, rows, columns, dtype=dtype), axes=(1,), keepdims=True)))


@pytest.mark.parametrize("op", ["sum", "mean", "amax", "amin"])
@pytest.mark.parametrize("count", [2, 8])
def test_the_pieces_mean_the_task(op: str, count: int) -> None:
    task = reduced(op, 64, 24, images=3)
    way = tall.way_tall(task, count)
    values = {way.inputs[0]: array(3, 64, 24, dtype=DType.F16)}
    for piece in way.pieces:
        (values[piece.result],) = evaluate(
            piece.task.graph, [values[node] for node in piece.operands], precise=True
        )
    (expected,) = evaluate(task.graph, list(values.values())[:1], precise=True)
    assert relative_error(np.asarray(values[way.pieces[-1].result]), np.asarray(expected)) < 1e-3


def test_groups_of_columns_in_parts_mean_the_task() -> None:
    x = Inputs()
    groups = apply("reshape", apply("relu", x(6, 96)), shape=(6, 3, 32))
    highest = apply("amax", groups, axes=(2,), keepdims=False)
    task, of = x.task(apply("tanh", highest)), combined_of(highest)
    assert of is not None and of.parts == 3
    values = {task.graph.inputs[0]: array(6, 96)}
    (expected,) = evaluate(task.graph, list(values.values()))
    pieces = tall.in_parts(task, highest, of, 4)
    for piece in pieces:
        (values[piece.result],) = evaluate(piece.task.graph, [values[node] for node in piece.operands])
    np.testing.assert_array_equal(values[pieces[-1].result], expected)


def test_integers_are_not_summed_in_floats() -> None:
    for dtype in (DType.I8, DType.I64, DType.F64):
        x = Inputs()
        task = x.task(apply("sum", x(65_536, 2_048, dtype=dtype), axes=(0,), keepdims=False))
        assert tall.parts_of(task, H200) is None


def test_it_is_chosen_where_it_pays_and_comes_back_from_its_config() -> None:
    long = reduced("sum", 65_536, 2_048)
    way = choose(long, H200, "fast", ())
    assert way.config.template == tall.NAME and len(way.pieces) == 2
    assert way.pieces[1].config is not None, "few results of many parts, which threads share"
    again = way_of(long, H200, "fast", (), way.config)
    assert again is not None and again.config == way.config
    assert all(build_piece(piece, H200, "fast", None).resources.spilled_bytes == 0 for piece in way.pieces)
    for wrong in ({"count": 3}, {"count": 512, "group": 5, "beside": 1, "lanes": 1}, {}):
        assert way_of(long, H200, "fast", (), Config.of(tall.NAME, wrong)) is None
    for other in (reduced("sum", 512, 512), reduced("sum", 1_000, 64, images=4_096)):
        assert len(choose(other, H200, "fast", ()).pieces) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["mean", "amax"])
def test_it_is_right_on_a_card(op: str) -> None:
    from tilewright.hw.gpu import detect
    from tilewright.measure.gpu_ways import way_plan
    from tilewright.runtime.cuda.executor import GpuExecutor

    machine, task = detect(), reduced(op, 16_384, 520, images=2)
    arrays = [array(2, 16_384, 520, dtype=DType.F16)]
    count = tall.parts_of(task, machine)
    assert count is not None
    plan, constants, objects = way_plan(task, tall.way_tall(task, count), arrays, machine, "fast")
    executor = GpuExecutor(plan, constants, objects)
    results = [np.empty(task.output.shape, np.float16) for _ in range(5)]
    for result in results:
        executor.run(arrays, [result])
    (expected,) = evaluate(task.graph, arrays, precise=True)
    assert all(result.tobytes() == results[0].tobytes() for result in results)
    assert relative_error(results[0], np.asarray(expected)) < 2e-3
