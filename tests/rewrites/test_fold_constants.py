from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.rewrites.helpers import assert_same_function, graph_of, ops_of, scalar, weight, x_input
from tilewright.dtypes import DType
from tilewright.graph.ir import Node
from tilewright.graph.op import apply
from tilewright.graph.verify import verify
from tilewright.rewrites.fold_constants import FoldConstants

X = x_input(3, 4)


def folded(node: Node, **options: int) -> Node:
    graph = FoldConstants(**options).run(graph_of(node))
    verify(graph, "imported")
    return graph.outputs[0]


def test_chains_of_constants_become_one() -> None:
    w = weight(4, 3, name="w")
    product = apply("matmul", apply("exp", w), apply("permute", w, axes=(1, 0)))
    before = graph_of(apply("add", x_input(4, 4), product))
    after = FoldConstants().run(before)
    assert ops_of(after) == ["add"]
    assert_same_function(before, after, tolerance=1e-6)
    assert after.outputs[0].inputs[1].name == "w"


def test_the_value_is_rounded_once() -> None:
    w = weight(1000)
    assert w.data is not None
    result = folded(apply("exp", w)).data
    np.testing.assert_array_equal(result, np.exp(w.data.astype(np.float64)).astype(np.float32))


@pytest.mark.parametrize("dtype", list(DType), ids=lambda d: d.short)
def test_movement_keeps_the_bits(dtype: DType) -> None:
    w = weight(3, 4, dtype=dtype)
    assert w.data is not None
    if dtype.is_float:
        w.data[0, 0] = np.nan
    data = w.data
    cases = [
        (apply("permute", w, axes=(1, 0)), data.T),
        (apply("reshape", w, shape=(2, 6)), data.reshape(2, 6)),
        (apply("slice", w, starts=(0, 0), stops=(3, 4), steps=(1, 2)), data[:, ::2]),
        (apply("concat", w, w, axis=0), np.concatenate([data, data])),
        (apply("flip", w, axes=(0,)), data[::-1]),
    ]
    for node, expected in cases:
        result = folded(node)
        assert result.is_constant and result.type == node.type and result.data is not None
        assert result.data.tobytes() == expected.tobytes()


def test_a_reshape_shares_the_array() -> None:
    w = weight(3, 4)
    assert np.shares_memory(folded(apply("reshape", w, shape=(12,))).data, w.data)  # type: ignore[arg-type]


def test_interpolation_is_computed_in_f64() -> None:
    w = weight(1, 1, 4, 4)
    node = apply("resize", w, sizes=(7, 9), mode="linear", coordinates="half_pixel")
    assert_same_function(graph_of(node), graph_of(folded(node)), tolerance=1e-7)


def test_results_of_every_kind_are_folded() -> None:
    iota = apply("iota", shape=(4, 1), axis=0, dtype=DType.I32)
    other = apply("iota", shape=(1, 4), axis=1, dtype=DType.I32)
    mask = folded(apply("le", other, iota))
    np.testing.assert_array_equal(mask.data, np.tri(4, dtype=np.bool_))
    assert folded(apply("sum", weight(3), axes=(0,), keepdims=False)).shape == ()
    assert folded(apply("cast", weight(3), dtype=DType.BF16)).data.dtype == ml_dtypes.bfloat16  # type: ignore[union-attr]


def test_overflow_on_rounding_is_infinity() -> None:
    assert np.isinf(folded(apply("cast", scalar(1e30), dtype=DType.F16)).data)  # type: ignore[arg-type]


def test_inputs_are_not_constant() -> None:
    assert folded(apply("relu", X)).op == "relu"


def test_repetition_of_data_is_folded_only_where_small() -> None:
    small, large = (4, 16), (1000, 1000)
    assert folded(apply("broadcast_to", scalar(1), shape=small)).is_constant
    assert folded(apply("broadcast_to", scalar(1), shape=large)).op == "broadcast_to"
    assert folded(apply("full", value=1.0, shape=small, dtype=DType.F32)).is_constant
    assert folded(apply("full", value=1.0, shape=large, dtype=DType.F32)).op == "full"


def test_large_results_may_not_outgrow_what_they_are_made_of() -> None:
    row, column = weight(1, 100), weight(100, 1)
    outer = apply("add", row, column)
    assert folded(outer).is_constant
    assert folded(outer, large=1000).op == "add"
    assert folded(outer, large=1000, growth=100).is_constant
    assert folded(apply("permute", weight(100, 100), axes=(1, 0)), large=1000).is_constant
    assert folded(apply("iota", shape=(1000,), axis=0, dtype=DType.I64), large=1000).op == "iota"
