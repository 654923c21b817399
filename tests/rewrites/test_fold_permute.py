from __future__ import annotations

import pytest

from tests.rewrites.helpers import assert_same_function, conv, graph_of, ops_of, weight, x_input
from tilewright.graph.ir import Graph, Node
from tilewright.graph.op import apply
from tilewright.rewrites.fold_constants import FoldConstants
from tilewright.rewrites.fold_permute import FoldPermute
from tilewright.rewrites.pipeline import rewrite
from tilewright.rewrites.simplify import Simplify

X = x_input(2, 3, 4, 5)


def flat(x: Node, axes: tuple[int, ...], *shape: int) -> Node:
    return apply("reshape", apply("permute", x, axes=axes), shape=shape)


def folded(*outputs: Node) -> Graph:
    before = graph_of(*outputs)
    after = FoldConstants().run(FoldPermute().run(before))
    assert_same_function(before, after)
    return after


@pytest.mark.parametrize(
    "axes,shape",
    [
        ((0, 3, 1, 2), (2, 60)),
        ((0, 2, 3, 1), (2, 60)),
        ((0, 3, 2, 1), (2, 60)),
        ((0, 1, 3, 2), (2, 60)),
        ((0, 1, 3, 2), (2, 3, 20)),
        ((0, 1, 3, 2), (6, 20)),
        ((3, 1, 0, 2), (1, 120)),
    ],
)
@pytest.mark.parametrize("transposed", [False, True])
def test_the_permute_goes_into_the_weight(
    axes: tuple[int, ...], shape: tuple[int, ...], transposed: bool
) -> None:
    length = shape[-1]
    w = apply("permute", weight(7, length), axes=(1, 0)) if transposed else weight(length, 7)
    assert ops_of(folded(apply("matmul", flat(X, axes, *shape), w))) == ["reshape", "matmul"]


@pytest.mark.parametrize(
    "axes,shape", [((3, 1, 2, 0), (5, 24)), ((1, 0, 3, 2), (6, 20)), ((0, 2, 1, 3), (8, 15))]
)
def test_rows_that_are_moved_too_stay_permuted(axes: tuple[int, ...], shape: tuple[int, ...]) -> None:
    after = folded(apply("matmul", flat(X, axes, *shape), weight(shape[-1], 7)))
    assert ops_of(after) == ["permute", "reshape", "matmul"]


def test_a_weight_that_others_read_is_not_kept_twice() -> None:
    w = weight(60, 7)
    other = apply("matmul", x_input(2, 60, index=1), w)
    after = folded(apply("matmul", flat(X, (0, 3, 1, 2), 2, 60), w), other)
    assert len([node for node in after.nodes() if node.is_constant]) == 1


def test_the_other_operand_must_be_a_constant_matrix() -> None:
    rows = flat(X, (0, 3, 1, 2), 2, 60)
    assert "permute" in ops_of(folded(apply("matmul", rows, x_input(60, 7, index=1))))
    assert "permute" in ops_of(folded(apply("matmul", rows, weight(2, 60, 7))))


def test_all_dense_layers_that_read_it_take_it() -> None:
    rows = flat(X, (0, 3, 1, 2), 2, 60)
    after = folded(*(apply("matmul", rows, weight(60, n, seed=n)) for n in (4, 7)))
    assert "permute" not in ops_of(after)


def test_from_the_last_convolution_to_the_dense_layer() -> None:
    x = apply("reshape", apply("relu", conv(X, weight(6, 3, 3, 3))), shape=(2, 36))
    before = graph_of(apply("linear", x, weight(7, 36), weight(7)))
    after = rewrite(before)
    assert_same_function(before, after, tolerance=1e-6)
    (image,) = (node for node in Simplify().run(after).nodes() if node.op == "permute")
    assert image.inputs[0].is_input
