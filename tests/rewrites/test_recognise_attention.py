"""Attention written out by hand is found, in its common forms and no others, and keeps its value."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from tilewright.dtypes import DType
from tilewright.graph.ir import Graph, Node, TensorType, constant, input_node
from tilewright.graph.op import apply
from tilewright.graph.oracle import evaluate
from tilewright.rewrites.fold_constants import FoldConstants
from tilewright.rewrites.recognise_attention import RecogniseAttention
from tilewright.rewrites.simplify import Simplify

F32 = DType.F32
LOOK = np.tri(5, 7, dtype=np.bool_)
BLIND = np.where(np.arange(5)[:, None] == 2, False, LOOK)


def number(value: float) -> Node:
    return constant(np.array(value, np.float32))


def by_hand(between: Callable[[Node], Node], *, axis: int = 3, transposed: bool = True) -> Graph:
    q, k, v = (input_node(n, TensorType((2, 3, length, 4), F32)) for n, length in enumerate((5, 7, 7)))
    swap = (0, 1, 3, 2) if transposed else (0, 1, 2, 3)
    keys = apply("permute", k, axes=swap) if transposed else apply("reshape", k, shape=(2, 3, 4, 7))
    scores = between(apply("matmul", q, keys))
    return Graph((q, k, v), (apply("matmul", apply("softmax", scores, axis=axis), v),))


def ops(graph: Graph) -> list[str]:
    return [node.op for node in graph.nodes() if not node.is_input and not node.is_constant]


def recognised(graph: Graph) -> Graph:
    found = RecogniseAttention().run(graph)
    return Simplify().run(FoldConstants().run(found))


def check_value(graph: Graph, after: Graph) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(x.shape).astype(np.float32) for x in graph.inputs]
    with np.errstate(all="ignore"):
        (expected,), (got,) = evaluate(graph, arrays), evaluate(after, arrays)
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12)


FORMS: dict[str, Callable[[Node], Node]] = {
    "plain": lambda s: s,
    "scaled": lambda s: apply("mul", s, number(0.5)),
    "divided": lambda s: apply("div", s, number(2.0)),
    "masked": lambda s: apply("add", apply("mul", number(0.5), s), constant(np.float32(LOOK))),
    "two masks": lambda s: apply("add", number(3.0), apply("add", s, constant(np.float32(LOOK)))),
    "filled": lambda s: apply("select", constant(LOOK), s, number(-math.inf)),
    "filled where not": lambda s: apply("select", constant(~LOOK), number(-math.inf), s),
    "filled with the lowest": lambda s: apply("select", constant(LOOK), s, number(np.finfo(np.float32).min)),
    "blind rows": lambda s: apply("select", constant(BLIND), s, number(-math.inf)),
    "blind rows added": lambda s: apply("add", s, constant(np.where(BLIND, 0, -np.inf).astype(np.float32))),
}


@pytest.mark.parametrize("form", FORMS)
def test_it_is_found_and_keeps_its_value(form: str) -> None:
    graph = by_hand(FORMS[form])
    after = recognised(graph)
    assert ops(after) == ["attention"]
    check_value(graph, after)


def test_keys_that_come_transposed() -> None:
    graph = by_hand(FORMS["plain"], transposed=False)
    after = recognised(graph)
    assert ops(after) == ["reshape", "permute", "attention"]
    check_value(graph, after)


@pytest.mark.parametrize(
    "graph",
    [
        by_hand(FORMS["plain"], axis=2),
        by_hand(lambda s: apply("relu", s)),
        by_hand(lambda s: apply("mul", s, constant(np.float32(LOOK)))),
        by_hand(lambda s: apply("mul", apply("add", s, number(1.0)), number(0.5))),
        by_hand(lambda s: apply("select", constant(BLIND), s, number(-1e38))),
    ],
    ids=["another axis", "relu", "by a matrix", "scaled after the mask", "finite fill of a blind row"],
)
def test_what_it_is_not(graph: Graph) -> None:
    assert RecogniseAttention().run(graph).outputs == graph.outputs


def test_scores_that_are_read_elsewhere_stay() -> None:
    graph = by_hand(FORMS["plain"])
    weights = graph.outputs[0].inputs[0]
    graph = Graph(graph.inputs, (*graph.outputs, weights))
    assert RecogniseAttention().run(graph).outputs == graph.outputs
