"""Export a graph captured by torch.compile at concrete sizes, and import it; `regions` cuts it first if necessary.

Dynamo passes a flat graph of torch functions. `Captured` is that graph as a functional ATen program, with whole
composites, for arguments of given sizes; writes to its arguments have become results.

Views that end in a result which shares memory with an argument or with another result stay with PyTorch: only it can
return those, and they cost nothing. The same goes for results whose strides leave gaps or overlap (`expand`). Every
other result gets fresh memory with the strides that PyTorch would give it: a dense result that is not row-major
is computed in the order of its memory, and permuted back without a copy.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from tilewright.errors import MutationError
from tilewright.frontend.imported import ImportedModel
from tilewright.frontend.torch.decompose import retraced
from tilewright.frontend.torch.mutation import functionalised, writes
from tilewright.frontend.torch.plain_modules import plain_modules
from tilewright.frontend.torch.program import Literal, import_program
from tilewright.frontend.torch.types import to_numpy
from tilewright.graph.ir import Graph, Node, constant, input_node
from tilewright.graph.op import apply


def scalar_positions(body: fx.GraphModule) -> tuple[int, ...]:
    """The arguments that Dynamo passes as one-element tensors only to read them back as Python numbers."""
    placeholders = [node for node in body.graph.nodes if node.op == "placeholder"]
    return tuple(
        i
        for i, node in enumerate(placeholders)
        if node.users and all(u.op == "call_method" and u.target == "item" for u in node.users)
    )


def with_numbers(body: fx.GraphModule, numbers: Mapping[int, Any]) -> fx.GraphModule:
    """The graph with these numbers in place of the values read back from its arguments, which it still takes."""
    if not numbers:
        return body
    body = fx.GraphModule(body, fx.Graph.__deepcopy__(body.graph, {}))
    placeholders = [node for node in body.graph.nodes if node.op == "placeholder"]
    for i, value in numbers.items():
        for read in list(placeholders[i].users):
            _replace_by_value(read, value)
            body.graph.erase_node(read)
    body.recompile()
    return body


def _replace_by_value(node: fx.Node, value: Any) -> None:
    for user in list(node.users):
        swap = lambda argument: value if argument is node else argument  # noqa: E731
        user.args = fx.node.map_aggregate(user.args, swap)
        user.kwargs = fx.node.map_aggregate(user.kwargs, swap)


class _Flat(nn.Module):
    """The graph as a function of its tensors only; numbers among the arguments are part of it."""

    def __init__(self, body: fx.GraphModule, arguments: Sequence[Any]) -> None:
        super().__init__()
        self.body = body
        self._numbers = {i: a for i, a in enumerate(arguments) if not isinstance(a, torch.Tensor)}
        self._count = len(arguments)

    def forward(self, *tensors: torch.Tensor) -> Any:
        waiting = iter(tensors)
        arguments = [self._numbers[i] if i in self._numbers else next(waiting) for i in range(self._count)]
        # Node by node: what is traced then knows the lines of the user's code, which generated code would hide.
        with fx.traceback.preserve_node_meta():
            return fx.Interpreter(self.body, garbage_collect_values=False).run(*arguments)


@dataclass(frozen=True)
class Captured:
    program: ExportedProgram  # functional; its inputs are the tensors among the arguments
    writes: tuple[int, ...]  # the first results are new values of these inputs
    torch_side: frozenset[str]  # nodes that must stay with PyTorch whatever converters there are
    returns_itself: (
        bool  # whether an argument is a result, or one tensor is two results, so that copies are not allowed
    )
    returned: Mapping[int, int]  # results that are arguments which the graph writes to -> which of its inputs


def capture(body: fx.GraphModule, arguments: Sequence[Any]) -> Captured:
    """Capture the graph for such arguments. Raises MutationError if it writes to an argument and returns a part of
    it."""
    with (
        plain_modules,
        torch.inference_mode(False),
        torch.no_grad(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        examples = _examples([a for a in arguments if isinstance(a, torch.Tensor)])
        program = torch.export.export(_Flat(body, arguments), examples, strict=False)
        before, itself_before = _argument_views(program), _returned_arguments(program)
        program = functionalised(program, outside=True)
        autocast = any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
        if autocast or any(writes(node) for node in program.graph.nodes):
            program = retraced(program, {})  # also makes the casts of autocast explicit
    names = user_inputs(program)
    targets = list(program.graph_signature.user_inputs_to_mutate.values())
    returned = {i: names.index(name) for i, name in itself_before.items() if name in targets}
    shared = [name for name in targets if before.get(name, 0) > list(itself_before.values()).count(name)]
    if shared:
        raise MutationError(f"the graph writes to {', '.join(shared)} and returns a view of it")
    results = _results(program)
    itself = len(set(results)) < len(results) or any(node.op == "placeholder" for node in results)
    written = tuple(names.index(name) for name in targets)
    return Captured(program, written, _torch_side(program), itself, returned)


def _examples(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Tensors like these, each in memory of its own. An export reads no data."""
    return tuple(
        torch.empty_strided(tuple(t.shape), t.stride(), dtype=t.dtype, device=t.device) for t in tensors
    )


