"""Graphs executed by the oracle."""

from __future__ import annotations

import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from tests.graph.ops.checks import BF16, BOOL, F16, F32, F64, I64
from tilewright.dtypes import DType
from tilewright.errors import InternalError
from tilewright.graph import op as op_module
from tilewright.graph.ir import Graph, Node, TensorType, constant, input_node
from tilewright.graph.op import apply
from tilewright.graph.oracle import evaluate, evaluate_node


def value(index: int, *shape: int, dtype: DType = F32) -> Node:
    return input_node(index, TensorType(shape, dtype))


def test_a_small_network() -> None:
    rng = np.random.default_rng(0)
    w, b = rng.standard_normal((5, 4)).astype(np.float32), rng.standard_normal(5).astype(np.float32)
    x = value(0, 3, 4)
    hidden = apply("relu", apply("linear", x, constant(w), constant(b)))
    graph = Graph((x,), (apply("softmax", hidden, axis=1), hidden))
    array = rng.standard_normal((3, 4)).astype(np.float32)
    probabilities, activations = evaluate(graph, [array])
    expected = torch.relu(torch.nn.functional.linear(*(torch.from_numpy(a).double() for a in (array, w, b))))
    np.testing.assert_allclose(activations, expected, rtol=1e-12)
    np.testing.assert_allclose(probabilities, torch.softmax(expected, 1), rtol=1e-12)
    assert probabilities.dtype == np.float64


def test_precise_values_are_never_rounded() -> None:
    x = value(0, 2)
    narrow = apply("cast", apply("add", x, x), dtype=F16)
    graph = Graph((x,), (narrow, apply("cast", narrow, dtype=F32)))
    array = np.array([0.1, 1 / 3], np.float32)
    exact = 2 * array.astype(np.float64)
    for result in evaluate(graph, [array]):
        np.testing.assert_array_equal(result, exact)
    rounded, widened = evaluate(graph, [array], precise=False)
    assert rounded.dtype == np.float16 and widened.dtype == np.float32
    np.testing.assert_array_equal(rounded, (array + array).astype(np.float16))
    np.testing.assert_array_equal(widened, rounded.astype(np.float32))


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_rounding_happens_at_every_node(dtype: DType) -> None:
    x = value(0, dtype=dtype)
    total = apply("sub", apply("add", x, apply("full", value=1e-6, shape=(), dtype=dtype)), x)
    one = np.array(1.0, dtype.numpy)
    (exact,) = evaluate(Graph((x,), (total,)), [one])
    np.testing.assert_allclose(exact, 1e-6, rtol=1e-6)
    (rounded,) = evaluate(Graph((x,), (total,)), [one], precise=False)
    assert rounded.dtype == dtype.numpy
    assert (rounded == 0) == (dtype is not F32)


def test_integers_and_bools_are_exact() -> None:
    x = value(0, 3)
    whole = apply("cast", x, dtype=I64)
    truth = apply("cast", x, dtype=BOOL)
    results = evaluate(Graph((x,), (whole, truth)), [np.array([-2.7, 0.0, 2.0**40], np.float32)])
    np.testing.assert_array_equal(results[0], [-2, 0, 2**40])
    np.testing.assert_array_equal(results[1], [True, False, True])
    assert results[0].dtype == np.int64 and results[1].dtype == np.bool_


def test_inputs_and_constants_may_be_outputs_and_repeat() -> None:
    x, c = value(0, 2), constant(np.array([1, 2], ml_dtypes.bfloat16))
    unused = value(1, 3)
    results = evaluate(Graph((x, unused), (c, x, x)), [np.ones(2, np.float32), np.zeros(3, np.float32)])
    assert [result.tolist() for result in results] == [[1, 2], [1, 1], [1, 1]]
    assert all(result.dtype == np.float64 for result in results)


def test_an_operand_used_twice_by_one_node_is_kept_until_then() -> None:
    x = value(0, 2)
    square = apply("mul", x, x)
    result = evaluate(Graph((x,), (apply("add", square, square),)), [np.array([2.0, 3.0], np.float32)])
    np.testing.assert_array_equal(result[0], [8, 18])


def test_intermediates_are_freed_after_their_last_use(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[Any] = []
    most = 0
    real = op_module.op_of("neg").oracle

    def watched(attrs: Any, x: np.ndarray) -> np.ndarray:
        nonlocal most
        result = np.array(real(attrs, x))
        alive.append(weakref.ref(result))
        most = max(most, sum(reference() is not None for reference in alive))
        return result

    record = op_module.op_of("neg")
    monkeypatch.setitem(op_module._TABLE, "neg", op_module.Op("neg", record.infer, watched, record.fusion))
    x = node = value(0, 4, dtype=F64)
    for _ in range(10):
        node = apply("neg", node)
    evaluate(Graph((x,), (node,)), [np.ones(4)])
    assert len(alive) == 10 and most <= 2


def test_arrays_that_do_not_fit_are_refused() -> None:
    x = value(0, 2)
    graph = Graph((x,), (apply("neg", x),))
    with pytest.raises(InternalError, match="1 inputs, 0 were given"):
        evaluate(graph, [])
    with pytest.raises(InternalError, match=r"shape \[3\]"):
        evaluate(graph, [np.zeros(3, np.float32)])


def test_one_node() -> None:
    node = apply("div", value(0, 1), value(1, 1))
    one, three = np.array([1.0], np.float32), np.array([3.0], np.float32)
    assert evaluate_node(node, [one, three], True)[0] == 1 / 3
    assert evaluate_node(node, [one, three], False)[0] == np.float32(1 / 3)
    assert np.isnan(evaluate_node(node, [one * 0, one * 0], True)[0])
