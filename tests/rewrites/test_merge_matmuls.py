"""Matmuls and convolutions of one operand become one, where that is faster, and compute the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from tests.rewrites.helpers import assert_close, graph_of, inputs_for, weight, x_input
from tests.rewrites.oracles import Whims
from tilewright.graph.ir import Graph, Node
from tilewright.graph.op import apply
from tilewright.graph.oracle import evaluate
from tilewright.graph.task import Task
from tilewright.rewrites.local import Judge
from tilewright.rewrites.merge_matmuls import MergeMatmuls
from tilewright.rewrites.partition import partition

LAYOUTS = ("channels_last", "channels_first")


@dataclass(frozen=True)
class PerKernel(Whims):
    """Each kernel takes one second, and each with a slice alone `copy` seconds."""

    copy: float = 0.1

    def seconds(self, task: Task) -> float:
        return 1.0 if any(node.op in ("conv", "matmul") for node in task.graph.nodes()) else self.copy


def conv(x: Node, outputs: int, layout: str, window: int = 1, seed: int = 0, **changed: Any) -> Node:
    inputs = x.shape[-1] if layout == "channels_last" else x.shape[1]
    sides = (window, window)
    shape = (*sides, inputs, outputs) if layout == "channels_last" else (outputs, inputs, *sides)
    attrs = {"stride": (1, 1), "padding": ((0, 0), (0, 0)), "dilation": (1, 1), "groups": 1, "layout": layout}
    return apply("conv", x, weight(*shape, seed=seed), **(attrs | changed))


def biased(x: Node, layout: str, seed: int = 0) -> Node:
    channels = x.shape[-1] if layout == "channels_last" else x.shape[1]
    return apply(
        "add", x, weight(*((channels,) if layout == "channels_last" else (channels, 1, 1)), seed=seed)
    )


def image(layout: str) -> Node:
    return x_input(2, 5, 6, 8) if layout == "channels_last" else x_input(2, 8, 5, 6)


def merged(graph: Graph, copy: float = 0.1) -> Graph:
    after = MergeMatmuls(Judge(PerKernel(copy=copy), partition)).run(graph)
    inputs = inputs_for(graph)
    assert_close(evaluate(after, inputs, precise=True), evaluate(graph, inputs, precise=True))
    return after


def convs(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes() if node.op == "conv"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("end", ["", "bias", "relu", "both"])
def test_convolutions_of_one_operand_become_one(layout: str, window: int, end: str) -> None:
    x = image(layout)
    made = []
    for seed, outputs in enumerate((4, 6, 3)):
        y = conv(x, outputs, layout, window, seed)
        y = biased(y, layout, seed) if end in ("bias", "both") else y
        made.append(apply("relu", y) if end in ("relu", "both") else y)
    graph = graph_of(*made)
    after = merged(graph)
    (one,) = convs(after)
    assert one.shape[3 if layout == "channels_last" else 1] == 13
    assert sum(node.op == "relu" for node in after.nodes()) == (end in ("relu", "both"))


def test_only_where_the_kernels_are_faster() -> None:
    x = image("channels_last")
    graph = graph_of(*(conv(x, outputs, "channels_last", seed=outputs) for outputs in (4, 6)))
    assert len(convs(merged(graph, copy=0.1))) == 1
    assert merged(graph, copy=0.6) is graph


@pytest.mark.parametrize(
    "other",
    [
        {"stride": (2, 2)},
        {"window": 3, "padding": ((1, 1), (1, 1))},
        {"groups": 2},
    ],
    ids=["stride", "window", "groups"],
)
def test_other_convolutions_stay_apart(other: dict[str, Any]) -> None:
    x = image("channels_last")
    if other.get("groups"):
        attrs = {"stride": (1, 1), "padding": ((0, 0), (0, 0)), "dilation": (1, 1), "layout": "channels_last"}
        made = [apply("conv", x, weight(1, 1, 4, 4, seed=n), groups=2, **attrs) for n in range(2)]
    else:
        made = [conv(x, 4, "channels_last"), conv(x, 4, "channels_last", **other)]
    graph = graph_of(*made)
    assert merged(graph) is graph


def test_different_activations_stay_behind_their_slices() -> None:
    """The products have different forms then, and are not merged."""
    x = image("channels_last")
    graph = graph_of(
        apply("relu", conv(x, 4, "channels_last")), apply("tanh", conv(x, 4, "channels_last", seed=1))
    )
    assert merged(graph) is graph


def test_a_result_that_is_read_before_its_activation_keeps_it_apart() -> None:
    x = image("channels_last")
    first, second = conv(x, 4, "channels_last"), conv(x, 4, "channels_last", seed=1)
    graph = graph_of(apply("relu", first), first, apply("relu", second), second)
    after = merged(graph)
    assert len(convs(after)) == 1 and sum(node.op == "relu" for node in after.nodes()) == 2


def test_a_convolution_of_what_is_merged_reads_its_slice() -> None:
    x = image("channels_last")
    first, second = (apply("relu", conv(x, 4, "channels_last", seed=n)) for n in range(2))
    last = conv(first, 5, "channels_last", 3, seed=7)
    graph = graph_of(last, second)
    assert len(convs(merged(graph))) == 2


def test_matmuls_with_one_activation() -> None:
    x = x_input(6, 8)
    made = [apply("relu", apply("matmul", x, weight(8, 4 + n, seed=n))) for n in range(2)]
    after = merged(graph_of(*made))
    assert [node.shape for node in after.nodes() if node.op == "matmul"] == [(6, 9)]