def user_inputs(program: ExportedProgram) -> list[str]:
    specs = program.graph_signature.input_specs
    return [spec.arg.name for spec in specs if spec.kind is InputKind.USER_INPUT]


def lifted_tensors(program: ExportedProgram) -> dict[str, Any]:
    """The program's own constants by the names of the inputs of its graph, which come before the tensors of a call."""
    found: dict[str, Any] = {}
    for spec in program.graph_signature.input_specs:
        if spec.kind is not InputKind.USER_INPUT:
            known = program.constants.get(spec.target)
            found[spec.arg.name] = program.state_dict[spec.target] if known is None else known
    return found


def _argument_views(program: ExportedProgram) -> Counter[str]:
    """The arguments that results share memory with, and the number of such results."""
    owners = {storage_of(n): n.name for n in program.graph.nodes if n.op == "placeholder"}
    return Counter(
        owners[storage_of(n)] for n in _results(program) if storage_of(n) in owners and storage_of(n)
    )


def _returned_arguments(program: ExportedProgram) -> dict[int, str]:
    """The results, by their number, that are an argument whole: the same memory with the same sizes and strides."""
    owners = {storage_of(n): n for n in program.graph.nodes if n.op == "placeholder"}
    output = next(node for node in program.graph.nodes if node.op == "output")
    kinds = [spec.kind for spec in program.graph_signature.output_specs]
    results = [n for kind, n in zip(kinds, output.args[0], strict=True) if kind is OutputKind.USER_OUTPUT]
    found: dict[int, str] = {}
    for i, node in enumerate(results):
        owner = owners.get(storage_of(node)) if isinstance(node, fx.Node) and storage_of(node) else None
        if owner is not None and _layout(owner) == _layout(node):
            found[i] = owner.name
    return found


def _layout(node: fx.Node) -> Any:
    value = node.meta["val"]
    return tuple(value.shape), value.stride(), value.storage_offset(), value.dtype


def _results(program: ExportedProgram) -> list[fx.Node]:
    """The nodes that the program returns to its caller."""
    output = next(node for node in program.graph.nodes if node.op == "output")
    kinds = [spec.kind for spec in program.graph_signature.output_specs]
    pairs = zip(kinds, output.args[0], strict=True)
    return [n for kind, n in pairs if kind is OutputKind.USER_OUTPUT and isinstance(n, fx.Node)]


def storage_of(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) and _is_strided(value) else 0


def _is_strided(value: torch.Tensor) -> bool:
    return value.layout is torch.strided


def _torch_side(program: ExportedProgram) -> frozenset[str]:
    """The views that lead to results which share memory with an argument or another result, or are not contiguous."""
    arguments = {storage_of(node) for node in program.graph.nodes if node.op == "placeholder"}
    results = list(dict.fromkeys(_results(program)))
    storages = [storage_of(node) for node in results]
    chosen: set[str] = set()
    for node, storage in zip(results, storages, strict=True):
        if storage and (storage in arguments or storages.count(storage) > 1 or not is_dense(node)):
            chosen.update(view_chain(node))
    return frozenset(chosen)


def view_chain(node: fx.Node) -> list[str]:
    """The names of the views from the tensor that owns the memory, which is not among them, to this node."""
    chain: list[str] = []
    storage = storage_of(node)
    while node.op == "call_function" and storage:
        source = next((n for n in node.all_input_nodes if _shares(n, storage)), None)
        if source is None:
            break
        chain.append(node.name)
        node = source
    return chain


def _shares(node: fx.Node, storage: int) -> bool:
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):  # the views of a split, before one is taken
        return any(isinstance(v, torch.Tensor) and v.untyped_storage()._cdata == storage for v in value)
    return storage_of(node) == storage


