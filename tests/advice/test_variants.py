"""Variations of a layer are legal tasks that compute what they say."""

from __future__ import annotations

import numpy as np
import pytest

from tests.rewrites.helpers import array, graph_of, x_input
from tilewright.advice.variants import (
    COMPARED,
    VariedLayer,
    activation_of,
    alternatives,
    layer_of,
    pointwise_after,
    wider,
    with_activation,
    with_channels,
)
from tilewright.graph.ir import Node, constant
from tilewright.graph.op import apply
from tilewright.graph.oracle import evaluate
from tilewright.graph.task import Task
from tilewright.rewrites.partition import partition


def conv_task(
    channels: int = 46, outputs: int = 46, activation: str | None = "relu", layout: str = "channels_last"
) -> Task:
    first = layout == "channels_first"
    x = x_input(1, channels, 9, 8) if first else x_input(1, 9, 8, channels)
    low = (0, 0, 1, 1) if first else (0, 1, 1, 0)
    shape = (outputs, channels, 3, 3) if first else (3, 3, channels, outputs)
    padded = apply("pad", x, low=low, high=low, interior=(0,) * 4, value=0.0)
    y = apply(
        *("conv", padded, constant(array(*shape))),
        **{"stride": (1, 1), "padding": ((0, 0), (0, 0)), "dilation": (1, 1)},  # type: ignore[arg-type]
        **{"groups": 1, "layout": layout},  # type: ignore[arg-type]
    )
    y = apply("add", y, constant(array(*((outputs, 1, 1) if first else (outputs,)))))
    if activation is not None:
        y = apply(activation, y)
    (call,) = partition(graph_of(y)).calls
    return call.task


def layer(**options: object) -> VariedLayer:
    found = layer_of(conv_task(**options))  # type: ignore[arg-type]
    assert found is not None
    return found


def values(task: Task) -> np.ndarray:
    inputs = [array(*node.shape, seed=n) for n, node in enumerate(task.graph.inputs)]
    return evaluate(task.graph, inputs)[0]


@pytest.mark.parametrize("layout", ["channels_last", "channels_first"])
def test_another_activation(layout: str) -> None:
    own = layer(layout=layout)
    found = activation_of(own)
    assert found is not None and found.op == "relu"
    plain = values(with_activation(own, None))
    np.testing.assert_allclose(values(with_activation(own, "relu")), np.maximum(plain, 0))
    for op in COMPARED:
        assert with_activation(own, op).label.endswith(f"add+{op}")


def test_an_activation_where_there_is_none() -> None:
    own = layer(activation=None)
    assert activation_of(own) is None
    assert with_activation(own, "gelu").label == "pad+conv+add+gelu"
    assert with_activation(own, None) == own.task


def test_other_channels() -> None:
    own = layer()
    assert list(alternatives(own)) == [(46, 48), (48, 46)]
    changed = with_channels(own, 46, 48)
    assert changed is not None
    assert changed.output.shape == (1, 9, 8, 48)
    assert [node.shape for node in changed.graph.inputs] == [(1, 9, 8, 46), (3, 3, 46, 48), (48,)]
    changed = with_channels(own, 48, 46)
    assert changed is not None
    assert [node.shape for node in changed.graph.inputs] == [(1, 9, 8, 48), (3, 3, 48, 46), (46,)]
    values(changed)


def test_channels_that_are_not_last_are_left() -> None:
    assert with_channels(layer(layout="channels_first"), 46, 48) is None


def test_a_linear_layer() -> None:
    y = apply("gelu", apply("matmul", x_input(5, 100), constant(array(100, 1000))), approximate="none")
    (call,) = partition(graph_of(y)).calls
    own = layer_of(call.task)
    assert own is not None and (own.inputs, own.outputs, own.window) == (100, 1000, ())
    changed = with_channels(own, 100, 1024)
    assert changed is not None and changed.output.shape == (5, 1024)
    assert pointwise_after(own) is None


def test_rounder_numbers_of_channels() -> None:
    assert wider(46) == [48]
    assert wider(174) == [176, 192]
    assert wider(64) == []
    assert wider(3) == []


@pytest.mark.parametrize("layout", ["channels_last", "channels_first"])
def test_one_more_pointwise_convolution(layout: str) -> None:
    made = pointwise_after(layer(layout=layout))
    assert made is not None
    both, alone = made
    assert both.label == "pad+conv+add+relu+conv+relu"
    assert both.output.type == alone.output.type == conv_task(layout=layout).output.type
    values(both)


def test_a_task_without_a_contraction_is_no_layer() -> None:
    (call,) = partition(graph_of(apply("softmax", x_input(4, 4), axis=1))).calls
    assert layer_of(call.task) is None


def test_a_product_of_two_activations_is_no_layer() -> None:
    product: Node = apply("matmul", x_input(4, 4), x_input(4, 4, index=1))
    (call,) = partition(graph_of(product)).calls
    assert layer_of(call.task) is None
