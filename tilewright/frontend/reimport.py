"""A model that can be imported again for other shapes, and run by its own framework meanwhile.

`source_of(model)` returns a `ReimportSource`: for an nn.Module, which PyTorch can run, or for an ONNX model, which
the oracle runs in NumPy. Both represent the model as it was when they were made.
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import TYPE_CHECKING, Any, Protocol

from tilewright.errors import (
    GradientError,
    InputError,
    ModelChangedError,
    TilewrightWarning,
    UnsupportedModelError,
)
from tilewright.frontend.imported import ImportedModel
from tilewright.frontend.onnx import require_onnx
from tilewright.frontend.torch_export import import_torch
from tilewright.graph.oracle import evaluate
from tilewright.runtime import tree
from tilewright.runtime.dynamic import Arguments, bind

if TYPE_CHECKING:
    from torch import nn


class ReimportSource(Protocol):
    names: tuple[str, ...]  # of the arguments that can be given by name

    def import_for(self, arguments: Arguments) -> ImportedModel:
        """Import the model for calls like this one."""

    def run(self, arguments: Arguments) -> Any:
        """The result of a call without compiling anything; as with a compiled model, new tensors, torch's if any
        input is."""


def source_of(model: Any) -> ReimportSource:
    if isinstance(model, (str, os.PathLike)) or _is_a(model, "onnx", "ModelProto"):
        return OnnxSource(model)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        return TorchSource(model)
    if torch is not None and isinstance(model, torch.export.ExportedProgram):
        raise UnsupportedModelError(
            "an exported program has the shapes that it was exported with, and dynamic=True is for others too",
            remedy="pass the nn.Module that it was exported from, or leave dynamic=True out",
        )
    raise UnsupportedModelError(f"cannot import a {type(model).__module__}.{type(model).__qualname__}")


def _is_a(model: Any, package: str, name: str) -> bool:
    return package in sys.modules and isinstance(model, getattr(sys.modules[package], name))


class TorchSource:
    def __init__(self, model: nn.Module) -> None:
        from tilewright.frontend.torch import export

        export.check_mode(model)
        self.model = model
        self.names = export.argument_names(model)
        self._versions = self._found()
        self._autocast = export.autocast_now()  # later shapes use the same autocast as the first one

    def import_for(self, arguments: Arguments) -> ImportedModel:
        from tilewright.frontend.torch import export

        self._check_unchanged()
        args, kwargs = self._in_torch(arguments)
        with export.autocast_as(self._autocast):
            return import_torch(self.model, args, kwargs)

    def run(self, arguments: Arguments) -> Any:
        import torch

        from tilewright.frontend.torch import export
        from tilewright.frontend.torch.types import to_numpy

        self._check_unchanged()
        args, kwargs = self._in_torch(arguments)
        inputs = [leaf for leaf in tree.flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
            raise GradientError("an input requires gradients, and a compiled model computes none")
        with torch.no_grad(), export.autocast_as(self._autocast):
            result = self.model(*args, **kwargs)
        leaves, spec = tree.flatten(result)
        taken = {_memory(tensor) for tensor in (*inputs, *self._tensors())}
        fresh = []
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                raise UnsupportedModelError(f"among the results is {tree.describe(leaf)}")
            leaf = leaf.detach().contiguous()
            fresh.append(leaf.clone() if _memory(leaf) in taken else leaf)
            taken.add(_memory(leaf))
        given = tree.flatten(arguments)[0]
        as_torch = any(isinstance(leaf, torch.Tensor) for leaf in given)
        return tree.unflatten(spec, fresh if as_torch else [to_numpy(leaf) for leaf in fresh])

    def _in_torch(self, arguments: Arguments) -> Arguments:
        from tilewright.frontend.torch.types import to_torch

        leaves, spec = tree.flatten(arguments)
        args, kwargs = tree.unflatten(spec, [to_torch(leaf) for leaf in leaves])
        return tuple(args), dict(kwargs)

    def _tensors(self) -> list[Any]:
        return [*self.model.parameters(), *self.model.buffers()]

    def _found(self) -> list[tuple[int, int]]:
        """The state of the weights, as far as PyTorch counts writes to them."""
        return [(t.data_ptr(), 0 if t.is_inference() else t._version) for t in self._tensors()]

    def _check_unchanged(self) -> None:
        from tilewright.frontend.torch import export

        export.check_mode(self.model)
        if self._found() != self._versions:
            raise ModelChangedError(
                f"the weights of {type(self.model).__name__} were written to after it was compiled, and this call needs"
                " the model again for a new shape"
            )


def _memory(tensor: Any) -> int:
    return int(tensor.untyped_storage().data_ptr())


class OnnxSource:
    def __init__(self, model: Any) -> None:
        require_onnx()
        from tilewright.frontend.onnx.load import load

        self._loaded = load(model)
        graph = self._loaded.model.graph
        initialised = {tensor.name for tensor in graph.initializer}
        self.names = tuple(value.name for value in graph.input if value.name not in initialised)
        self._warned = False

    def import_for(self, arguments: Arguments) -> ImportedModel:
        from tilewright.frontend.onnx.program import import_program

        return import_program(self._loaded, self._named(arguments))

    def run(self, arguments: Arguments) -> Any:
        named = self._named(arguments)
        if not self._warned:
            self._warned = True
            warnings.warn(
                "tilewright: an ONNX model is called with more shapes than are compiled; calls with the others run in"
                " NumPy, slowly",
                TilewrightWarning,
                stacklevel=4,
            )
        imported = self.import_for(arguments)
        results = evaluate(imported.graph, tree.flatten(tuple(named.values()))[0], precise=False)
        if any(_is_a(leaf, "torch", "Tensor") for leaf in tree.flatten(arguments)[0]):
            from tilewright.frontend.torch.types import to_torch

            return tree.unflatten(imported.output_tree, [to_torch(result.copy()) for result in results])
        return tree.unflatten(imported.output_tree, [result.copy() for result in results])

    def _named(self, arguments: Arguments) -> dict[str, Any]:
        given = bind(self.names, *arguments)
        missing = [name for name in self.names if name not in given]
        unknown = [name for name in given if name not in self.names]
        if missing or unknown:
            what = f"{', '.join(missing)} missing" if missing else f"{', '.join(unknown)} not among them"
            raise InputError(f"the model takes the inputs {', '.join(self.names)}: {what}")
        return {name: _as_arrays(given[name]) for name in self.names}


def _as_arrays(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_as_arrays(item) for item in value]
    if _is_a(value, "torch", "Tensor"):
        from tilewright.frontend.torch.types import to_numpy

        return to_numpy(value)
    return value
