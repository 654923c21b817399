from __future__ import annotations

import numpy as np

from tests.rewrites.helpers import assert_same_function, graph_of, ops_of, scalar, weight, x_input
from tilewright.graph.ir import Graph, Node, constant
from tilewright.graph.op import apply
from tilewright.rewrites.common_subexpressions import CommonSubexpressions

X = x_input(2, 3)


def merged(*nodes: Node) -> Graph:
    before = graph_of(*nodes)
    after = CommonSubexpressions().run(before)
    assert_same_function(before, after)
    return after


def test_equal_chains_are_one() -> None:
    def chain() -> Node:
        return apply("clamp", apply("mul", X, scalar(3)), min=0, max=1)

    after = merged(apply("add", chain(), chain()))
    assert ops_of(after) == ["mul", "clamp", "add"]
    assert after.outputs[0].inputs[0] is after.outputs[0].inputs[1]


def test_different_attributes_operands_and_orders_are_not() -> None:
    after = merged(
        apply("clamp", X, min=0, max=1),
        apply("clamp", X, min=0, max=2),
        apply("sub", X, scalar(1)),
        apply("sub", scalar(1), X),
        apply("mul", X, scalar(0.0)),
        apply("mul", X, scalar(-0.0)),
    )
    assert len(ops_of(after)) == 6


def test_small_constants_by_content_large_ones_by_identity() -> None:
    a, b = weight(2, 3), weight(2, 3)
    assert ops_of(merged(apply("add", X, a), apply("add", X, b))) == ["add"]
    large = np.ones((1000, 3), np.float32)
    same = [apply("matmul", constant(large), apply("permute", X, axes=(1, 0))) for _ in range(2)]
    assert ops_of(merged(*same)) == ["permute", "matmul"]
    other = [apply("matmul", constant(large.copy()), apply("permute", X, axes=(1, 0))) for _ in range(2)]
    assert ops_of(merged(*other)) == ["permute", "matmul", "matmul"]
    assert ops_of(merged(apply("reshape", constant(large), shape=(3000,)), constant(large))) == ["reshape"]


def test_nothing_to_merge_keeps_the_nodes() -> None:
    node = apply("relu", X)
    assert merged(node).outputs[0] is node
