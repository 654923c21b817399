"""Convert an ONNX graph node by node, and name every node that cannot be converted in one error."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto

from tilewright.dtypes import DType
from tilewright.errors import (
    InternalError,
    ModelFileError,
    TilewrightError,
    TypeRuleError,
    UnknownShapeError,
    UnsupportedOpsError,
)
from tilewright.frontend.builder import Absent, Unsupported
from tilewright.frontend.imported import ImportedModel
from tilewright.frontend.onnx.context import Context, Value
from tilewright.frontend.onnx.external import ExternalData
from tilewright.frontend.onnx.functions import bound, contradiction, function_of
from tilewright.frontend.onnx.load import Loaded, load
from tilewright.frontend.onnx.names import layer_of
from tilewright.frontend.onnx.registry import STANDARD, FallBack, find
from tilewright.frontend.onnx.statics import Statics
from tilewright.frontend.onnx.types import array_of, checked_shape, dtype_of
from tilewright.graph.ir import Graph, Node, TensorType, constant, input_node
from tilewright.graph.provenance import Provenance
from tilewright.runtime import tree
from tilewright.runtime.arguments import CallArguments
from tilewright.runtime.dynamic import bind
from tilewright.support.budget import Budget, exhaustion

NO_CONVERTER = "no converter"
_PER_INTEGER = 64  # bytes of an attribute's number while it is read, in protobuf and in a Python tuple


class _Poison:
    """The value of a failed node; its uses are not further failures."""


_POISON = _Poison()


@dataclass(frozen=True)
class _Body:
    """The nodes of a graph that its results need, computed once for all iterations of a loop."""

    graph: onnx.GraphProto
    names: set[str]
    nodes: list[onnx.NodeProto]
    initialisers: list[onnx.TensorProto]

    @staticmethod
    def of(graph: onnx.GraphProto) -> _Body:
        names = _needed(graph.node, [value.name for value in graph.output])
        nodes = [node for node in graph.node if any(name in names for name in node.output)]
        return _Body(graph, names, nodes, [tensor for tensor in graph.initializer if tensor.name in names])


class NameScope:
    """Names and their values; a subgraph sees the outer names."""

    def __init__(self, outer: NameScope | None = None) -> None:
        self.values: dict[str, Value] = {}
        self.outer = outer

    def __getitem__(self, name: str) -> Value:
        scope: NameScope | None = self
        while scope is not None:
            if name in scope.values:
                return scope.values[name]
            scope = scope.outer
        raise ModelFileError(f"the value {name!r} is used and not defined")


def import_program(
    source: Any,
    example_inputs: Any = None,
    *,
    pin: bool = False,
    pin_elements: int | None = None,
    max_bytes: int | None = None,
) -> ImportedModel:
    budget = Budget.of_options(max_bytes)
    loaded = load(source, budget)
    most = (math.inf if pin_elements is None else pin_elements) if pin else -1
    with exhaustion("importing the model"):
        return _Walk(loaded, budget).run(example_inputs, most)


class _Walk:
    """One pass over a model."""

    def __init__(self, loaded: Loaded, budget: Budget) -> None:
        self.model = loaded.model
        self.opsets = loaded.opsets
        self.budget = budget
        self.external = ExternalData(loaded.folder)
        self.statics = Statics(budget)
        self.failures: list[tuple[str, str]] = []
        self.quantised: dict[Node, Any] = {}
        self._arrays: dict[int, tuple[onnx.TensorProto, np.ndarray]] = {}
        self._bodies: dict[int, _Body] = {}

    def run(self, example_inputs: Any, pin_elements: float) -> ImportedModel:
        """`pin_elements`: the maximum number of elements of an input that may be pinned; -1: none may."""
        graph = self.model.graph
        if graph.sparse_initializer:
            raise UnsupportedOpsError(
                [("sparse initialiser", tensor.values.name) for tensor in graph.sparse_initializer]
            )
        scope = NameScope()
        body = _Body.of(graph)
        initialised = {tensor.name for tensor in graph.initializer}
        declared = [value for value in graph.input if value.name not in initialised]
        examples = named_examples([value.name for value in declared], example_inputs)
        leaves, inputs = self._inputs(declared, examples, scope)
        self.statics.examples.update(
            (node, leaf)
            for node, leaf in zip(inputs, leaves, strict=True)
            if leaf is not None and leaf.size <= pin_elements
        )
        self._initialisers(body, scope)
        self._nodes(body.nodes, scope, self.opsets)
        outputs = [scope[value.name] for value in graph.output]
        for value, result in zip(graph.output, outputs, strict=True):
            if isinstance(result, Absent):
                self._fail(f"output {value.name}", value.name, result.reason)
        if self.failures:
            raise UnsupportedOpsError(list(dict.fromkeys(self.failures)))
        return self._finish(scope, declared, inputs, outputs)

    # -- the boundary --------------------------------------------------------------------------------------------

    def _inputs(
        self, declared: Sequence[onnx.ValueInfoProto], examples: Mapping[str, Any], scope: NameScope
    ) -> tuple[list[np.ndarray | None], list[Node]]:
        """Input nodes for the model's inputs; (example values, input nodes) of the tensors among them."""
        unknown: list[str] = []
        leaves: list[np.ndarray | None] = []
        inputs: list[Node] = []

        def tensor(name: str, type: TensorType, example: Any) -> Node:
            node = input_node(len(inputs), type, name=name)
            inputs.append(node)
            leaves.append(example)
            return node

        for value in declared:
            example = examples.get(value.name)
            try:
                if value.type.HasField("tensor_type"):
                    found = self._input_type(value, example, unknown)
                    scope.values[value.name] = tensor(value.name, found, example)
                else:
                    scope.values[value.name] = self._structured(value.name, value.type, example, tensor)
            except Unsupported as error:
                self._fail(f"input {value.name}", value.name, str(error))
                scope.values[value.name] = _POISON
        if unknown:
            raise UnknownShapeError(f"the model leaves dimensions open: {'; '.join(unknown)}")
        return leaves, inputs

    def _input_type(self, value: onnx.ValueInfoProto, example: Any, unknown: list[str]) -> TensorType:
        declared = value.type.tensor_type
        dtype = dtype_of(declared.elem_type)
        dims: list[int | str] | None = None
        if declared.HasField("shape"):
            # Some exporters write -1 for an open dimension, and ONNX Runtime accepts it.
            dims = [
                d.dim_value if d.HasField("dim_value") and d.dim_value >= 0 else d.dim_param or "?"
                for d in declared.shape.dim
            ]
        if example is not None:
            return _example_type(value.name, dtype, dims, example)
        if dims is None:
            unknown.append(f"{value.name} (of any shape)")
            return TensorType((), dtype)
        named = [f"{dim} (axis {axis})" for axis, dim in enumerate(dims) if isinstance(dim, str)]
        if named:
            unknown.append(f"{value.name}: {', '.join(named)}")
            return TensorType((), dtype)
        shape = checked_shape([int(dim) for dim in dims], dtype, self.budget, f"input {value.name!r}")
        return TensorType(shape, dtype)

    def _structured(self, name: str, type: onnx.TypeProto, example: Any, tensor: Any) -> Value:
        """A sequence or an optional among the inputs: as many tensors as the example has."""
        kind = type.WhichOneof("value")
        if kind == "optional_type":
            inner = type.optional_type.elem_type
            if example is None:
                return None
            if inner.WhichOneof("value") != "tensor_type":
                return self._structured(name, inner, example, tensor)
            found = _example_type(name, dtype_of(inner.tensor_type.elem_type), None, example)
            return tensor(name, found, example)
        if kind != "sequence_type" or type.sequence_type.elem_type.WhichOneof("value") != "tensor_type":
            raise Unsupported(f"an input that is a {str(kind).removesuffix('_type')}")
        if example is None:
            raise Unsupported("a sequence among the inputs, of which no example says the length")
        dtype = dtype_of(type.sequence_type.elem_type.tensor_type.elem_type)
        return [
            tensor(f"{name}[{position}]", _example_type(f"{name}[{position}]", dtype, None, item), item)
            for position, item in enumerate(example)
        ]

    def _initialisers(self, body: _Body, scope: NameScope) -> None:
        for tensor in body.initialisers:
            self.budget.count(1, f"initialiser {tensor.name!r}")
            try:
                scope.values[tensor.name] = constant(self._array(tensor), name=tensor.name)
            except Unsupported as error:
                self._fail(f"initialiser {tensor.name}", tensor.name, str(error))
                scope.values[tensor.name] = _POISON

    def _array(self, tensor: onnx.TensorProto) -> np.ndarray:
        """The values of a tensor of the model; those in a loop's body are read once."""
        # Protobuf returns the same object for a message as long as the object lives, so it is kept here.
        if id(tensor) not in self._arrays:
            self._arrays[id(tensor)] = (tensor, array_of(tensor, self.external, self.budget))
        return self._arrays[id(tensor)][1]

    def _finish(
        self,
        scope: NameScope,
        declared: Sequence[onnx.ValueInfoProto],
        inputs: list[Node],
        outputs: list[Value],
    ) -> ImportedModel:
        arguments = tuple(_leaves(scope.values[value.name]) for value in declared)
        found, input_tree = tree.flatten((arguments, {}))
        if [leaf.value for leaf in found] != inputs:
            raise InternalError("the inputs of the model come in another order than its arguments")
        results = [_leaves(value) for value in outputs]
        nodes, output_tree = tree.flatten(results[0] if len(results) == 1 else tuple(results))
        graph = Graph(tuple(inputs), tuple(leaf.value for leaf in nodes))
        pinned = {node.name: self.statics.examples[node] for node in inputs if node in self.statics.pinned}
        return ImportedModel(
            graph=graph,
            input_names=tuple(node.name for node in inputs),
            input_tree=input_tree,
            output_tree=output_tree,
            argument_names=tuple(value.name for value in declared),
            pinned=pinned,
        )

    # -- nodes ---------------------------------------------------------------------------------------------------

    def _nodes(self, protos: Sequence[onnx.NodeProto], scope: NameScope, opsets: Mapping[str, int]) -> None:
        for proto in protos:
            self.budget.count(1 + (len(proto.input) + len(proto.output)) // 16, str(_location(proto)))
            try:
                results = self._node(proto, scope, opsets)
            except Unsupported as error:
                self._fail(_operator(proto), str(_location(proto)), str(error))
                results = (_POISON,) * len(proto.output)
            for position, name in enumerate(proto.output):
                if not name:
                    continue
                if position >= len(results):
                    raise ModelFileError(f"{_operator(proto)} at {_location(proto)} has no output {position}")
                scope.values[name] = named = _named(results[position], name)
                if isinstance(named, Node) and results[position] in self.quantised:
                    self.quantised[named] = self.quantised[results[position]]

    def _node(self, proto: onnx.NodeProto, scope: NameScope, opsets: Mapping[str, int]) -> Sequence[Value]:
        domain = "" if proto.domain in STANDARD else proto.domain
        opset = opsets.get(domain, 0)
        operands = [scope[name] if name else None for name in proto.input]
        convert = find(domain, proto.op_type, opset)
        if any(isinstance(operand, _Poison) for operand in operands):
            if convert is None and function_of(proto, opset, []) is None and not _is_function(proto, opset):
                raise Unsupported(NO_CONVERTER)
            return (_POISON,) * len(proto.output)
        for operand in operands:
            if isinstance(operand, Absent):
                raise Unsupported(operand.reason)
        if convert is None:
            return self._expanded(proto, opset, opsets, operands)
        ctx = self._context(proto, opset, opsets, scope)
        keywords = {attribute.name: self._attribute(attribute) for attribute in proto.attribute}
        _check_signature(convert, len(operands), keywords)
        try:
            result = convert(ctx, *operands, **keywords)
        except FallBack:
            return self._expanded(proto, opset, opsets, operands)
        except TypeRuleError as error:
            raise Unsupported(error.message) from None
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            # A converter relies on operands of the standard's form; these do not have it.
            raise Unsupported(f"inputs or attributes that do not go together: {error}") from error
        return result if isinstance(result, tuple) else (result,)

    def _context(
        self, proto: onnx.NodeProto, opset: int, opsets: Mapping[str, int], scope: NameScope
    ) -> Context:
        def run_graph(graph: onnx.GraphProto, arguments: Sequence[Value]) -> list[Value]:
            return self._subgraph(graph, arguments, scope, opsets)

        return Context(
            proto,
            _location(proto),
            opset,
            self.statics,
            run_graph,
            self.budget,
            self.quantised,
            self.failures,
        )

    def _attribute(self, attribute: AttributeProto) -> Any:
        if attribute.ref_attr_name:
            raise ModelFileError(
                f"the attribute {attribute.name!r} refers to one of a function that there is not"
            )
        if attribute.type == AttributeProto.GRAPH:
            return attribute.g
        if attribute.type == AttributeProto.TENSOR:
            return self._array(attribute.t)
        if attribute.type == AttributeProto.STRING:
            return attribute.s.decode("utf-8", "replace")
        if attribute.type == AttributeProto.STRINGS:
            return [text.decode("utf-8", "replace") for text in attribute.strings]
        if attribute.type in (AttributeProto.INT, AttributeProto.FLOAT):
            return attribute.i if attribute.type == AttributeProto.INT else attribute.f
        if attribute.type in (AttributeProto.INTS, AttributeProto.FLOATS):
            numbers = attribute.ints if attribute.type == AttributeProto.INTS else attribute.floats
            self.budget.fits(_PER_INTEGER * len(numbers), f"the attribute {attribute.name!r}")
            return tuple(numbers)
        if attribute.type == AttributeProto.TYPE_PROTO:
            return attribute.tp
        raise Unsupported(
            f"the attribute {attribute.name!r}, a {AttributeProto.AttributeType.Name(attribute.type)}"
        )

    def _expanded(
        self, proto: onnx.NodeProto, opset: int, outer: Mapping[str, int], operands: Sequence[Value]
    ) -> Sequence[Value]:
        """The node expanded to the function that the standard defines."""
        found = function_of(proto, opset, operands)
        if found is None:
            raise Unsupported(NO_CONVERTER)
        if reason := contradiction(proto, opset, operands):
            raise Unsupported(reason)
        body, opsets = found[0], {**outer, **found[1]}
        with self.budget.nested("functions and subgraphs are"):
            scope = NameScope()
            for position, name in enumerate(body.input):
                scope.values[name] = operands[position] if position < len(operands) else None
            nodes = bound(body, proto, opset)
            wanted = [body.output[i] for i, name in enumerate(proto.output) if name]
            before = len(self.failures)
            names = _needed(nodes, wanted)
            self._nodes([n for n in nodes if any(name in names for name in n.output)], scope, opsets)
            if len(self.failures) > before:
                inner = "; ".join(dict.fromkeys(operator for operator, _ in self.failures[before:]))
                del self.failures[before:]
                raise Unsupported(f"is defined by operators of which some are not supported: {inner}")
            return tuple(scope[body.output[i]] if name else None for i, name in enumerate(proto.output))

    def _subgraph(
        self,
        graph: onnx.GraphProto,
        arguments: Sequence[Value],
        outer: NameScope,
        opsets: Mapping[str, int],
    ) -> list[Value]:
        """The results of a body for these arguments. A failure inside is raised as the failure of the
        enclosing node."""
        crossing = len(graph.input) + len(graph.output)
        self.budget.count(1 + crossing // 16, f"the subgraph {graph.name!r}")
        with self.budget.nested("functions and subgraphs are"):
            scope = NameScope(outer)
            if len(arguments) != len(graph.input):
                raise ModelFileError(
                    f"the subgraph {graph.name!r} takes {len(graph.input)} values and is given {len(arguments)}"
                )
            for value, argument in zip(graph.input, arguments, strict=True):
                scope.values[value.name] = argument
            if id(graph) not in self._bodies:
                self._bodies[id(graph)] = _Body.of(graph)
            self._initialisers(self._bodies[id(graph)], scope)
            self._nodes(self._bodies[id(graph)].nodes, scope, opsets)
            results = [scope[value.name] for value in graph.output]
            if any(isinstance(result, _Poison) for result in results):
                raise Unsupported(f"nodes of its subgraph {graph.name!r} are not supported")
            return results

    def _fail(self, operator: str, location: str, reason: str) -> None:
        self.failures.append((f"{operator} ({reason})", location))


# -- names and types --------------------------------------------------------------------------------------------------


def named_examples(names: Sequence[str], examples: Any) -> dict[str, Any]:
    """Example values by input name, arrays where they are tensors."""
    if examples is None:
        return {}
    if isinstance(examples, CallArguments):
        examples = bind(names, examples.args, examples.kwargs)
    if isinstance(examples, Mapping):
        unknown = [name for name in examples if name not in names]
        if unknown:
            raise TilewrightError(
                f"the model has no inputs called {', '.join(map(repr, unknown))}; it has {', '.join(names)}",
                remedy="name the example inputs as the model names its inputs",
            )
        return {name: _as_array(value) for name, value in examples.items()}
    values = examples if isinstance(examples, (tuple, list)) else (examples,)
    if len(values) > len(names):
        raise TilewrightError(
            f"{len(values)} example inputs for a model with {len(names)}: {', '.join(names)}",
            remedy="pass one example for every input, in order, or a dict by name",
        )
    return {name: _as_array(value) for name, value in zip(names, values, strict=False)}


def _as_array(value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, (list, tuple)):
        return [_as_array(item) for item in value]
    if hasattr(value, "detach"):  # a torch tensor
        value = value.detach().cpu().numpy()
    return np.asarray(value)


def _example_type(name: str, dtype: DType, dims: Sequence[int | str] | None, example: Any) -> TensorType:
    if not isinstance(example, np.ndarray):
        raise Unsupported(f"an example that is a {type(example).__name__} and not an array")
    if example.dtype != dtype.numpy:
        raise TilewrightError(
            f"the input {name!r} is of {dtype.short}, and its example of {example.dtype}",
            remedy="convert the example with .astype",
        )
    fits = dims is None or (
        len(dims) == example.ndim
        and all(
            isinstance(dim, str) or dim == extent for dim, extent in zip(dims, example.shape, strict=True)
        )
    )
    if not fits:
        raise TilewrightError(
            f"the input {name!r} has the shape {list(dims or ())}, and its example {list(example.shape)}",
            remedy="pass an example of the shape that the model declares",
        )
    return TensorType(tuple(example.shape), dtype)


class _Boxed:
    """A node that `tree.flatten` treats as a leaf."""

    def __init__(self, value: Node) -> None:
        self.value = value


def _leaves(value: Value) -> Any:
    if isinstance(value, list):
        return [_leaves(item) for item in value]
    return None if value is None else _Boxed(value)


def _named(value: Value, name: str) -> Value:
    """`value` under the name that the model gives it, if it has none yet."""
    if isinstance(value, Node) and not value.name and not value.is_input:
        return replace(value, name=name)
    return value


def _needed(protos: Iterable[onnx.NodeProto], outputs: Sequence[str]) -> set[str]:
    """The names that `outputs` depend on, including outer names read by subgraphs."""
    needed = set(outputs)
    for proto in reversed(list(protos)):
        if any(name in needed for name in proto.output):
            needed.update(_reads(proto))
    return needed


def _reads(proto: onnx.NodeProto) -> set[str]:
    names = {name for name in proto.input if name}
    for attribute in proto.attribute:
        graphs = [attribute.g] if attribute.type == AttributeProto.GRAPH else list(attribute.graphs)
        for graph in graphs:
            names.update(value.name for value in graph.output)
            for inner in graph.node:
                names |= _reads(inner)
    return names


def _is_function(proto: onnx.NodeProto, opset: int) -> bool:
    try:
        schema = onnx.defs.get_schema(proto.op_type, opset, proto.domain)
    except onnx.defs.SchemaError:
        return False
    return bool(schema.has_function or schema.has_context_dependent_function)


@dataclass(frozen=True)
class _Signature:
    """The parameters of a converter."""

    attributes: frozenset[str] | None  # None: any
    required: int  # inputs
    most: float


@functools.cache
def _signature(convert: Any) -> _Signature:
    parameters = inspect.signature(convert).parameters.values()
    free = any(p.kind is p.VAR_KEYWORD for p in parameters)
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][1:]
    variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return _Signature(
        None if free else frozenset(p.name for p in parameters if p.kind is p.KEYWORD_ONLY),
        sum(p.default is p.empty for p in positional),
        math.inf if variadic else len(positional),
    )


def _check_signature(convert: Any, operands: int, keywords: Mapping[str, Any]) -> None:
    """Raise Unsupported for an attribute or an input that the converter does not have."""
    signature = _signature(convert)
    if signature.attributes is not None:
        unknown = [name for name in keywords if name not in signature.attributes]
        if unknown:
            raise Unsupported(f"the attribute {', '.join(unknown)}")
    if not signature.required <= operands <= signature.most:
        raise Unsupported(f"{operands} inputs")


def _operator(proto: onnx.NodeProto) -> str:
    return proto.op_type if proto.domain in STANDARD else f"{proto.domain}.{proto.op_type}"


def _location(proto: onnx.NodeProto) -> Provenance:
    output = next((name for name in proto.output if name), "")
    layer = layer_of(proto)
    return Provenance((layer,) if layer else (), f"-> {output}" if proto.name not in ("", output) else "")
