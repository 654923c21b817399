"""Checks the caller's tensors and converts them to addresses, without importing torch.

A `Port` checks one input of the model. It takes a NumPy array or a torch CPU tensor, says precisely what does not
fit, and returns the address of contiguous data. Torch is looked up in `sys.modules`, because a caller with a tensor
has imported it.
"""

from __future__ import annotations

import ctypes
import math
import sys
from typing import Any

import numpy as np

from tilewright.dtypes import DType
from tilewright.errors import GradientError, InputError
from tilewright.runtime.outputs import LARGE, OutputMemory
from tilewright.runtime.plan import TensorSpec
from tilewright.runtime.tree import describe

_TORCH_NAMES = {
    DType.F64: "float64",
    DType.F32: "float32",
    DType.F16: "float16",
    DType.BF16: "bfloat16",
    DType.I64: "int64",
    DType.I32: "int32",
    DType.I16: "int16",
    DType.I8: "int8",
    DType.U64: "uint64",
    DType.U32: "uint32",
    DType.U16: "uint16",
    DType.U8: "uint8",
    DType.BOOL: "bool",
}


def torch_module() -> Any:
    """torch, if this process has imported it; otherwise None."""
    module = sys.modules.get("torch")
    return module if hasattr(module, "Tensor") else None  # not during its import


def torch_dtype(dtype: DType) -> Any:
    return getattr(torch_module(), _TORCH_NAMES[dtype])


_NO_BYTES: Any = ctypes.c_char * 0  # fits into every buffer, also an empty one


def array_address(array: np.ndarray) -> int:
    """The data address of a contiguous array. For writable arrays, four times as fast as `array.ctypes.data`."""
    try:
        return ctypes.addressof(_NO_BYTES.from_buffer(array))
    except (TypeError, ValueError):  # read-only, or of a type without buffer support
        return int(array.ctypes.data)


def overruns(array: np.ndarray) -> bool:
    """Whether an array extends beyond the memory that it is a view of, as `numpy.lib.stride_tricks.as_strided`
    allows."""
    first, last = _bounds(array)
    if first == last:
        return False
    owner = array.base
    while owner is not None:
        if not isinstance(owner, np.ndarray):
            inner = getattr(owner, "base", None)  # an object that as_strided inserts
            if not isinstance(inner, np.ndarray):
                return _overruns_buffer(owner, first, last)
            owner = inner
        begin, end = _bounds(owner)
        if first < begin or last > end:
            return True
        owner = owner.base
    return False


def _overruns_buffer(owner: Any, first: int, last: int) -> bool:
    """For bytes, memory maps and other buffers; owners of unknown size are trusted."""
    try:
        whole = np.frombuffer(owner, np.uint8)
    except (TypeError, ValueError, BufferError, AttributeError):
        return False
    begin = int(whole.ctypes.data)
    return first < begin or last > begin + whole.size


def _bounds(array: np.ndarray) -> tuple[int, int]:
    """The addresses of the first byte of an array, and of the one after its last."""
    first = last = int(array.__array_interface__["data"][0])
    if array.size == 0:
        return first, first
    for extent, stride in zip(array.shape, array.strides, strict=True):
        if stride < 0:
            first += (extent - 1) * stride
        else:
            last += (extent - 1) * stride
    return first, last + array.itemsize


def _torch_overruns(value: Any, held: int) -> bool:
    """Whether elements of a tensor are outside its storage."""
    last = sum((extent - 1) * stride for extent, stride in zip(value.shape, value.stride(), strict=True))
    return bool(value.numel()) and (value.storage_offset() + last + 1) * value.itemsize > held


