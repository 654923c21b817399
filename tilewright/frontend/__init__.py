"""Foreign models into the graph IR, without optimisation. A framework is imported only when a model of it comes."""

from __future__ import annotations

import os
import sys
from typing import Any

from tilewright.errors import UnsupportedModelError
from tilewright.frontend.imported import ImportedModel
from tilewright.frontend.onnx import import_onnx
from tilewright.frontend.reimport import Source, source_of
from tilewright.frontend.torch_export import import_torch

__all__ = ["ImportedModel", "Source", "import_model", "import_onnx", "import_torch", "source_of"]


# Elements of an input whose value may be fixed by `compile`: a shape, a sampling rate, a number of steps.
MAX_PINNED = 64


def import_model(model: Any, example_inputs: Any = None) -> ImportedModel:
    """The model as a graph, by the frontend that knows its kind; one that is imported already, as it is.

    Where the value of an input decides shapes in an ONNX model, it is fixed to that of the example (`pinned`)."""
    if isinstance(model, ImportedModel):
        return model
    if isinstance(model, (str, os.PathLike)) or _is_onnx(model):
        return import_onnx(model, example_inputs, pin=True, pin_elements=MAX_PINNED)
    if "torch" in sys.modules:  # as it is if the model is one of PyTorch's
        return import_torch(model, example_inputs)
    raise UnsupportedModelError(f"cannot import a {type(model).__module__}.{type(model).__qualname__}")


def _is_onnx(model: Any) -> bool:
    return "onnx" in sys.modules and isinstance(model, sys.modules["onnx"].ModelProto)
