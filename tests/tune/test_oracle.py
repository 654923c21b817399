"""What is predicted for rewrites, and what the layout pass makes of it on networks whose best layout is plain."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tests.machines import ICE_LAKE, ZEN_4
from tests.rewrites.helpers import (
    assert_close,
    assert_same_function,
    conv,
    graph_of,
    inputs_for,
    weight,
    x_input,
)
from tests.space.checked import Inputs
from tilewright.dtypes import DType
from tilewright.graph.ir import Graph, Node, TensorType, constant, input_node
from tilewright.graph.op import apply
from tilewright.graph.oracle import evaluate
from tilewright.measure.passes import run_calls
from tilewright.rewrites.layout import permuted_bytes
from tilewright.rewrites.layout_assignment import assign, solve
from tilewright.rewrites.partition import partition
from tilewright.rewrites.pipeline import rewrite, run_pipeline
from tilewright.space.template import Work
from tilewright.tune import oracle as predictions
from tilewright.tune.choose import choose
from tilewright.tune.oracle import PredictedCosts

# What is decided must not depend on where the tests run.
MACHINE = ICE_LAKE
ORACLE = PredictedCosts(MACHINE)
ONE = ((1, 1), (1, 1))


def pool(x: Node) -> Node:
    attrs: dict[str, Any] = {"kernel": (2, 2), "stride": (2, 2), "padding": (0, 0), "ceil_mode": False}
    return apply("max_pool", x, **attrs, dilation=(1, 1), layout="channels_first")


def layouts(graph: Graph) -> set[str]:
    return {node.attrs["layout"] for node in graph.nodes() if "layout" in node.attrs}


def laid_out(*outputs: Node) -> Graph:
    before = graph_of(*outputs)
    after = rewrite(before, oracle=ORACLE)
    assert_same_function(before, after, tolerance=1e-6)
    return after


# -- predictions ------------------------------------------------------------------------------------------------------


def test_a_task_takes_what_its_best_config_is_predicted_to_take() -> None:
    x = Inputs()
    task = x.task(apply("matmul", x(24, 40), x(40, 48, constant=True)))
    assert ORACLE.seconds(task) == choose(Work(task, MACHINE)).seconds
    assert ORACLE.upper_bound(task) == (ORACLE.seconds(task), True)


def test_a_quick_answer_is_a_kernels_but_may_not_be_the_bests() -> None:
    x = Inputs()
    convolution = conv(
        x(1, 30, 30, 64), x(3, 3, 64, 64, constant=True), padding=((0, 0), (0, 0)), layout="channels_last"
    )
    task = x.task(convolution)
    seconds, best = ORACLE.upper_bound(task)
    assert not best and seconds > ORACLE.seconds(task)  # a direct convolution, and Winograd's


@pytest.mark.parametrize("op", ["relu", "exp"])
def test_what_has_no_template_is_counted(op: str) -> None:
    small, large = Inputs(), Inputs()
    times = [ORACLE.seconds(x.task(apply(op, x(n, 64)))) for x, n in ((small, 64), (large, 1024))]
    assert 8 * times[0] < times[1] < 32 * times[0]


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_a_template_without_a_legal_config_leaves_the_default_program(batch: int) -> None:
    """Of an image of 1072 channels in blocks no template has a config once the batch is larger than 1."""
    x, shape = input_node(0, TensorType((batch, 67, 14, 9, 16), DType.F32)), (3, 3, 1072, 24)
    border = {"low": (0, 0, 1, 1, 0), "high": (0, 0, 1, 1, 0), "interior": (0,) * 5, "value": 0.0}
    window = {"stride": (1, 1), "padding": ((0, 0), (0, 0)), "dilation": (1, 1), "groups": 1}
    weights = constant(np.broadcast_to(np.float32(0), shape))
    convolved = apply("conv", apply("pad", x, **border), weights, **window, layout="channels_by_8")
    (call,) = partition(Graph((x,), (convolved,))).calls
    for machine in (MACHINE, ZEN_4):
        costs = PredictedCosts(machine)
        assert math.isfinite(costs.seconds(call.task))
        assert math.isfinite(costs.upper_bound(call.task)[0])
        assert choose(Work(call.task, machine)).program


def test_predictions_are_made_once() -> None:
    def asked() -> float:
        x = Inputs()
        return ORACLE.seconds(x.task(apply("matmul", x(3, 5), x(5, 16, constant=True))))

    first = asked()
    misses = predictions._prediction.cache_info().misses
    assert asked() == first and predictions._prediction.cache_info().misses == misses


@pytest.mark.parametrize("shape", [(1, 64, 56, 56), (1, 3, 64, 64), (2, 5, 7, 3)])
def test_a_permute_costs_less_in_company(shape: tuple[int, ...]) -> None:
    kind = TensorType(shape, DType.F32)
    alone = ORACLE.permute_seconds(kind, (0, 2, 3, 1))
    assert 0 <= ORACLE.permute_seconds(kind, (0, 2, 3, 1), alone=False) < alone


# -- layouts ----------------------------------------------------------------------------------------------------------


def test_wide_convolutions_are_channels_last() -> None:
    x = x_input(1, 64, 28, 28)
    for seed in range(3):
        x = apply("relu", conv(x, weight(64, 64, 3, 3, seed=seed), padding=ONE))
    after = laid_out(x)
    assert layouts(after) == {"channels_last"}
    assert permuted_bytes(after) == 2 * x.type.bytes


def test_a_lone_strided_convolution_needs_no_permute() -> None:
    x = conv(x_input(1, 16, 29, 29), weight(32, 16, 3, 3), stride=(2, 2))
    assert layouts(laid_out(x)) == {"channels_first"}


def test_convolutions_of_few_channels_stay_as_they_came() -> None:
    x = x_input(1, 3, 64, 64)
    for seed in range(3):
        x = apply("relu", conv(x, weight(3, 3, 3, 3, seed=seed), padding=ONE))
    after = laid_out(x)
    assert layouts(after) == {"channels_first"} and not permuted_bytes(after)


def test_one_product_over_channels_stays_as_it_came() -> None:
    after = laid_out(conv(x_input(1, 64, 32, 32), weight(64, 64, 1, 1)))
    assert layouts(after) == {"channels_first"} and not permuted_bytes(after)


def test_pools_between_elementwise_work_stay_as_they_came() -> None:
    x = pool(apply("tanh", pool(apply("sigmoid", x_input(1, 64, 56, 56)))))
    after = laid_out(apply("exp", x))
    assert layouts(after) == {"channels_first"} and not permuted_bytes(after)


def test_between_convolutions_they_are_as_those_are() -> None:
    x = conv(x_input(1, 32, 32, 32), weight(64, 32, 3, 3), padding=ONE)
    x = pool(apply("tanh", pool(apply("sigmoid", x))))
    x = conv(x, weight(64, 64, 3, 3), padding=ONE)
    assert layouts(laid_out(apply("mean", x, axes=(2, 3), keepdims=False))) == {"channels_last"}


def test_an_image_is_read_as_it_comes_and_written_channels_last() -> None:
    x = conv(x_input(1, 3, 65, 65), weight(64, 3, 7, 7), stride=(2, 2), padding=((3, 3), (3, 3)))
    for seed in range(2):
        x = conv(apply("relu", x), weight(64, 64, 3, 3, seed=seed), padding=ONE)
    after = laid_out(apply("mean", x, axes=(2, 3), keepdims=False))
    assert layouts(after) == {"channels_by_64", "channels_last"} and not permuted_bytes(after)
    first = run_pipeline(graph_of(x), oracle=ORACLE).calls[0].task.graph
    assert [node.op for node in first.nodes() if not node.is_input][:2] == ["pad", "conv"]


def test_large_windows_over_many_channels_are_in_blocks() -> None:
    x = x_input(1, 512, 28, 28)
    for seed in range(4):
        depthwise = conv(x, weight(512, 1, 5, 5, seed=seed), padding=((2, 2), (2, 2)), groups=512)
        x = apply("add", apply("relu", depthwise), weight(512, 1, 1, seed=seed))
    after = rewrite(graph_of(apply("mean", x, axes=(2, 3), keepdims=False)), oracle=ORACLE)
    assert layouts(after) == {"channels_by_16"}
    assert permuted_bytes(after) == x.type.bytes


zoo = pytest.importorskip("tilewright.zoo")
torch_export = pytest.importorskip("tilewright.frontend.torch_export")


@pytest.mark.parametrize(
    "name",
    ["resnet18", "vgg16", "mobilenetv2", "unet", pytest.param("retinanet", marks=pytest.mark.slow)],
)
def test_models(name: str) -> None:
    """The same function, and no worse than either layout everywhere."""
    inputs = zoo.example_inputs(name, small=True)
    graph: Graph = torch_export.import_torch(zoo.build(name, small=True), inputs).graph
    arrays = inputs_for(graph)
    assert_close(run_calls(run_pipeline(graph, oracle=ORACLE), arrays), evaluate(graph, arrays), 1e-6)
    graph = rewrite(graph)
    best, costs = assign(graph, ORACLE)
    for layout in ("channels_first", "channels_last"):
        everywhere = solve(graph, costs, lambda node, way, layout=layout: way.layout == layout)
        assert best.total <= everywhere.total * (1 + 1e-9)
