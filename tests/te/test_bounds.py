"""The bounds that programs are held to: wide enough for any order of a sum, and not much wider."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.loops.formulas import EXAMPLES, Example, matmul
from tests.te.bounds import ROUNDOFF, assert_within_bounds, bounded
from tilewright import te
from tilewright.dtypes import DType
from tilewright.te.interpret import interpret


def drawn(tensors: list[te.Tensor], seed: int) -> dict[te.Tensor, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        tensor: rng.standard_normal(tensor.shape).astype(tensor.dtype.numpy)
        if tensor.dtype.is_float
        else rng.integers(0, 9, tensor.shape).astype(tensor.dtype.numpy)
        for tensor in tensors
    }


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_the_interpreter_is_within(example: Example) -> None:
    output, inputs = example.make()
    values = drawn(inputs, 1)
    assert_within_bounds(interpret(output, values), output, values)


@settings(max_examples=30, deadline=None)
@given(k=st.integers(1, 300), seed=st.integers(0, 1000))
def test_a_sum_in_any_order_is_within(k: int, seed: int) -> None:
    """One after another in a random order, each product and each sum rounded."""
    output, (a, b, bias) = matmul(3, 4, k)
    values = drawn([a, b, bias], seed)
    total = np.zeros((3, 4), np.float32)
    for r in np.random.default_rng(seed).permutation(k):
        total += values[a][:, r, None] * values[b][None, r]
    assert_within_bounds(np.maximum(total + values[bias], np.float32(0)), output, values)


@pytest.mark.parametrize("dtype", [DType.F32, DType.F64])
def test_a_matmul_may_be_off_by_k_roundings_of_its_products(dtype: DType) -> None:
    output, (a, b, bias) = matmul(3, 4, 50, dtype)
    values = drawn([a, b, bias], 0)
    sizes = np.abs(values[a].astype(float)) @ np.abs(values[b].astype(float)) + np.abs(
        values[bias].astype(float)
    )
    error = bounded(output, values).error
    assert (error <= 1.5 * 54 * ROUNDOFF[dtype] * sizes).all()


def test_one_wrong_term_is_seen() -> None:
    """A product that is left out, or counted twice, of 300: in the smallest of ten it still shows."""
    output, (a, b, bias) = matmul(3, 4, 300)
    values = drawn([a, b, bias], 2)
    values[bias] += 100  # behind the relu
    right = np.maximum(values[a] @ values[b] + values[bias], np.float32(0))
    assert_within_bounds(right, output, values)
    smallest = np.argsort(np.abs(values[a][0] * values[b][:, 0]))[30]
    for sign in (1, -1):
        wrong = right.copy()
        wrong[0, 0] += sign * values[a][0, smallest] * values[b][smallest, 0]
        with pytest.raises(AssertionError, match=r"1 of 12 elements are wrong, the first at \(0, 0\)"):
            assert_within_bounds(wrong, output, values)


def test_what_cannot_be_told_apart_may_be_either() -> None:
    """A comparison of two sums that are equal but for their rounding."""
    x = te.Tensor("x", (40,), DType.F32)
    (r, s) = te.reduce_axes([40, 40])
    one = te.compute("one", (), DType.F32, lambda: te.reduce_over("sum", x[r], [r]))
    other = te.compute("other", (), DType.F32, lambda: te.reduce_over("sum", x[39 - s], [s]))
    less = te.call("lt", one[()], other[()])
    output = te.compute(
        "out", (1,), DType.F32, lambda i: te.select(less, te.const(1.0, DType.F32), te.const(2.0, DType.F32))
    )
    values = drawn([x], 0)
    for got in (1.0, 2.0):
        assert_within_bounds(np.array([got], np.float32), output, values)
    with pytest.raises(AssertionError):
        assert_within_bounds(np.array([3.5], np.float32), output, values)
