"""A model compiled for a GPU: called with torch tensors of that GPU, or with NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tilewright.dtypes import DType
from tilewright.errors import ArtifactError
from tilewright.runtime.cuda.executor import GpuExecutor
from tilewright.runtime.model import CompiledModel
from tilewright.runtime.plan import Plan, TensorSpec
from tilewright.runtime.ports import Port, torch_dtype, torch_module


class GpuPort(Port):
    """One input: a tensor of the GPU that the model is for, or an array of the host."""

    __slots__ = ("ordinal",)

    def __init__(self, spec: TensorSpec, path: str, ordinal: int) -> None:
        super().__init__(spec, path)
        self.ordinal = ordinal

    def _is_here(self, value: Any) -> bool:
        return bool(value.is_cuda) and value.get_device() == self.ordinal

    def _device(self) -> str:
        return f"cuda:{self.ordinal}"

    def _move(self) -> str:
        return f'.to("{self._device()}")'

    def as_numpy(self, value: Any) -> np.ndarray:
        return super().as_numpy(value.cpu() if hasattr(value, "cpu") else value)


class GpuModel(CompiledModel):
    """Like `CompiledModel`, on a GPU. Calls run on PyTorch's current stream and return before they complete, unless a
    result is a NumPy array."""

    def __init__(
        self,
        plan: Plan,
        constants: Sequence[np.ndarray],
        objects: Mapping[str, bytes],
        *,
        ordinal: int = 0,
        checker: Any = None,
        to_save: Callable[[], Sequence[GpuModel]] | None = None,
    ) -> None:
        """`to_save`: makes the variants for a file; None: the current one."""
        self.ordinal = ordinal
        self._to_save = to_save
        super().__init__(plan, constants, objects, checker=checker)
        self._dtypes = [DType.parse(spec.dtype) for spec in plan.outputs]

    def _made_executor(
        self, constants: Sequence[np.ndarray], objects: Mapping[str, bytes], threads: int | None
    ) -> GpuExecutor:
        return GpuExecutor(self.plan, constants, objects, self.ordinal)

    def _made_port(self, spec: TensorSpec, path: str) -> Port:
        return GpuPort(spec, path, self.ordinal)

    def flat(self, leaves: Sequence[Any]) -> list[Any]:
        keep: list[Any] = []
        inputs = []
        any_torch = False
        for port, leaf in zip(self._in_ports, leaves, strict=True):
            address, is_torch = port.address(leaf, keep)
            inputs.append((address, not is_torch))
            any_torch = any_torch or is_torch
        if self._pinned:
            self._check_pinned(leaves)
        stream, outputs = 0, []
        results: list[Any] = []
        if any_torch:
            torch = torch_module()
            stream = torch.cuda.current_stream(self.ordinal).cuda_stream
            for spec, dtype in zip(self.plan.outputs, self._dtypes, strict=True):
                result = torch.empty(spec.shape, dtype=torch_dtype(dtype), device=f"cuda:{self.ordinal}")
                results.append(result)
                outputs.append((result.data_ptr(), False))
        else:
            results = self.executor.new_outputs()
            outputs = [(array.ctypes.data, True) for array in results]
        self.executor.run_addresses(inputs, outputs, stream)
        return results

    def saved(self) -> Sequence[CompiledModel]:
        """The variants for a file: library calls are replanned without libraries, and for other GPUs there is a PTX
        plan with their common features."""
        if self._to_save is not None:
            return self._to_save()
        if any(step.vendor is not None for step in self.plan.steps):
            raise ArtifactError(
                "the model calls libraries that a file cannot hold",
                remedy="compile it again where the model is at hand, and save that",
            )
        return [self]

    def __repr__(self) -> str:
        where = self.plan.target["cpu"]
        steps = len(self.plan.steps)
        return f"<GpuModel {self.signature}, {steps} step{'s' if steps != 1 else ''}, {where}>"
