"""cuBLASLt GEMMs with bias, residual and activation in one call, written in place.

PyTorch's functions offer less: none adds both a bias and a residual, and most return newly allocated memory. The
library comes with PyTorch, or with a CUDA installation.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tilewright.errors import DeviceError, MissingDependencyError

_NAMES = ("libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so")
WORKSPACE_BYTES = 32 << 20
_MAX_ALGORITHMS = 16

# From the library's headers.
_TYPES = {"f16": 2, "bf16": 14, "f32": 0}
_COMPUTE_F32, _COMPUTE_TF32, _SCALE_F32 = 68, 77, 0
_TRANSPOSE_A, _TRANSPOSE_B, _EPILOGUE, _BIAS_POINTER = 3, 4, 7, 8
_BATCH_COUNT, _BATCH_STRIDE = 5, 6
_MAX_WORKSPACE, _REDUCTION_SCHEMES = 1, 3
_REDUCED_IN_COMPUTE_TYPE = 2  # split-K sums stay float32: in the output's float16 they would lose digits
_EPILOGUES = {
    (False, ""): 1,
    (False, "relu"): 2,
    (True, ""): 4,
    (True, "relu"): 6,
    (False, "gelu"): 32,
    (True, "gelu"): 36,
}


class _Algorithm(ctypes.Structure):
    _fields_ = (("data", ctypes.c_uint64 * 8),)


class _Heuristic(ctypes.Structure):
    _fields_ = (
        ("algorithm", _Algorithm),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@lru_cache(maxsize=1)
def _library() -> Any:
    for name in _NAMES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise MissingDependencyError(
        "a plan with matmuls of cuBLASLt needs that library",
        remedy="pip install 'tilewright[torch]', whose CUDA wheels bring it, or install the CUDA toolkit",
    )


def is_available() -> bool:
    try:
        _library()
    except MissingDependencyError:
        return False
    return True


def _call(function: str, *arguments: Any) -> None:
    status = getattr(_library(), function)(*arguments)
    if status:
        raise DeviceError(f"{function}: status {status}")


@dataclass(frozen=True)
class Matrix:
    """A column-major matrix: columns of `rows` elements, `pitch` elements apart; `stride` between batch elements."""

    rows: int
    columns: int
    pitch: int
    stride: int = 0


@dataclass(frozen=True)
class Gemm:
    """out[b, m, n] = activation(a[b, m, k] @ w[b, k, n] + bias[n] + added[b, m, n]), all row-major.

    `transposed`: w is stored as [n, k].
    """

    dtype: str
    m: int
    n: int
    k: int
    batch: int = 1
    bias: bool = False
    added: bool = False
    activation: str = ""  # "relu", "gelu"
    transposed: bool = False
    rounded: bool = False  # whether float32 may be rounded before it is multiplied
    algorithm: int = 0  # index among the library's proposals, best first


class PreparedGemm:
    """A product with a chosen algorithm, which can be started any number of times."""

    def __init__(self, gemm: Gemm) -> None:
        self._gemm = gemm
        self._handle = _handle()
        # The library is column-major: out' [n, m] = w' [n, k] @ a' [k, m].
        p = gemm
        weight = Matrix(p.k, p.n, p.k, p.k * p.n) if p.transposed else Matrix(p.n, p.k, p.n, p.k * p.n)
        self._weight = _layout(p, weight)
        self._data = _layout(p, Matrix(p.k, p.m, p.k, p.m * p.k))
        self._out = _layout(p, Matrix(p.n, p.m, p.n, p.m * p.n))
        self._description = ctypes.c_void_p()
        compute = _COMPUTE_TF32 if p.rounded else _COMPUTE_F32
        _call("cublasLtMatmulDescCreate", ctypes.byref(self._description), compute, _SCALE_F32)
        self._set(_TRANSPOSE_A, ctypes.c_int32(1 if p.transposed else 0))
        self._set(_TRANSPOSE_B, ctypes.c_int32(0))
        self._set(_EPILOGUE, ctypes.c_int32(_EPILOGUES[p.bias, p.activation]))
        self._alpha, self._beta = ctypes.c_float(1.0), ctypes.c_float(1.0 if p.added else 0.0)
        found = self._algorithms()
        if not found:
            raise DeviceError(f"cuBLASLt has no algorithm for {p}")
        self.algorithms = len(found)
        self._chosen = found[min(p.algorithm, len(found) - 1)]

    def _set(self, attribute: int, value: Any) -> None:
        _call(
            "cublasLtMatmulDescSetAttribute",
            self._description,
            ctypes.c_int(attribute),
            ctypes.byref(value),
            ctypes.c_size_t(ctypes.sizeof(value)),
        )

    def _algorithms(self) -> list[_Heuristic]:
        preference = ctypes.c_void_p()
        _call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        try:
            wanted: dict[int, ctypes.c_uint64 | ctypes.c_uint32] = {
                _MAX_WORKSPACE: ctypes.c_uint64(WORKSPACE_BYTES),
                _REDUCTION_SCHEMES: ctypes.c_uint32(_REDUCED_IN_COMPUTE_TYPE),
            }
            for attribute, value in wanted.items():
                _call(
                    "cublasLtMatmulPreferenceSetAttribute",
                    preference,
                    ctypes.c_int(attribute),
                    ctypes.byref(value),
                    ctypes.c_size_t(ctypes.sizeof(value)),
                )
            results = (_Heuristic * _MAX_ALGORITHMS)()
            count = ctypes.c_int()
            _call(
                "cublasLtMatmulAlgoGetHeuristic",
                self._handle,
                self._description,
                self._weight,
                self._data,
                self._out,
                self._out,
                preference,
                ctypes.c_int(_MAX_ALGORITHMS),
                results,
                ctypes.byref(count),
            )
        finally:
            _call("cublasLtMatmulPreferenceDestroy", preference)
        return [result for result in results[: count.value] if result.state == 0]

    def start(self, addresses: Sequence[int], workspace: int, stream: int) -> None:
        """`addresses`: of a, w, then the bias and the residual if any, then the result."""
        data, weight, *rest, out = addresses
        if self._gemm.bias:
            self._set(_BIAS_POINTER, ctypes.c_void_p(rest[0]))
        added = rest[-1] if self._gemm.added else out
        _call(
            "cublasLtMatmul",
            self._handle,
            self._description,
            ctypes.byref(self._alpha),
            ctypes.c_void_p(weight),
            self._weight,
            ctypes.c_void_p(data),
            self._data,
            ctypes.byref(self._beta),
            ctypes.c_void_p(added),
            self._out,
            ctypes.c_void_p(out),
            self._out,
            ctypes.byref(self._chosen.algorithm),
            ctypes.c_void_p(workspace),
            ctypes.c_size_t(WORKSPACE_BYTES),
            ctypes.c_void_p(stream),
        )

    def __del__(self) -> None:
        # At interpreter exit the library may already be unloaded.
        for name, held in (("MatrixLayout", "_weight"), ("MatrixLayout", "_data"), ("MatrixLayout", "_out")):
            if getattr(self, held, None):
                getattr(_library(), f"cublasLt{name}Destroy")(getattr(self, held))
        if getattr(self, "_description", None):
            _library().cublasLtMatmulDescDestroy(self._description)


@lru_cache(maxsize=1)
def _handle() -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    _call("cublasLtCreate", ctypes.byref(handle))
    return handle


def _layout(gemm: Gemm, matrix: Matrix) -> ctypes.c_void_p:
    layout = ctypes.c_void_p()
    _call(
        "cublasLtMatrixLayoutCreate",
        ctypes.byref(layout),
        ctypes.c_int(_TYPES[gemm.dtype]),
        ctypes.c_uint64(matrix.rows),
        ctypes.c_uint64(matrix.columns),
        ctypes.c_int64(matrix.pitch),
    )
    if gemm.batch > 1:
        for attribute, value in (
            (_BATCH_COUNT, ctypes.c_int32(gemm.batch)),
            (_BATCH_STRIDE, ctypes.c_int64(matrix.stride)),
        ):
            _call(
                "cublasLtMatrixLayoutSetAttribute",
                layout,
                ctypes.c_int(attribute),
                ctypes.byref(value),
                ctypes.c_size_t(ctypes.sizeof(value)),
            )
    return layout
