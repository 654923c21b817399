"""What a MODEL argument may be, and how it becomes a model with example inputs.

resnet50              a model of the zoo, with random weights
model.pt2             a program saved by torch.export.save
model.onnx            an ONNX model; if it leaves dimensions open, with example inputs in an .npz file
model.tw              an artifact (where a compiled model will do)
package.module:name   a function without arguments that returns (nn.Module, example inputs)
"""

from __future__ import annotations

import sys
import zipfile
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

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

    @property
    def examples(self) -> Any:
        """As `tilewright.compile` takes them."""
        return self.inputs or self.kwargs or None

    @property
    def is_onnx(self) -> bool:
        return isinstance(self.model, Path)

    def eager(self) -> Any:
        """The model as PyTorch runs it."""
        if self.is_onnx:
            raise ModelArgumentError(
                f"{self.model} is an ONNX model, and this command compares with PyTorch",
                remedy="use `tilewright compile`, and then `bench` or `explain` on the artifact",
            )
        return self.model.module() if hasattr(self.model, "graph_signature") else self.model


def is_artifact(argument: str) -> bool:
    return argument.endswith(".tw")


TRUSTED = Annotated[
    list[Path] | None,
    typer.Option(
        "--trusted", metavar="KEYFILE", help="load a .tw file only if it is signed with this key; repeatable"
    ),
]


def load_artifact(argument: str, threads: int | None = None, trusted: list[Path] | None = None) -> Any:
    import tilewright

    return tilewright.load(argument, threads=threads, trusted=trusted or None)


def refuse_trusted(argument: str | None, trusted: list[Path] | None) -> None:
    """A key that would be ignored is a mistake."""
    if trusted and not (argument and is_artifact(argument)):
        raise ModelArgumentError(
            f"--trusted is for .tw files, and {argument or 'the database'} is none",
            remedy="leave --trusted out",
        )


def require_torch() -> Any:
    try:
        import torch
    except ImportError:
        raise MissingDependencyError(
            "PyTorch is not installed, and this command needs it", remedy="pip install 'tilewright[torch]'"
        ) from None
    return torch


def load_source(
    argument: str, *, batch: int = 1, small: bool = False, seed: int = 0, inputs: Path | None = None
) -> Source:
    """`inputs`: an .npz file with the example inputs of an ONNX model, by name."""
    if inputs is not None and not argument.endswith(".onnx"):
        raise ModelArgumentError(
            f"--inputs is for ONNX models, and {argument} is none", remedy="leave --inputs out"
        )
    if argument.endswith((".pt2", ".onnx")) and not Path(argument).is_file():
        raise ModelArgumentError(f"there is no file {argument}")
    if argument.endswith(".onnx"):
        return Source(Path(argument).stem, Path(argument), (), {} if inputs is None else _arrays(inputs))
    torch = require_torch()
    if argument.endswith(".pt2"):
        program = torch.export.load(argument)
        args, kwargs = program.example_inputs or ((), {})
        return Source(Path(argument).stem, program, tuple(args), dict(kwargs))
    if ":" in argument:
        return _from_function(argument)
    from tilewright import zoo

    if argument not in zoo.names():
        raise ModelArgumentError(
            f"{argument!r} is no model of the zoo, no .pt2 or .onnx file and no package.module:function"
        )
    model = zoo.build(argument, seed=seed, small=small)
    return Source(argument, model, zoo.example_inputs(argument, batch=batch, seed=seed + 1, small=small), {})


def _arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        archive = np.load(path, allow_pickle=False)
        if isinstance(archive, np.ndarray):
            raise ValueError("it holds one array without a name")
        with archive:
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ModelArgumentError(
            f"cannot read the inputs in {path}: {error}",
            remedy="write them with numpy.savez(path, name=array, ...), by the names of the model's inputs",
        ) from None


def _from_function(argument: str) -> Source:
    module_name, _, function_name = argument.partition(":")
    # The user's module is usually here. Last, so that no file here is taken for an installed module.
    sys.path.append("")
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
