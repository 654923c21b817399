"""ONNX models as graphs: `import_onnx`.

`load.py` reads and validates a model, with `external.py` for data outside the file; `program.py` converts its graph.
The `op_*` files hold the converters, one function per operator or family; `registry.py` defines what a converter is,
`context.py` the builder that it uses.

Values that must be known at import (the target of a Reshape, the axes of a sum) are found by evaluating the part of
the graph that computes them (`statics.py`). An operator without a converter that the standard defines as a function
is expanded (`functions.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

from tilewright.errors import MissingDependencyError

if TYPE_CHECKING:
    import onnx

    from tilewright.frontend.imported import ImportedModel

__all__ = ["import_onnx", "require_onnx"]


def import_onnx(
    model: onnx.ModelProto | str | PathLike[str],
    example_inputs: Mapping[str, Any] | Sequence[Any] | Any = None,
    *,
    pin: bool = False,
    pin_elements: int | None = None,
    max_bytes: int | None = None,
) -> ImportedModel:
    """The model as a graph, for inputs of fixed shapes.

    `example_inputs` (a tuple of arrays, a dict by name, or one array) give the sizes of dimensions that the model
    leaves open; without open dimensions they are not needed. With `pin`, an input whose value decides shapes (the
    target of a Reshape, the axes of a sum) is taken to have the example's value always: the result's `pinned` says
    which. With `pin_elements`, only inputs with at most that many elements are, so that no image is fixed.
    `max_bytes` is the memory that the import may take; the option `import_memory` by default.

    Errors: ModelFileError (not a sound model; ExternalDataError, ModelSizeError), UnknownShapeError (dimensions that
    are only names), UnsupportedOpsError (naming every operator that cannot be converted).
    """
    require_onnx()
    from tilewright.frontend.onnx.program import import_program

    return import_program(model, example_inputs, pin=pin, pin_elements=pin_elements, max_bytes=max_bytes)


def require_onnx() -> None:
    try:
        import onnx  # noqa: F401
    except ImportError:
        raise MissingDependencyError(
            "importing an ONNX model needs the package onnx", remedy="pip install 'tilewright[onnx]'"
        ) from None
