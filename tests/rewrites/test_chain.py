"""Which convolutions around a depthwise one share its kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.rewrites.helpers import assert_close, conv, graph_of, inputs_for, weight, x_input
from tilewright.graph.ir import Node
from tilewright.graph.op import apply
from tilewright.graph.oracle import evaluate
from tilewright.graph.separable import separable_of
from tilewright.measure.passes import run_calls
from tilewright.rewrites.chain import gain
from tilewright.rewrites.partition import partition


def pointwise(x: Node, channels: int, seed: int = 1) -> Node:
    result = conv(x, weight(1, 1, x.shape[-1], channels, seed=seed), layout="channels_last")
    return apply("add", result, weight(channels, seed=seed + 1))


def padded(x: Node) -> Node:
    sides = (0, 1, 1, 0)
    return apply("pad", x, low=sides, high=sides, interior=(0, 0, 0, 0), value=0.0)


def depthwise(x: Node, stride: int = 1) -> Node:
    channels = x.shape[-1]
    window = weight(3, 3, 1, channels, seed=3)
    return conv(padded(x), window, layout="channels_last", groups=channels, stride=(stride, stride))


def relu(x: Node) -> Node:
    return apply("clamp", x, min=0.0, max=6.0)


def labels(*outputs: Node) -> list[str]:
    graph = graph_of(*outputs)
    result = partition(graph)
    inputs = inputs_for(graph)
    assert_close(run_calls(result, inputs), evaluate(graph, inputs), 1e-12)
    for task, _ in result.tasks().values():
        if task.label.count("conv") > 1:
            assert separable_of(task) is not None
    return [call.task.label for call in result.calls]


IMAGE = x_input(1, 28, 28, 8)


def test_an_inverted_residual_block_is_one_task() -> None:
    block = apply("add", IMAGE, pointwise(relu(depthwise(relu(pointwise(IMAGE, 48)))), 8))
    assert len(labels(block)) == 1


def test_either_side_may_be_absent() -> None:
    assert len(labels(relu(depthwise(relu(pointwise(IMAGE, 48)))))) == 1
    assert len(labels(pointwise(relu(depthwise(IMAGE)), 16))) == 1


def test_a_few_rows_of_many_channels_are_not_projected_in_parts() -> None:
    image = x_input(1, 7, 7, 160)
    block = pointwise(relu(depthwise(relu(pointwise(image, 960)))), 160)
    assert labels(block) == ["conv+add+clamp+pad+conv+clamp", "conv+add"]


def test_two_blocks_in_a_row_stay_two() -> None:
    first = pointwise(relu(depthwise(relu(pointwise(IMAGE, 48)))), 8)
    second = pointwise(relu(depthwise(relu(pointwise(first, 48, 5)))), 8, 7)
    assert len(labels(second)) == 2


def test_what_is_read_elsewhere_is_written() -> None:
    expanded = relu(pointwise(IMAGE, 48))
    filtered = relu(depthwise(expanded))
    assert len(labels(pointwise(filtered, 8), expanded)) == 2
    assert len(labels(pointwise(filtered, 8), filtered)) == 2
    assert len(labels(apply("add", filtered, expanded))) == 2


def test_what_the_kernel_cannot_compute_is_not_joined() -> None:
    expanded = relu(pointwise(IMAGE, 48))
    row = weight(1, 28, 1, 48, seed=9)
    assert len(labels(apply("mul", depthwise(expanded), row))) == 2
    wide = conv(depthwise(expanded), weight(3, 3, 48, 8), layout="channels_last")
    assert len(labels(wide)) == 2


@pytest.mark.parametrize("parts", [1, 2, 8])
def test_more_parts_gain_less(parts: int) -> None:
    block = pointwise(relu(depthwise(relu(pointwise(IMAGE, 48)))), 8)
    (call,) = partition(graph_of(block)).calls
    chain = separable_of(call.task)
    assert chain is not None
    assert gain(chain, parts) > gain(chain, parts + 1)
    assert gain(replace(chain, project=None), parts) == gain(replace(chain, project=None), parts + 1)


def test_a_task_is_recognised_only_with_constant_weights() -> None:
    block = relu(depthwise(relu(pointwise(IMAGE, 48))))
    (call,) = partition(graph_of(block)).calls
    assert separable_of(call.task) is not None
    assert separable_of(replace(call.task, constants=frozenset())) is None
