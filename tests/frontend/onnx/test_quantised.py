"""Quantised operators: integer sums exact, in both forms (QDQ and QOperator), compiled."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import tilewright
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


def contraction(model: onnx.ModelProto, op: str) -> Node:
    (found,) = [node for node in import_onnx(model).graph.nodes() if node.op == op]
    return found


def with_weights(body: str, x: np.ndarray, **weights: np.ndarray) -> onnx.ModelProto:
    model = model_of(body, {"x": x})
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(array, name) for name, array in weights.items()
    )
    return model


QDQ = "q = QuantizeLinear (x, s, z) d = DequantizeLinear (q, s, z)"


@pytest.mark.parametrize("zero", [0, 131])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("op", ["MatMul", "Gemm"])
def test_the_qdq_form_is_a_product_of_bytes(zero: int, per_channel: bool, op: str) -> None:
    steps = np.abs(floats(8, seed=1)) + 0.01 if per_channel else np.float32(0.02).reshape(())
    call = "MatMul (d, e)" if op == "MatMul" else "Gemm <transB: int = 1> (d, e, b)"
    body = f"{QDQ} e = DequantizeLinear <axis: int = {int(op == 'MatMul')}> (w, t) y = {call}"
    x, w = floats(5, 16), whole(np.int8, 16, 8)
    weights = {
        "s": SCALE,
        "z": np.array(zero, np.uint8),
        "w": w if op == "MatMul" else w.T.copy(),
        "t": steps,
    }
    if op == "Gemm":
        weights["b"] = floats(8, seed=3)
    model = with_weights(body, x, **weights)
    check_model(model, {"x": x}, rtol=1e-4, atol=1e-4, compiled=True)
    assert [operand.dtype.short for operand in contraction(model, "matmul").inputs] == ["u8", "i8"]


@pytest.mark.parametrize("zero", [0, 131])
@pytest.mark.parametrize("per_channel", [False, True])
def test_the_qdq_form_is_a_convolution_of_bytes(zero: int, per_channel: bool) -> None:
    """What is padded around is the zero point."""
    steps = np.abs(floats(6, seed=1)) + 0.01 if per_channel else np.float32(0.02).reshape(())
    body = (
        f"{QDQ} e = DequantizeLinear <axis: int = 0> (w, t)"
        " y = Conv <pads: ints = [1, 0, 2, 1], group: int = 2> (d, e, b)"
    )
    x = floats(1, 4, 6, 5)
    weights = {"s": SCALE, "z": np.array(zero, np.uint8), "w": whole(np.int8, 6, 2, 3, 3), "t": steps}
    model = with_weights(body, x, b=floats(6, seed=2), **weights)
    check_model(model, {"x": x}, rtol=1e-4, atol=1e-3, compiled=True)
    assert [operand.dtype.short for operand in contraction(model, "conv").inputs] == ["u8", "i8"]


def test_scales_along_the_sum_stay_in_floats() -> None:
    body = f"{QDQ} e = DequantizeLinear <axis: int = 0> (w, t) y = MatMul (d, e)"
    x = floats(5, 16)
    weights = {"w": whole(np.int8, 16, 8), "t": np.abs(floats(16, seed=1)) + 0.01}
    model = with_weights(body, x, s=SCALE, z=np.array(3, np.uint8), **weights)
    check_model(model, {"x": x}, rtol=1e-4, atol=1e-4)
    assert contraction(model, "matmul").dtype.short == "f32"


def test_the_sum_is_in_i32() -> None:
    """127 * 127 * 4096 needs 26 bits."""
    ones = np.full((1, 4096), 127, np.int8)
    graph = import_onnx(model_of("y = MatMulInteger (a, b)", {"a": ones, "b": ones.T.copy()})).graph
    output: Node = graph.outputs[0]
    assert output.dtype.short == "i32"
    check("y = MatMulInteger (a, b)", {"a": ones, "b": ones.T.copy()}, rtol=0, atol=0, compiled=True)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("pads", [(0, 0, 0, 0), (1, 0, 2, 1)])
def test_the_border_of_a_convolution_is_its_zero_point(pads: tuple[int, ...], known: bool) -> None:
    """Known when the model is compiled, or only when it is called (dynamic quantisation): bytes go into the sum."""
    x, zero, weight = whole(np.uint8, 1, 4, 6, 5), np.array(77, np.uint8), whole(np.int8, 8, 4, 3, 3, seed=1)
    body = f"y = ConvInteger <pads: ints = [{', '.join(map(str, pads))}]> (x, w, z)"
    inputs = {"x": x} if known else {"x": x, "z": zero}
    model = model_of(body, inputs)
    constants = {"w": weight, "z": zero} if known else {"w": weight}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a, name) for name, a in constants.items())
    check_model(model, inputs, rtol=0, atol=0, compiled=True)
    assert [operand.dtype.short for operand in contraction(model, "conv").inputs] == ["u8", "i8"]


@pytest.mark.parametrize(("zero", "convolutions"), [(128, 1), (114, 2)])
@pytest.mark.parametrize("per_channel", [False, True])
def test_weights_with_zero_points_stay_bytes(zero: int, convolutions: int, per_channel: bool) -> None:
    """Less its zero point a weight needs nine bits: it is the sum of two of bytes, or one that happens to fit."""
    x = whole(np.uint8, 1, 4, 6, 5)
    constants = {
        "w": whole(np.uint8, 8, 4, 3, 3, seed=1),
        "z": np.array(77, np.uint8),
        "q": np.full(8, zero, np.uint8) if per_channel else np.array(zero, np.uint8),
    }
    constants["w"].flat[:2] = (0, 255)
    if per_channel and convolutions == 2:
        constants["q"][3] = 250
    model = with_weights("y = ConvInteger <pads: ints = [1, 1, 1, 1]> (x, w, z, q)", x, **constants)
    check_model(model, {"x": x}, rtol=0, atol=0, compiled=True)
    found = [node for node in import_onnx(model).graph.nodes() if node.op == "conv"]
    assert [[operand.dtype.short for operand in node.inputs] for node in found] == [
        ["u8", "i8"]
    ] * convolutions


@pytest.mark.parametrize("magnitude", [1e-38, 1e-40, 1.0, 1e37])
def test_dynamic_quantisation_of_any_magnitude(magnitude: float) -> None:
    """A scale that is subnormal: bytes as of the same numbers at another magnitude, with the default numerics."""
    x = np.linspace(-1, 3, 96, dtype=np.float64).reshape(8, 12)
    inputs = {"x": (x * magnitude).astype(np.float32)}
    model = model_of("y, s, z = DynamicQuantizeLinear (x)", inputs, "y s z")
    y, scale, zero = tilewright.compile(import_onnx(model), threads=1)(inputs["x"])
    assert scale == pytest.approx(4 / 255 * magnitude, rel=1e-3) and zero == 64
    assert np.abs(y.astype(int) - np.clip(np.round(x / (4 / 255)) + 64, 0, 255)).max() <= 1
