"""ONNX Runtime's own operators against ONNX Runtime, where it is installed, and some against their parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import tilewright
from tests.frontend.onnx.checking import floats, ints
from tilewright.frontend.onnx import import_onnx
from tilewright.frontend.onnx.op_microsoft import DOMAIN
from tilewright.frontend.onnx.registry import table
from tilewright.graph.oracle import evaluate

F = np.float32


def number(value: float, dtype: Any = F) -> np.ndarray:
    return np.asarray(value, dtype)


def model_of(
    op: str,
    inputs: Mapping[str, np.ndarray],
    outputs: Mapping[str, Any],
    domain: str = DOMAIN,
    **attributes: Any,
) -> onnx.ModelProto:
    """One node. Inputs and outputs whose names begin with "_" are left out."""
    names = ["" if name.startswith("_") else name for name in inputs]
    results = ["" if name.startswith("_") else name for name in outputs]
    node = helper.make_node(op, names, results, domain=domain, **attributes)
    given = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in inputs.items()
        if not name.startswith("_")
    ]
    made = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), None)
        for name, dtype in outputs.items()
        if not name.startswith("_")
    ]
    graph = helper.make_graph([node], "node", given, made)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def results(model: onnx.ModelProto, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    given = [array for name, array in inputs.items() if not name.startswith("_")]
    return evaluate(import_onnx(model).graph, given, precise=False)


def scales(x: str = "x", scale: float = 0.021, zero: int = 117) -> dict[str, np.ndarray]:
    return {f"{x}_scale": number(scale), f"{x}_zero": number(zero, np.uint8)}


BYTES = ints(0, 256, 2, 6, 5, 4, dtype=np.uint8)
MATRIX, WEIGHT = ints(0, 256, 7, 16, dtype=np.uint8), ints(-128, 128, 16, 9, seed=1, dtype=np.int8)
X, Y = scales(), scales("y", 0.043, 101)
NOTHING = np.zeros(0, F)
LSTM = {
    "x": floats(4, 2, 6),
    "w": ints(-128, 128, 2, 6, 20, dtype=np.int8),
    "r": ints(-128, 128, 2, 5, 20, seed=1, dtype=np.int8),
    "b": floats(2, 40),
    "_lengths": NOTHING,
    "h": floats(2, 2, 5, seed=2),
    "c": floats(2, 2, 5, seed=3),
    "_p": NOTHING,
    "ws": F([0.004, 0.003]),
    "wz": np.zeros(2, np.int8),
    "rs": F([0.005, 0.002]),
    "rz": np.zeros(2, np.int8),
}
BERT = {"x": floats(2, 5, 12), "w": floats(12, 36, seed=1) / F(4), "b": floats(36, seed=2)}
EMBED = {
    "ids": ints(0, 9, 2, 5, dtype=np.int32),
    "segments": ints(0, 2, 2, 5, dtype=np.int32),
    "words": floats(9, 12),
    "places": floats(8, 12, seed=1),
    "kinds": floats(2, 12, seed=2),
    "gamma": floats(12, seed=3),
    "beta": floats(12, seed=4),
    "mask": np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], np.int32),
}
NORM = {"x": floats(2, 5, 12), "skip": floats(2, 5, 12, seed=1), "gamma": floats(12, seed=2)}

# (operator, inputs, outputs, attributes)
CASES: dict[str, tuple[str, dict[str, np.ndarray], dict[str, Any], dict[str, Any]]] = {
    "MatMulIntegerToFloat": (
        "MatMulIntegerToFloat",
        {"a": MATRIX, "b": WEIGHT, "as": number(0.02), "bs": np.abs(floats(9)), "az": number(9, np.uint8)},
        {"y": F},
        {},
    ),
    "DynamicQuantizeMatMul": (
        "DynamicQuantizeMatMul",
        {"a": floats(7, 16), "b": WEIGHT, "bs": number(0.03), "bz": number(5, np.int8), "bias": floats(9)},
        {"y": F},
        {},
    ),
    "QGemm": (
        "QGemm",
        {"a": MATRIX, **scales("a"), "b": WEIGHT, "bs": number(0.03), "bz": number(0, np.int8)}
        | {"c": ints(-500, 500, 9, dtype=np.int32), **scales("y", 2.5, 120)},
        {"y": np.uint8},
        {},
    ),
    "DynamicQuantizeLSTM": (
        "DynamicQuantizeLSTM",
        LSTM,
        {"y": F, "yh": F, "yc": F},
        {"direction": "bidirectional", "hidden_size": 5},
    ),
    "QLinearAdd": ("QLinearAdd", {"x": BYTES, **X, "z": BYTES[:1], **scales("z"), **Y}, {"y": np.uint8}, {}),
    "QLinearMul": (
        "QLinearMul",
        {"x": BYTES, **X, "z": BYTES[::-1].copy(), **scales("z"), **Y},
        {"y": np.uint8},
        {},
    ),
    "QLinearSigmoid": ("QLinearSigmoid", {"x": BYTES, **X, **scales("y", 0.004, 0)}, {"y": np.uint8}, {}),
    "QLinearLeakyRelu": ("QLinearLeakyRelu", {"x": BYTES, **X, **Y}, {"y": np.uint8}, {"alpha": 0.2}),
    "QLinearSoftmax": (
        "QLinearSoftmax",
        {"x": MATRIX, **X, **scales("y", 1 / 256, 0)},
        {"y": np.uint8},
        {"axis": -1, "opset": 13},
    ),
    "QLinearConcat": (
        "QLinearConcat",
        {**Y, "x": BYTES, **X, "z": BYTES, **scales("z", 0.05, 9)},
        {"out": np.uint8},
        {"axis": 1},
    ),
    "QLinearGlobalAveragePool": ("QLinearGlobalAveragePool", {"x": BYTES, **X, **Y}, {"y": np.uint8}, {}),
    "QLinearAveragePool": (
        "QLinearAveragePool",
        {"x": BYTES, **X, **Y},
        {"y": np.uint8},
        {"kernel_shape": [2, 2], "strides": [2, 1]},
    ),
    "FusedConv": (
        "FusedConv",
        {"x": floats(1, 3, 6, 6), "w": floats(4, 3, 3, 3, seed=1), "b": floats(4)},
        {"y": F},
        {"activation": "Clip", "activation_params": [-0.5, 2.0], "pads": [1, 1, 1, 1]},
    ),
    "FusedGemm": (
        "FusedGemm",
        {"a": floats(4, 6), "b": floats(5, 6), "c": floats(5)},
        {"y": F},
        {"activation": "LeakyRelu", "activation_alpha": 0.3, "transB": 1},
    ),
    "FusedMatMul": (
        "FusedMatMul",
        {"a": floats(2, 3, 6, 4), "b": floats(2, 3, 5, 6, seed=1)},
        {"y": F},
        {"alpha": 0.25, "transA": 1, "transB": 1},
    ),
    "FusedMatMul batched": (
        "FusedMatMul",
        {"a": floats(4, 3, 6), "b": floats(3, 6, 5, seed=1)},
        {"y": F},
        {"transBatchA": 1},
    ),
    "Gelu": ("Gelu", {"x": floats(3, 8)}, {"y": F}, {}),
    "BiasGelu": ("BiasGelu", {"x": floats(3, 8), "b": floats(8)}, {"y": F}, {}),
    "FastGelu": ("FastGelu", {"x": floats(3, 8), "b": floats(8)}, {"y": F}, {}),
    "QuickGelu": ("QuickGelu", {"x": floats(3, 8)}, {"y": F}, {"alpha": 1.3}),
    "SkipLayerNormalization": (
        "SkipLayerNormalization",
        {**NORM, "beta": floats(12, seed=3), "bias": floats(12, seed=4)},
        {"y": F, "_mean": F, "_deviation": F, "sum": F},
        {"epsilon": 1e-5},
    ),
    "SkipSimplifiedLayerNormalization": (
        "SkipSimplifiedLayerNormalization",
        NORM,
        {"y": F},
        {"epsilon": 1e-5},
    ),
    "EmbedLayerNormalization": (
        "EmbedLayerNormalization",
        EMBED,
        {"y": F, "kept": np.int32},
        {"epsilon": 1e-5},
    ),
    "Attention": ("Attention", {**BERT, "mask": EMBED["mask"]}, {"y": F}, {"num_heads": 3}),
    "Attention of counts": (
        "Attention",
        {**BERT, "mask": np.array([3, 5], np.int32)},
        {"y": F},
        {"num_heads": 3},
    ),
    "Attention causal": ("Attention", BERT, {"y": F}, {"num_heads": 2, "unidirectional": 1}),
}


@pytest.mark.parametrize("case", sorted(CASES))
def test_as_onnx_runtime_computes_it(case: str) -> None:
    """Bytes may be one step apart: where it rounds fewer times than the parts do, at a tie."""
    runtime = pytest.importorskip("onnxruntime")
    op, inputs, outputs, attributes = CASES[case]
    model = model_of(op, inputs, outputs, **attributes)
    options = runtime.SessionOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    session = runtime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    expected = session.run(None, {k: v for k, v in inputs.items() if not k.startswith("_")})
    for got, wanted in zip(results(model, inputs), expected, strict=True):
        assert got.dtype == wanted.dtype and got.shape == wanted.shape
        if got.dtype == np.uint8:
            assert np.abs(got.astype(int) - wanted).max() <= 1
            assert np.mean(got != wanted) < 0.02
        else:
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


def test_every_operator_of_the_domain_has_a_case() -> None:
    named = {op for op, *_ in CASES.values()}
    same = {"QuantizeLinear", "DequantizeLinear", "TransposeMatMul"}  # as others here, or as the standard's
    assert {name for domain, name in table() if domain == DOMAIN} == named | same


def test_an_lstm_of_bytes_compiles() -> None:
    """As the float LSTM of the weights that the bytes stand for, within what quantising its inputs costs."""
    op, inputs, outputs, attributes = CASES["DynamicQuantizeLSTM"]
    given = {name: value for name, value in inputs.items() if not name.startswith("_")}
    compiled = tilewright.compile(model_of(op, inputs, outputs, **attributes), given, threads=1)
    plain = {
        "x": inputs["x"],
        "w": (inputs["w"] * inputs["ws"][:, None, None]).transpose(0, 2, 1).astype(F),
        "r": (inputs["r"] * inputs["rs"][:, None, None]).transpose(0, 2, 1).astype(F),
        "b": inputs["b"],
        "_lengths": NOTHING,
        "h": inputs["h"],
        "c": inputs["c"],
    }
    exact = results(model_of("LSTM", plain, outputs, "", **attributes), plain)
    for got, wanted in zip(compiled(*given.values()), exact, strict=True):
        np.testing.assert_allclose(got, wanted, atol=0.05)
        assert np.abs(got - wanted).max() > 0


def test_adding_bytes() -> None:
    op, inputs, outputs, _ = CASES["QLinearAdd"]
    (got,) = results(model_of(op, inputs, outputs), inputs)
    a, b = ((inputs[name].astype(np.int32) - 117).astype(F) * F(0.021) for name in ("x", "z"))
    expected = np.clip(np.rint((a + b) / F(0.043)) + F(101), 0, 255).astype(np.uint8)
    np.testing.assert_array_equal(got, expected)


def test_statistics_of_a_fused_normalisation_are_refused_where_they_are_used() -> None:
    inputs = {**NORM, "beta": floats(12, seed=3)}
    model = model_of("SkipLayerNormalization", inputs, {"y": F, "mean": F})
    with pytest.raises(tilewright.TilewrightError, match="mean and deviation"):
        import_onnx(model)
