"""What stands before a product joins it where the machine can compute both together, and only then."""

from __future__ import annotations

import pytest

from tilewright.dtypes import DType
from tilewright.graph.ir import Graph, Node, TensorType, input_node
from tilewright.graph.op import apply
from tilewright.rewrites.partition import partition

F16 = DType.F16


def inputs(*shapes: tuple[int, ...], dtype: DType = F16) -> list[Node]:
    return [input_node(number, TensorType(shape, dtype)) for number, shape in enumerate(shapes)]


def labels(graph: Graph, prologues: bool = True) -> list[str]:
    return [call.task.label for call in partition(graph, prologues=prologues).calls]


def gated(dtype: DType = F16) -> Graph:
    x, gate, weight = given = inputs((8, 16), (8, 16), (16, 4), dtype=dtype)
    return Graph(
        tuple(given), (apply("relu", apply("matmul", apply("mul", apply("silu", gate), x), weight)),)
    )


def test_it_joins_where_it_may() -> None:
    assert labels(gated()) == ["silu+mul+matmul+relu"]
    assert labels(gated(), prologues=False) == ["silu+mul", "matmul+relu"]
    assert labels(gated(DType.F32)) == ["silu+mul", "matmul+relu"], "no kernel computes that on the way"


def test_through_a_reshape_and_with_what_is_spread() -> None:
    x, scale, weight = given = inputs((2, 4, 16), (16,), (16, 4))
    flat = apply("reshape", apply("mul", x, scale), shape=(8, 16))
    assert labels(Graph(tuple(given), (apply("matmul", flat, weight),))) == ["mul+reshape+matmul"]


def test_a_reshape_alone_stays_a_view() -> None:
    x, weight = given = inputs((2, 6, 16), (16, 4))
    part = apply("slice", x, starts=(0, 0, 0), stops=(2, 4, 16), steps=(1, 1, 1))
    graph = Graph(tuple(given), (apply("matmul", apply("reshape", part, shape=(8, 16)), weight),))
    assert labels(graph) == ["slice", "matmul"]


@pytest.mark.parametrize("choice", ["two readers", "the other operand", "an output"])
def test_it_stays_apart(choice: str) -> None:
    x, weight, other = given = inputs((8, 16), (16, 8), (8, 16))
    before = apply("relu", x)
    total = apply("matmul", before, weight)
    outputs: tuple[Node, ...] = (total,)
    if choice == "two readers":
        outputs = (total, apply("matmul", before, apply("permute", other, axes=(1, 0))))
    elif choice == "the other operand":
        outputs = (apply("matmul", other, apply("relu", weight)),)
    else:
        outputs = (total, before)
    assert "relu" in labels(Graph(tuple(given), outputs))
