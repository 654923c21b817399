"""Kernels for tensor cores -> CUDA C++: one generator for each kind of kernel."""

from __future__ import annotations

from tilewright.codegen.cuda.build import GpuSource, source_of
from tilewright.codegen.cuda.tensor_attention import attention_source
from tilewright.codegen.cuda.tensor_chain import chain_source
from tilewright.codegen.cuda.tensor_frame import Kernel
from tilewright.codegen.cuda.tensor_gemm import gemm_source
from tilewright.errors import CodegenError
from tilewright.loops.gemmini.kernel import GemminiKernel
from tilewright.loops.gpu.chain import TensorChain
from tilewright.loops.gpu.tensor import TensorGemm
from tilewright.loops.ir import Program
from tilewright.space.tile_operator import TileCall


def tensor_source(kernel: Kernel | Program | TileCall | GemminiKernel) -> GpuSource:
    if isinstance(kernel, TileCall):
        raise CodegenError(f"{kernel.name}: tile kernels have code generation of their own")
    if isinstance(kernel, Program):
        return source_of(kernel)
    if isinstance(kernel, GemminiKernel):
        raise CodegenError(f"{kernel.name}: a GPU has no systolic array")
    if isinstance(kernel, TensorChain):
        return chain_source(kernel)
    return gemm_source(kernel) if isinstance(kernel, TensorGemm) else attention_source(kernel)
