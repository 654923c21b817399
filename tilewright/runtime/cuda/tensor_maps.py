"""Tensor maps: what the tensor copy engine of a GPU is told of a matrix, encoded by the driver into 128 bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from tilewright.errors import DeviceError
from tilewright.runtime.cuda.device import checked, driver
from tilewright.runtime.plan import MatrixMap

MAP_BYTES = 128
_KINDS = {"f16": "FLOAT16", "bf16": "BFLOAT16", "f32": "FLOAT32"}
_SWIZZLES = {32: "32B", 64: "64B", 128: "128B"}


def encoded(
    address: int, kind: str, rows: int, columns: int, stride_bytes: int, box_rows: int, box_columns: int
) -> bytes:
    """The tensor map of a matrix of `kind` ("f16") with contiguous columns, for boxes that are swizzled in shared
    memory, in rows of 32, 64 or 128 bytes. Elements of a box outside the matrix are zero. Raises DeviceError if the
    driver refuses: for sizes of zero or above 2**32, or strides that are not multiples of 16 bytes."""
    api = driver()
    row_bytes = box_columns * (4 if kind == "f32" else 2)
    if min(rows, columns, stride_bytes) < 1 or kind not in _KINDS or row_bytes not in _SWIZZLES:
        raise DeviceError(f"a matrix of {rows} x {columns} has no tensor map")
    names = api.CUtensorMapDataType
    swizzle = getattr(api.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{_SWIZZLES[row_bytes]}")
    made = checked(
        "cuTensorMapEncodeTiled",
        api.cuTensorMapEncodeTiled(
            getattr(names, f"CU_TENSOR_MAP_DATA_TYPE_{_KINDS[kind]}"),
            2,
            address,
            [api.cuuint64_t(columns), api.cuuint64_t(rows)],
            [api.cuuint64_t(stride_bytes)],
            [api.cuuint32_t(box_columns), api.cuuint32_t(box_rows)],
            [api.cuuint32_t(1), api.cuuint32_t(1)],
            api.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle,
            api.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            api.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ),
    )
    return ctypes.string_at(int(made.getPtr()), MAP_BYTES)


def of_arguments(maps: Sequence[MatrixMap], addresses: Sequence[int], kinds: Sequence[str]) -> list[bytes]:
    """The tensor maps of a launch, whose arguments have these addresses and types."""
    found = []
    for each in maps:
        kind = kinds[each.argument]
        stride_bytes = each.stride * (4 if kind == "f32" else 2)
        sizes = (each.rows, each.columns, stride_bytes, each.box_rows, each.box_columns)
        found.append(encoded(addresses[each.argument], kind, *sizes))
    return found