class Port:
    __slots__ = (
        *("_bytes", "_grad_enabled", "_strided", "_tensor"),
        *("dtype", "numpy", "path", "shape", "spec", "torch"),
    )

    def __init__(self, spec: TensorSpec, path: str) -> None:
        self.spec = spec
        self.path = path
        self.shape = tuple(spec.shape)
        self.dtype = DType.parse(spec.dtype)
        self.numpy = self.dtype.numpy
        self._bytes = spec.bytes
        self._tensor: Any = None  # torch.Tensor, once torch is loaded
        self.torch: Any = None  # the torch dtype
        self._strided: Any = None
        self._grad_enabled: Any = None

    def address(self, value: Any, keep: list[Any]) -> tuple[int, bool]:
        """(address of contiguous data, whether it is torch's). Objects that must stay alive until the call ends are
        added to `keep`."""
        if type(value) is np.ndarray:
            if value.dtype != self.numpy or value.shape != self.shape:
                raise self._misfit(value)
            if value.flags.c_contiguous:
                address = array_address(value)
                owner = value.base
                if owner is None:
                    return address, False
                if type(owner) is np.ndarray and owner.base is None:  # the view of an ordinary array
                    begin = array_address(owner)
                    if begin <= address and address + self._bytes <= begin + owner.nbytes:
                        return address, False
            if value.base is not None and overruns(value):
                raise self._short(type(value))
            if not value.flags.c_contiguous:
                value = np.ascontiguousarray(value)
                keep.append(value)
            return array_address(value), False
        if self._tensor is None and not self._find_torch():
            return self._unusual(value, keep), False
        if isinstance(value, self._tensor):
            return self._torch_address(value, keep), True
        return self._unusual(value, keep), False

    def as_numpy(self, value: Any) -> np.ndarray:
        """A value that `address` has accepted, as a contiguous array, copied only if necessary."""
        if self._tensor is not None and isinstance(value, self._tensor):
            value = value.detach().resolve_neg().contiguous()
            if self.dtype is DType.BF16:  # NumPy's bfloat16 type is unknown to torch
                module = torch_module()
                return np.asarray(value.view(module.int16).numpy()).view(self.numpy)
            value = value.numpy()
        return np.ascontiguousarray(value).reshape(self.shape)

    def _find_torch(self) -> bool:
        module = torch_module()
        if module is None:
            return False
        self.torch = getattr(module, _TORCH_NAMES[self.dtype])
        self._strided = module.strided
        self._grad_enabled = module.is_grad_enabled
        self._tensor = module.Tensor
        return True

    def _torch_address(self, value: Any, keep: list[Any]) -> int:
        if value.dtype is not self.torch or value.shape != self.shape or not self._is_here(value):
            raise self._misfit(value)
        if value.layout is not self._strided:
            raise InputError(
                f"{self.path}: expected a dense tensor, got the layout {value.layout}",
                remedy="convert it first, with .to_dense()",
            )
        if value.requires_grad and self._grad_enabled():
            raise GradientError(f"{self.path} requires gradients, and a compiled model computes none")
        try:
            held = value.untyped_storage().nbytes()
        except (RuntimeError, NotImplementedError):  # no storage, and so no data: detected below
            held = self._bytes
        # Torch keeps views within their storage, which may have been shrunk since.
        if held != self._bytes and held < self._bytes + value.storage_offset() * self.numpy.itemsize:
            if _torch_overruns(value, held):
                raise self._short(type(value))
        if value.is_neg():  # a lazy negation: the memory holds the opposite sign
            value = value.resolve_neg()
            keep.append(value)
        if not value.is_contiguous():
            value = value.contiguous()
            keep.append(value)
        # Fake and functional tensors have no data: they raise an error, or return a null pointer.
        try:
            address = int(value.data_ptr())
        except RuntimeError:
            address = 0
        if address == 0 and value.numel():
            raise InputError(f"{self.path}: a {type(value).__name__} without data")
        return address

    def _short(self, kind: type) -> InputError:
        return InputError(
            f"{self.path}: a {kind.__name__} of {self.spec} whose memory is shorter than that",
            remedy="pass a tensor that owns all of its elements, such as a copy made before its storage was changed",
        )

    def _unusual(self, value: Any, keep: list[Any]) -> int:
        """NumPy scalars and subclasses; an error for everything else."""
        if isinstance(value, np.ma.MaskedArray):
            raise InputError(
                f"{self.path}: a masked array; its mask would be lost", remedy="pass array.filled(value)"
            )
        if not isinstance(value, (np.ndarray, np.generic)):
            raise self._misfit(value)
        array = np.asarray(value)
        keep.append(array)
        return self.address(array, keep)[0]

    def _misfit(self, value: Any) -> InputError:
        """The error for a value that does not fit, the most basic mismatch first."""
        if isinstance(value, (bool, int, float)):
            return InputError(
                f"{self.path}: expected a tensor {self.spec}, got the Python number {value!r}",
                remedy=f"pass numpy.full({self.shape}, {value!r}, numpy.{self.numpy}) or its torch equivalent",
            )
        is_numpy = isinstance(value, np.ndarray)
        if not is_numpy and not (self._tensor is not None and isinstance(value, self._tensor)):
            return InputError(
                f"{self.path}: expected a tensor {self.spec}, got {describe(value)}",
                remedy=f"pass a torch.Tensor on {self._device()} or a numpy.ndarray",
            )
        if not is_numpy and not self._is_here(value):
            return InputError(
                f"{self.path}: the model was compiled for {self._device()}, got a tensor on {value.device}",
                remedy=f"move it with {self._move()}, or compile for that device",
            )
        if is_numpy and value.dtype != self.numpy and value.dtype.newbyteorder("=") == self.numpy:
            return InputError(
                f"{self.path}: expected {self.spec} in this machine's byte order, got {value.dtype.str}",
                remedy='convert it with array.astype(array.dtype.newbyteorder("="))',
            )
        if tuple(value.shape) != self.shape:
            return InputError(
                f"{self.path}: expected the shape {self.shape}, got {tuple(value.shape)}"
                + ("" if self._dtype_fits(value) else f" (and {self.spec.dtype}, got {value.dtype})"),
                remedy="call it with the shape that it was compiled for, or compile with dynamic=True for shapes that"
                " change",
            )
        return InputError(
            f"{self.path}: expected {self.spec}, got elements of {value.dtype}",
            remedy="convert it with .to(dtype) or .astype(dtype), or compile for this type",
        )

    # -- device-specific methods ------------------------------------------------------------------------------------

    def _is_here(self, value: Any) -> bool:
        return bool(value.is_cpu)

    def _device(self) -> str:
        return "the CPU"

    def _move(self) -> str:
        return ".cpu()"

    def _dtype_fits(self, value: Any) -> bool:
        return value.dtype == self.numpy if isinstance(value, np.ndarray) else value.dtype is self.torch


