"""What a MODEL argument may be, and how it becomes a model with example inputs.

resnet50              a model of the zoo, with random weights
model.pt2             a program saved by torch.export.save
model.onnx            an ONNX model with fixed input shapes
model.tw              an artifact (where a compiled model will do)
package.module:name   a function without arguments that returns (nn.Module, example inputs)
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from tilewright.errors import MissingDependencyError, TilewrightError


class ModelArgumentError(TilewrightError):
    """A MODEL argument that names nothing."""

    remedy = "give a zoo model (see `tilewright zoo`), a .pt2, .onnx or .tw file, or package.module:function"


@dataclass(frozen=True)
class Source:
    """A model that is not compiled yet."""

    name: str
    model: Any  # nn.Module, ExportedProgram, or the path of an ONNX model
    inputs: tuple[Any, ...]
    kwargs: dict[str, Any]

    def eager(self) -> Any:
        """The model as PyTorch runs it."""
        if isinstance(self.model, Path):
            raise ModelArgumentError(
                f"{self.model} is an ONNX model, and this command compares with PyTorch",
                remedy="use `tilewright compile`, and then `bench` or `explain` on the artifact",
            )
        return self.model.module() if hasattr(self.model, "graph_signature") else self.model


def is_artifact(argument: str) -> bool:
    return argument.endswith(".tw")


def require_torch() -> Any:
    try:
        import torch
    except ImportError:
        raise MissingDependencyError(
            "PyTorch is not installed, and this command needs it", remedy="pip install 'tilewright[torch]'"
        ) from None
    return torch


def load_source(argument: str, *, batch: int = 1, small: bool = False, seed: int = 0) -> Source:
    if argument.endswith((".pt2", ".onnx")) and not Path(argument).is_file():
        raise ModelArgumentError(f"there is no file {argument}")
    if argument.endswith(".onnx"):
        return Source(Path(argument).stem, Path(argument), (), {})
    torch = require_torch()
    if argument.endswith(".pt2"):
        program = torch.export.load(argument)
        inputs, kwargs = program.example_inputs or ((), {})
        return Source(Path(argument).stem, program, tuple(inputs), dict(kwargs))
    if ":" in argument:
        return _from_function(argument)
    from tilewright import zoo

    if argument not in zoo.names():
        raise ModelArgumentError(
            f"{argument!r} is no model of the zoo, no .pt2 or .onnx file and no package.module:function"
        )
    model = zoo.build(argument, seed=seed, small=small)
    return Source(argument, model, zoo.example_inputs(argument, batch=batch, seed=seed + 1, small=small), {})


def _from_function(argument: str) -> Source:
    module_name, _, function_name = argument.partition(":")
    sys.path.insert(0, "")  # as `python -m` does: the user's module is usually here
    try:
        function = getattr(import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ModelArgumentError(f"cannot get {argument}: {error}") from None
    finally:
        sys.path.remove("")
    made = function()
    if not (isinstance(made, tuple) and len(made) == 2):
        raise ModelArgumentError(f"{argument} returned a {type(made).__name__}, not (model, example inputs)")
    model, inputs = made
    if isinstance(inputs, dict):
        return Source(function_name, model, (), inputs)
    return Source(function_name, model, inputs if isinstance(inputs, tuple) else (inputs,), {})
