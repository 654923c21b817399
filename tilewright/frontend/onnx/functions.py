"""The bodies of operators that the standard defines as functions of others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
import onnx.defs
import onnx.shape_inference

from tilewright.frontend.onnx.types import element_of
from tilewright.graph.ir import Node


def function_of(
    proto: onnx.NodeProto, opset: int, operands: Sequence[Any]
) -> tuple[onnx.FunctionProto, dict[str, int]] | None:
    """(body of the node's operator, opsets that it is written in); None if the standard gives none."""
    try:
        schema = onnx.defs.get_schema(proto.op_type, opset, proto.domain)
    except onnx.defs.SchemaError:
        return None
    body = onnx.FunctionProto()
    if schema.has_function:
        body.CopyFrom(schema.function_body)
    elif schema.has_context_dependent_function:
        types = [_type_of(operand).SerializeToString() for operand in operands]
        written = [v for v in schema.context_dependent_function_opset_versions if v <= opset]
        if not written:
            return None
        content = schema.get_context_dependent_function_with_opset_version(
            max(written), proto.SerializeToString(), types
        )
        if not content:
            return None
        body.ParseFromString(content)
    else:
        return None
    opsets = {entry.domain if entry.domain != "ai.onnx" else "": entry.version for entry in body.opset_import}
    return body, opsets or {"": opset}


def contradiction(proto: onnx.NodeProto, opset: int, operands: Sequence[Any]) -> str | None:
    """A conflict between the standard's shape inference and the shapes of the node's operands."""
    if not all(isinstance(operand, Node) for operand in operands if operand is not None):
        return None
    types = {name: _type_of(x) for name, x in zip(proto.input, operands, strict=False) if x is not None}
    schema = onnx.defs.get_schema(proto.op_type, opset, proto.domain)
    try:
        opsets = [onnx.helper.make_opsetid(proto.domain, opset)]
        onnx.shape_inference.infer_node_outputs(schema, proto, types, opset_imports=opsets)
    except onnx.shape_inference.InferenceError as error:
        return str(error)
    return None


def _type_of(operand: Any) -> onnx.TypeProto:
    if isinstance(operand, Node):
        made: onnx.TypeProto = onnx.helper.make_tensor_type_proto(element_of(operand.dtype), operand.shape)
        return made
    if isinstance(operand, list) and operand:
        sequence: onnx.TypeProto = onnx.helper.make_sequence_type_proto(_type_of(operand[0]))
        return sequence
    return onnx.TypeProto()


def bound(body: onnx.FunctionProto, proto: onnx.NodeProto, opset: int) -> list[onnx.NodeProto]:
    """The nodes of a body, with referenced attributes filled in from the expanded node."""
    given = {attribute.name: attribute for attribute in proto.attribute}
    for attribute in body.attribute_proto:
        given.setdefault(attribute.name, attribute)
    for default in onnx.defs.get_schema(proto.op_type, opset, proto.domain).attributes.values():
        if default.default_value.name and default.name not in given:
            given[default.name] = default.default_value
    return [_bound_node(node, given) for node in body.node]


def _bound_node(node: onnx.NodeProto, given: dict[str, onnx.AttributeProto]) -> onnx.NodeProto:
    result = onnx.NodeProto()
    result.CopyFrom(node)
    del result.attribute[:]
    for attribute in node.attribute:
        if attribute.ref_attr_name:
            if attribute.ref_attr_name in given:
                filled = result.attribute.add()
                filled.CopyFrom(given[attribute.ref_attr_name])
                filled.name = attribute.name
        elif attribute.type == onnx.AttributeProto.GRAPH:
            filled = result.attribute.add()
            filled.CopyFrom(attribute)
            inner = [_bound_node(each, given) for each in attribute.g.node]
            del filled.g.node[:]
            filled.g.node.extend(inner)
        else:
            result.attribute.add().CopyFrom(attribute)
    return result
