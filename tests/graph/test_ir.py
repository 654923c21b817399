from __future__ import annotations

import numpy as np

from tilewright.dtypes import DType
from tilewright.graph.ir import Graph, Node, TensorType, constant, input_node, rebuild, toposort, with_inputs
from tilewright.graph.op import apply

X = TensorType((2, 3), DType.F32)


def test_types() -> None:
    assert repr(X) == "f32[2,3]"
    assert (X.size, X.bytes, X.rank) == (6, 24, 2)
    assert repr(TensorType((), DType.BOOL)) == "bool[]"
    assert TensorType((), DType.BF16).bytes == 2


def test_nodes_list_producers_first_and_all_inputs() -> None:
    x, unused = input_node(0, X), input_node(1, X)
    a = apply("relu", x)
    b = apply("add", a, x)
    graph = Graph((x, unused), (b, a))
    assert graph.nodes() == [x, unused, a, b]
    assert graph.users() == {x: [a, b], unused: [], a: [b], b: []}
    assert apply("add", x, x).inputs == (x, x)


def test_a_deep_graph_does_not_recurse() -> None:
    node = input_node(0, X)
    for _ in range(5000):
        node = apply("relu", node)
    assert len(toposort([node])) == 5001


def test_constants_are_contiguous() -> None:
    node = constant(np.arange(6, dtype=np.float32).reshape(2, 3).T, "w")
    assert node.data is not None and node.data.flags.c_contiguous
    assert node.type == TensorType((3, 2), DType.F32)
    assert constant(np.float32(1)).type == TensorType((), DType.F32)


def test_rebuild_shares_what_it_keeps() -> None:
    x = input_node(0, X)
    a = apply("relu", x)
    b = apply("neg", a)
    c = apply("exp", x)
    graph = Graph((x,), (b, c))

    def rule(node: Node, operands: tuple[Node, ...]) -> Node | None:
        return operands[0] if node.op == "relu" else None

    new = rebuild(graph, rule)
    assert new.outputs[1] is c
    assert new.outputs[0].op == "neg"
    assert new.outputs[0].inputs == (x,)
    assert graph.outputs[0] is b and b.inputs == (a,)
    assert with_inputs(b, [x]).inputs == (x,)
