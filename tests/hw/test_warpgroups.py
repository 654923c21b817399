"""Instructions of warpgroups as data: their fragments, descriptors and swizzles; NVRTC takes them for sm_90a."""

from __future__ import annotations

import itertools

import pytest

from tests.nvrtc import needs_nvrtc
from tilewright.codegen.cuda.tiles.contraction import shared_tile
from tilewright.dtypes import DType
from tilewright.hw.gpu import A100, H200
from tilewright.hw.warpgroups import (
    WARPGROUP,
    function_text,
    matrix_descriptor,
    swizzled_offset,
    warpgroup_multiply,
)


@pytest.mark.parametrize("columns", [8, 64, 256])
def test_every_result_is_held_once(columns: int) -> None:
    held = warpgroup_multiply(columns, DType.F16).fragments[0]
    found = [held.element(thread, n) for thread in range(WARPGROUP) for n in range(held.size)]
    assert sorted(found) == list(itertools.product(range(64), range(columns)))


def test_it_needs_a_card_that_has_it() -> None:
    assert not warpgroup_multiply(64, DType.BF16).missing(H200)
    assert warpgroup_multiply(64, DType.BF16).missing(A100) == ("warpgroup_mma",)


def test_the_descriptor_of_rows_of_128_bytes() -> None:
    """Leading offset 1, stride offset 64 (8 rows of 128 bytes in units of 16), bit 62."""
    assert matrix_descriptor(128) == 1 << 16 | 64 << 32 | 1 << 62
    assert matrix_descriptor(32) >> 62 == 3 and matrix_descriptor(64) >> 32 & 0x3FFF == 32


@pytest.mark.parametrize("row_bytes", [32, 64, 128])
@pytest.mark.parametrize("dtype", [DType.F16, DType.F32], ids=lambda dtype: dtype.short)
def test_tiles_in_shared_memory_are_swizzled_alike(row_bytes: int, dtype: DType) -> None:
    """An operand with rows along k, as `dot` puts it there, is one of these instructions too."""
    size = dtype.bytes
    k = (row_bytes // size).bit_length() - 1
    masks = shared_tile(6, k, 0, size, by_rows=True).masks
    for row, column in itertools.product(range(64), range(1 << k)):
        address = 0
        for bit, mask in enumerate(masks):
            address ^= mask if (row << k | column) >> bit & 1 else 0
        assert address == swizzled_offset(row, column * size, row_bytes)


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16, DType.F32], ids=lambda dtype: dtype.short)
def test_nvrtc_takes_it(dtype: DType) -> None:
    needs_nvrtc()
    from tilewright.codegen.cuda.toolchain import compile_source

    intrinsic = warpgroup_multiply(64, dtype)
    count = intrinsic.fragments[0].size
    text = (
        function_text(intrinsic, "multiply")
        + f"""
extern "C" __global__ void __launch_bounds__(128) kernel(float* out) {{
  extern __shared__ __align__(1024) unsigned char shared[];
  const unsigned long long at = ((unsigned)__cvta_generic_to_shared(shared) & 0x3ffff) >> 4;
  const unsigned long long a = at | {matrix_descriptor(128)}ULL, b = a + 512;
  float c[{count}];
  for (int n = 0; n < {count}; ++n) c[n] = 0;
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int k = 0; k < 4; ++k) multiply(c, a + 2 * k, b + 2 * k, k > 0);
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  for (int n = 0; n < {count}; ++n) out[n * 128 + threadIdx.x] = c[n];
}}
"""
    )
    compiled = compile_source(text, "sm_90a")
    assert compiled.resources.spilled_bytes == 0 and "serial" not in compiled.warnings
