"""Convert an exported program to a graph: placeholders, then one converter call per node, with all failures
collected.

The result of a converter is checked against the exported type. A node that cannot be converted is recorded and
replaced by a placeholder of the right type, so that one error names every unsupported operator of the model.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, TensorArgument

from tilewright.errors import InternalError, UnsupportedOpsError
from tilewright.frontend.builder import Absent, Unsupported
from tilewright.frontend.torch.context import Context
from tilewright.frontend.torch.decompose import decomposed, origin_of
from tilewright.frontend.torch.mutation import Aliases, functional_name, functionalised, writes
from tilewright.frontend.torch.registry import STORAGE_ARGUMENTS, Inexpressible, table
from tilewright.frontend.torch.source_location import SourceLocation, indices_of, location_of
from tilewright.frontend.torch.types import tensor_type, to_numpy
from tilewright.graph.ir import Graph, Node, constant, input_node
from tilewright.graph.provenance import UNKNOWN

NO_CONVERTER = "no converter"
_REMEDY = (
    'replace these operators in the model, or run it with torch.compile(model, backend="tilewright"), which leaves them'
    " to PyTorch"
)
MAX_DECOMPOSITIONS = 8  # rounds: a decomposition may yield operators that are decomposed in turn


@dataclass(frozen=True)
class Failure:
    """A node that could not be converted."""

    operator: str
    reason: str
    location: str
    origin: str  # the node of the original program that it comes from
    target: Any  # the operator, if PyTorch's decomposition of it might help; else None


@dataclass(frozen=True)
class Literal:
    """A non-tensor argument or result: part of the program."""

    value: Any


@dataclass(frozen=True)
class ImportedProgram:
    graph: Graph
    inputs: tuple[
        Literal | None, ...
    ]  # each leaf of the call: None for a tensor, the next input of the graph
    outputs: tuple[Literal | None, ...]  # each leaf of the result: None for a tensor, the next output
    writes: tuple[int, ...] = ()  # the first outputs of the graph are new values of these inputs


class _Poison:
    """The value of a failed node without a supported type; its uses are not further failures."""


_POISON = _Poison()


class _Poisoned(Exception):
    pass


def import_program(program: ExportedProgram, *, outside: bool = False) -> ImportedProgram:
    """Import a program. UnsupportedOpsError names every operator that cannot be converted, MutationError every buffer
    that is written. With `outside` the program may write to its inputs: see `ImportedProgram.writes`."""
    result, first, last = _attempt(program, outside)
    if result is None:
        raise UnsupportedOpsError(_uses(first, last), remedy=_REMEDY)
    return result


def unsupported_nodes(program: ExportedProgram) -> dict[str, str]:
    """The nodes of a functional program that prevent its import, by name, with the reason."""
    for node in program.graph.nodes:
        node.meta.pop("from_node", None)  # what this program was made from has names of its own
    _, first, last = _attempt(program, True)
    reasons = {failure.origin: f"{failure.operator}: {failure.reason}" for failure in (*last, *first)}
    return {failure.origin: reasons[failure.origin] for failure in last}


def _attempt(
    program: ExportedProgram, outside: bool
) -> tuple[ImportedProgram | None, Sequence[Failure], Sequence[Failure]]:
    """Import the program, decomposing operators without a converter round by round; or None, with the failures of the
    first and of the last round."""
    locations = indices_of(program.graph)
    first: list[Failure] | None = None
    for _ in range(MAX_DECOMPOSITIONS):
        program = functionalised(program, outside=outside)
        walk = _Walk(program, locations)
        result = walk.run()
        if not walk.failures:
            return result, (), ()
        first = first or walk.failures
        simpler = decomposed(program, dict.fromkeys(failure.target for failure in walk.failures))
        if simpler is None:
            break
        program = simpler
    return None, first or [], walk.failures


def _uses(first: Sequence[Failure], last: Sequence[Failure]) -> list[tuple[str, str]]:
    """The failures to report: those that no decomposition could resolve, as the operators that the user wrote."""
    written = {failure.origin: failure for failure in first}
    uses: dict[tuple[str, str], None] = {}
    for failure in last:
        known = written.get(failure.origin, failure)
        reason = known.reason
        if known.operator != failure.operator and reason == NO_CONVERTER:
            reason = f"decomposes into {failure.operator}: {failure.reason}"
        uses[(f"{known.operator} ({reason})", known.location)] = None
    return list(uses)


class _Walk:
    """One pass over an exported program."""

    def __init__(self, program: ExportedProgram, locations: dict[str, SourceLocation]) -> None:
        self.program = program
        self.locations = locations
        self.failures: list[Failure] = []
        self.inputs: list[Node] = []
        self.call: list[Literal | None] = []
        self._constants: dict[Any, Node] = {}

    def run(self) -> ImportedProgram:
        graph = self.program.graph
        live = _live(graph)
        values = self._placeholders(live)
        self._convert(graph, values, live)
        return self._finish(values)

    # -- the boundary --------------------------------------------------------------------------------------------

    def _placeholders(self, live: set[Any]) -> dict[Any, Any]:
        nodes = {node.name: node for node in self.program.graph.nodes if node.op == "placeholder"}
        values: dict[Any, Any] = {}
        for spec in self.program.graph_signature.input_specs:
            node = nodes[spec.arg.name]
            if spec.kind is InputKind.USER_INPUT:
                values[node] = self._user_input(node, spec.arg)
            elif spec.kind is InputKind.TOKEN:
                values[node] = _POISON
            elif node in live:
                values[node] = self._constant(node, spec)
        return values

    def _user_input(self, node: Any, argument: Any) -> Any:
        if isinstance(argument, ConstantArgument):
            self.call.append(Literal(argument.value))
            return argument.value
        self.call.append(None)
        try:
            if not isinstance(argument, TensorArgument):
                raise Inexpressible("a symbolic number among the inputs: only static shapes are supported")
            value = input_node(len(self.inputs), tensor_type(node.meta["val"]), name=node.name)
        except Unsupported as error:
            self._fail(node, f"input {node.name}", str(error))
            return _POISON
        self.inputs.append(value)
        return value

    def _constant(self, node: Any, spec: Any) -> Any:
        """A parameter, buffer or lifted constant. Tensors that share memory are one node."""
        program = self.program
        if spec.kind is InputKind.PARAMETER or (
            spec.kind is InputKind.BUFFER and spec.persistent is not False
        ):
            tensor = program.state_dict[spec.target]
        elif spec.target in program.constants:
            tensor = program.constants[spec.target]
        else:
            tensor = program.state_dict.get(spec.target)
        if not isinstance(tensor, torch.Tensor):
            self._fail(node, spec.target or node.name, f"a {type(tensor).__name__} is not a tensor")
            return _POISON
        key = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), str(tensor.device))
        if key not in self._constants or not tensor.numel():
            try:
                self._constants[key] = constant(to_numpy(tensor), name=str(spec.target))
            except Unsupported as error:
                self._fail(node, spec.target, str(error))
                return _POISON
        return self._constants[key]

    def _finish(self, values: dict[Any, Any]) -> ImportedProgram:
        output = next(node for node in self.program.graph.nodes if node.op == "output")
        results: list[Node] = []
        outputs: list[Literal | None] = []
        writes: list[int] = []
        names = [node.name for node in self.inputs]
        for spec, argument in zip(self.program.graph_signature.output_specs, output.args[0], strict=True):
            if spec.kind is OutputKind.TOKEN:
                continue  # orders side effects, which a graph does not have
            if spec.kind is OutputKind.USER_INPUT_MUTATION:
                if isinstance(values[argument], Node):
                    writes.append(names.index(spec.target))
                    results.append(values[argument])
                continue
            if spec.kind is not OutputKind.USER_OUTPUT:
                raise InternalError(f"the program has an output of kind {spec.kind.name}")
            value = values[argument] if isinstance(argument, torch.fx.Node) else argument
            if isinstance(value, Node):
                outputs.append(None)
                results.append(value)
            else:
                outputs.append(Literal(None if isinstance(value, _Poison) else value))
        graph = Graph(tuple(self.inputs), tuple(results))
        return ImportedProgram(graph, tuple(self.call), tuple(outputs), tuple(writes))

    # -- nodes ---------------------------------------------------------------------------------------------------

    def _convert(self, graph: Any, values: dict[Any, Any], live: set[Any]) -> None:
        aliases = Aliases(graph.nodes) if any(writes(node) for node in live) else None
        for node in graph.nodes:
            if node not in live or node.op in ("placeholder", "output"):
                continue
            values[node] = self._node(graph, node, values)
            if aliases is not None and writes(node):
                for other in aliases.same(node):
                    if other in values:
                        values[other] = values[node]

    def _node(self, graph: Any, node: Any, values: dict[Any, Any]) -> Any:
        if node.op == "get_attr":
            return self._attribute(graph, node)
        try:
            arguments = torch.fx.node.map_aggregate(node.args, lambda a: _resolved(a, values))
            keywords = torch.fx.node.map_aggregate(node.kwargs, lambda a: _resolved(a, values))
            return self._call(node, tuple(arguments), dict(keywords))
        except _Poisoned:
            if isinstance(node.target, torch._ops.OpOverload) and _converter_name(node) not in table():
                self._fail(node, str(node.target), NO_CONVERTER, target=node.target)
        except Inexpressible as error:
            self._fail(node, _operator_name(node), str(error))
        except Unsupported as error:
            self._fail(node, _operator_name(node), str(error), target=_producer(node).target)
        return _placeholder_for(node)

    def _call(self, node: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if node.target is operator.getitem:
            return _item(arguments[0], arguments[1])
        if str(node.target) in ("wrap_with_set_grad_enabled", "wrap_with_autocast"):
            return self._inlined(node, arguments)
        convert = table().get(_converter_name(node))
        if convert is None:
            raise Unsupported(_why_not(node))
        for value in _tensors(node.meta.get("val")):
            tensor_type(value)  # raises Unsupported for unsupported types
        ctx = Context(node.name, self._location(node).provenance, node.meta.get("val"))
        keywords = {name: value for name, value in keywords.items() if name not in STORAGE_ARGUMENTS}
        result = convert(ctx, *arguments, **keywords)
        return _checked(node, ctx, result)

    def _inlined(self, node: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """A region that only disables gradients or autocast: its body, inlined."""
        position = next(i for i, a in enumerate(arguments) if isinstance(a, torch.fx.GraphModule))
        body: Any = arguments[position].graph
        parameters = (n for n in body.nodes if n.op == "placeholder")
        inner: dict[Any, Any] = dict(zip(parameters, arguments[position + 1 :], strict=True))
        self._convert(body, inner, _live(body))
        output = next(n for n in body.nodes if n.op == "output")
        return tuple(torch.fx.node.map_aggregate(output.args[0], lambda a: inner.get(a, a)))

    def _attribute(self, graph: Any, node: Any) -> Any:
        value: Any = graph.owning_module
        for part in str(node.target).split("."):
            value = getattr(value, part)
        return constant(to_numpy(value), name=str(node.target)) if isinstance(value, torch.Tensor) else value

    def _fail(self, node: Any, name: str, reason: str, target: Any = None) -> None:
        location = self._location(node).full
        where = node.name + (f" {location}" if location else "")
        self.failures.append(Failure(name, reason, where, origin_of(node), target))

    def _location(self, node: Any) -> SourceLocation:
        """The origin of the node; if a retracing lost it, that of the original program."""
        location, first = location_of(node), self.locations.get(origin_of(node))
        if first is None:
            return location
        return replace(location, layer=first.layer) if location.file else first


def _live(graph: Any) -> set[Any]:
    """The nodes that the outputs need, and every write: assertions and unused results need no converter."""
    nodes = list(graph.nodes)
    live: set[Any] = set()
    waiting = [node for node in nodes if node.op == "output" or writes(node)]
    while waiting:
        node = waiting.pop()
        if node not in live:
            live.add(node)
            waiting.extend(node.all_input_nodes)
    return live


def _resolved(argument: Any, values: dict[Any, Any]) -> Any:
    if isinstance(argument, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise Inexpressible("a symbolic size: only static shapes are supported")
    if not isinstance(argument, torch.fx.Node):
        return argument
    value = values[argument]
    if isinstance(value, _Poison):
        raise _Poisoned
    return value


def _item(values: Any, index: int) -> Any:
    item = values[index]
    if isinstance(item, Absent):
        raise Unsupported(item.reason)
    return item


def _producer(node: Any) -> Any:
    """The node that computes this one: for an item of several results, the node with these results."""
    return node.args[0] if node.target is operator.getitem else node


def _converter_name(node: Any) -> str:
    name = str(node.target)
    return functional_name(name) if writes(node) or name == "aten.detach_.default" else name


def _operator_name(node: Any) -> str:
    target = _producer(node).target
    return (
        str(target) if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", str(target))
    )


def _why_not(node: Any) -> str:
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return "control flow in the graph"
    if not isinstance(node.target, torch._ops.OpOverload):
        return "arithmetic on symbolic sizes: only static shapes are supported"
    return NO_CONVERTER


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for part in value for tensor in _tensors(part)]
    return []


def _placeholder_for(node: Any) -> Any:
    """A value of the failed node's type, so that the conversion can continue."""
    value = node.meta.get("val")

    def stand_in(part: Any) -> Any:
        if isinstance(part, (tuple, list)):
            return tuple(stand_in(inner) for inner in part)
        try:
            type = tensor_type(part)
            return Context(node.name, UNKNOWN, part).full(0, type.dtype, type.shape)
        except (Unsupported, AttributeError):
            return _POISON

    return stand_in(value)


def _checked(node: Any, ctx: Context, result: Any) -> Any:
    """The named result, after checking each part against the exported type."""
    value = node.meta.get("val")
    if not isinstance(result, (tuple, list)):
        return ctx.named(_checked_type(node, result, value), node.name)
    parts: list[Node | Absent] = []
    for index, (part, exported) in enumerate(zip(result, value, strict=True)):
        if not isinstance(part, Absent):
            part = ctx.named(_checked_type(node, part, exported), f"{node.name}.{index}")
        parts.append(part)
    return tuple(parts)


def _checked_type(node: Any, result: Any, exported: Any) -> Node:
    expected = tensor_type(exported)
    if not isinstance(result, Node) or result.type != expected:
        got = result.type if isinstance(result, Node) else type(result).__name__
        raise InternalError(
            f"{node.name} ({node.target}) was imported as {got}, and PyTorch exported {expected}"
        )
    return result
