"""Permutes after the layout pass: how many are left, where, and that the function is the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.rewrites.helpers import (
    assert_same_function,
    batch_norm,
    conv,
    count,
    graph_of,
    ops_of,
    scalar,
    weight,
    x_input,
)
from tilewright.dtypes import DType
from tilewright.graph.ir import Graph, Node, TensorType, input_node, rebuild
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.graph.verify import verify
from tilewright.rewrites.decompose import Decompose
from tilewright.rewrites.fold_constants import FoldConstants
from tilewright.rewrites.layout import Layout, permuted_bytes
from tilewright.rewrites.layout_choices import reshape_stored
from tilewright.rewrites.simplify import Simplify

IMAGE = x_input(2, 4, 6, 8)
ONE = ((1, 1), (1, 1))


def laid_out(*nodes: Node) -> Graph:
    before = graph_of(*nodes)
    after = Layout().run(Decompose().run(before))
    verify(after, "decomposed")
    assert_same_function(before, after, tolerance=1e-6)
    return Simplify().run(FoldConstants().run(after))


def permute(x: Node, *axes: int) -> Node:
    return apply("permute", x, axes=axes)


def reshape(x: Node, *shape: int) -> Node:
    return apply("reshape", x, shape=shape)


def pool(x: Node) -> Node:
    attrs: dict[str, Any] = {"kernel": (2, 2), "stride": (2, 2), "padding": (0, 0), "ceil_mode": False}
    return apply("max_pool", x, **attrs, dilation=(1, 1), layout="channels_first")


def block(x: Node, width: int, seed: int = 0) -> Node:
    y = apply("relu", batch_norm(conv(x, weight(width, x.shape[1], 3, 3, seed=seed), padding=ONE), seed))
    return batch_norm(conv(y, weight(width, width, 3, 3, seed=seed + 1), padding=ONE), seed + 1)


def test_one_convolution() -> None:
    assert ops_of(laid_out(conv(IMAGE, weight(5, 4, 3, 3)))) == ["permute", "conv", "permute"]


def test_a_residual_network_with_global_pooling_has_one_permute() -> None:
    x = apply("relu", conv(IMAGE, weight(8, 4, 3, 3), weight(8), padding=ONE))
    x = pool(x)
    for seed in range(3):
        x = apply("relu", apply("add", x, block(x, 8, seed)))
    x = apply("adaptive_avg_pool", x, sizes=(1, 1), layout="channels_first")
    x = apply("linear", reshape(x, 2, 8), weight(10, 8), weight(10))
    after = laid_out(x)
    assert count(after, "permute") == 1
    assert after.nodes()[1].op == "permute" and after.nodes()[1].inputs == (IMAGE,)


def test_squeeze_and_excitation() -> None:
    x = conv(IMAGE, weight(8, 4, 1, 1))
    squeezed = apply("mean", x, axes=(2, 3), keepdims=True)
    gate = apply("sigmoid", conv(squeezed, weight(8, 8, 1, 1), weight(8)))
    assert count(laid_out(apply("mean", apply("mul", x, gate), axes=(2, 3), keepdims=False)), "permute") == 1


def test_skips_are_concatenated_channels_last() -> None:
    skip = apply("relu", conv(IMAGE, weight(8, 4, 3, 3), padding=ONE))
    low = conv(pool(skip), weight(8, 8, 1, 1))
    up = apply("resize", low, sizes=(6, 8), mode="linear", coordinates="half_pixel")
    x = conv(apply("concat", skip, up, axis=1), weight(3, 16, 3, 3), padding=ONE)
    after = laid_out(x)
    assert count(after, "permute") == 2
    (joined,) = (n for n in after.nodes() if n.op == "concat")
    assert joined.attrs["axis"] == 3


def test_heads_of_a_detector_end_channels_last() -> None:
    x = conv(IMAGE, weight(6, 4, 3, 3), weight(6), padding=ONE)
    assert count(laid_out(detector(x)), "permute") == 1


def detector(x: Node) -> Node:
    """[N, A V, H, W] -> [N, A, V, H, W] -> [N, H, W, A, V] -> [N, H W A, V]"""
    batch, channels, height, width = x.shape
    x = reshape(x, batch, 3, channels // 3, height, width)
    return reshape(permute(x, 0, 3, 4, 1, 2), batch, height * width * 3, channels // 3)


def test_patches_of_a_transformer_need_no_permute() -> None:
    patches = conv(IMAGE, weight(5, 4, 2, 2), weight(5), stride=(2, 2))
    tokens = permute(reshape(patches, 2, 5, 12), 0, 2, 1)
    assert count(laid_out(apply("layer_norm", tokens, dims=1, eps=1e-5)), "permute") == 1


def test_norms_over_channels_between_convolutions() -> None:
    x = permute(conv(IMAGE, weight(4, 1, 3, 3), groups=4, padding=ONE), 0, 2, 3, 1)
    x = apply("layer_norm", x, weight(4), weight(4), dims=1, eps=1e-5)
    x = permute(apply("linear", x, weight(4, 4)), 0, 3, 1, 2)
    assert count(laid_out(apply("add", IMAGE, x)), "permute") == 2


def test_parameters_per_channel_become_vectors() -> None:
    x = apply("mul", conv(IMAGE, weight(5, 4, 1, 1)), weight(5, 1, 1))
    x = apply("add", x, weight(1, 5, 1, 1))
    after = laid_out(apply("add", x, scalar(1)))
    shapes = [operand.shape for n in after.nodes() if n.op in ("mul", "add") for operand in n.inputs[1:]]
    assert shapes == [(5,), (5,), ()]


@pytest.mark.parametrize(
    "op,attrs",
    [
        ("pad", {"low": (0, 1, 2, 0), "high": (1, 0, 0, 3), "interior": (0, 0, 1, 0), "value": 1.0}),
        ("slice", {"starts": (0, 1, 2, 0), "stops": (2, 4, 5, 8), "steps": (1, 2, 1, 3)}),
        ("flip", {"axes": (1, 3)}),
        ("sum", {"axes": (1,), "keepdims": False}),
        ("sum", {"axes": (2, 3), "keepdims": True}),
        ("amax", {"axes": (0, 3), "keepdims": False}),
        ("var", {"axes": (1, 2), "correction": 1, "keepdims": False}),
        ("argmax", {"axis": 1, "keepdims": False}),
        ("argmin", {"axis": 2, "keepdims": True}),
        ("softmax", {"axis": 1}),
        ("log_softmax", {"axis": 2}),
        ("cumsum", {"axis": 1}),
        ("broadcast_to", {"shape": (3, 2, 4, 6, 8)}),
        ("reshape", {"shape": (2, 4, 48)}),
        ("reshape", {"shape": (2, 2, 2, 6, 8)}),
        ("resize", {"sizes": (3, 16), "mode": "nearest", "coordinates": "asymmetric"}),
        ("resize", {"sizes": (9,), "mode": "cubic", "coordinates": "half_pixel"}),
    ],
)
def test_operators_work_in_any_order(op: str, attrs: dict[str, Any]) -> None:
    """Behind a convolution there is no permute before the operator, but where it makes its operand larger."""
    x = apply(op, conv(IMAGE, weight(4, 4, 1, 1)), **attrs)
    after = laid_out(apply("relu", x) if x.dtype.is_float else x)
    assert count(after, "permute") <= 2
    inner = [n for n in after.nodes() if n.op == op]
    assert all(n.inputs[0].op != "permute" or op in ("resize", "pad", "broadcast_to") for n in inner)


def test_rows_that_the_user_put_last_stay_last() -> None:
    scores = permute(IMAGE, 0, 2, 3, 1)
    after = laid_out(apply("softmax", scores, axis=3))
    assert ops_of(after) == ["permute", "softmax"]
    channels = apply("softmax", conv(IMAGE, weight(5, 4, 1, 1)), axis=1)
    (softmax,) = (n for n in laid_out(channels).nodes() if n.op == "softmax")
    assert softmax.attrs["axis"] == 3


def test_the_image_is_permuted_before_it_is_padded() -> None:
    after = laid_out(apply("mean", conv(IMAGE, weight(5, 4, 3, 3), padding=ONE), axes=(2, 3), keepdims=False))
    assert ops_of(after) == ["permute", "pad", "conv", "mean"]


def test_logits_are_permuted_before_they_are_upsampled() -> None:
    x = conv(IMAGE, weight(3, 4, 1, 1))
    after = laid_out(apply("resize", x, sizes=(24, 32), mode="linear", coordinates="half_pixel"))
    assert ops_of(after) == ["permute", "conv", "permute", "resize"]


def test_operands_in_different_orders_move_the_fewest_bytes() -> None:
    small = conv(x_input(2, 4, 1, 8, index=1), weight(4, 4, 1, 1))
    after = laid_out(apply("exp", apply("add", IMAGE, small)))
    assert permuted_bytes(after) == 2 * small.type.bytes


def test_weights_shared_by_two_convolutions_are_permuted_once() -> None:
    w = weight(4, 4, 3, 3)
    x = conv(conv(IMAGE, w, padding=ONE), w, padding=ONE)
    constants = [n for n in laid_out(x).nodes() if n.is_constant]
    assert len(constants) == 1


def test_permutes_of_the_model_are_joined_and_cancelled() -> None:
    x = apply("relu", permute(IMAGE, 1, 0, 3, 2))
    x = apply("tanh", permute(x, 3, 2, 1, 0))
    after = laid_out(apply("mul", permute(x, 3, 0, 1, 2), scalar(2)))
    assert count(after, "permute") <= 1


def test_readers_that_need_a_value_as_written_share_one_permute() -> None:
    x = conv(IMAGE, weight(4, 4, 1, 1))
    rows = [apply("matmul", apply(op, x), weight(8, 8)) for op in ("relu", "tanh", "sin", "cos")]
    total = rows[0]
    for row in rows[1:]:
        total = apply("add", total, row)
    assert count(laid_out(apply("mean", total, axes=(0, 1, 2, 3), keepdims=False)), "permute") == 2


def naive(graph: Graph) -> Graph:
    """Every convolution and pool between permutes of its own, and neighbours cancelled: what a simple pass gives."""

    def rule(node: Node, operands: tuple[Node, ...]) -> Node | None:
        if node.attrs.get("layout") != "channels_first":
            return None
        last = [permute(operands[0], 0, 2, 3, 1)]
        if node.op == "conv":
            last.append(permute(operands[1], 2, 3, 1, 0))
        return permute(apply(node.op, *last, **{**node.attrs, "layout": "channels_last"}), 0, 3, 1, 2)

    return Simplify().run(rebuild(graph, rule))


@pytest.mark.parametrize("seed", range(4))
def test_never_more_than_a_naive_conversion(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x: Node = x_input(1, 4, 8, 8)
    for step in range(12):
        choice = rng.integers(6)
        if choice <= 1:
            x = conv(x, weight(4, 4, 3, 3, seed=step), padding=ONE)
        elif choice == 2:
            x = apply("relu", x)
        elif choice == 3:
            x = apply("concat", x, apply("tanh", x), axis=1)
            x = conv(x, weight(4, 8, 1, 1, seed=step))
        elif choice == 4:
            x = permute(apply("neg", permute(x, 0, 2, 3, 1)), 0, 3, 1, 2)
        else:
            x = apply("add", x, x_input(4, 8, 8, index=1))
    graph = Decompose().run(graph_of(x, x_input(1, 4, 8, 8), x_input(4, 8, 8, index=1)))
    after = Layout().run(graph)
    assert_same_function(graph, after)
    assert permuted_bytes(after) <= permuted_bytes(naive(graph))


@pytest.mark.parametrize(
    "source,target,order,expected",
    [
        ((2, 4, 6, 8), (2, 4, 48), (0, 2, 3, 1), ((2, 48, 4), (0, 2, 1))),
        ((2, 4, 6, 8), (2, 2, 2, 6, 8), (0, 2, 3, 1), ((2, 6, 8, 2, 2), (0, 3, 4, 1, 2))),
        ((1, 4, 6, 8), (4, 48), (0, 2, 3, 1), ((48, 4), (1, 0))),
        ((2, 4, 1, 1), (2, 4), (0, 2, 3, 1), ((2, 4), (0, 1))),
        ((2, 4, 6, 8), (2, 4, 6, 8, 1), (0, 2, 3, 1), ((2, 6, 8, 1, 4), (0, 2, 3, 4, 1))),
        ((2, 4, 6, 8), (8, 48), (0, 2, 3, 1), None),
        ((2, 4, 6, 8), (2, 24, 8), (0, 2, 3, 1), None),
        ((2, 0, 6), (2, 0), (0, 2, 1), None),
    ],
)
def test_reshapes_of_stored_values(source: Any, target: Any, order: Any, expected: Any) -> None:
    assert reshape_stored(source, target, order) == expected


@dataclass(frozen=True)
class ChainsCost:
    """Channels first is faster for each convolution by itself; several in one kernel take `chain` seconds."""

    chain: float

    def seconds(self, task: Task) -> float:
        layouts = [node.attrs["layout"] for node in task.graph.nodes() if node.op == "conv"]
        if len(layouts) > 1:
            return self.chain
        return sum({"channels_first": 1.0, "channels_last": 2.0}[layout] for layout in layouts)

    def kernel_seconds(self) -> float:
        return 0.0

    def upper_bound(self, task: Task) -> tuple[float, bool]:
        return self.seconds(task), True

    def permute_seconds(self, type: TensorType, axes: Sequence[int], *, alone: bool = True) -> float:
        return 0.001

    def block(self, channels: int, dtype: DType) -> int:
        return 0


@pytest.mark.parametrize(("chain", "layout"), [(1.0, "channels_last"), (10.0, "channels_first")])
def test_channels_last_for_the_sake_of_a_chain(chain: float, layout: str) -> None:
    expanded = apply("relu", conv(x_input(1, 16, 14, 14), weight(96, 16, 1, 1, seed=1)))
    depthwise = conv(expanded, weight(96, 1, 3, 3, seed=2), padding=ONE, groups=96)
    before = Decompose().run(graph_of(conv(apply("relu", depthwise), weight(16, 96, 1, 1, seed=3))))
    after = Layout(ChainsCost(chain)).run(before)
    assert_same_function(before, after, tolerance=1e-6)
    assert {node.attrs["layout"] for node in after.nodes() if node.op == "conv"} == {layout}


def test_the_choice_is_that_of_least_time_with_what_is_fused() -> None:
    """Between the two: as long as the chain takes less than three convolutions, not one moment longer."""
    expanded = conv(x_input(1, 16, 14, 14), weight(96, 16, 1, 1, seed=1))
    depthwise = conv(expanded, weight(96, 1, 3, 3, seed=2), padding=ONE, groups=96)
    graph = Decompose().run(graph_of(conv(depthwise, weight(16, 96, 1, 1, seed=3))))
    for chain in (2.9, 3.1):
        after = Layout(ChainsCost(chain)).run(graph)
        last = any(node.attrs.get("layout") == "channels_last" for node in after.nodes())
        assert last == (chain < 3.0)


def test_a_graph_too_wide_to_be_assigned_keeps_its_orders() -> None:
    """The time of an assignment is that of the values alive at each step: here of 7,000 inputs, summed one by one."""
    inputs = tuple(input_node(n, TensorType((2,), DType.F32)) for n in range(7000))
    total = inputs[0]
    for each in inputs[1:]:
        total = apply("add", total, each)
    graph = Graph(inputs, (total,))
    assert Layout().run(graph) is graph
