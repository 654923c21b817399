"""What the tests of the ONNX frontend share: small models in the standard's text form, run by the oracle or compiled,
compared with onnx's own reference implementation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

import tilewright
from tilewright.frontend.onnx import import_onnx
from tilewright.graph.oracle import evaluate
from tilewright.graph.verify import verify
from tilewright.runtime import tree

NAMES = {
    np.dtype(np.float64): "double",
    np.dtype(np.float32): "float",
    np.dtype(np.float16): "float16",
    np.dtype(np.int64): "int64",
    np.dtype(np.int32): "int32",
    np.dtype(np.int16): "int16",
    np.dtype(np.int8): "int8",
    np.dtype(np.uint8): "uint8",
    np.dtype(np.bool_): "bool",
}


def model_of(
    body: str, inputs: Mapping[str, np.ndarray], outputs: str = "y", opset: int = 21
) -> onnx.ModelProto:
    """A model whose graph has this body and inputs like these. Outputs are given no types: they follow."""
    given = ", ".join(f"{NAMES[a.dtype]}[{','.join(map(str, a.shape))}] {name}" for name, a in inputs.items())
    made = ", ".join(f"float {name}" for name in outputs.split())
    text = f'<ir_version: 10, opset_import: ["" : {opset}]> graph ({given}) => ({made}) {{ {body} }}'
    model = onnx.parser.parse_model(text)
    for value in model.graph.input:
        value.type.tensor_type.shape.SetInParent()  # the text form has no way to say: a single number
    for value in model.graph.output:
        value.type.Clear()
        value.type.tensor_type.SetInParent()
    return model


def expected_of(model: onnx.ModelProto, inputs: Mapping[str, np.ndarray]) -> list[Any]:
    return list(ReferenceEvaluator(model).run(None, dict(inputs)))


def check(
    body: str,
    inputs: Mapping[str, np.ndarray],
    outputs: str = "y",
    *,
    opset: int = 21,
    pin: bool = False,
    rtol: float = 1e-5,
    atol: float = 1e-6,
    compiled: bool = False,
) -> None:
    """The model gives what the reference gives: by the oracle, and compiled if asked."""
    model = model_of(body, inputs, outputs, opset)
    check_model(model, inputs, pin=pin, rtol=rtol, atol=atol, compiled=compiled)


def check_model(
    model: onnx.ModelProto,
    inputs: Mapping[str, np.ndarray],
    *,
    pin: bool = False,
    rtol: float = 1e-5,
    atol: float = 1e-6,
    compiled: bool = False,
) -> None:
    imported = import_onnx(model, dict(inputs) if pin else None, pin=pin)
    verify(imported.graph, "imported")
    expected = expected_of(model, inputs)
    results = evaluate(imported.graph, list(inputs.values()), precise=False)
    compare(tree.unflatten(imported.output_tree, results), expected, rtol, atol)
    if compiled:
        fast = tilewright.compile(imported, numerics="strict", threads=1)
        compare(fast(*inputs.values()), expected, rtol, atol)


def compare(got: Any, expected: Sequence[Any], rtol: float, atol: float) -> None:
    values = [got] if len(expected) == 1 else list(got)
    for value, wanted in zip(values, expected, strict=True):
        wanted = np.asarray(wanted)
        assert value.dtype == wanted.dtype and value.shape == wanted.shape
        np.testing.assert_allclose(
            value.astype(np.float64), wanted.astype(np.float64), rtol=rtol, atol=atol, equal_nan=True
        )


def floats(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    return np.asarray(np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


def ints(low: int, high: int, *shape: int, seed: int = 0, dtype: Any = np.int64) -> np.ndarray:
    return np.asarray(np.random.default_rng(seed).integers(low, high, shape)).astype(dtype)
