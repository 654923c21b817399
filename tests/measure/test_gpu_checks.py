"""The kernels that check results on a GPU, as far as that shows without one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.nvrtc import needs_nvrtc
from tilewright.codegen.cuda.build import GpuSource
from tilewright.dtypes import DType
from tilewright.loops.ir import Buffer
from tilewright.measure import gpu_checks
from tilewright.testing.emulator.run import COMPILER, Emulated

WORDS, THREADS = 100, 64
# The text of `tw_fill_shared` up to its wait, and what shared memory holds then.
FILLED = """typedef unsigned long long u64;
typedef unsigned char u8;
%s
extern "C" __global__ void KERNEL_NAME(u8* out) {
  extern __shared__ __align__(128) unsigned char shared[];
  fill((volatile u64*)shared, %d, 0x7b7b7b7b7b7b7b7bull);
  __syncthreads();
  for (int at = threadIdx.x; at < %d; at += blockDim.x) out[at] = shared[at];
}
"""


@pytest.mark.skipif(COMPILER is None, reason="no g++ here to compile the emulator with")
def test_shared_memory_is_filled_to_its_end(tmp_path: Path) -> None:
    text = gpu_checks._SOURCE
    begin = text.index("__device__ void fill(")
    function = text[begin : text.index('extern "C"', begin)]
    out = Buffer("out", DType.U8, 8 * WORDS)
    source = GpuSource("fill", FILLED % (function, WORDS, 8 * WORDS), (out,), 1, THREADS, 8 * WORDS, "")
    (found,) = Emulated(source, tmp_path).in_both_orders([[]])
    assert np.array_equal(found, np.full(8 * WORDS, 0x7B, np.uint8))


def test_the_fill_is_in_the_machine_code() -> None:
    needs_nvrtc()
    from tilewright.codegen.cuda.toolchain import compile_source

    text = compile_source(gpu_checks._SOURCE, "compute_80").cubin.decode()
    kernel = text[text.index(".entry tw_fill_shared") :]
    kernel = kernel[: kernel.index("\n}")]
    assert "st.volatile" in kernel and "%clock64" in kernel
