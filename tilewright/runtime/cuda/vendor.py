"""Steps computed by vendor libraries: cuBLASLt directly, cuDNN and attention through PyTorch.

A PyTorch function returns newly allocated memory, which is used as the step's result if it has the plan's layout; in
a captured graph that memory is the same in every run. Torch is looked up in `sys.modules`, because compiling such a
plan has imported it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tilewright.dtypes import DType
from tilewright.errors import MissingDependencyError
from tilewright.runtime.cuda import cublaslt
from tilewright.runtime.cuda.cublaslt import Gemm, PreparedGemm
from tilewright.runtime.plan import Step, TaskInfo, TensorSpec, VendorCall, View
from tilewright.runtime.ports import torch_dtype, torch_module

GEMM = "product"


def needs_torch(call: VendorCall) -> bool:
    return call.function != GEMM


def loaded_torch() -> Any:
    module = torch_module()
    if module is None:
        import importlib

        try:
            module = importlib.import_module("torch")
        except ImportError:
            raise MissingDependencyError(
                "this plan has steps of cuDNN or of attention, which run through PyTorch",
                remedy="pip install 'tilewright[torch]', or load a file that `save` wrote: it has no such steps",
            ) from None
    return module


class _Memory:
    """GPU memory in the form that PyTorch accepts."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


def as_tensor(address: int, spec: TensorSpec, ordinal: int) -> Any:
    """GPU memory as a PyTorch tensor, without a copy."""
    torch = loaded_torch()
    flat = torch.as_tensor(_Memory(address, spec.bytes), device=f"cuda:{ordinal}")
    return flat.view(torch_dtype(DType.parse(spec.dtype))).reshape(spec.shape)


class VendorStep:
    """A step of a plan, bound to its library."""

    def __init__(self, step: Step, info: TaskInfo, ordinal: int) -> None:
        assert step.vendor is not None
        self.call = step.vendor
        self._specs = (*info.inputs, info.output)
        self._ordinal = ordinal
        self._made: dict[tuple[View, int], Any] = {}
        self._gemm = _prepared(self.call, info) if self.call.function == GEMM else None

    def run(self, addresses: Sequence[int], tensors: Sequence[Any], workspace: int, stream: int) -> Any:
        """Start it on `stream`, which is PyTorch's current one. `tensors`: for each input the tensor that holds it,
        if another library returned one. Returns None if the result is at the last address, otherwise the tensor that
        holds it."""
        if self._gemm is not None:
            order = [addresses[view.argument] for view in self.call.operands]
            self._gemm.start([*order, addresses[-1]], workspace, stream)
            return None
        torch = loaded_torch()
        operands = [self._operand(view, addresses, tensors) for view in self.call.operands]
        result = _FUNCTIONS[self.call.function](torch, operands, self.call.options)
        if self.call.order:
            result = result.permute(self.call.order)
        return result.contiguous()

    def _operand(self, view: View, addresses: Sequence[int], tensors: Sequence[Any]) -> Any:
        held = tensors[view.argument]
        if held is not None:
            return held.as_strided(view.shape, view.strides, held.storage_offset() + view.offset)
        # Made once: during graph capture PyTorch must not query an address.
        key = view, addresses[view.argument]
        if key not in self._made:
            spec = self._specs[view.argument]
            whole = as_tensor(key[1], spec, self._ordinal)
            self._made[key] = whole.as_strided(view.shape, view.strides, view.offset)
        return self._made[key]


def _prepared(call: VendorCall, info: TaskInfo) -> PreparedGemm:
    data, weight = call.operands[:2]
    *batch, m, k = data.shape
    transposed = weight.strides[-1] != 1
    return PreparedGemm(
        Gemm(
            info.output.dtype,
            m,
            call.result[-1],
            k,
            math.prod(batch),
            bias=bool(call.options.get("bias")),
            added=bool(call.options.get("added")),
            activation=str(call.options.get("activation", "")),
            transposed=transposed,
            rounded=bool(call.options.get("rounded")),
            algorithm=int(call.options.get("algorithm", 0)),
        )
    )


# -- functions of the framework -------------------------------------------------------------------------------------

_Function = Callable[[Any, Sequence[Any], dict[str, Any]], Any]


def _window(options: dict[str, Any]) -> tuple[Any, Any, Any, int]:
    return options["stride"], options["padding"], options["dilation"], options["groups"]


def _conv(torch: Any, tensors: Sequence[Any], options: dict[str, Any]) -> Any:
    data, weight = tensors
    with _searching(torch, options):
        return torch.conv2d(data, weight, None, *_window(options))


def _conv_relu(torch: Any, tensors: Sequence[Any], options: dict[str, Any]) -> Any:
    data, weight, bias = tensors
    with _searching(torch, options):
        return torch.cudnn_convolution_relu(data, weight, bias, *_window(options))


def _conv_add_relu(torch: Any, tensors: Sequence[Any], options: dict[str, Any]) -> Any:
    data, weight, bias, added = tensors
    with _searching(torch, options):
        return torch.cudnn_convolution_add_relu(data, weight, added, 1.0, bias, *_window(options))


def _searching(torch: Any, options: dict[str, Any]) -> Any:
    """cuDNN measures its algorithms when it first meets a convolution."""
    rounded = bool(options.get("rounded"))
    return torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False, allow_tf32=rounded)


def _attention(torch: Any, tensors: Sequence[Any], options: dict[str, Any]) -> Any:
    query, key, value, *mask = tensors
    return torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask[0] if mask else None,
        is_causal=options["causal"],
        scale=options["scale"],
    )


_FUNCTIONS: dict[str, _Function] = {
    "conv": _conv,
    "conv_relu": _conv_relu,
    "conv_add_relu": _conv_add_relu,
    "attention": _attention,
}


def is_available() -> dict[str, bool]:
    """The libraries that this process could call."""
    torch = torch_module()
    return {"cublaslt": cublaslt.is_available(), "torch": torch is not None and torch.cuda.is_available()}