# -- strides ----------------------------------------------------------------------------------------------------


def memory_order(value: torch.Tensor) -> tuple[int, ...] | None:
    """The axes from the slowest to the fastest, if the elements fill their memory without gaps; else None."""
    axes = tuple(range(value.dim()))
    if value.is_contiguous() or not value.numel():
        return axes
    strides = value.stride()
    order = tuple(sorted(axes, key=lambda axis: (-strides[axis], axis)))
    expected = 1
    for axis in reversed(order):
        if value.shape[axis] != 1 and strides[axis] != expected:
            return None
        expected *= int(value.shape[axis])
    return order


def is_dense(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return not isinstance(value, torch.Tensor) or memory_order(value) is not None


# -- import -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Region:
    """An imported program, and how the tensors of a call map to it.

    A call takes the tensors at positions `inputs` of the program's inputs. The first results are new values of the
    inputs `writes`; the rest replace the None entries of `results`, each permuted by its `orders` entry.
    """

    model: ImportedModel
    inputs: tuple[int, ...]
    writes: tuple[int, ...]
    results: tuple[Literal | None, ...]
    orders: tuple[tuple[int, ...] | None, ...]  # None: row-major


def import_region(
    program: ExportedProgram, written: Sequence[int] = (), frozen: Mapping[int, torch.Tensor] | None = None
) -> Region:
    """The whole program as a graph. `frozen`: inputs that are constants, by position; written ones are not."""
    imported = import_program(program, outside=True)
    values = [n.meta.get("val") for n in _results(program)]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    outputs: list[Node] = list(imported.graph.outputs[: len(imported.writes)])
    orders: list[tuple[int, ...] | None] = []
    for node, value in zip(imported.graph.outputs[len(imported.writes) :], tensors, strict=True):
        order = memory_order(value)
        plain = order is None or order == tuple(range(len(order)))
        outputs.append(node if plain else apply("permute", node, axes=order, name=node.name))
        orders.append(None if plain else _inverse(order or ()))
    fixed = {i: t for i, t in (frozen or {}).items() if i not in written}
    graph, kept = _bound(Graph(imported.graph.inputs, tuple(outputs)), fixed)
    leaves = [{"kind": "leaf", "index": index} for index in range(len(kept))]
    empty: dict[str, Any] = {"kind": "dict", "keys": [], "items": []}
    model = ImportedModel(
        graph=graph,
        input_names=tuple(node.name for node in graph.inputs),
        input_tree={"kind": "tuple", "items": [{"kind": "tuple", "items": leaves}, empty]},
        output_tree={
            "kind": "tuple",
            "items": [{"kind": "leaf", "index": index} for index in range(len(outputs))],
        },
        argument_names=(),
    )
    return Region(model, kept, imported.writes, imported.outputs, tuple(orders))


def _inverse(order: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(range(len(order)), key=lambda axis: order[axis]))


def _bound(graph: Graph, fixed: Mapping[int, torch.Tensor]) -> tuple[Graph, tuple[int, ...]]:
    """The graph with some inputs as constants, and the positions of the remaining inputs. Tensors that share memory
    become one constant."""
    kept = tuple(index for index in range(len(graph.inputs)) if index not in fixed)
    constants: dict[Any, Node] = {}
    new: dict[Node, Node] = {}
    for index, node in enumerate(graph.inputs):
        if index in fixed:
            tensor = fixed[index]
            key = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
            if key not in constants or not tensor.numel():
                constants[key] = constant(to_numpy(tensor), name=node.name)
            new[node] = constants[key]
        else:
            new[node] = input_node(kept.index(index), node.type, name=node.name)
    for node in graph.nodes():
        if node not in new:
            operands = tuple(new[operand] for operand in node.inputs)
            same = all(a is b for a, b in zip(operands, node.inputs, strict=True))
            new[node] = node if same else replace(node, inputs=operands)
    inputs = tuple(new[graph.inputs[index]] for index in kept)
    return Graph(inputs, tuple(new[node] for node in graph.outputs)), kept


def export_region(module: fx.GraphModule) -> ExportedProgram:
    """A region of a cut program as a separate program."""
    values = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    with torch.inference_mode(False), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        examples = _examples(values)
        program = torch.export.export(_Flat(module, examples), examples, strict=False)
        return functionalised(program)
