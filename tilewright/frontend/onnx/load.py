"""Load and validate a model: parse it, check it against the format's rules, and inline local functions.

Nothing is allocated for a model's claims alone: files are measured before they are read, and the checker sees the
model without its tensors.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnx.checker
import onnx.inliner
import onnx.shape_inference

from tilewright.errors import ModelFileError, ModelSizeError, UnsupportedModelError
from tilewright.frontend.onnx.expansion import check_expansion, subgraphs
from tilewright.frontend.onnx.wire import check_wire
from tilewright.support.budget import MAX_NAME, Budget

MAX_FILE_BYTES = (1 << 31) - 1  # protobuf's own limit; larger models keep their tensors in other files
_CHECKED_COPIES = 4  # copies of a model without its initialisers during the check
UNKNOWN_OPERATOR = (
    "No Op registered for"  # the checker's message for an operator that Tilewright reports itself
)


@dataclass(frozen=True)
class Loaded:
    model: onnx.ModelProto
    folder: Path | None  # the file's folder
    opsets: dict[str, int]


def load(source: Any, budget: Budget | None = None) -> Loaded:
    """Load a model from a file, or validate one in memory. Raises ModelFileError if it is invalid."""
    if isinstance(source, Loaded):
        return source
    budget = budget or Budget.of_options()
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        model, folder = _read(path, budget), path.resolve().parent
    elif isinstance(source, onnx.ModelProto):
        model, folder = source, None
    else:
        raise UnsupportedModelError(f"cannot import a {type(source).__module__}.{type(source).__qualname__}")
    if not model.HasField("graph") or not (model.graph.node or model.graph.output):
        name = "the model" if isinstance(source, onnx.ModelProto) else str(source)
        raise ModelFileError(f"{name} has no graph: it is empty or not an ONNX model")
    opsets = {
        entry.domain if entry.domain != "ai.onnx" else "": entry.version for entry in model.opset_import
    }
    _check(model, budget)
    newest = onnx.defs.onnx_opset_version()
    if opsets.get("", 1) > newest:
        raise ModelFileError(
            f"the model is of opset {opsets['']}, and the installed onnx {onnx.__version__} knows up to {newest}",
            remedy="install a newer onnx",
        )
    if model.functions:
        model = _inlined(model)
    return Loaded(model, folder, opsets)


def _read(path: Path, budget: Budget) -> onnx.ModelProto:
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise ModelFileError(f"{path} is not a file", remedy="pass the path of an .onnx file")
        if size > MAX_FILE_BYTES:
            raise ModelSizeError(
                f"{path} has {size} bytes, and an ONNX file at most {MAX_FILE_BYTES}",
                remedy="keep its tensors in other files: onnx.save_model(..., save_as_external_data=True)",
            )
        budget.fits(2 * size, f"{path}, with its contents as text and as a model,")
        content = path.read_bytes()
    except OSError as error:
        raise ModelFileError(f"cannot read {path}: {error.strerror}", remedy="check the path") from None
    check_wire(content, budget, str(path))
    budget.hold(size, str(path))
    model = onnx.ModelProto()
    try:
        model.ParseFromString(content)
    except Exception as error:  # protobuf's own classes, of which it has had several
        raise ModelFileError(f"{path} is not an ONNX model, or a truncated one: {error}") from None
    return model


def _check(model: onnx.ModelProto, budget: Budget) -> None:
    """The rules of the format: one definition per name, definitions before uses, operators with the inputs and
    attributes that they have."""
    repeated = _repeated(tensor.name for tensor in model.graph.initializer)
    if repeated:
        raise ModelFileError(f"two initialisers are called {repeated!r}")
    if not model.opset_import:
        raise ModelFileError("the model does not say which opset it uses")
    check_expansion(model, budget)
    for graph in (model.graph, *model.functions):
        for name in _names(graph):
            if not isinstance(name, str):  # protobuf returns invalid text as bytes
                raise ModelFileError("a name in the model is not text")
            if len(name) > MAX_NAME:
                raise ModelSizeError(
                    f"a name in the model has {len(name)} characters: {name[:40]!r}...",
                    remedy=f"give values, nodes and operators names of at most {MAX_NAME} characters",
                )
    data = sum(tensor.ByteSize() for tensor in model.graph.initializer)
    budget.fits(_CHECKED_COPIES * (model.ByteSize() - data), "the checker's copy of the model")
    try:
        onnx.checker.check_model(_skeleton(model))
    except Exception as error:  # the checker raises its own class, and errors of protobuf for broken strings
        lines = [line for line in str(error).splitlines() if line.strip()]
        if not any(UNKNOWN_OPERATOR in line for line in lines):
            raise ModelFileError(f"the model breaks the format: {' '.join(lines[:3])}") from None


def _skeleton(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with its initialisers as inputs, whose data the checker does not need."""
    result = onnx.ModelProto(ir_version=max(model.ir_version, 4))
    result.opset_import.extend(model.opset_import)
    result.functions.extend(model.functions)
    graph = result.graph
    graph.name = model.graph.name or "graph"
    graph.node.extend(model.graph.node)
    for value in model.graph.input:  # which may leave their shapes open
        declared = value.type.tensor_type
        if value.type.HasField("tensor_type") and not declared.HasField("shape"):
            value = onnx.helper.make_tensor_value_info(value.name, declared.elem_type, ())
        graph.input.append(value)
    for value in model.graph.output:  # their types follow from the graph, whatever is declared
        graph.output.append(onnx.helper.make_tensor_value_info(value.name, onnx.TensorProto.FLOAT, ()))
    given = {value.name for value in graph.input}
    for tensor in model.graph.initializer:
        if tensor.name not in given:
            graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    return result


def _names(graph: onnx.GraphProto | onnx.FunctionProto) -> Iterator[Any]:
    """Every name that the walk over the graph looks at."""
    waiting = [graph]
    while waiting:
        current = waiting.pop()
        if isinstance(current, onnx.FunctionProto):
            yield from (current.name, current.domain, *current.input, *current.output)
        else:
            yield current.name
            yield from (value.name for value in (*current.input, *current.output, *current.initializer))
        for node in current.node:
            yield from (node.op_type, node.domain, node.name, *node.input, *node.output)
            for attribute in node.attribute:
                yield from (attribute.name, attribute.ref_attr_name)
                waiting += subgraphs(attribute)


def _repeated(names: Any) -> str | None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return str(name)
        seen.add(name)
    return None


def _inlined(model: onnx.ModelProto) -> onnx.ModelProto:
    try:
        result: onnx.ModelProto = onnx.inliner.inline_local_functions(model)
    except Exception as error:  # onnx's inliner is native code with errors of its own
        raise ModelFileError(f"the model's functions cannot be expanded: {error}") from None
    return result
