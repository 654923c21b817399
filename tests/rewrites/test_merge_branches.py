"""merge-branches: convolutions whose results are added become one, with the same function."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.rewrites.helpers import array, graph_of, inputs_for, x_input
from tilewright.dtypes import DType
from tilewright.graph.ir import Graph, Node, constant
from tilewright.graph.op import apply
from tilewright.graph.oracle import evaluate
from tilewright.rewrites.merge_branches import MergeBranches
from tilewright.rewrites.pipeline import passes


def conv(
    x: Node, channels: int, size: int, *, stride: int = 1, groups: int = 1, seed: int = 0, bias: bool = True
) -> Node:
    parameters = [constant(array(channels, x.shape[1] // groups, size, size, seed=seed, dtype=x.dtype))]
    if bias:
        parameters.append(constant(array(channels, seed=seed + 50, dtype=x.dtype)))
    pad = (size // 2, size // 2)
    return apply(
        *("conv", x, *parameters),
        **{"stride": (stride, stride), "padding": (pad, pad), "dilation": (1, 1)},
        **{"groups": groups, "layout": "channels_first"},
    )


def norm(x: Node, seed: int = 3) -> Node:
    weight, bias, mean = (constant(array(x.shape[1], seed=seed + n, dtype=x.dtype)) for n in range(3))
    variance = constant(np.abs(array(x.shape[1], seed=seed + 9, dtype=x.dtype)) + 0.5)
    return apply("batch_norm", x, weight, bias, mean, variance, eps=1e-5)


def merged(graph: Graph) -> tuple[Graph, list[str]]:
    after = MergeBranches().run(graph)
    inputs = inputs_for(graph)
    for actual, expected in zip(evaluate(after, inputs), evaluate(graph, inputs), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5 * max(1.0, np.abs(expected).max()))
    return after, [node.op for node in after.nodes() if not node.is_input and not node.is_constant]


def test_a_block_of_repvgg_is_one_convolution() -> None:
    x = x_input(2, 8, 7, 7)
    block = apply("add", apply("add", conv(x, 8, 3), conv(x, 8, 1, seed=1)), norm(x))
    after, ops = merged(graph_of(apply("relu", block)))
    assert ops == ["conv", "relu"]
    (made,) = (node for node in after.nodes() if node.op == "conv")
    assert made.inputs[1].shape == (8, 8, 3, 3)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_random_branches(data: Any) -> None:
    groups = data.draw(st.sampled_from((1, 2, 4)))
    stride = data.draw(st.sampled_from((1, 2)))
    x = x_input(1, 8, data.draw(st.integers(3, 9)), data.draw(st.integers(3, 9)))
    total = conv(x, 8, data.draw(st.sampled_from((3, 5))), stride=stride, groups=groups)
    for number in range(data.draw(st.integers(1, 3))):
        kind = data.draw(st.sampled_from(("conv", "conv", "identity", "norm")))
        if kind == "conv" or stride != 1:
            size, bias = data.draw(st.sampled_from((1, 3, 5))), data.draw(st.booleans())
            other = conv(x, 8, size, stride=stride, groups=groups, seed=number + 1, bias=bias)
        else:
            other = x if kind == "identity" else norm(x, number)
        total = apply("add", total, other) if data.draw(st.booleans()) else apply("add", other, total)
    _, ops = merged(graph_of(total))
    assert ops == ["conv"]


def test_a_branch_that_is_read_elsewhere_stays() -> None:
    x = x_input(1, 8, 6, 6)
    small = conv(x, 8, 1, seed=1)
    _, ops = merged(graph_of(apply("add", conv(x, 8, 3), small), small))
    assert sorted(ops) == ["add", "conv", "conv"]


@pytest.mark.parametrize("change", [{"stride": 2}, {"groups": 2}])
def test_branches_with_other_strides_or_groups_stay(change: dict[str, int]) -> None:
    x = x_input(1, 8, 1, 1)
    _, ops = merged(graph_of(apply("add", conv(x, 8, 3), conv(x, 8, 1, seed=1, **change))))
    assert sorted(ops) == ["add", "conv", "conv"]


def test_branches_of_other_operands_stay() -> None:
    x, y = x_input(1, 8, 6, 6), x_input(1, 8, 6, 6, index=1)
    _, ops = merged(graph_of(apply("add", conv(x, 8, 3), conv(y, 8, 1, seed=1))))
    assert sorted(ops) == ["add", "conv", "conv"]


def test_the_identity_is_not_merged_into_16_bit_weights() -> None:
    x = x_input(1, 8, 6, 6, dtype=DType.F16)
    graph = graph_of(apply("add", conv(x, 8, 3), x))
    assert MergeBranches().run(graph).outputs[0].op == "add"
    both = graph_of(apply("add", conv(x, 8, 3), conv(x, 8, 1, seed=1)))
    assert MergeBranches().run(both).outputs[0].op == "conv"


def test_strict_numerics_keep_the_branches() -> None:
    assert "merge-branches" in [each.name for each in passes("fast")]
    assert "merge-branches" not in [each.name for each in passes("strict")]


@pytest.mark.parametrize("numerics", ["fast", "strict"])
def test_only_infinity_minus_infinity_of_two_branches_is_no_nan_in_fast(numerics: str) -> None:
    """The one exception of `docs/numerics.md`: elsewhere NaN and infinity are where they were."""
    x = x_input(1, 8, 9, 9)
    graph = graph_of(apply("add", conv(x, 16, 3, bias=False), conv(x, 16, 1, seed=1, bias=False)))
    data = array(1, 8, 9, 9)
    data[0, 3, 4, 4] = np.inf
    (expected,) = evaluate(graph, [data])
    after = graph
    for each in passes(numerics):
        if each.name == "merge-branches":
            after = each.run(after)
    (actual,) = evaluate(after, [data])
    np.testing.assert_array_equal(np.isfinite(actual), np.isfinite(expected))
    assert np.isnan(expected).any() and not np.isnan(expected[:, :, :4]).any()
    assert np.isnan(actual).any() == (numerics == "strict")
