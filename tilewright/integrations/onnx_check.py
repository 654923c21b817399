"""Check whether a compiled ONNX model is correct: `check_onnx`, the counterpart of `measure.bisect.check_model`.

There are two references, each in float64 and in the model's own types, whose error shows what to expect. The first is
the imported graph, run by the oracle: if the compiled model deviates from it, a rewrite or a kernel is wrong, and
`measure.bisect` names the first such task. The second is onnx's reference implementation, run on the model with its
floats widened: if only that deviates, the importer (or the reference) is wrong, and the report names the first value
at which the two differ.

A quantised model rounds to integers inside, so float64 gives a different result, not a more exact one: both
references then use the model's own types.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, numpy_helper
from onnx.reference import ReferenceEvaluator

from tilewright.errors import InputError
from tilewright.frontend.imported import ImportedModel
from tilewright.frontend.onnx import import_onnx
from tilewright.frontend.onnx.external import ExternalData
from tilewright.frontend.onnx.load import load
from tilewright.frontend.onnx.types import array_of
from tilewright.graph.ir import Graph
from tilewright.graph.oracle import evaluate
from tilewright.measure.bisect import CheckReport, compare
from tilewright.measure.check import relative_error
from tilewright.runtime import tree
from tilewright.runtime.explain import random_inputs
from tilewright.runtime.model import CompiledModel
from tilewright.support.budget import Budget

_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
_TYPE_ATTRIBUTES = ("to", "dtype")  # of Cast, EyeLike, SequenceEmpty and similar operators
_VALUE_BOUND = 1e-6  # for one value in float64: some constants in the reference are float32


@dataclass(frozen=True)
class ValueDeviation:
    """The first value of the model at which the imported graph differs from the reference."""

    name: str
    operator: str
    error: float


@dataclass(frozen=True)
class OnnxReport:
    oracle: CheckReport  # against the imported graph, run by the oracle
    reference: CheckReport | None  # against onnx's reference; None: it cannot run the model
    skipped: str = ""  # why it cannot
    value: ValueDeviation | None = None  # where the reference and the graph first differ, if they do

    @property
    def ok(self) -> bool:
        return self.oracle.ok and (self.reference is None or self.reference.ok)

    def __str__(self) -> str:
        lines = [f"against the imported graph: {self.oracle}"]
        if self.reference is None:
            lines.append(f"against onnx's reference: not compared, {self.skipped}")
        else:
            lines.append(f"against onnx's reference: {self.reference}")
        if self.value is not None:
            lines.append(
                f"The imported graph leaves the reference at the value {self.value.name!r} of"
                f" {self.value.operator}, with an error of {self.value.error:.1e}"
            )
        return "\n".join(lines)


def check_onnx(compiled: CompiledModel, model: Any, inputs: Any = None, *, seed: int = 0) -> OnnxReport:
    """Compare `compiled` with `model`, the ModelProto or the path that it was compiled from. `inputs`: a dict by name,
    a tuple in order, or one array; random ones by default."""
    named = _named(compiled, inputs, seed)
    imported = import_onnx(model, named, pin=True)
    leaves = tree.flatten(tuple(named.values()))[0]
    got = tree.flatten(compiled(*named.values()))[0]

    source = _Source(model)
    own = evaluate(imported.graph, leaves, precise=False)
    exact = own if source.quantised else evaluate(imported.graph, leaves)
    call = _call(compiled, leaves)
    oracle = compare(compiled, got, own, exact, call)
    try:
        theirs = source.run(named)
        right = theirs if source.quantised else source.run(named, wide=True)
    except Exception as error:  # the reference may raise anything for what it does not support
        return OnnxReport(
            oracle, None, f"it cannot run the model: {type(error).__name__}: {_first_line(error)}"
        )
    reference = compare(compiled, got, _flat(theirs), _flat(right), call)
    value = None
    if oracle.ok and not reference.ok:
        value = _first_value(source, imported, named, leaves)
    return OnnxReport(oracle, reference, value=value)


def _call(compiled: CompiledModel, leaves: Sequence[np.ndarray]) -> Any:
    """The positional arguments of a call with these tensors."""
    args, _ = tree.unflatten(compiled.plan.input_tree, list(leaves))
    return args


def _named(compiled: CompiledModel, inputs: Any, seed: int) -> dict[str, Any]:
    names = compiled.plan.input_names
    if inputs is None:
        return dict(zip(names, _call(compiled, random_inputs(compiled.plan, seed)), strict=True))
    if isinstance(inputs, Mapping):
        missing = [name for name in names if name not in inputs]
        if missing:
            raise InputError(
                f"the inputs {', '.join(missing)} are missing; the model takes {', '.join(names)}"
            )
        return {name: inputs[name] for name in names}
    values = inputs if isinstance(inputs, tuple) else (inputs,)
    if len(values) != len(names):
        raise InputError(
            f"the model takes {len(names)} inputs ({', '.join(names)}), {len(values)} were given"
        )
    return dict(zip(names, values, strict=True))


def _flat(results: Sequence[Any]) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in tree.flatten(list(results))[0]]


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")


# -- onnx's reference -------------------------------------------------------------------------------------------------


class _Source:
    """A model for onnx's reference: its external data is read by the importer's rules."""

    def __init__(self, model: Any) -> None:
        loaded = load(model)
        self.external = ExternalData(loaded.folder)
        self.model = loaded.model
        self.quantised = any(_rounds(node) for node in _nodes(loaded.model.graph))

    def run(self, named: Mapping[str, Any], *, wide: bool = False, intermediate: bool = False) -> Any:
        feeds = {name: _widened_value(value) if wide else value for name, value in named.items()}
        evaluator = ReferenceEvaluator(self._prepared(wide))
        with np.errstate(all="ignore"):
            return evaluator.run(None, feeds, intermediate=intermediate)

    def _prepared(self, wide: bool) -> onnx.ModelProto:
        model = onnx.ModelProto()
        model.CopyFrom(self.model)
        self._graph(model.graph, wide)
        return model

    def _graph(self, graph: onnx.GraphProto, wide: bool) -> None:
        for tensor in graph.initializer:
            self._tensor(tensor, wide)
        for node in graph.node:
            for attribute in node.attribute:
                self._attribute(attribute, wide)
        if wide:
            del graph.value_info[:]
            for value in (*graph.input, *graph.output):
                _widen_type(value.type)

    def _tensor(self, tensor: TensorProto, wide: bool) -> None:
        widen = wide and tensor.data_type in _FLOATS
        if not widen and tensor.data_location != TensorProto.EXTERNAL:
            return
        array = array_of(tensor, self.external, Budget.of_options())
        tensor.CopyFrom(numpy_helper.from_array(array.astype(np.float64) if widen else array, tensor.name))

    def _attribute(self, attribute: AttributeProto, wide: bool) -> None:
        if attribute.type == AttributeProto.TENSOR:
            self._tensor(attribute.t, wide)
        elif attribute.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS):
            for graph in (*([attribute.g] if attribute.HasField("g") else ()), *attribute.graphs):
                self._graph(graph, wide)
        elif not wide:
            return
        elif attribute.name in _TYPE_ATTRIBUTES and attribute.i in _FLOATS:
            attribute.i = TensorProto.DOUBLE
        elif attribute.name in ("value_float", "value_floats"):  # of Constant, which makes them float32
            value = attribute.f if attribute.name == "value_float" else list(attribute.floats)
            attribute.Clear()
            attribute.name, attribute.type = "value", AttributeProto.TENSOR
            attribute.t.CopyFrom(numpy_helper.from_array(np.array(value, np.float64)))


def in_float64(model: Any) -> onnx.ModelProto:
    """The model with all floats widened to float64 and its external data read."""
    return _Source(model)._prepared(wide=True)


def _widen_type(type: onnx.TypeProto) -> None:
    kind = type.WhichOneof("value")
    if kind == "tensor_type" and type.tensor_type.elem_type in _FLOATS:
        type.tensor_type.elem_type = TensorProto.DOUBLE
    elif kind == "sequence_type":
        _widen_type(type.sequence_type.elem_type)
    elif kind == "optional_type":
        _widen_type(type.optional_type.elem_type)


def _widened_value(value: Any) -> Any:
    if isinstance(value, list):
        return [_widened_value(item) for item in value]
    is_float = isinstance(value, np.ndarray) and (value.dtype.kind == "f" or value.dtype.name == "bfloat16")
    return value.astype(np.float64) if is_float else value


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _nodes(inner)


def _rounds(node: onnx.NodeProto) -> bool:
    """Whether the operator rounds floats to integers as part of its meaning."""
    return "Quantize" in node.op_type or node.op_type.startswith("QLinear")


def _first_value(
    source: _Source, imported: ImportedModel, named: Mapping[str, Any], leaves: Sequence[np.ndarray]
) -> ValueDeviation | None:
    """The first difference between the graph and the reference, both in float64 (for quantised models, in their own
    types)."""
    wide = not source.quantised
    values = source.run(named, wide=wide, intermediate=True)
    nodes = {node.name: node for node in imported.graph.nodes() if node.name and not node.is_input}
    known = [
        (n, name) for n in source.model.graph.node for name in n.output if name in nodes and name in values
    ]
    graph = Graph(imported.graph.inputs, tuple(nodes[name] for _, name in known))
    ours = evaluate(graph, leaves, precise=wide)
    for (proto, name), mine in zip(known, ours, strict=True):
        right = np.asarray(values[name])
        error = relative_error(mine, right) if mine.shape == right.shape else float("inf")
        if error > _VALUE_BOUND:
            return ValueDeviation(name, proto.op_type, error)
    return None
