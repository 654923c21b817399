"""Convert foreign models to the graph IR, without optimisation. A framework is imported only for its own models."""

from __future__ import annotations

import os
import sys
import zipfile
from typing import Any

from tilewright.errors import MissingDependencyError, ModelFileError, UnsupportedModelError
from tilewright.frontend.imported import ImportedModel
from tilewright.frontend.onnx import import_onnx
from tilewright.frontend.reimport import ReimportSource, source_of
from tilewright.frontend.torch_export import import_torch

__all__ = [
    "ImportedModel",
    "ReimportSource",
    "check_program_file",
    "import_model",
    "import_onnx",
    "import_torch",
    "opened",
    "source_of",
]


def opened(model: Any) -> Any:
    """The program in a file of torch.export.save (`.pt2`); other models unchanged."""
    if not isinstance(model, (str, os.PathLike)) or not os.fspath(model).endswith(".pt2"):
        return model
    check_program_file(model)
    try:
        from tilewright.frontend.torch.export import load_program
    except ImportError:
        raise MissingDependencyError(
            f"PyTorch is not installed, and {model} is a program of it",
            remedy="pip install 'tilewright[torch]'",
        ) from None
    return load_program(model)


def check_program_file(path: str | os.PathLike[str]) -> None:
    """Raise ModelFileError if an existing file is not a zip archive: exported programs are. It does not import
    torch."""
    if os.path.isfile(path) and not zipfile.is_zipfile(path):
        raise ModelFileError(
            f"{os.fspath(path)} is not an exported program, or is damaged: it is not a zip archive",
            remedy="write it again with torch.export.save",
        )


# Maximum elements of an input whose value `compile` may fix: a shape, a sampling rate, a number of steps.
MAX_PINNED = 64


def import_model(model: Any, example_inputs: Any = None) -> ImportedModel:
    """Import a model as a graph with the frontend for its kind; an imported model is returned unchanged.

    If the value of an input decides shapes in an ONNX model, it is fixed to the example's value (`pinned`).
    """
    if isinstance(model, ImportedModel):
        return model
    if isinstance(model, (str, os.PathLike)) or _is_onnx(model):
        return import_onnx(model, example_inputs, pin=True, pin_elements=MAX_PINNED)
    if "torch" in sys.modules:  # unchanged if the model is a PyTorch model
        return import_torch(model, example_inputs)
    raise UnsupportedModelError(f"cannot import a {type(model).__module__}.{type(model).__qualname__}")


def _is_onnx(model: Any) -> bool:
    return "onnx" in sys.modules and isinstance(model, sys.modules["onnx"].ModelProto)
