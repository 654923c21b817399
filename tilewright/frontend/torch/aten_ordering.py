"""Sorting and what is made of it, running reductions, searching."""

from __future__ import annotations

import torch

from tilewright.dtypes import DType
from tilewright.frontend.builder import Number, Operand
from tilewright.frontend.torch.aten_formula import lerp
from tilewright.frontend.torch.context import Context, axis_of, widened
from tilewright.frontend.torch.registry import Inexpressible, converter
from tilewright.frontend.torch.types import common_dtype
from tilewright.graph.ir import Node

MAX_STEPS = (
    1 << 28
)  # limit of a formula that is quadratic in an extent; above it, PyTorch's own algorithm is better


def check_steps(steps: int, what: str) -> None:
    if steps > MAX_STEPS:
        raise Inexpressible(f"{what} takes {steps:.1e} steps as a formula without a loop over data")


def _with_extent(shape: tuple[int, ...], axis: int, extent: int) -> tuple[int, ...]:
    return (*shape[:axis], extent, *shape[axis + 1 :])


# -- sorting ----------------------------------------------------------------------------------------------------


def sorted_along(
    ctx: Context, x: Node, dim: int, descending: bool = False, count: int | None = None
) -> tuple[Node, Node]:
    """The first `count` elements in order along an axis, and their indices."""
    if x.type.rank == 0:
        return x, ctx.full(0, DType.I64)
    axis = axis_of(dim, x.type.rank)
    extent = x.shape[axis]
    shape = _with_extent(x.shape, axis, extent if count is None else count)
    if not x.type.size or 0 in shape:
        return ctx.full(0, x.dtype, shape), ctx.full(0, DType.I64, shape)
    check_steps(x.type.size * extent, "sorting")
    keys = ctx.cast(x, DType.U8) if x.dtype is DType.BOOL else x
    positions = ctx.emit("argsort", keys, axis=axis, descending=descending)

    def arranged(values: Node) -> Node:
        room = ctx.full(0, values.dtype, shape)
        return ctx.emit("put_along", room, positions, values, axis=axis, combine="set")

    return arranged(x), arranged(ctx.iota(x.shape, axis))


@converter("aten.sort.default")
def sort(ctx: Context, x: Node, dim: int = -1, descending: bool = False) -> tuple[Node, Node]:
    return sorted_along(ctx, x, dim, descending)


