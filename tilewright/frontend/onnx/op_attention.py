"""Attention: the common forms as Tilewright's operator, the rest by the standard's definition."""

from __future__ import annotations

import math
from typing import Any

from tilewright.dtypes import DType
from tilewright.frontend.onnx.context import Context
from tilewright.frontend.onnx.registry import FallBack, converter
from tilewright.graph.ir import Node


@converter("Attention")
def attention(
    ctx: Context,
    q: Node,
    k: Node,
    v: Node,
    mask: Node | None = None,
    past_key: Node | None = None,
    past_value: Node | None = None,
    lengths: Node | None = None,
    *,
    is_causal: int = 0,
    kv_num_heads: int = 0,
    q_num_heads: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    **others: Any,
) -> Node:
    special = past_key is not None or past_value is not None or lengths is not None or softcap
    special = special or any(ctx.wants(output) for output in (1, 2, 3))
    if special or set(others) - {"softmax_precision", "qk_matmul_output_mode"} or not q.dtype.is_float:
        raise FallBack
    if mask is not None and (mask.dtype not in (DType.BOOL, q.dtype) or is_causal):
        raise FallBack
    flat = q.type.rank == 3
    if flat:
        if not q_num_heads or not kv_num_heads or (k.type.rank, v.type.rank) != (3, 3):
            raise FallBack
        q, k, v = (
            _heads(ctx, x, heads) for x, heads in ((q, q_num_heads), (k, kv_num_heads), (v, kv_num_heads))
        )
    if not q.type.rank == k.type.rank == v.type.rank == 4 or not k.shape[1] or q.shape[1] % k.shape[1]:
        raise FallBack
    if mask is not None and mask.shape[-1] != k.shape[2]:
        raise FallBack
    k, v = _repeated(ctx, k, q.shape[1]), _repeated(ctx, v, q.shape[1])
    operands = [q, k, v] if mask is None else [q, k, v, mask]
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    result = ctx.emit("attention", *operands, causal=bool(is_causal), scale=factor)
    if not flat:
        return result
    batch, heads, length, width = result.shape
    return ctx.reshape(ctx.permute(result, (0, 2, 1, 3)), (batch, length, heads * width))


def _heads(ctx: Context, x: Node, heads: int) -> Node:
    batch, length, width = x.shape
    if heads < 1 or width % heads:
        raise FallBack
    return ctx.permute(ctx.reshape(x, (batch, length, heads, width // heads)), (0, 2, 1, 3))


def _repeated(ctx: Context, x: Node, heads: int) -> Node:
    """Repeat every head of keys or values for the queries that share it."""
    batch, own, length, width = x.shape
    if own == heads:
        return x
    wide = ctx.broadcast_to(ctx.unsqueeze(x, 2), (batch, own, heads // own, length, width))
    return ctx.reshape(wide, (batch, heads, length, width))
