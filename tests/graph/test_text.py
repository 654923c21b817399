"""The text form round-trips, exactly, and says which line is wrong."""

from __future__ import annotations

import math
import struct
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.rewrites.helpers import conv, graph_of, scalar, weight, x_input
from tests.rewrites.random_graphs import graphs
from tilewright.dtypes import DType
from tilewright.errors import TextFormError
from tilewright.graph.ir import Graph, Node, TensorType, constant
from tilewright.graph.op import apply
from tilewright.graph.provenance import Provenance
from tilewright.graph.text import (
    constants_of,
    parse_graph,
    print_attr,
    print_graph,
    same_attrs,
    structurally_equal,
)


def round_trip(graph: Graph) -> Graph:
    return parse_graph(print_graph(graph), constants_of(graph))


def small_graph() -> Graph:
    x = x_input(1, 3, 8, 8)
    y = conv(x, weight(4, 3, 3, 3, name="conv1.weight"), stride=(2, 2))
    z = apply("mul", y, scalar(0.1), name="out", source=Provenance(("layer1.0", "layer1.1"), "model.py:3"))
    return graph_of(z)


def test_what_it_looks_like() -> None:
    assert print_graph(small_graph()) == (
        "%x0 = input {index=0} : f32[1,3,8,8]\n"
        "%conv1.weight = constant @conv1.weight : f32[4,3,3,3]\n"
        '%2 = conv(%x0, %conv1.weight) {dilation=(1, 1), groups=1, layout="channels_first", '
        "padding=((0, 0), (0, 0)), stride=(2, 2)} : f32[1,4,3,3]\n"
        "%3 = constant [0.1] : f32[]\n"
        "%out = mul(%2, %3) : f32[1,4,3,3]  # layer1.0 + layer1.1 model.py:3\n"
        "return %out\n"
    )


def test_names_and_sources_survive() -> None:
    (out,) = round_trip(small_graph()).outputs
    assert (out.name, out.source) == ("out", Provenance(("layer1.0", "layer1.1"), "model.py:3"))
    assert out.inputs[0].name == ""


def test_without_names_equal_graphs_have_equal_texts() -> None:
    x, y = x_input(2), x_input(2, index=1)
    a = graph_of(apply("add", x, y, name="one", source=Provenance(("here",))))
    b = graph_of(apply("add", x, y, name="two"))
    assert print_graph(a) != print_graph(b)
    assert print_graph(a, names=False) == print_graph(b, names=False)


def test_names_that_cannot_be_used() -> None:
    x = x_input(2)
    a = apply("relu", x, name="same")
    b = apply("relu", a, name="same")
    c = apply("relu", b, name="not a name")
    d = apply("relu", c, name="inf")
    e = apply("relu", d, name="return")
    assert structurally_equal(round_trip(graph_of(e)), graph_of(e))
    assert round_trip(graph_of(e)).outputs[0].name == "return"


def test_references_have_unique_names() -> None:
    weights = [weight(20, seed=i, name=name) for i, name in enumerate(["w", "w", "", "1 x"])]
    graph = graph_of(apply("concat", x_input(20), *weights, axis=0))
    assert list(constants_of(graph)) == ["w", "w_1", "constant", "_1_x"]
    assert structurally_equal(round_trip(graph), graph)


def test_no_outputs_and_unused_inputs() -> None:
    graph = Graph((x_input(2), x_input(3, index=1)), ())
    assert structurally_equal(round_trip(graph), graph)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(graphs())
def test_random_graphs_round_trip(graph: Graph) -> None:
    again = round_trip(graph)
    assert structurally_equal(again, graph)
    assert print_graph(again, names=False) == print_graph(graph, names=False)


DTYPES = [dtype.numpy for dtype in DType if dtype.numpy.type is not ml_dtypes.bfloat16]


@given(st.sampled_from(DTYPES).flatmap(lambda dtype: hnp.arrays(dtype, hnp.array_shapes(max_side=3))))
def test_any_constant_round_trips_bit_by_bit(data: np.ndarray) -> None:
    graph = Graph((), (constant(data),))
    again = round_trip(graph).outputs[0].data
    assert again is not None
    assert again.dtype == data.dtype and again.tobytes() == data.tobytes()


@pytest.mark.parametrize("dtype", [d for d in DType if d.is_float], ids=lambda d: d.short)
def test_special_floats_are_written_inline(dtype: DType) -> None:
    numbers = [0.0, -0.0, math.inf, -math.inf, math.nan, 1 / 3, 1e-30, 3.0]
    data = np.array(numbers).astype(dtype.numpy)
    text = print_graph(Graph((), (constant(data),)))
    assert "@" not in text and "[0.0, -0.0, inf, -inf, nan, " in text
    again = parse_graph(text).outputs[0].data
    assert again is not None and again.tobytes() == data.tobytes()


def test_bits_of_unusual_nans_survive() -> None:
    data = np.frombuffer(struct.pack("<II", 0x7FC00001, 0xFFC00000), np.float32)
    text = print_graph(Graph((), (constant(data),)))
    assert "nan:7fc00001" in text
    again = parse_graph(text).outputs[0].data
    assert again is not None and again.tobytes() == data.tobytes()


attrs = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(list(DType)),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=5,
)


@given(attrs)
def test_any_attribute_round_trips(value: Any) -> None:
    from tilewright.graph.text import _attr, _Tokens

    tokens = _Tokens(print_attr(value))
    again = _attr(tokens)
    assert tokens.at_end()
    assert same_attrs({"a": again}, {"a": value})


