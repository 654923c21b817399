"""Element types and tensors of PyTorch as those of the graph, and PyTorch's rule of type promotion."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np
import torch

from tilewright.dtypes import DType
from tilewright.frontend.builder import Operand
from tilewright.frontend.torch.registry import Inexpressible
from tilewright.graph.ir import Node, TensorType

_FROM_TORCH: dict[torch.dtype, DType] = {
    torch.float64: DType.F64,
    torch.float32: DType.F32,
    torch.float16: DType.F16,
    torch.bfloat16: DType.BF16,
    torch.int64: DType.I64,
    torch.int32: DType.I32,
    torch.int16: DType.I16,
    torch.int8: DType.I8,
    torch.uint8: DType.U8,
    torch.bool: DType.BOOL,
}
_TO_TORCH = {dtype: foreign for foreign, dtype in _FROM_TORCH.items()}


def from_torch_dtype(dtype: torch.dtype) -> DType:
    found = _FROM_TORCH.get(dtype)
    if found is None:
        raise Inexpressible(f"tensors of {str(dtype).removeprefix('torch.')} are not supported")
    return found


def tensor_type(value: torch.Tensor) -> TensorType:
    """The type of an exported value; Unsupported for a symbolic size or an unsupported element type."""
    if any(not isinstance(extent, int) for extent in value.shape):
        if re.search(r"\bu\d", str(tuple(value.shape))):  # PyTorch's name of a data-dependent size
            raise Inexpressible("the shape of its result depends on data")
        raise Inexpressible(f"symbolic shape {tuple(value.shape)}: only static shapes are supported")
    if value.layout is not torch.strided:
        raise Inexpressible(f"{value.layout} tensors are not supported")
    return TensorType(tuple(int(extent) for extent in value.shape), from_torch_dtype(value.dtype))


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The tensor as an array, sharing its memory if it is contiguous and on the CPU."""
    from_torch_dtype(tensor.dtype)
    tensor = tensor.detach()
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def to_torch(value: Any) -> Any:
    """An array as a tensor that shares its memory; other values unchanged."""
    if isinstance(value, np.generic):
        value = np.asarray(value)
    if not isinstance(value, np.ndarray):
        return value
    value = np.ascontiguousarray(value).reshape(value.shape)
    if not value.flags.writeable:
        value = value.copy()  # PyTorch warns about read-only memory
    if value.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(value.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(value)


def common_dtype(operands: Iterable[Operand]) -> DType:
    """The type in which PyTorch computes with these operands (`torch.result_type` of any number of them).

    Tensors with dimensions decide before those without, those before plain numbers; a later group counts only where its
    kind (bool < integer < float) is higher.
    """
    groups: list[list[torch.dtype]] = [[], [], []]
    numbers: list[Any] = []
    for operand in operands:
        if isinstance(operand, Node):
            groups[0 if operand.type.rank else 1].append(_TO_TORCH[operand.dtype])
        else:
            numbers.append(operand)
    tensors = [
        torch.empty((1,) if i == 0 else (), dtype=_promote(group), device="cpu")
        for i, group in enumerate(groups)
        if group
    ]
    number = max(numbers, key=_kind_rank, default=None)
    terms: list[Any] = tensors + ([number] if number is not None else [])
    if len(terms) == 1:
        terms *= 2
    result = torch.result_type(terms[0], terms[1])
    if len(terms) == 3:
        first = torch.empty((1,), dtype=result, device="cpu")
        result = torch.result_type(first, terms[2])
    return from_torch_dtype(result)


def _promote(dtypes: list[torch.dtype]) -> torch.dtype:
    result = dtypes[0]
    for dtype in dtypes[1:]:
        result = torch.promote_types(result, dtype)
    return result


def _kind_rank(number: Any) -> int:
    return 0 if isinstance(number, bool) else 1 if isinstance(number, int) else 2