@converter("aten.sort.stable")
def sort_stable(
    ctx: Context, x: Node, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> tuple[Node, Node]:
    return sorted_along(ctx, x, dim, descending)


@converter("aten.argsort.default")
def argsort(ctx: Context, x: Node, dim: int = -1, descending: bool = False) -> Node:
    return sorted_along(ctx, x, dim, descending)[1]


@converter("aten.argsort.stable")
def argsort_stable(ctx: Context, x: Node, *, stable: bool, dim: int = -1, descending: bool = False) -> Node:
    return sorted_along(ctx, x, dim, descending)[1]


@converter("aten.msort.default")
def msort(ctx: Context, x: Node) -> Node:
    return sorted_along(ctx, x, 0)[0]


@converter("aten.topk.default")
def topk(
    ctx: Context, x: Node, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Node, Node]:
    if x.type.rank == 0:
        shape = ctx.shape
        return ctx.reshape(x, shape), ctx.full(0, DType.I64, shape)
    return sorted_along(ctx, x, dim, largest, k)


@converter("aten.kthvalue.default")
def kthvalue(ctx: Context, x: Node, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Node, Node]:
    if x.type.rank == 0:
        return x, ctx.full(0, DType.I64)
    axis = axis_of(dim, x.type.rank)

    def kth(values: Node) -> Node:
        one = ctx.slice_axis(values, axis, k - 1, k)
        return one if keepdim else ctx.squeeze(one, axis)

    values, indices = sorted_along(ctx, x, axis, count=k)
    return kth(values), kth(indices)


def _median(ctx: Context, x: Node, dim: int, keepdim: bool, skip_nan: bool) -> tuple[Node, Node]:
    """The lower of two middle elements. A NaN is the median where there is one, unless it is skipped."""
    if x.type.rank == 0:
        return x, ctx.full(0, DType.I64)
    axis = axis_of(dim, x.type.rank)
    extent = x.shape[axis]
    values, indices = sorted_along(ctx, x, axis)
    middle = ctx.full((extent - 1) // 2, DType.I64, _with_extent(x.shape, axis, 1))
    if x.dtype.is_float:
        numbers = ctx.emit("logical_not", ctx.emit("isnan", x))
        count = ctx.emit("sum", ctx.cast(numbers, DType.I64), axes=(axis,), keepdims=True)
        if skip_nan:
            last = ctx.emit("clamp", ctx.sub(count, 1), min=0, max=None)
            middle = ctx.emit("floordiv", last, ctx.full(2, DType.I64))
        else:
            middle = ctx.select(ctx.compare("lt", count, extent), count, middle)

    def chosen(of: Node) -> Node:
        one = ctx.emit("take_along", of, middle, axis=axis)
        return one if keepdim else ctx.squeeze(one, axis)

    return chosen(values), chosen(indices)


@converter("aten.median.dim")
def median(ctx: Context, x: Node, dim: int, keepdim: bool = False) -> tuple[Node, Node]:
    return _median(ctx, x, dim, keepdim, False)


@converter("aten.nanmedian.dim")
def nanmedian(ctx: Context, x: Node, dim: int, keepdim: bool = False) -> tuple[Node, Node]:
    return _median(ctx, x, dim, keepdim, True)


@converter("aten.median.default")
def median_of_all(ctx: Context, x: Node) -> Node:
    return _median(ctx, ctx.reshape(x, (x.type.size,)), 0, False, False)[0]


@converter("aten.nanmedian.default")
def nanmedian_of_all(ctx: Context, x: Node) -> Node:
    return _median(ctx, ctx.reshape(x, (x.type.size,)), 0, False, True)[0]


# -- quantiles --------------------------------------------------------------------------------------------------


def _quantile(ctx: Context, x: Node, q: Operand, dim: int | None, interpolation: str, skip_nan: bool) -> Node:
    """The elements at fraction q along the sorted axis, or interpolated between the two neighbours."""
    if dim is None or x.type.rank == 0:
        x, dim = ctx.reshape(x, (x.type.size,)), 0
    axis = axis_of(dim, x.type.rank)
    x = ctx.move_axis(x, axis, x.type.rank - 1)
    last = x.type.rank - 1
    values, _ = sorted_along(ctx, x, last)
    points = ctx.reshape(ctx.operand(q, x.dtype), (q.type.size if isinstance(q, Node) else 1,))
    nan = ctx.emit("isnan", x)
    if skip_nan:
        count = ctx.emit("sum", ctx.cast(ctx.emit("logical_not", nan), x.dtype), axes=(last,), keepdims=True)
        length = ctx.emit("clamp", ctx.sub(count, 1), min=0.0, max=None)
    else:
        length = ctx.full(x.shape[last] - 1, x.dtype, (*x.shape[:last], 1))
    position = ctx.mul(points, length)
    if interpolation in ("lower", "higher", "nearest"):
        position = ctx.emit({"lower": "floor", "higher": "ceil", "nearest": "round"}[interpolation], position)
    below = ctx.emit("floor", position)
    result = ctx.emit("take_along", values, ctx.cast(below, DType.I64), axis=last)
    if interpolation in ("linear", "midpoint"):
        above = ctx.emit("take_along", values, ctx.cast(ctx.emit("ceil", position), DType.I64), axis=last)
        weight: Operand = 0.5 if interpolation == "midpoint" else ctx.sub(position, below)
        result = lerp(ctx, result, above, weight)
    if not skip_nan:
        broken = ctx.emit("any", nan, axes=(last,), keepdims=True)
        result = ctx.select(broken, float("nan"), result, x.dtype)
    if isinstance(q, Node) and q.type.rank:
        result = ctx.move_axis(result, last, 0)
    return ctx.reshape(result, ctx.shape)


def _register_quantile(name: str, skip_nan: bool) -> None:
    @converter(f"aten.{name}.default", f"aten.{name}.scalar")
    def convert(
        ctx: Context,
        x: Node,
        q: Operand,
        dim: int | None = None,
        keepdim: bool = False,
        *,
        interpolation: str = "linear",
    ) -> Node:
        return _quantile(ctx, x, q, dim, interpolation, skip_nan)


_register_quantile("quantile", False)
_register_quantile("nanquantile", True)


# -- searching --------------------------------------------------------------------------------------------------


def _searched(ctx: Context, boundaries: Node, values: Node, right: bool) -> Node:
    """The number of boundaries, sorted along their last axis, that come before each value."""
    dtype = common_dtype((boundaries, values))
    values = ctx.cast(values, dtype)
    lines = ctx.cast(boundaries, dtype)
    check_steps(values.type.size * lines.shape[-1], "searching")
    if lines.type.rank > 1:
        lines = ctx.unsqueeze(lines, lines.type.rank - 1)
    before = ctx.emit("le" if right else "lt", lines, ctx.unsqueeze(values, values.type.rank))
    # A NaN is above every boundary.
    if dtype.is_float:
        before = ctx.emit("logical_or", before, ctx.unsqueeze(ctx.emit("isnan", values), values.type.rank))
    counts = ctx.cast(ctx.broadcast_to(before, (*values.shape, lines.shape[-1])), DType.I64)
    return ctx.cast(ctx.emit("sum", counts, axes=(values.type.rank,), keepdims=False), ctx.dtype)


@converter("aten.searchsorted.Tensor", "aten.searchsorted.Scalar")
def searchsorted(
    ctx: Context,
    sequence: Node,
    values: Node | Number,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Node | None = None,
) -> Node:
    if sorter is not None:
        sequence = ctx.emit("take_along", sequence, sorter, axis=sequence.type.rank - 1)
    given = values if isinstance(values, Node) else ctx.full(values, common_dtype((sequence, values)))
    return _searched(ctx, sequence, given, right or side == "right")


@converter("aten.bucketize.Tensor", "aten.bucketize.Scalar")
def bucketize(
    ctx: Context, x: Node | Number, boundaries: Node, *, out_int32: bool = False, right: bool = False
) -> Node:
    given = x if isinstance(x, Node) else ctx.full(x, common_dtype((boundaries, x)))
    return _searched(ctx, boundaries, given, right)


# -- running reductions -----------------------------------------------------------------------------------------


@converter("aten.cumprod.default")
def cumprod(ctx: Context, x: Node, dim: int, dtype: torch.dtype | None = None) -> Node:
    x = ctx.cast(x, ctx.dtype)
    return ctx.emit("cumprod", x, axis=axis_of(dim, x.type.rank)) if x.type.rank and x.type.size else x


def _register_running_extreme(name: str) -> None:
    @converter(f"aten.{name}.default")
    def convert(ctx: Context, x: Node, dim: int) -> tuple[Node, Node]:
        """The extremes, and of those equal to each the last place so far."""
        if not x.type.rank or not x.type.size:
            return x, ctx.full(0, DType.I64, x.shape)
        axis = axis_of(dim, x.type.rank)
        numbers = ctx.cast(x, DType.U8) if x.dtype is DType.BOOL else x
        values = ctx.emit(name, numbers, axis=axis)
        hit = ctx.compare("eq", numbers, values)
        if x.dtype.is_float:
            hit = ctx.emit("logical_or", hit, ctx.emit("isnan", x))
        positions = ctx.select(hit, ctx.iota(x.shape, axis), 0, DType.I64)
        return ctx.cast(values, x.dtype), ctx.emit("cummax", positions, axis=axis)


_register_running_extreme("cummax")
_register_running_extreme("cummin")


@converter("aten.linalg_vander.default")
def vander(ctx: Context, x: Node, *, N: int | None = None) -> Node:
    """1, x, x^2, ... along a new last axis."""
    x = ctx.reshape(ctx.cast(x, ctx.dtype), ctx.shape[:-1])
    ones = ctx.full(1, x.dtype, (*x.shape, 1))
    if ctx.shape[-1] == 1:
        return ones
    powers = ctx.broadcast_to(ctx.unsqueeze(x, x.type.rank), (*x.shape, ctx.shape[-1] - 1))
    powers = ctx.emit("cumprod", powers, axis=x.type.rank)
    return ctx.concat([ones, powers], x.type.rank)


@converter("aten.logcumsumexp.default")
@widened
def logcumsumexp(ctx: Context, x: Node, dim: int) -> Node:
    """log of the sum of exp of the elements up to each, the greatest so far taken out."""
    if not x.type.rank or not x.type.size:
        return x
    axis = axis_of(dim, x.type.rank)
    check_steps(x.type.size * x.shape[axis], "logcumsumexp")
    greatest = ctx.emit("cummax", x, axis=axis)
    greatest = ctx.select(ctx.emit("isinf", greatest), 0, greatest, x.dtype)
    # [..., i, r, ...]: element r as seen from element i
    shape = (*x.shape[: axis + 1], x.shape[axis], *x.shape[axis + 1 :])
    terms = ctx.emit("exp", ctx.sub(ctx.unsqueeze(x, axis), ctx.unsqueeze(greatest, axis + 1)))
    so_far = ctx.emit("le", ctx.iota(shape, axis + 1), ctx.iota(shape, axis))
    total = ctx.emit("sum", ctx.select(so_far, terms, 0, x.dtype), axes=(axis + 1,), keepdims=False)
    return ctx.add(ctx.emit("log", total), greatest)


@converter("aten.histc.default")
def histc(ctx: Context, x: Node, bins: int = 100, min: Number = 0, max: Number = 0) -> Node:
    """Counts of equally wide bins; what is outside is not counted. Equal bounds stand for the data's own."""
    x = ctx.reshape(x, (x.type.size,))
    if not x.type.size:
        return ctx.full(0, ctx.dtype, (bins,))
    low, high = ctx.full(min, x.dtype), ctx.full(max, x.dtype)
    if min == max:
        low, high = (ctx.emit(op, x, axes=(0,), keepdims=False) for op in ("amin", "amax"))
        flat = ctx.emit("eq", low, high)
        low, high = (
            ctx.select(flat, ctx.sub(low, 1), low, x.dtype),
            ctx.select(flat, ctx.add(high, 1), high, x.dtype),
        )
    position = ctx.mul(ctx.div(ctx.sub(x, low), ctx.sub(high, low)), bins)
    bin_of = ctx.emit("clamp", ctx.cast(ctx.emit("floor", position), DType.I64), min=0, max=bins - 1)
    inside = ctx.emit("logical_and", ctx.emit("le", low, x), ctx.emit("le", x, high))
    bin_of = ctx.select(inside, bin_of, bins, DType.I64)
    ones = ctx.full(1, ctx.dtype, x.shape)
    return ctx.emit("put", ctx.full(0, ctx.dtype, (bins,)), bin_of, ones, axis=0, combine="add")