def test_attributes_of_other_kinds_are_refused() -> None:
    with pytest.raises(TypeError):
        print_attr([1, 2])
    with pytest.raises(TypeError):
        print_attr(object())


def test_structural_equality_tells_differences() -> None:
    x, y = x_input(2, 2), x_input(2, 2, index=1)

    def one(node: Node) -> Graph:
        return Graph((x, y), (node,))

    same = [one(apply("add", x, y)), one(apply("add", x, y, name="n", source=Provenance(("s",))))]
    assert structurally_equal(*same)
    relu = apply("relu", x)
    different = [
        one(apply("add", x, y)),
        one(apply("add", y, x)),
        one(apply("sub", x, y)),
        one(apply("add", relu, relu)),
        one(apply("add", relu, apply("relu", x))),
        one(apply("sum", x, axes=(0,), keepdims=True)),
        one(apply("sum", x, axes=(1,), keepdims=True)),
        one(apply("clamp", x, min=0, max=1)),
        one(apply("clamp", x, min=0.0, max=1)),
        one(constant(np.zeros((2, 2), np.float32))),
        one(constant(-np.zeros((2, 2), np.float32))),
        one(constant(np.zeros((2, 2), np.float64))),
        Graph((x, y), (relu, relu)),
        Graph((x,), (relu,)),
    ]
    for i, a in enumerate(different):
        for j, b in enumerate(different):
            assert structurally_equal(a, b) == (i == j)


HEAD = "%x = input {index=0} : f32[2,3]\n"


@pytest.mark.parametrize(
    "line,message",
    [
        ("%1 = relu(%y) : f32[2,3]", "%y has not been defined"),
        ("%x = relu(%x) : f32[2,3]", "%x has been defined before"),
        ("%1 = nothing(%x) : f32[2,3]", "the operator nothing is not known"),
        ("%1 = relu(%x) : f32[3,2]", r"the type is f32\[2,3\], not f32\[3,2\]"),
        ("%1 = relu(%x) {a=1} : f32[2,3]", "relu takes the attributes none"),
        ("%1 = relu(%x, %x) : f32[2,3]", "takes 1 operand"),
        ("%1 = permute(%x) {axes=(0, 0)} : f32[2,3]", "permutation"),
        ("%1 = permute(%x) {axes=(1, 0), axes=(1, 0)} : f32[3,2]", "given twice"),
        ("%1 = relu(%x) : f99[2,3]", "f99 is not an element type"),
        ("%1 = relu(%x) : f32[2,-3]", "an extent was expected"),
        ("%1 = relu(%x) : f32[2,3] more", "unexpected 'more'"),
        ("%1 = relu(%x : f32[2,3]", "expected, not ':'"),
        ("%1 = relu(%x)", "the line ends where"),
        ("%1 = relu(%x) ! : f32[2,3]", "unexpected '!' in column"),
        ("%1 = constant @w : f32[2]", "no constant @w was given"),
        ("%1 = constant @v : f32[2]", r"constant @v is float32\[3\]"),
        ("%1 = constant [1.0, 2.0] : f32[3]", "2 elements for"),
        ("%1 = constant [1.5] : i32[1]", "an element must be of type i32, got 1.5"),
        ("%1 = constant [300] : u8[1]", "300 does not fit u8"),
        ("%1 = constant [1] : bool[1]", "an element must be of type bool, got 1"),
        ("%1 = constant [true] : f32[1]", "an element must be of type f32, got True"),
        ("%1 = constant [nan:7fc0] : f32[1]", "nan:7fc0 does not have the bits of a NaN of type f32"),
        ("%1 = constant [what] : f32[1]", "what is not an element"),
        ("%1 = clamp(%x) {min=what, max=none} : f32[2,3]", "what is not an attribute"),
        ('%1 = clamp(%x) {min="\\q", max=none} : f32[2,3]', "is not a string"),
        ("%1 = input {at=1} : f32[2]", "an input has the one attribute index"),
        ("%1 = input {index=5} : f32[2]\nreturn %1", "inputs have the positions"),
        ("1 = relu(%x) : f32[2,3]", "'%' was expected"),
        ("%( = relu(%x) : f32[2,3]", "a value was expected"),
        ("return %x\n%1 = relu(%x) : f32[2,3]", "statements after the return"),
    ],
)
def test_errors_name_the_line(line: str, message: str) -> None:
    with pytest.raises(TextFormError, match=message) as caught:
        parse_graph(HEAD + "\n# a comment\n" + line, {"v": np.zeros(3, np.float32)})
    assert caught.value.message.startswith("line ")
    assert any(caught.value.message.startswith(f"line {number}:") for number in (4, 5))


def test_a_text_without_return() -> None:
    with pytest.raises(TextFormError, match="line 2: the text ends without a return"):
        parse_graph(HEAD)


def test_nothing_is_evaluated() -> None:
    with pytest.raises(TextFormError):
        parse_graph(HEAD + "%1 = clamp(%x) {min=__import__('os'), max=none} : f32[2,3]")


def test_types_are_checked_against_given_constants() -> None:
    graph = graph_of(apply("add", x_input(20), weight(20, name="w")))
    with pytest.raises(TextFormError, match="constant @w is"):
        parse_graph(print_graph(graph), {"w": np.zeros(20)})
    assert parse_graph(print_graph(graph), constants_of(graph)).outputs[0].type == TensorType(
        (20,), DType.F32
    )
