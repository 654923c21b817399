"""Six small networks through the whole pipeline: the passes that changed each, and the tasks that it is cut into."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.programs import AVX512, pipeline_text
from tests.rewrites.helpers import batch_norm, conv, graph_of, scalar, weight, x_input
from tilewright.dtypes import DType
from tilewright.graph.ir import Graph, Node
from tilewright.graph.op import apply


def dense(x: Node, outputs: int, name: str) -> Node:
    """x @ weight' + bias, as a linear layer."""
    inputs = x.shape[-1]
    return apply(
        "linear", x, weight(outputs, inputs, name=f"{name}.weight"), weight(outputs, name=f"{name}.bias")
    )


def linear_gelu() -> Graph:
    return graph_of(apply("gelu", dense(x_input(8, 64), 128, "linear"), approximate="none"))


def conv_bn_relu() -> Graph:
    x = x_input(1, 32, 14, 14)
    y = conv(x, weight(48, 32, 3, 3, name="conv.weight"), padding=((1, 1), (1, 1)))
    return graph_of(apply("relu", batch_norm(y)))


def attention_block() -> Graph:
    """Self-attention of 4 heads, written out by hand, and the residual."""
    x = x_input(1, 24, 64)

    def heads(name: str) -> Node:
        split = apply("reshape", dense(x, 64, name), shape=(1, 24, 4, 16))
        return apply("permute", split, axes=(0, 2, 1, 3))

    q, k, v = heads("q"), heads("k"), heads("v")
    scores = apply("matmul", q, apply("permute", k, axes=(0, 1, 3, 2)))
    weights = apply("softmax", apply("div", scores, scalar(4.0)), axis=3)
    seen = apply("permute", apply("matmul", weights, v), axes=(0, 2, 1, 3))
    return graph_of(apply("add", x, dense(apply("reshape", seen, shape=(1, 24, 64)), 64, "out")))


def mobilenet_block() -> Graph:
    """Expand, depthwise, project, each with a batch norm; the residual."""
    x = x_input(1, 24, 14, 14)
    y = batch_norm(conv(x, weight(144, 24, 1, 1, name="expand.weight")), seed=1)
    y = apply("clamp", y, min=0.0, max=6.0)
    y = conv(y, weight(144, 1, 3, 3, name="depthwise.weight"), padding=((1, 1), (1, 1)), groups=144)
    y = apply("clamp", batch_norm(y, seed=5), min=0.0, max=6.0)
    y = batch_norm(conv(y, weight(24, 144, 1, 1, name="project.weight")), seed=9)
    return graph_of(apply("add", x, y))


def layer_norm_linear() -> Graph:
    x = x_input(16, 128)
    scale, shift = weight(128, name="norm.weight"), weight(128, name="norm.bias")
    return graph_of(dense(apply("layer_norm", x, scale, shift, dims=1, eps=1e-5), 256, "linear"))


def int8_linear() -> Graph:
    """Quantised data times a constant of bytes, summed in 32 bits, scaled back to floats."""
    x = x_input(8, 64)
    scaled = apply("clamp", apply("round", apply("div", x, scalar(0.05))), min=-128.0, max=127.0)
    data = apply("cast", scaled, dtype=DType.I8)
    total = apply("matmul", data, weight(64, 96, dtype=DType.I8, name="weight"))
    return graph_of(apply("mul", apply("cast", total, dtype=DType.F32), scalar(0.0025)))


GRAPHS = [linear_gelu, conv_bn_relu, attention_block, mobilenet_block, layer_norm_linear, int8_linear]


@pytest.mark.parametrize("make", GRAPHS, ids=lambda make: make.__name__)
def test_the_partition_is_the_golden(make: Callable[[], Graph], golden: Callable[[str, str], None]) -> None:
    golden(f"{make.__name__}.txt", pipeline_text(make(), AVX512))