class OutPort:
    """Makes the tensors that a call returns."""

    __slots__ = ("_device", "_empty", "_memory", "_module", "_strides", "_torch", "numpy", "shape", "spec")

    def __init__(self, spec: TensorSpec) -> None:
        self.spec = spec
        self.shape = tuple(spec.shape)
        self.numpy = DType.parse(spec.dtype).numpy
        inner = [self.shape[axis:] for axis in range(1, len(self.shape) + 1)]
        self._strides = tuple(math.prod(max(size, 1) for size in sizes) for sizes in inner)
        self._device: Any = None
        self._memory = OutputMemory(spec.bytes) if spec.bytes >= LARGE else None
        self._module: Any = None
        self._torch: Any = None
        self._empty: Any = None

    def new_numpy(self) -> tuple[np.ndarray, int]:
        if self._memory is not None:
            array = np.frombuffer(self._memory.lend(), self.numpy).reshape(self.shape)
        else:
            array = np.empty(self.shape, self.numpy)
        return array, array_address(array)

    def new_torch(self) -> tuple[Any, int]:
        if self._torch is None:
            self._module = torch_module()
            self._empty = self._module.empty_strided  # twice as fast as `empty`
            self._device = self._module.device("cpu")
            self._torch = getattr(self._module, _TORCH_NAMES[DType.parse(self.spec.dtype)])
        # The device is explicit, because the caller may have set another default.
        if self._memory is None:
            tensor = self._empty(self.shape, self._strides, dtype=self._torch, device=self._device)
        else:
            # Not a view of the bytes: autograd would track writes to a view.
            storage = self._module.frombuffer(self._memory.lend(), dtype=self._module.uint8).untyped_storage()
            tensor = self._empty((0,), (1,), dtype=self._torch, device=self._device)
            tensor.set_(storage, 0, self.shape, self._strides)
        return tensor, tensor.data_ptr()
