"""Quantised operators with strict numerics: ONNX Runtime's results without graph optimisation, bit for bit.

What it computes is written here in NumPy's float32, one rounding for each operation; where onnxruntime is installed, it
is asked too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx
import pytest

import tilewright
from tests.frontend.onnx.checking import floats, ints, model_of

F = np.float32
DYNAMIC = {
    "normal": floats(33, 65),
    "ties": (ints(-255, 256, 16, 64) / 2).astype(F),
    "zeros": np.zeros((3, 5), F),
    "positive": np.abs(floats(7, 9)),
    "negative": -np.abs(floats(7, 9)),
    "one value": np.full((4, 4), 3.7, F),
    "tiny": floats(20, 20) * F(1e-38),
    "subnormal": (floats(20, 20) * F(1e-39)) * F(1e-3),
    "large": floats(20, 20) * F(1e37),
}


def quantised(x: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> np.ndarray:
    info = np.iinfo(zero.dtype)
    whole = np.rint(x / scale) + zero.astype(F)
    return np.clip(whole, info.min, info.max).astype(zero.dtype)


def dynamic(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    low, high = min(x.min(), F(0)), max(x.max(), F(0))
    scale = np.asarray(F(1) if low == high else (high - low) / F(255))
    zero = np.asarray(np.rint(np.clip(F(0) - low / scale, F(0), F(255)))).astype(np.uint8)
    return quantised(x, scale, zero), scale, zero


def same_bits(model: onnx.ModelProto, inputs: Mapping[str, np.ndarray], expected: list[np.ndarray]) -> None:
    got = tilewright.compile(model, dict(inputs), numerics="strict", threads=1)(*inputs.values())
    results = {"tilewright": [got] if len(expected) == 1 else list(got)}
    if (theirs := unoptimised(model, inputs)) is not None:
        results["onnxruntime"] = theirs
    for name, values in results.items():
        for value, wanted in zip(values, expected, strict=True):
            assert value.dtype == wanted.dtype and value.shape == wanted.shape, name
            assert value.tobytes() == wanted.tobytes(), name


def unoptimised(model: onnx.ModelProto, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray] | None:
    try:
        import onnxruntime
    except ImportError:
        return None
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    typed = onnx.shape_inference.infer_shapes(model)
    known = {value.name: value for value in typed.graph.output}
    del typed.graph.output[:]
    typed.graph.output.extend(known[value.name] for value in model.graph.output)
    session = onnxruntime.InferenceSession(
        typed.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return list(session.run(None, dict(inputs)))


@pytest.mark.parametrize("kind", sorted(DYNAMIC))
def test_dynamic_quantisation(kind: str) -> None:
    x = DYNAMIC[kind]
    model = model_of("y, s, z = DynamicQuantizeLinear (x)", {"x": x}, "y s z")
    same_bits(model, {"x": x}, list(dynamic(x)))


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@pytest.mark.parametrize("scale", [0.0173, 0.5, 1 / 3])
def test_quantise_and_back(dtype: type, scale: float) -> None:
    x = np.concatenate([floats(500) * F(9), (ints(-900, 900, 500) / 4).astype(F), F([np.inf, -np.inf, 1e36])])
    inputs = {"x": x, "s": np.asarray(F(scale)), "z": np.array(3, dtype)}
    bytes_ = quantised(x, inputs["s"], inputs["z"])
    back = (bytes_.astype(np.int32) - 3).astype(F) * F(scale)
    same_bits(
        model_of("y = QuantizeLinear (x, s, z) d = DequantizeLinear (y, s, z)", inputs, "y d"),
        inputs,
        [bytes_, back],
    )


def convolved(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """A 3 x 3 convolution of whole numbers with a border of zeros."""
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))
    return np.einsum("nchwij,ocij->nohw", windows, w)


def multiplied(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    return x @ w


LAYERS: dict[
    str, tuple[str, Callable[..., np.ndarray], tuple[int, ...], tuple[int, ...], tuple[int, ...]]
] = {
    "MatMul": ("", multiplied, (10, 24), (24, 24), (24,)),
    "Conv": ("<pads: ints = [1, 1, 1, 1]>", convolved, (2, 8, 9, 7), (8, 8, 3, 3), (1, 8, 1, 1)),
}


@pytest.mark.parametrize("kind", sorted(LAYERS))
@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_dynamically_quantised_layers(kind: str, dtype: type) -> None:
    """Four layers, as ONNX Runtime's quantiser writes them: what rounds at a tie in one would be seen behind it."""
    attributes, contraction, shape, weights, bias = LAYERS[kind]
    inputs: dict[str, np.ndarray] = {"x": floats(*shape)}
    body, value, current = [], inputs["x"], "x"
    for n in range(4):
        w = ints(np.iinfo(dtype).min, np.iinfo(dtype).max + 1, *weights, seed=n, dtype=dtype)
        zero = np.array(0 if dtype is np.int8 else 121, dtype)
        step, b = np.asarray(np.abs(floats(1, seed=n))[0] / F(99)), floats(*bias, seed=n)
        inputs |= {f"w{n}": w, f"z{n}": zero, f"s{n}": step, f"b{n}": b}
        body.append(
            f"q{n}, t{n}, o{n} = DynamicQuantizeLinear ({current})"
            f" i{n} = {kind}Integer {attributes} (q{n}, w{n}, o{n}, z{n}) f{n} = Cast <to: int = 1> (i{n})"
            f" m{n} = Mul (t{n}, s{n}) p{n} = Mul (f{n}, m{n}) a{n} = Add (p{n}, b{n}) r{n} = Relu (a{n})"
        )
        current = f"r{n}"
        q, scale, start = dynamic(value)
        total = contraction(q.astype(np.int32) - int(start), w.astype(np.int32) - int(zero)).astype(F)
        value = np.maximum(total * (scale * step) + b, F(0))
    same_bits(model_of(" ".join(body), inputs, current), inputs, [value])


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
@pytest.mark.parametrize("kind", sorted(LAYERS))
@pytest.mark.parametrize("per_channel", [False, True])
def test_operators_on_bytes(kind: str, dtype: type, per_channel: bool) -> None:
    """The QOperator form: one factor for the scales of both operands over that of the result."""
    attributes, contraction, shape, weights, bias = LAYERS[kind]
    channels = (bias[0] if kind == "MatMul" else bias[1]) if per_channel else 1
    steps = np.abs(floats(channels, seed=3)) / F(40)
    inputs = {
        "x": ints(0, 256, *shape, dtype=np.uint8),
        "xs": np.asarray(F(0.013)),
        "xz": np.array(131, np.uint8),
        "w": ints(np.iinfo(dtype).min, np.iinfo(dtype).max + 1, *weights, dtype=dtype, seed=1),
        "ws": steps if per_channel else steps.reshape(()),
        "wz": np.zeros(channels, dtype) if per_channel else np.array(5, dtype),
        "ys": np.asarray(F(0.61)),
        "yz": np.array(120, np.uint8),
    }
    body = f"y = QLinear{kind} {attributes} ({', '.join(inputs)})"
    x, w = inputs["x"].astype(np.int32) - 131, inputs["w"].astype(np.int32)
    total = contraction(x, w - (0 if per_channel else 5)).astype(F)
    factor = (inputs["xs"] * steps) / inputs["ys"]
    whole = np.rint(total * (factor if kind == "MatMul" else factor.reshape(-1, 1, 1))) + F(120)
    same_bits(model_of(body, inputs), inputs, [np.clip(whole, 0, 255).astype(np.uint8)])
