"""What the tests of the PyTorch frontend share: import a model, run it with the oracle, compare it with PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from tilewright.dtypes import DType
from tilewright.frontend import ImportedModel, import_torch
from tilewright.frontend.torch.types import to_numpy
from tilewright.graph.oracle import evaluate
from tilewright.graph.verify import verify
from tilewright.runtime import tree

# Relative L2 error against PyTorch run in the same type.
TOLERANCE = {DType.F64: 1e-12, DType.F32: 1e-5, DType.F16: 2e-3, DType.BF16: 1.6e-2}


class Function(nn.Module):
    """A function as a model."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def functions(table: Mapping[str, Callable[..., Any]]) -> nn.Module:
    """Many functions of the same inputs as one model: exporting one takes less time than exporting each."""
    return Function(lambda *args: {name: function(*args) for name, function in table.items()})


def imported(model: Any, *args: Any, **kwargs: Any) -> ImportedModel:
    if not isinstance(model, nn.Module):
        model = Function(model)
    result = import_torch(model, args, kwargs)
    verify(result.graph, "imported")
    return result


def check(model: Any, *args: Any, **kwargs: Any) -> ImportedModel:
    """Imports the model and compares every tensor of its result with what PyTorch computes."""
    model = model if isinstance(model, nn.Module) else Function(model)
    result = imported(model, *args, **kwargs)
    compare(result, model, args, kwargs)
    return result


def compare(result: ImportedModel, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    arrays = [to_numpy(leaf) for leaf in tree.flatten_like(result.input_tree, (args, kwargs))]
    outputs = evaluate(result.graph, arrays, precise=False)
    with torch.no_grad():
        expected, spec = tree.flatten(model(*args, **kwargs))
    assert spec == result.output_tree
    names = leaf_names(result.output_tree)
    problems = []
    for name, node, array, tensor in zip(names, result.graph.outputs, outputs, expected, strict=True):
        wanted = to_numpy(tensor)
        if node.dtype is not DType.of(wanted) or node.shape != wanted.shape:
            problems.append(f"{name}: {node.type} instead of {wanted.dtype}{wanted.shape}")
        elif (error := relative_error(array, wanted)) > TOLERANCE.get(node.dtype, 0):
            problems.append(f"{name}: error {error:.3g}\n{array}\n{wanted}")
    assert not problems, "\n".join(problems)


def relative_error(array: np.ndarray, wanted: np.ndarray) -> float:
    """Relative L2 error of the finite elements; infinite where NaNs or infinities are not the same."""
    got, want = array.astype(np.float64), wanted.astype(np.float64)
    finite = np.isfinite(want)
    if not np.array_equal(got[~finite], want[~finite], equal_nan=True):
        return float("inf")
    got, want = got[finite], want[finite]
    return float(np.linalg.norm(got - want)) / max(float(np.linalg.norm(want)), 1e-30)


def leaf_names(spec: tree.Spec, path: str = "result") -> list[str]:
    kind = spec["kind"]
    if kind == "leaf":
        return [path]
    if kind == "constant":
        return []
    labels = spec.get("keys") or spec.get("fields") or range(len(spec["items"]))
    return [
        n for key, item in zip(labels, spec["items"], strict=True) for n in leaf_names(item, f"{path}.{key}")
    ]


def ops_of(result: ImportedModel) -> list[str]:
    return [node.op for node in result.graph.nodes()]


def floats(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def integers(*shape: int, low: int = -9, high: int = 10, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(0)).to(dtype)
