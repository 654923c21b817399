"""Attention on tensor cores -> CUDA C++: the pipeline of `attention.cuh` with its holes filled."""

from __future__ import annotations

import math

from tilewright.codegen.cuda.build import GpuSource
from tilewright.codegen.cuda.emit import emit_statement, emit_value
from tilewright.codegen.cuda.scalars import c_type
from tilewright.codegen.cuda.tensor_frame import batch_coordinates, bool_text, framed, written
from tilewright.loops.gpu.attention import TensorAttention


def attention_source(attention: TensorAttention) -> GpuSource:
    t, kind = attention.tiles, c_type(attention.dtype)
    width, values = attention.padded
    blocks = -(-attention.queries // t.queries)
    tile = f"blockIdx.x % {blocks}"
    if attention.causal:  # those that see most keys begin first
        tile = f"{blocks - 1} - {tile}"
    operands = [
        ("q", attention.q, width, t.queries, attention.width, f"m0, {attention.width}, {attention.queries}"),
        ("k", attention.k, width, t.keys, attention.width, f"0, {attention.width}, {attention.keys}"),
        ("v", attention.v, values, t.keys, attention.values, f"0, {attention.values}, {attention.keys}"),
    ]
    plain = attention.mask is None and 0 < attention.scale <= 1
    numbers = (
        t.warps,
        t.rows,
        t.keys,
        width,
        values,
        t.stages,
        bool_text(attention.causal),
        bool_text(plain),
    )
    body = [
        f"  const int m0 = ({tile}) * {t.queries}, n0 = 0;",
        *batch_coordinates(attention.batch, f"blockIdx.x / {blocks}"),
        *(
            f"  Matrix<{kind}, {outer}, {rows}, true, false, {o.lanes}, {t.threads}, {o.pitch},"
            f" {bool_text(outer == extent)}> {name}({o.buffer.name} + {emit_value(o.offset)}, 0, {where});"
            for name, o, outer, rows, extent, where in operands
        ),
        "  const auto mask = [&](f32 value, int place_m, int place_k) {",
        *_mask(attention),
        "  };",
        f"  Attention<{kind}, {', '.join(map(str, numbers))}, decltype(q), decltype(k), decltype(v)>::run(shared,"
        f" q, k, v, m0, {attention.queries}, {attention.keys}, {attention.scale!r}f, mask);",
        "  f32* const sums = reinterpret_cast<f32*>(shared);",
        *written(attention, (attention.queries, attention.values), (t.queries, values), 1),
    ]
    heads = math.prod(axis.extent for axis in attention.batch)
    return framed(attention, ["attention"], [], body, blocks * heads, 1)


def _mask(attention: TensorAttention) -> list[str]:
    if attention.mask is None:
        return ["    return value;"]
    return [
        "    const f32 score[1] = {value};",
        "    f32 masked[1];",
        emit_statement(attention.mask, attention.params, indent=2).rstrip("\n"),
        "    return masked[0];",
    ]
