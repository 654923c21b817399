"""What the tests of the rewrites share: running graphs and partitions, and making random ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tilewright.dtypes import DType
from tilewright.graph.ir import Graph, Node, TensorType, constant, input_node
from tilewright.graph.op import apply
from tilewright.graph.oracle import evaluate

F32 = DType.F32


def x_input(*shape: int, index: int = 0, dtype: DType = F32) -> Node:
    return input_node(index, TensorType(shape, dtype), f"x{index}")


def graph_of(*outputs: Node) -> Graph:
    """The graph with these outputs; its inputs are those that they reach."""
    found = {n for n in Graph((), tuple(outputs)).nodes() if n.is_input}
    return Graph(tuple(sorted(found, key=lambda n: int(n.attrs["index"]))), tuple(outputs))


def array(*shape: int, seed: int = 0, dtype: DType = F32) -> np.ndarray:
    rng = np.random.default_rng((seed, *shape))
    if dtype is DType.BOOL:
        return rng.integers(0, 2, shape).astype(np.bool_)
    if dtype.is_integer:
        return rng.integers(0, 5, shape).astype(dtype.numpy)
    return rng.standard_normal(shape).astype(dtype.numpy)


def weight(*shape: int, seed: int = 0, dtype: DType = F32, name: str = "") -> Node:
    return constant(array(*shape, seed=seed, dtype=dtype), name)


def scalar(value: float, dtype: DType = F32) -> Node:
    return constant(np.array(value, dtype.numpy))


def inputs_for(graph: Graph, seed: int = 7) -> list[np.ndarray]:
    return [array(*n.shape, seed=seed + i, dtype=n.dtype) for i, n in enumerate(graph.inputs)]


def assert_close(
    actual: Sequence[np.ndarray], expected: Sequence[np.ndarray], tolerance: float = 1e-9
) -> None:
    """Relative L2 error, and NaN and infinities in the same places."""
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert a.shape == b.shape
        if a.dtype.kind != "f":
            np.testing.assert_array_equal(a, b)
            continue
        a, b = a.astype(np.float64), b.astype(np.float64)
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
        np.testing.assert_array_equal(np.where(np.isinf(a), a, 0), np.where(np.isinf(b), b, 0))
        finite = np.isfinite(a)
        norm = float(np.linalg.norm(b[finite])) if finite.any() else 0.0
        error = float(np.linalg.norm(a[finite] - b[finite])) if finite.any() else 0.0
        assert error <= tolerance * max(norm, 1e-30) or error <= 1e-12, (
            f"relative error {error / max(norm, 1e-30)}"
        )


def assert_same_function(before: Graph, after: Graph, tolerance: float = 1e-9, seed: int = 7) -> None:
    assert before.inputs == after.inputs
    assert [n.type for n in before.outputs] == [n.type for n in after.outputs]
    inputs = inputs_for(before, seed)
    assert_close(evaluate(after, inputs), evaluate(before, inputs), tolerance)


def ops_of(graph: Graph) -> list[str]:
    """The operators of a graph in order, inputs and constants left out."""
    return [n.op for n in graph.nodes() if not n.is_input and not n.is_constant]


def count(graph: Graph, op: str) -> int:
    return ops_of(graph).count(op)


def conv(x: Node, w: Node, *bias: Node, **changes: Any) -> Node:
    rank = x.type.rank - 2
    attrs = {
        "stride": (1,) * rank,
        "padding": ((0, 0),) * rank,
        "dilation": (1,) * rank,
        "groups": 1,
        "layout": "channels_first",
        **changes,
    }
    return apply("conv", x, w, *bias, **attrs)


def batch_norm(x: Node, seed: int = 0, eps: float = 1e-5) -> Node:
    channels = x.shape[1]
    parameters = [weight(channels, seed=seed + i, dtype=x.dtype) for i in range(3)]
    variance = constant(np.abs(array(channels, seed=seed + 3, dtype=x.dtype)) + x.dtype.numpy.type(0.5))
    return apply("batch_norm", x, *parameters, variance, eps=eps)
