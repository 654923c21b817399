"""Every mistake that the verifier knows, and that it names the pass and the place."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.rewrites.helpers import batch_norm, conv, graph_of, weight, x_input
from tilewright.dtypes import DType
from tilewright.errors import VerificationError
from tilewright.graph.ir import Graph, Node, TensorType, constant
from tilewright.graph.op import apply, table
from tilewright.graph.provenance import Provenance
from tilewright.graph.verify import STAGES, forbidden_at, is_attr, verify

X = x_input(2, 3)
RELU = apply("relu", X, name="r", source=Provenance(("layer1",), "model.py:7"))
W = constant(np.zeros((2, 2), np.float32), "w")


def test_a_sound_graph() -> None:
    verify(graph_of(apply("add", RELU, X)), "imported")
    verify(Graph((X, x_input(1, index=1)), (RELU, RELU)), "decomposed")


def strided(array: np.ndarray) -> Node:
    return Node("constant", (), TensorType(array.shape, DType.F32), data=array)


@pytest.mark.parametrize(
    "graph,message",
    [
        (Graph((X,), (replace(RELU, op="rleu"),)), "the operator is not registered"),
        (Graph((X,), (replace(RELU, attrs={"a": 1}),)), "takes the attributes"),
        (
            Graph((X,), (replace(apply("sum", X, axes=(0,), keepdims=True), attrs={"axes": (0,)}),)),
            "takes the attrib",
        ),
        (
            Graph((X,), (replace(apply("clamp", X, min=0, max=1), attrs={"min": np.int64(0), "max": 1}),)),
            "int64",
        ),
        (
            Graph((X,), (replace(RELU, type=TensorType((3, 2), DType.F32)),)),
            r"its type is f32\[3,2\], and should be",
        ),
        (Graph((X,), (replace(RELU, inputs=(X, X)),)), "the type rule refuses it"),
        (Graph((X,), (replace(RELU, data=np.zeros(2)),)), "only constants have data"),
        (Graph((), (RELU,)), "used but not listed"),
        (Graph((RELU,), (RELU,)), "listed as input 0 but is none"),
        (Graph((X, X), (RELU,)), "input 1 has the attributes"),
        (Graph((x_input(2, index=1),), ()), "input 0 has the attributes"),
        (Graph((replace(X, data=np.zeros((2, 3))),), ()), "an input has no operands"),
        (Graph((), (replace(W, type=TensorType((4,), DType.F32)),)), r"its data is float32\[2, 2\]"),
        (Graph((), (replace(W, type=TensorType((2, 2), DType.F16)),)), "its data is float32"),
        (Graph((), (replace(W, data=None),)), "an array as its data"),
        (Graph((), (replace(W, attrs={"a": 1}),)), "no operands and no attributes"),
        (Graph((), (strided(np.zeros((4, 4), np.float32)[::2]),)), "not contiguous"),
    ],
)
def test_mistakes(graph: Graph, message: str) -> None:
    with pytest.raises(VerificationError, match=message):
        verify(graph, "imported")


def test_the_error_says_what_where_and_after_which_pass() -> None:
    wrong = Graph((X,), (replace(RELU, type=TensorType((3, 2), DType.F32)),))
    with pytest.raises(VerificationError) as caught:
        verify(wrong, "decomposed", after="layout")
    for part in ("after layout", "stage decomposed", "relu r", "layer1 model.py:7"):
        assert part in caught.value.message


def attention() -> Node:
    x = x_input(2, 4, 8, dtype=DType.F64)
    return apply("attention", x, x, x, causal=False, scale=1.0)


def transposed() -> Node:
    one = (1, 1)
    return apply(
        "conv_transpose",
        x_input(1, 2, 4, 4),
        weight(2, 2, 2, 2),
        stride=one,
        padding=(0, 0),
        output_padding=(0, 0),
        dilation=one,
        groups=1,
    )


IMAGE = x_input(1, 2, 6, 6)
KERNEL = weight(4, 2, 3, 3)


@pytest.mark.parametrize(
    "node,stage",
    [
        (batch_norm(IMAGE), "decomposed"),
        (attention(), "decomposed"),
        (apply("linear", x_input(2, 3), weight(4, 3)), "decomposed"),
        (transposed(), "decomposed"),
        (conv(IMAGE, KERNEL, padding=((1, 1), (0, 0))), "decomposed"),
        (conv(IMAGE, KERNEL, weight(4)), "decomposed"),
    ],
    ids=lambda value: value.op if isinstance(value, Node) else "",
)
def test_what_a_stage_forbids(node: Node, stage: str) -> None:
    stages = list(STAGES)
    for earlier in stages[: stages.index(stage)]:
        verify(graph_of(node), earlier)
    for later in stages[stages.index(stage) :]:
        with pytest.raises(VerificationError, match=r"illegal at this stage|has no lowering"):
            verify(graph_of(node), later)


def test_stages_name_operators_that_exist() -> None:
    for stage in STAGES:
        assert all(rule.op in table() and rule.why for rule in forbidden_at(stage))
    with pytest.raises(VerificationError, match="got 'lost'"):
        verify(graph_of(RELU), "lost")


def test_everything_without_a_lowering_is_ruled_out_by_name() -> None:
    ruled_out = {rule.op for rule in forbidden_at("decomposed")}
    assert {op.name for op in table().values() if op.lower is None} <= ruled_out


def test_attribute_kinds() -> None:
    assert all(map(is_attr, [1, 1.5, True, None, "a", DType.F32, (1, ("a", None)), ()]))
    assert not any(map(is_attr, [[1], np.float32(1), np.int64(1), {}, (1, [2]), object()]))
