"""What hostile model files are built with. A case writes its file, and what lies alongside it, into a folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.frontend.onnx.checking import model_of

Case = Callable[[Path], Path]


def written(make: Callable[[], onnx.ModelProto]) -> Case:
    def case(folder: Path) -> Path:
        path = folder / "model.onnx"
        path.write_bytes(make().SerializeToString())
        return path

    return case


def raw(make: Callable[[], bytes]) -> Case:
    def case(folder: Path) -> Path:
        path = folder / "model.onnx"
        path.write_bytes(make())
        return path

    return case


def body(
    text: str, outputs: str = "y", opset: int = 21, x: Sequence[int] = (2, 3), **weights: np.ndarray
) -> Case:
    """A model of one float input `x` with these nodes, and weights."""

    def make() -> onnx.ModelProto:
        model = model_of(text, {"x": np.zeros((0,) * len(x), np.float32)}, outputs, opset)
        for dim, extent in zip(model.graph.input[0].type.tensor_type.shape.dim, x, strict=True):
            dim.dim_value = extent
        model.graph.initializer.extend(numpy_helper.from_array(a, name) for name, a in weights.items())
        return model

    return written(make)


def numbers(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def scalar(value: int) -> np.ndarray:
    return np.array(value, np.int64)


def graph_model(
    nodes: Sequence[onnx.NodeProto],
    outputs: Sequence[str] = ("y",),
    shape: Sequence[int] = (2, 3),
    initialisers: Sequence[onnx.TensorProto] = (),
    opset: int = 21,
    functions: Sequence[onnx.FunctionProto] = (),
) -> onnx.ModelProto:
    graph = helper.make_graph(
        list(nodes),
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, list(shape))],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        list(initialisers),
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("local", 1)]
    return helper.make_model(graph, opset_imports=opsets, functions=list(functions), ir_version=10)


def function(name: str, nodes: Sequence[onnx.NodeProto]) -> onnx.FunctionProto:
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("local", 1)]
    return helper.make_function("local", name, ["a"], ["b"], list(nodes), opsets)
