from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.rewrites.helpers import (
    array,
    assert_same_function,
    batch_norm,
    conv,
    graph_of,
    ops_of,
    scalar,
    weight,
    x_input,
)
from tilewright.dtypes import DType
from tilewright.graph.ir import Graph, Node, constant
from tilewright.graph.op import apply
from tilewright.graph.verify import verify
from tilewright.rewrites.fold_batch_norm import FoldBatchNorm, carried

IMAGE = x_input(2, 4, 6, 6)
LAST = x_input(2, 6, 6, 4)


def folded(*nodes: Node, tolerance: float = 1e-6) -> Graph:
    before = graph_of(*nodes)
    after = FoldBatchNorm().run(before)
    verify(after, "imported")
    assert_same_function(before, after, tolerance)
    return after


def transpose(x: Node, w: Node, *bias: Node, groups: int = 1) -> Node:
    return apply(
        "conv_transpose",
        x,
        w,
        *bias,
        stride=(2, 2),
        padding=(0, 0),
        output_padding=(0, 0),
        dilation=(1, 1),
        groups=groups,
    )


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda b: conv(IMAGE, weight(6, 4, 3, 3), *b(6), padding=((1, 1), (1, 1))),
        lambda b: conv(IMAGE, weight(8, 1, 3, 3), *b(8), groups=4),
        lambda b: transpose(IMAGE, weight(4, 6, 2, 2), *b(6)),
        lambda b: transpose(IMAGE, weight(4, 3, 2, 2), *b(6), groups=2),
        lambda b: apply("linear", x_input(5, 4), weight(6, 4), *b(6)),
    ],
    ids=["conv", "depthwise", "transposed", "transposed groups", "linear"],
)
def test_batch_norm_goes_into_the_weights(make: object, bias: bool) -> None:
    node = make(lambda n: [weight(n, seed=5)] if bias else [])  # type: ignore[operator]
    after = folded(apply("relu", batch_norm(node)))
    assert ops_of(after) == [node.op, "relu"]
    assert len(after.nodes()) == 5


def test_the_weights_are_rounded_once() -> None:
    w = array(6, 4, 1, 1)
    node = batch_norm(conv(IMAGE, constant(w, "c.weight")))
    (out,) = folded(node).outputs
    _, g, b, mean, var = (n.data for n in node.inputs)
    scale = g.astype(np.float64) / np.sqrt(var.astype(np.float64) + 1e-5)  # type: ignore[union-attr]
    expected = (w * scale.reshape(-1, 1, 1, 1)).astype(np.float32)
    np.testing.assert_array_equal(out.inputs[1].data, expected)
    shift = b.astype(np.float64) - mean.astype(np.float64) * scale  # type: ignore[union-attr]
    np.testing.assert_array_equal(out.inputs[2].data, shift.astype(np.float32))
    assert out.inputs[2].name == "c.bias"


def test_multiplications_and_additions_per_channel() -> None:
    node = conv(IMAGE, weight(6, 4, 3, 3))
    node = apply("mul", node, weight(6, 1, 1))
    node = apply("add", weight(1, 6, 1, 1, seed=1), node)
    node = apply("sub", node, scalar(0.5))
    assert ops_of(folded(node)) == ["conv"]
    last = conv(LAST, weight(3, 3, 4, 6), layout="channels_last")
    assert ops_of(folded(apply("add", apply("mul", last, weight(6)), weight(6)))) == ["conv"]
    dense = apply("linear", x_input(2, 5, 4), weight(6, 4))
    assert ops_of(folded(apply("mul", dense, weight(6)))) == ["linear"]


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16, DType.F64], ids=lambda d: d.short)
def test_other_element_types(dtype: DType) -> None:
    x = x_input(1, 4, 5, 5, dtype=dtype)
    after = folded(batch_norm(conv(x, weight(6, 4, 3, 3, dtype=dtype))), tolerance=1e-2)
    assert ops_of(after) == ["conv"]
    assert {n.dtype for n in after.nodes()} == {dtype}


@pytest.mark.parametrize(
    "node",
    [
        apply("mul", conv(IMAGE, weight(6, 4, 3, 3)), weight(4, 1)),
        apply("mul", conv(IMAGE, weight(6, 4, 3, 3)), weight(2, 6, 1, 1)),
        apply("mul", conv(IMAGE, weight(1, 4, 3, 3)), weight(6, 1, 1)),
        apply("mul", conv(IMAGE, weight(6, 4, 3, 3)), x_input(6, 1, 1, index=1)),
        apply("mul", conv(IMAGE, x_input(6, 4, 3, 3, index=1)), weight(6, 1, 1)),
        apply("sub", scalar(1), conv(IMAGE, weight(6, 4, 3, 3))),
        apply("mul", apply("relu", IMAGE), weight(4, 1, 1)),
        batch_norm(apply("linear", x_input(2, 5, 4), weight(6, 4))),
        batch_norm(conv(LAST, weight(3, 3, 4, 6), layout="channels_last")),
        apply("mul", conv(IMAGE, weight(6, 4, 3, 3)), scalar(3e38)),
    ],
)
def test_what_stays(node: Node) -> None:
    before = graph_of(node)
    assert ops_of(FoldBatchNorm().run(before)) == ops_of(before)


def test_a_contraction_that_others_read_stays() -> None:
    shared = conv(IMAGE, weight(6, 4, 3, 3))
    assert ops_of(folded(batch_norm(shared), shared)) == ["conv", "batch_norm"]
    assert ops_of(folded(batch_norm(shared), apply("relu", shared))) == ["conv", "batch_norm", "relu"]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_what_rounding_takes_from_one_weight_goes_to_the_next(dtype: type) -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((5, 300)).astype(dtype)
    factors = rng.uniform(0.5, 2.0, (5, 1))
    got = carried(rows, factors)
    exact = rows.astype(np.float64) * factors
    step = np.abs(exact).max() * float(ml_dtypes.finfo(dtype).eps)
    assert got.dtype == rows.dtype
    assert np.abs(got.astype(np.float64) - exact).max() <= 2 * step
    assert np.abs((got.astype(np.float64) - exact).sum(axis=1)).max() <= step
