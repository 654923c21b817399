"""Operators that read at indices which are data: embedding, gather, advanced indexing."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tilewright.dtypes import DType
from tilewright.frontend.torch.context import Context, axis_of
from tilewright.frontend.torch.registry import Inexpressible, converter
from tilewright.graph.ir import Node


def _as_index(ctx: Context, indices: Node) -> Node:
    if indices.dtype in (DType.I64, DType.I32):
        return indices
    return ctx.cast(indices, DType.I64)


@converter("aten.embedding.default")
def embedding(
    ctx: Context,
    weight: Node,
    indices: Node,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Node:
    return ctx.take(weight, _as_index(ctx, indices), 0)


@converter("aten.index_select.default")
def index_select(ctx: Context, x: Node, dim: int, index: Node) -> Node:
    if x.type.rank == 0:
        return x
    index = ctx.reshape(index, (index.type.size,))
    return ctx.take(x, _as_index(ctx, index), axis_of(dim, x.type.rank))


@converter("aten.gather.default")
def gather(ctx: Context, x: Node, dim: int, index: Node, sparse_grad: bool = False) -> Node:
    if x.type.rank == 0:
        return ctx.broadcast_to(x, index.shape)
    if index.type.rank == 0:
        index = ctx.reshape(index, (1,) * x.type.rank)
    result = ctx.emit("take_along", x, _as_index(ctx, index), axis=axis_of(dim, x.type.rank))
    return ctx.reshape(result, ctx.shape)


@converter("aten.take_along_dim.default")
def take_along_dim(ctx: Context, x: Node, indices: Node, dim: int | None = None) -> Node:
    if dim is None:
        flat = ctx.reshape(x, (x.type.size,))
        return ctx.take(flat, _as_index(ctx, ctx.reshape(indices, (indices.type.size,))), 0)
    axis = axis_of(dim, x.type.rank)
    common = list(ctx.shape)
    common[axis] = x.shape[axis]
    indices = ctx.broadcast_to(_as_index(ctx, indices), ctx.shape)
    return ctx.emit("take_along", ctx.broadcast_to(x, common), indices, axis=axis)


@converter("aten.take.default")
def take(ctx: Context, x: Node, index: Node) -> Node:
    return ctx.take(ctx.reshape(x, (x.type.size,)), _as_index(ctx, index), 0)


@converter("aten.index.Tensor", "aten._unsafe_index.Tensor")
def index(ctx: Context, x: Node, indices: Sequence[Node | None]) -> Node:
    """Advanced indexing: the indexed axes, brought together and merged, are read with one flat index.

    The indices broadcast together. Their dimensions stand where the indexed axes stood if those are neighbours, and
    in front if they are not.
    """
    chosen = [(axis, _as_positions(ctx, i)) for axis, i in enumerate(indices) if i is not None]
    if not chosen:
        return x
    axes = [axis for axis, _ in chosen]
    position = axes[0]
    if axes != list(range(axes[0], axes[0] + len(axes))):
        others = [axis for axis in range(x.type.rank) if axis not in axes]
        x, position = ctx.permute(x, (*axes, *others)), 0
    extents = x.shape[position : position + len(axes)]
    if len(chosen) == 1:
        return ctx.take(x, chosen[0][1], position)
    flat: Node | None = None
    for (_, positions), extent in zip(chosen, extents, strict=True):
        positions = ctx.cast(positions, DType.I64)
        wrapped = ctx.select(ctx.compare("lt", positions, 0), ctx.add(positions, extent), positions)
        flat = wrapped if flat is None else ctx.add(ctx.mul(flat, extent), wrapped)
    assert flat is not None
    merged = ctx.reshape(x, (*x.shape[:position], math.prod(extents), *x.shape[position + len(axes) :]))
    return ctx.take(merged, flat, position)


def _as_positions(ctx: Context, indices: Node) -> Node:
    if indices.dtype in (DType.BOOL, DType.U8):
        raise Inexpressible("indexing with a mask: the shape of the result depends on data")
    return _as_index(ctx, indices)


@converter("aten.one_hot.default")
def one_hot(ctx: Context, x: Node, num_classes: int = -1) -> Node:
    if num_classes < 0:
        raise Inexpressible("one_hot without num_classes: the shape of the result depends on data")
    classes = ctx.iota((num_classes,), 0)
    return ctx.cast(ctx.compare("eq", ctx.unsqueeze(ctx.cast(x, DType.I64), x.type.rank), classes), DType.I64)
