"""Models that break a rule of the format, or lie about what they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import onnx
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from tests.faults.hostile.building import (
    Case,
    function,
    graph_model,
    numbers,
    written,
)
from tests.frontend.onnx.checking import floats, model_of


def lying(change: Callable[[onnx.ModelProto], None], text: str = "a = Relu (x) y = MatMul (a, w)") -> Case:
    def make() -> onnx.ModelProto:
        model = model_of(text, {"x": floats(2, 3)})
        model.graph.initializer.append(numpy_helper.from_array(floats(3, 4), "w"))
        change(model)
        return model

    return written(make)


def set_dims(*dims: int) -> Callable[[onnx.ModelProto], None]:
    def change(model: onnx.ModelProto) -> None:
        del model.graph.initializer[0].dims[:]
        model.graph.initializer[0].dims.extend(dims)

    return change


def set_input(*dims: int) -> Callable[[onnx.ModelProto], None]:
    def change(model: onnx.ModelProto) -> None:
        shape = model.graph.input[0].type.tensor_type.shape
        del shape.dim[:]
        for extent in dims:
            shape.dim.add(dim_value=extent)

    return change


def each(action: Callable[[onnx.ModelProto], Any]) -> Callable[[onnx.ModelProto], None]:
    def change(model: onnx.ModelProto) -> None:
        action(model)

    return change


def retyped(kind: str) -> Callable[[onnx.ModelProto], None]:
    """The first attribute of the model as another type."""

    def change(model: onnx.ModelProto) -> None:
        attribute = model.graph.node[0].attribute[0]
        name = attribute.name
        attribute.Clear()
        attribute.name = name
        values = {
            "STRING": {"s": b"\xff\xfe"},
            "FLOAT": {"f": float("nan")},
            "INTS": {"ints": [1] * 70},
            "FLOATS": {"floats": [1e30]},
            "TENSOR": {"t": numpy_helper.from_array(floats(3))},
            "GRAPH": {"g": model.graph},
            "TENSORS": {"tensors": [numpy_helper.from_array(floats(3))]},
            "SPARSE_TENSOR": {"sparse_tensor": onnx.SparseTensorProto(dims=[1 << 40])},
            "UNDEFINED": {},
        }[kind]
        copied = AttributeProto(**values)  # type: ignore[arg-type]
        attribute.MergeFrom(copied)
        attribute.type = AttributeProto.AttributeType.Value(kind)

    return change


def rules() -> Iterator[tuple[str, Case]]:
    most = (1 << 63) - 1
    for dims in (
        (-3, -4),
        (1 << 62, 4),
        (1 << 32, 1 << 32),
        (0, 1 << 62),
        (12,),
        (3, 4, most),
        (1,) * 100,
        (),
    ):
        yield f"a weight of {dims[:4]}", lying(set_dims(*dims))
    for dims in ((-2, 3), (1 << 62, 3), (1 << 33, 3), (0, 3), (2,) * 70, (2, (1 << 63) - 1), ()):
        yield f"an input of {dims[:4]}", lying(set_input(*dims))
    for kind in (0, 8, 14, 17, 21, 22, 23, 99):
        yield (
            f"a weight of type {kind}",
            lying(each(lambda m, k=kind: setattr(m.graph.initializer[0], "data_type", k))),
        )
        yield (
            f"an input of type {kind}",
            lying(each(lambda m, k=kind: setattr(m.graph.input[0].type.tensor_type, "elem_type", k))),
        )
    pool = "y = MaxPool <kernel_shape: ints = [2, 2]> (x)"
    for kind in (
        "STRING",
        "FLOAT",
        "INTS",
        "FLOATS",
        "TENSOR",
        "GRAPH",
        "TENSORS",
        "SPARSE_TENSOR",
        "UNDEFINED",
    ):
        yield f"a kernel_shape that is {kind}", lying(retyped(kind), pool)
        yield f"a keepdims that is {kind}", lying(retyped(kind), "y = ReduceSum <keepdims: int = 1> (x)")
        yield f"a to that is {kind}", lying(retyped(kind), "y = Cast <to: int = 6> (x)")
    yield "no opset", lying(each(lambda m: m.ClearField("opset_import")))
    for version in (-1, 0, 1, 99, 1 << 40):
        yield f"opset {version}", lying(each(lambda m, v=version: setattr(m.opset_import[0], "version", v)))
    yield "two opsets", lying(each(lambda m: m.opset_import.add(domain="", version=7)))
    yield "no ir_version", lying(each(lambda m: m.ClearField("ir_version")))
    yield "no graph", lying(each(lambda m: m.ClearField("graph")))
    yield "no nodes", lying(each(lambda m: m.graph.ClearField("node")))
    yield "no outputs", lying(each(lambda m: m.graph.ClearField("output")))
    yield "no inputs", lying(each(lambda m: m.graph.ClearField("input")))
    yield "an input without a type", lying(each(lambda m: m.graph.input[0].ClearField("type")))
    yield "a cycle", lying(each(lambda m: m.graph.node[0].input.__setitem__(0, "y")))
    yield "a node that reads itself", lying(each(lambda m: m.graph.node[0].input.__setitem__(0, "a")))
    yield "a missing input", lying(each(lambda m: m.graph.node[0].input.__setitem__(0, "nowhere")))
    yield "nodes out of order", lying(each(lambda m: m.graph.node.reverse()))
    yield "two values of one name", lying(each(lambda m: m.graph.node[1].output.__setitem__(0, "a")))
    yield "two weights of one name", lying(each(lambda m: m.graph.initializer.append(m.graph.initializer[0])))
    yield "two inputs of one name", lying(each(lambda m: m.graph.input.append(m.graph.input[0])))
    yield "two outputs of one name", lying(each(lambda m: m.graph.output.append(m.graph.output[0])))
    yield "an output that is an input", lying(each(lambda m: setattr(m.graph.output[0], "name", "x")))
    yield "an output that nobody makes", lying(each(lambda m: setattr(m.graph.output[0], "name", "nobody")))
    yield "an output without a name", lying(each(lambda m: setattr(m.graph.output[0], "name", "")))
    yield "a name of a megabyte", lying(each(lambda m: setattr(m.graph.node[0], "name", "n" * (1 << 20))))
    yield (
        "an operator of a megabyte",
        lying(each(lambda m: setattr(m.graph.node[0], "op_type", "N" * (1 << 20)))),
    )
    yield "a name with a NUL", lying(each(lambda m: setattr(m.graph.node[0], "name", "a\0b")))
    yield (
        "names that are paths",
        lying(each(lambda m: setattr(m.graph.node[0], "name", "../../../etc/passwd"))),
    )
    yield "an unknown domain", lying(each(lambda m: setattr(m.graph.node[0], "domain", "com.nowhere")))
    yield "too many inputs", lying(each(lambda m: m.graph.node[0].input.extend(["x"] * 1000)))
    yield "too many outputs", lying(each(lambda m: m.graph.node[0].output.extend(["p", "q"])))
    yield "no inputs of a node", lying(each(lambda m: m.graph.node[1].ClearField("input")))
    yield "an unknown attribute", lying(each(lambda m: m.graph.node[0].attribute.add(name="zz", i=3, type=2)))
    yield (
        "an attribute twice",
        lying(each(lambda m: m.graph.node[0].attribute.append(m.graph.node[0].attribute[0])), pool),
    )
    yield (
        "an attribute that refers to a function",
        lying(each(lambda m: setattr(m.graph.node[0].attribute[0], "ref_attr_name", "k")), pool),
    )
    yield (
        "types that lie about shapes",
        lying(
            each(
                lambda m: m.graph.value_info.add(name="a").CopyFrom(
                    helper.make_tensor_value_info("a", 1, [1 << 40])
                )
            )
        ),
    )
    yield (
        "an output that lies about its shape",
        lying(each(lambda m: m.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", 7, [1 << 40])))),
    )
    yield "a sparse weight", lying(_sparse)
    yield "a weight of strings", lying(each(lambda m: m.graph.initializer[0].CopyFrom(_strings("w"))))
    yield (
        "a weight in segments",
        lying(
            each(lambda m: m.graph.initializer[0].segment.CopyFrom(TensorProto.Segment(begin=0, end=1 << 40)))
        ),
    )
    yield (
        "a weight with too little data",
        lying(each(lambda m: setattr(m.graph.initializer[0], "raw_data", b"123"))),
    )
    yield "a weight without data", lying(each(lambda m: m.graph.initializer[0].ClearField("raw_data")))
    yield (
        "a weight with data of two kinds",
        lying(each(lambda m: m.graph.initializer[0].float_data.append(1))),
    )
    yield (
        "a sequence as input",
        lying(
            each(
                lambda m: m.graph.input[0].type.CopyFrom(
                    helper.make_sequence_type_proto(helper.make_tensor_type_proto(1, [2, 3]))
                )
            )
        ),
    )
    yield (
        "an optional as input",
        lying(
            each(
                lambda m: m.graph.input[0].type.CopyFrom(
                    helper.make_optional_type_proto(helper.make_tensor_type_proto(1, [2, 3]))
                )
            )
        ),
    )
    yield (
        "a map as input",
        lying(
            each(
                lambda m: m.graph.input[0].type.CopyFrom(
                    helper.make_map_type_proto(7, helper.make_tensor_type_proto(1, [2, 3]))
                )
            )
        ),
    )
    yield "sequences in sequences", lying(_deep_type)
    yield (
        "a function that calls itself",
        written(
            lambda: graph_model(
                [helper.make_node("f", ["x"], ["y"], domain="local")],
                functions=[function("f", [helper.make_node("f", ["a"], ["b"], domain="local")])],
            )
        ),
    )
    yield (
        "functions that call each other",
        written(
            lambda: graph_model(
                [helper.make_node("f", ["x"], ["y"], domain="local")],
                functions=[
                    function("f", [helper.make_node("g", ["a"], ["b"], domain="local")]),
                    function("g", [helper.make_node("f", ["a"], ["b"], domain="local")]),
                ],
            )
        ),
    )
    yield (
        "a function defined twice",
        written(
            lambda: graph_model(
                [helper.make_node("f", ["x"], ["y"], domain="local")],
                functions=[function("f", [helper.make_node(op, ["a"], ["b"])]) for op in ("Neg", "Exp")],
            )
        ),
    )
    yield (
        "a function that shadows Relu",
        written(
            lambda: graph_model(
                [helper.make_node("Relu", ["x"], ["y"], domain="local")],
                functions=[function("Relu", [helper.make_node("Relu", ["a"], ["b"])])],
            )
        ),
    )
    yield (
        "a function with a missing value",
        written(
            lambda: graph_model(
                [helper.make_node("f", ["x"], ["y"], domain="local")],
                functions=[function("f", [helper.make_node("Neg", ["nowhere"], ["b"])])],
            )
        ),
    )
    yield (
        "a function given too much",
        written(
            lambda: graph_model(
                [helper.make_node("f", ["x", "x", "x"], ["y"], domain="local")],
                functions=[function("f", [helper.make_node("Neg", ["a"], ["b"])])],
            )
        ),
    )


def _sparse(model: onnx.ModelProto) -> None:
    del model.graph.initializer[:]
    values = numpy_helper.from_array(floats(2), "w")
    indices = numpy_helper.from_array(numbers(1, 1 << 40), "w_indices")
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [1 << 40]))


def _strings(name: str) -> TensorProto:
    return helper.make_tensor(name, TensorProto.STRING, [2], ["a", "b"])


def _deep_type(model: onnx.ModelProto) -> None:
    kind = helper.make_tensor_type_proto(1, [2, 3])
    for _ in range(20):
        kind = helper.make_sequence_type_proto(kind)
    model.graph.input[0].type.CopyFrom(kind)
