"""CUDA text that all tensor-core kernels share: the function around a pipeline, and the code that writes its
results."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tilewright import te
from tilewright.codegen.cuda.build import SYMBOL, GpuSource
from tilewright.codegen.cuda.emit import beginning, emit_statement, emit_value, included
from tilewright.codegen.cuda.scalars import c_type
from tilewright.loops.gpu.attention import TensorAttention
from tilewright.loops.gpu.chain import TensorChain
from tilewright.loops.gpu.tensor import MatrixOperand, TensorGemm
from tilewright.loops.gpu.thread_index import positions

_ACROSS = (
    4  # vectors along m that neighbouring threads write, if the result is stored by columns: whole sectors
)
_WRITTEN_AT_ONCE = 4  # vectors of a thread: what the epilogue reads is prefetched before the first is needed

Kernel = TensorGemm | TensorAttention | TensorChain


def framed(
    kernel: Kernel,
    headers: Sequence[str],
    before: Sequence[str],
    body: Sequence[str],
    blocks: int,
    cluster: int,
) -> GpuSource:
    *inputs, output = kernel.params
    pointers = [f"const {c_type(b.dtype)}* __restrict__ {b.name}" for b in inputs]
    pointers.append(f"{c_type(output.dtype)}* __restrict__ {output.name}")
    threads = kernel.tiles.threads
    # Left alone, the compiler weighs registers against blocks; with many small copies it would rather spill.
    small = not isinstance(kernel, TensorAttention) and kernel.small_copies
    bounds = f"{threads}, 1" if small else str(threads)
    together = f"__cluster_dims__({cluster}, 1, 1) " if cluster > 1 else ""
    lines = [
        *before,
        f'extern "C" __global__ void {together}__launch_bounds__({bounds}) {SYMBOL}({", ".join(pointers)}) {{',
        "  extern __shared__ __align__(128) unsigned char shared[];",
        *beginning(blocks),
        *body,
        "}",
    ]
    return GpuSource(
        name=kernel.name,
        text="\n".join(
            [*(included(f"{name}.cuh") for name in ("prelude", "tensor_cores", *headers)), *lines, ""]
        ),
        params=kernel.params,
        blocks=blocks,
        threads=threads,
        shared_bytes=kernel.shared_bytes,
        decisions=kernel.decisions,
        packings=() if isinstance(kernel, TensorAttention) else kernel.packings,
    )


def batch_coordinates(axes: Sequence[te.Var], number: str) -> list[str]:
    """The batch axes as variables, from the number of the batch."""
    count = math.prod(axis.extent for axis in axes)
    if count == 1:
        return [f"  const int {axis.name} = 0;" for axis in axes]
    coords = positions(te.Var("batch", count), axes)
    return [
        f"  const int batch = {number};",
        *(f"  const int {axis.name} = {emit_value(coord)};" for axis, coord in coords.items()),
    ]


def written(kernel: Kernel, size: tuple[int, int], tile: tuple[int, int], split: int) -> list[str]:
    """The code that writes the sums: every thread writes vectors, and those of a warp are adjacent."""
    threads, lanes = kernel.tiles.threads, kernel.lanes
    rows, wide = tile[0] // split, tile[1] // lanes
    vectors = rows * wide
    turns = -(-vectors // threads)
    guards = [
        *([f"i < {vectors}"] if vectors % threads else []),
        *([f"place_m < {size[0]}"] if size[0] % tile[0] else []),
        *([f"place_n < {size[1] // lanes}"] if size[1] % tile[1] else []),
    ]
    return [
        "  __syncthreads();",
        f"#pragma unroll {min(turns, _WRITTEN_AT_ONCE)}",
        f"  for (int turn = 0; turn < {turns}; ++turn) {{",
        f"    const int i = turn * {threads} + threadIdx.x;",
        f"    const int sum_row = {f'part * {rows} + ' if split > 1 else ''}i / {wide};",
        f"    const int sum_vector = i % {wide};",
        f"    const int place_m = m0 + sum_row, place_n = n0 / {lanes} + sum_vector;",
        f"    {'if (' + ' && '.join(guards) + ') ' if guards else ''}{{",
        emit_statement(kernel.write, kernel.params, indent=3).rstrip("\n"),
        "    }",
        "  }",
    ]


def written_across(gemm: TensorGemm) -> list[str]:
    """The same for a result that is stored by columns: a few neighbouring threads write a run of a column, and the
    others of a warp the columns beside it, which are in other banks of shared memory."""
    t, lanes = gemm.tiles, gemm.lanes
    high = t.bm // lanes
    run = min(_ACROSS, high)
    turns = -(-high * t.bn // t.threads)
    guards = [
        *([f"i < {high * t.bn}"] if high * t.bn % t.threads else []),
        *([f"place_m < {gemm.m // lanes}"] if gemm.m % t.bm else []),
        *([f"place_n < {gemm.n}"] if gemm.n % t.bn else []),
    ]
    return [
        "  __syncthreads();",
        f"#pragma unroll {min(turns, _WRITTEN_AT_ONCE)}",
        f"  for (int turn = 0; turn < {turns}; ++turn) {{",
        f"    const int i = turn * {t.threads} + threadIdx.x;",
        f"    const int sum_row = i / {run * t.bn} * {run} + i % {run};",
        f"    const int sum_vector = i / {run} % {t.bn};",
        f"    const int place_m = m0 / {lanes} + sum_row, place_n = n0 + sum_vector;",
        f"    {'if (' + ' && '.join(guards) + ') ' if guards else ''}{{",
        emit_statement(gemm.write, gemm.params, indent=3).rstrip("\n"),
        "    }",
        "  }",
    ]


def matrix_type(
    kind: str, operand: MatrixOperand, outer: int, k: int, left: bool, threads: int, whole: bool
) -> str:
    switches = (
        f"{bool_text(operand.transposed)}, {bool_text(left)}, {operand.lanes}, {threads}, {operand.pitch}"
    )
    return f"Matrix<{kind}, {outer}, {k}, {switches}, {bool_text(whole)}>"


def bool_text(value: bool) -> str:
    return "true" if value else "false"
