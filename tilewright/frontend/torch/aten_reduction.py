"""Reductions, and what is made of them: norms, moments, running sums."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tilewright.dtypes import DType
from tilewright.frontend.builder import Ints, Number
from tilewright.frontend.torch.context import Context, axes_of, axis_of, widened
from tilewright.frontend.torch.registry import converter, refuse
from tilewright.graph.ir import Node
from tilewright.graph.ops.common import broadcast_shapes

Dims = int | Ints | None


@converter("aten.sum.default", "aten.sum.dim_IntList")
def sum_(
    ctx: Context, x: Node, dim: Dims = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Node:
    return ctx.reduce("sum", ctx.cast(x, ctx.dtype), axes_of(dim, x.type.rank), keepdim)


@converter("aten.mean.default", "aten.mean.dim")
def mean(
    ctx: Context, x: Node, dim: Dims = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Node:
    return ctx.reduce("mean", ctx.cast(x, ctx.dtype), axes_of(dim, x.type.rank), keepdim)


@converter("aten.prod.default", "aten.prod.dim_int")
def prod(
    ctx: Context, x: Node, dim: Dims = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Node:
    return ctx.reduce("prod", ctx.cast(x, ctx.dtype), axes_of(dim, x.type.rank), keepdim)


@converter("aten.nansum.default")
def nansum(
    ctx: Context, x: Node, dim: Dims = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Node:
    if x.dtype.is_float:
        x = ctx.select(ctx.emit("isnan", x), 0, x, x.dtype)
    return sum_(ctx, x, dim, keepdim, dtype)


@converter("aten.any.default", "aten.any.dim", "aten.any.dims")
def any_(ctx: Context, x: Node, dim: Dims = None, keepdim: bool = False) -> Node:
    return ctx.cast(ctx.reduce("any", ctx.truth(x), axes_of(dim, x.type.rank), keepdim), ctx.dtype)


@converter("aten.all.default", "aten.all.dim", "aten.all.dims")
def all_(ctx: Context, x: Node, dim: Dims = None, keepdim: bool = False) -> Node:
    return ctx.cast(ctx.reduce("all", ctx.truth(x), axes_of(dim, x.type.rank), keepdim), ctx.dtype)


@converter("aten.count_nonzero.default", "aten.count_nonzero.dim_IntList")
def count_nonzero(ctx: Context, x: Node, dim: Dims = None) -> Node:
    return ctx.reduce("sum", ctx.cast(ctx.truth(x), DType.I64), axes_of(dim, x.type.rank), False)


# -- extremes ---------------------------------------------------------------------------------------------------


def _extreme(ctx: Context, op: str, x: Node, dim: Dims, keepdim: bool) -> Node:
    if x.dtype is DType.BOOL:
        op = {"amax": "any", "amin": "all"}[op]
    return ctx.reduce(op, x, axes_of(dim, x.type.rank), keepdim)


def _position(ctx: Context, op: str, x: Node, dim: int | None, keepdim: bool) -> Node:
    if x.dtype is DType.BOOL:
        x = ctx.cast(x, DType.U8)
    if x.type.rank == 0:
        return ctx.full(0, DType.I64)
    if dim is None:
        slot = ctx.emit(op, ctx.reshape(x, (x.type.size,)), axis=0, keepdims=False)
        return ctx.reshape(slot, (1,) * x.type.rank) if keepdim else slot
    return ctx.emit(op, x, axis=axis_of(dim, x.type.rank), keepdims=keepdim)


def _register_extremes(short: str, extreme: str, position: str) -> None:
    @converter(f"aten.{extreme}.default")
    def along(ctx: Context, x: Node, dim: Dims = (), keepdim: bool = False) -> Node:
        return _extreme(ctx, extreme, x, dim, keepdim)

    @converter(f"aten.{short}.default")
    def total(ctx: Context, x: Node) -> Node:
        return _extreme(ctx, extreme, x, None, False)

    @converter(f"aten.{short}.dim")
    def with_indices(ctx: Context, x: Node, dim: int, keepdim: bool = False) -> tuple[Node, Node]:
        return _extreme(ctx, extreme, x, dim, keepdim), _position(ctx, position, x, dim, keepdim)

    @converter(f"aten.{position}.default")
    def index(ctx: Context, x: Node, dim: int | None = None, keepdim: bool = False) -> Node:
        return _position(ctx, position, x, dim, keepdim)


_register_extremes("max", "amax", "argmax")
_register_extremes("min", "amin", "argmin")


@converter("aten.aminmax.default")
def aminmax(ctx: Context, x: Node, dim: int | None = None, keepdim: bool = False) -> tuple[Node, Node]:
    return _extreme(ctx, "amin", x, dim, keepdim), _extreme(ctx, "amax", x, dim, keepdim)


# -- moments ----------------------------------------------------------------------------------------------------


def _correction(unbiased: bool | None, correction: Number | None) -> Number:
    if correction is not None:
        return correction
    return 1 if unbiased is None or unbiased else 0


def _variance(ctx: Context, x: Node, dim: Dims, correction: Number, keepdim: bool) -> Node:
    """The variance over the axes that `dim` names. (The operator takes axes of a rank of at least 1.)"""
    if x.type.rank == 0:
        whole = ctx.emit("var", ctx.reshape(x, (1,)), axes=(0,), correction=correction, keepdims=False)
        return ctx.reshape(whole, ())
    return ctx.emit("var", x, axes=axes_of(dim, x.type.rank), correction=correction, keepdims=keepdim)


def _register_moments(overloads: tuple[str, ...], bind: Callable[..., tuple[Dims, Number, bool]]) -> None:
    """var, std, var_mean, std_mean with the argument lists of `overloads`."""

    def register(name: str, root: bool, with_mean: bool) -> None:
        def convert(ctx: Context, x: Node, *arguments: Any, **keywords: Any) -> Node | tuple[Node, Node]:
            dim, correction, keepdim = bind(*arguments, **keywords)
            spread = _variance(ctx, ctx.widen(x) if root else x, dim, correction, keepdim)
            spread = ctx.cast(ctx.emit("sqrt", spread), x.dtype) if root else spread
            if not with_mean:
                return spread
            return spread, ctx.reduce("mean", x, axes_of(dim, x.type.rank), keepdim)

        converter(*(f"aten.{name}.{overload}" for overload in overloads))(convert)

    for name, root in (("var", False), ("std", True)):
        register(name, root, False)
        register(f"{name}_mean", root, True)


_register_moments(("default",), lambda unbiased=True: (None, _correction(unbiased, None), False))
_register_moments(
    ("dim",), lambda dim, unbiased=True, keepdim=False: (dim, _correction(unbiased, None), keepdim)
)
_register_moments(
    ("correction",),
    lambda dim=None, correction=None, keepdim=False: (dim, _correction(None, correction), keepdim),
)


# -- norms ------------------------------------------------------------------------------------------------------


@converter("aten.linalg_vector_norm.default")
@widened
def vector_norm(
    ctx: Context,
    x: Node,
    ord: Number = 2,
    dim: Dims = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Node:
    axes = axes_of(dim, x.type.rank)
    x = ctx.cast(x, ctx.dtype.compute)
    if ord == 2:
        return ctx.emit("sqrt", ctx.reduce("sum", ctx.emit("square", x), axes, keepdim))
    magnitude = ctx.emit("abs", x)
    if ord == 0:
        return ctx.reduce("sum", ctx.cast(ctx.truth(x), x.dtype), axes, keepdim)
    if ord == 1:
        return ctx.reduce("sum", magnitude, axes, keepdim)
    if math.isinf(ord):
        return ctx.reduce("amax" if ord > 0 else "amin", magnitude, axes, keepdim)
    total = ctx.reduce("sum", ctx.arithmetic("pow", magnitude, float(ord)), axes, keepdim)
    return ctx.arithmetic("pow", total, 1 / ord)


@converter(
    "aten.norm.Scalar",
    "aten.norm.ScalarOpt_dtype",
    "aten.norm.ScalarOpt_dim",
    "aten.norm.ScalarOpt_dim_dtype",
)
def norm(
    ctx: Context,
    x: Node,
    p: Number | None = 2,
    dim: Dims = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Node:
    if isinstance(dim, torch.dtype):  # the overload without dimensions has the type in this place
        dim = None
    return vector_norm(ctx, x, 2 if p is None else p, dim, keepdim)


@converter("aten.frobenius_norm.dim")
def frobenius_norm(ctx: Context, x: Node, dim: Dims = None, keepdim: bool = False) -> Node:
    return vector_norm(ctx, x, 2, dim, keepdim)


@converter("aten.logsumexp.default", "aten.special_logsumexp.default")
@widened
def logsumexp(ctx: Context, x: Node, dim: Dims, keepdim: bool = False) -> Node:
    x = ctx.cast(x, ctx.dtype.compute)
    axes = axes_of(dim, x.type.rank)
    if not axes:
        return x
    largest = ctx.emit("amax", x, axes=axes, keepdims=True)
    largest = ctx.select(
        ctx.emit("isfinite", largest), largest, 0
    )  # an infinity would be subtracted from itself
    total = ctx.emit("sum", ctx.emit("exp", ctx.sub(x, largest)), axes=axes, keepdims=True)
    return ctx.reshape(ctx.add(ctx.emit("log", total), largest), ctx.shape)


# -- along one axis ---------------------------------------------------------------------------------------------


@converter("aten.cumsum.default")
def cumsum(ctx: Context, x: Node, dim: int, dtype: torch.dtype | None = None) -> Node:
    x = ctx.cast(x, ctx.dtype)
    return ctx.emit("cumsum", x, axis=axis_of(dim, x.type.rank)) if x.type.rank else x


@converter("aten.diff.default")
def diff(
    ctx: Context, x: Node, n: int = 1, dim: int = -1, prepend: Node | None = None, append: Node | None = None
) -> Node:
    if n == 0:
        return x  # without what would be put before and after it
    axis = axis_of(dim, x.type.rank)
    parts = [part for part in (prepend, x, append) if part is not None]
    x = ctx.concat([ctx.cast(part, ctx.dtype) for part in parts], axis)
    for _ in range(n):
        extent = x.shape[axis]
        if extent <= 1:
            return ctx.slice_axis(x, axis, 0, 0)
        later, earlier = ctx.slice_axis(x, axis, 1, extent), ctx.slice_axis(x, axis, 0, extent - 1)
        x = ctx.emit("logical_xor" if x.dtype is DType.BOOL else "sub", later, earlier)
    return x


@converter("aten.trace.default")
def trace(ctx: Context, x: Node) -> Node:
    rows, columns = x.shape
    diagonal = ctx.emit("eq", ctx.iota((rows, columns), 0), ctx.iota((rows, columns), 1))
    return ctx.emit(
        "sum", ctx.cast(ctx.select(diagonal, x, 0, x.dtype), ctx.dtype), axes=(0, 1), keepdims=False
    )


@converter("aten.dist.default")
def dist(ctx: Context, x: Node, other: Node, p: Number = 2) -> Node:
    return vector_norm(ctx, ctx.sub(x, other), p)


@converter("aten.cdist.default", "aten._cdist_forward.default")
def cdist(ctx: Context, x1: Node, x2: Node, p: Number = 2, compute_mode: int | None = None) -> Node:
    """The distance of every row of x1 to every row of x2."""
    rows, columns = ctx.unsqueeze(x1, x1.type.rank - 1), ctx.unsqueeze(x2, x2.type.rank - 2)
    return vector_norm(ctx, ctx.sub(rows, columns), p, -1)


@converter("aten.pdist.default", "aten._pdist_forward.default")
def pdist(ctx: Context, x: Node, p: Number = 2) -> Node:
    """The distance of every pair of rows, in order."""
    rows, columns = np.triu_indices(x.shape[0], 1)
    return vector_norm(ctx, ctx.sub(ctx.take(x, rows, 0), ctx.take(x, columns, 0)), p, -1)


@converter("aten.cosine_similarity.default")
@widened
def cosine_similarity(ctx: Context, x1: Node, x2: Node, dim: int = 1, eps: float = 1e-8) -> Node:
    """The product of the two vectors, each divided by its length or by eps if that is greater."""
    shape = broadcast_shapes(x1.shape, x2.shape)
    axis = axis_of(dim, len(shape))

    def unit(x: Node) -> Node:
        x = ctx.broadcast_to(x, shape)  # first: an element that is repeated counts as often
        length = ctx.emit("sqrt", ctx.emit("sum", ctx.emit("square", x), axes=(axis,), keepdims=True))
        return ctx.div(x, ctx.emit("clamp", length, min=float(eps), max=None))

    return ctx.emit("sum", ctx.mul(unit(x1), unit(x2)), axes=(axis,), keepdims=False)


refuse("counting equal elements is not supported yet", "aten.mode.default")
refuse(
    "the shape of its result depends on data",
    "aten.nonzero.default",
    "aten.nonzero_numpy.default",
    "aten.masked_select.default",
    "aten.unique_consecutive.default",
    "aten._unique2.default",
    "aten.unique_dim.default",
    "aten.bincount.default",
)
refuse(
    "reads a value of a tensor into Python while the model runs",
    "aten.item.default",
    "aten._local_scalar_dense.default",
)
