"""TensorProduct -> CUDA C++: the hand-written pipeline with its holes filled."""

from __future__ import annotations

import math

from tilewright import te
from tilewright.codegen.cuda.build import SYMBOL, GpuSource
from tilewright.codegen.cuda.emit import emit_statement, emit_value, included
from tilewright.codegen.cuda.scalars import c_type
from tilewright.loops.gpu.places import positions
from tilewright.loops.gpu.tensor import TensorProduct

_RASTER = 8  # tiles along m that neighbouring blocks share a column of b with: they meet in the second cache


def tensor_source(product: TensorProduct) -> GpuSource:
    tiles = product.tiles
    rows, columns = -(-product.m // tiles.bm), -(-product.n // tiles.bn)
    batches = math.prod(axis.extent for axis in product.batch)
    *inputs, output = product.params
    pointers = [f"const {c_type(b.dtype)}* __restrict__ {b.name}" for b in inputs]
    pointers.append(f"{c_type(output.dtype)}* __restrict__ {output.name}")
    kind = ", ".join(
        str(part)
        for part in (
            *(
                c_type(product.dtype),
                tiles.bm,
                tiles.bn,
                tiles.bk,
                tiles.warps_m,
                tiles.warps_n,
                tiles.stages,
            ),
            *(_bool(product.a.turned), _bool(product.b.turned), product.a.lanes, product.b.lanes),
        )
    )
    lines = [
        f'extern "C" __global__ void __launch_bounds__({tiles.threads}) {SYMBOL}({", ".join(pointers)}) {{',
        "  extern __shared__ __align__(128) unsigned char shared[];",
        f"  using P = Product<{kind}>;",
        f"  const int tile = blockIdx.x % {rows * columns};",
        f"  const int group = tile / {_RASTER * columns} * {_RASTER};",
        f"  const int height = min({rows} - group, {_RASTER});",
        f"  const int m0 = (group + tile % {_RASTER * columns} % height) * {tiles.bm};",
        f"  const int n0 = tile % {_RASTER * columns} / height * {tiles.bn};",
    ]
    number = te.Var("batch", max(2, batches))
    if batches > 1:
        lines.append(f"  const int batch = blockIdx.x / {rows * columns};")
    for axis, value in positions(number, product.batch).items():
        lines.append(f"  const int {axis.name} = {emit_value(value) if batches > 1 else '0'};")
    a, b = (f"{o.buffer.name} + {emit_value(o.offset)}" for o in (product.a, product.b))
    lines += [
        f"  P::run(shared, {a}, {b}, {product.a.pitch}, {product.b.pitch}, m0, n0, {product.m}, {product.n},"
        f" {product.k});",
        "  const f32* const sums = reinterpret_cast<const f32*>(shared);",
        f"  for (int i = threadIdx.x; i < {tiles.bm * tiles.bn // product.lanes}; i += {tiles.threads}) {{",
        f"    const int sum_row = i / {tiles.bn // product.lanes}, sum_vector = i % {tiles.bn // product.lanes};",
        f"    const int place_m = m0 + sum_row, place_n = n0 / {product.lanes} + sum_vector;",
        f"    if (place_m < {product.m} && place_n < {product.n // product.lanes}) {{",
        emit_statement(product.write, product.params, depth=3).rstrip("\n"),
        "    }",
        "  }",
        "}",
    ]
    parts = [included(name) for name in ("prelude.cuh", "tensor_cores.cuh", "matmul.cuh")]
    return GpuSource(
        name=product.name,
        text="\n".join([*parts, *lines]) + "\n",
        params=product.params,
        blocks=rows * columns * batches,
        threads=tiles.threads,
        shared_bytes=tiles.shared_bytes,
        decisions=product.decisions,
    )


def _bool(value: bool) -> str:
    return "true" if value else "false"
