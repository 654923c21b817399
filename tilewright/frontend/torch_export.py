"""PyTorch models as graphs: `import_torch`.

A module is exported with `torch.export` on example inputs, and the exported program is converted operator by operator
(`frontend/torch`). Shapes are those of the examples. Numbers, strings and None among the inputs are part of the model:
the graph is for those values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tilewright.errors import InternalError, MissingDependencyError, UnsupportedModelError
from tilewright.frontend.imported import ImportedModel
from tilewright.runtime import tree

if TYPE_CHECKING:
    from torch import nn
    from torch.export import ExportedProgram


def import_torch(
    model: nn.Module | ExportedProgram,
    example_inputs: Any = None,
    example_kwargs: Mapping[str, Any] | None = None,
) -> ImportedModel:
    """The model as a graph.

    `example_inputs` of a module: a tuple of positional arguments, a single tensor, or a dict of keyword arguments;
    `example_kwargs` are keyword arguments alongside them. A program has its own examples, and these are ignored.

    Errors: UnsupportedModelError (not a model, no examples), TrainingModeError, ExportError, MutationError (the model
    writes to its buffers or inputs), UnsupportedOpsError (naming every operator that cannot be converted).
    """
    try:
        import torch
    except ImportError:
        raise MissingDependencyError(
            "importing a PyTorch model needs torch", remedy="pip install 'tilewright[torch]'"
        ) from None
    from tilewright.frontend.torch import export
    from tilewright.frontend.torch.program import import_program

    if isinstance(model, torch.export.ExportedProgram):
        program, names = model, export.program_argument_names(model)
    elif isinstance(model, torch.nn.Module):
        arguments, keywords = export.call_arguments(example_inputs, example_kwargs)
        export.check_mode(model)
        program, names = export.export(model, arguments, keywords), export.argument_names(model)
    else:
        raise UnsupportedModelError(f"cannot import a {type(model).__module__}.{type(model).__qualname__}")

    program = export.autocast_written_out(program)
    imported = import_program(program)
    return ImportedModel(
        graph=imported.graph,
        input_names=tuple(node.name for node in imported.graph.inputs),
        input_tree=_tree(program.call_spec.in_spec, imported.inputs, "arguments"),
        output_tree=_tree(program.call_spec.out_spec, imported.outputs, "results"),
        argument_names=names,
    )


def _tree(spec: Any, leaves: Sequence[Any], what: str) -> tree.Spec:
    """The `runtime.tree` form of an exported structure. `leaves` are PyTorch's: None for a tensor, else a Literal."""
    import torch
    from torch.utils import _pytree

    tensors = [torch.empty(0, device="meta") for leaf in leaves if leaf is None]
    waiting = iter(tensors)
    value = _pytree.tree_unflatten([next(waiting) if leaf is None else leaf.value for leaf in leaves], spec)
    found, result = tree.flatten(value)
    for leaf in found:
        if not isinstance(leaf, torch.Tensor):
            raise UnsupportedModelError(
                f"among the {what} of the model is a {type(leaf).__module__}.{type(leaf).__qualname__}",
                remedy="use tensors, numbers, strings and None in tuples, lists, dicts, namedtuples and dataclasses",
            )
    if [id(leaf) for leaf in found] != [id(tensor) for tensor in tensors]:
        raise InternalError(f"the tensors in the {what} of the model come in different orders: {spec}")
    return result
