"""Quantised operators: integer sums exact, in both forms (QDQ and QOperator), compiled."""

from __future__ import annotations

import numpy as np
import pytest

from tests.frontend.onnx.checking import check, check_model, floats, ints, model_of
from tilewright.frontend.onnx import import_onnx
from tilewright.graph.ir import Node

SCALE = np.float32(0.05).reshape(())
BYTES = [(np.int8, np.int8), (np.uint8, np.int8), (np.uint8, np.uint8), (np.int8, np.uint8)]


def whole(dtype: type, *shape: int, seed: int = 0) -> np.ndarray:
    info = np.iinfo(dtype)
    return ints(info.min, info.max + 1, *shape, seed=seed, dtype=dtype)


@pytest.mark.parametrize(("left", "right"), BYTES)
@pytest.mark.parametrize("zero", [0, 3])
def test_matmul_integer_is_exact(left: type, right: type, zero: int) -> None:
    inputs = {
        "a": whole(left, 5, 64),
        "b": whole(right, 64, 7, seed=1),
        "az": np.array(zero, left),
        "bz": np.array(zero, right),
    }
    model = model_of("y = MatMulInteger (a, b, az, bz)", inputs)
    check_model(model, inputs, rtol=0, atol=0, compiled=True)


def test_bytes_stay_bytes_up_to_the_product() -> None:
    """Without zero points nothing is widened before the contraction, which takes bytes and gives i32."""
    inputs = {"a": whole(np.uint8, 4, 32), "b": whole(np.int8, 32, 8, seed=1)}
    graph = import_onnx(model_of("y = MatMulInteger (a, b)", inputs)).graph
    assert [node.op for node in graph.nodes() if not node.is_input] == ["matmul"]


@pytest.mark.parametrize("zero", [0, 7])
def test_conv_integer_is_exact(zero: int) -> None:
    inputs = {
        "x": whole(np.uint8, 1, 3, 6, 7),
        "w": whole(np.uint8, 4, 3, 3, 3, seed=1),
        "xz": np.array(zero, np.uint8),
    }
    check("y = ConvInteger <pads: ints = [1, 1, 1, 1]> (x, w, xz)", inputs, rtol=0, atol=0, compiled=True)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16])
def test_quantise_and_back(dtype: type) -> None:
    inputs = {"x": floats(4, 6) * 10, "s": SCALE, "z": np.array(5, dtype)}
    check("y = QuantizeLinear (x, s, z)", inputs, rtol=0, atol=0, compiled=True)
    check("y = DequantizeLinear (x, s, z)", {**inputs, "x": whole(dtype, 4, 6)}, compiled=True)


def test_per_axis_and_blocked() -> None:
    per_axis = {
        "x": floats(3, 4, 5) * 10,
        "s": np.abs(floats(4, seed=1)) + 0.1,
        "z": whole(np.uint8, 4, seed=2),
    }
    check("y = QuantizeLinear <axis: int = 1> (x, s, z)", per_axis, rtol=0, atol=0)
    blocked = {
        "x": whole(np.int8, 4, 6),
        "s": np.abs(floats(4, 3, seed=1)) + 0.1,
        "z": whole(np.int8, 4, 3, seed=2),
    }
    check("y = DequantizeLinear <axis: int = 1, block_size: int = 2> (x, s, z)", blocked)


def test_qlinear_matmul() -> None:
    inputs = {
        "a": whole(np.uint8, 2, 4),
        "as": SCALE,
        "az": np.array(113, np.uint8),
        "b": whole(np.uint8, 4, 3, seed=1),
        "bs": np.float32(0.07).reshape(()),
        "bz": np.array(114, np.uint8),
        "ys": np.float32(0.9).reshape(()),
        "yz": np.array(118, np.uint8),
    }
    check("y = QLinearMatMul (a, as, az, b, bs, bz, ys, yz)", inputs, rtol=0, atol=0, compiled=True)


def test_a_model_with_quantised_weights() -> None:
    """The QDQ form: weights are dequantised by constants, which fold away."""
    body = (
        "q = QuantizeLinear (x, s, z) d = DequantizeLinear (q, s, z) e = DequantizeLinear (w, t)"
        " m = MatMul (d, e) r = QuantizeLinear (m, s, z) y = DequantizeLinear (r, s, z)"
    )
    inputs = {
        "x": floats(4, 16),
        "s": SCALE,
        "z": np.array(128, np.uint8),
        "w": whole(np.int8, 16, 8),
        "t": np.float32(0.01).reshape(()),
    }
    check(body, inputs, atol=1e-5, compiled=True)


def test_the_sum_is_in_i32() -> None:
    """127 * 127 * 4096 needs 26 bits."""
    ones = np.full((1, 4096), 127, np.int8)
    graph = import_onnx(model_of("y = MatMulInteger (a, b)", {"a": ones, "b": ones.T.copy()})).graph
    output: Node = graph.outputs[0]
    assert output.dtype.short == "i32"
    check("y = MatMulInteger (a, b)", {"a": ones, "b": ones.T.copy()}, rtol=0, atol=0, compiled=True)
