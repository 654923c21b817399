"""Pooling windows and resampling."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from tilewright.frontend.builder import Absent, Ints, Number, Unsupported
from tilewright.frontend.torch.aten_contraction import spatial
from tilewright.frontend.torch.context import Context
from tilewright.frontend.torch.registry import Result, converter
from tilewright.graph.ir import Node

_NO_INDICES = Absent("the positions of the maxima in each window are not computed")


def _windows(ctx: Context, x: Node, kernel: Ints, stride: Ints, dilation: Ints, sizes: Ints) -> Node:
    """[..., spatial] -> [..., windows, elements of a window]: what each window sees, in order."""
    rank = len(kernel)
    lead = x.type.rank - rank
    for d in range(rank):
        position = np.arange(sizes[d])[:, None] * stride[d] + np.arange(kernel[d])[None, :] * dilation[d]
        x = ctx.take(x, position, lead + 2 * d)
    order = (*range(lead), *(lead + 2 * d for d in range(rank)), *(lead + 2 * d + 1 for d in range(rank)))
    return ctx.reshape(ctx.permute(x, order), (*x.shape[:lead], math.prod(sizes), math.prod(kernel)))


def _max_indices(
    ctx: Context,
    x: Node,
    rank: int,
    kernel_size: Ints,
    stride: Ints,
    padding: int | Ints,
    dilation: int | Ints,
    sizes: Ints,
) -> Node:
    """The index of each window's maximum in the flattened spatial axes."""
    kernel, steps = spatial(kernel_size, rank), spatial(stride or kernel_size, rank)
    around, gaps = spatial(padding, rank), spatial(dilation, rank)
    lead = x.type.rank - rank
    extents = x.shape[lead:]
    high = [
        max(0, (n - 1) * step + gap * (k - 1) + 1 - extent - p)
        for n, step, gap, k, extent, p in zip(sizes, steps, gaps, kernel, extents, around, strict=True)
    ]
    low: Number = -math.inf if x.dtype.is_float else int(np.iinfo(x.dtype.numpy).min)
    zeros = (0,) * lead
    padded = ctx.emit(
        "pad", x, low=(*zeros, *around), high=(*zeros, *high), interior=(0,) * x.type.rank, value=low
    )
    best = ctx.emit(
        "argmax", _windows(ctx, padded, kernel, steps, gaps, sizes), axis=lead + 1, keepdims=False
    )
    # The same windows over element indices; padding never wins, so its index is arbitrary.
    numbers = np.pad(np.arange(math.prod(extents)).reshape(extents), list(zip(around, high, strict=True)))
    seen = _windows(ctx, ctx.constant(numbers), kernel, steps, gaps, sizes)
    seen = ctx.broadcast_to(seen, (*x.shape[:lead], *seen.shape))
    found = ctx.emit("take_along", seen, ctx.unsqueeze(best, lead + 1), axis=lead + 1)
    return ctx.reshape(found, (*x.shape[:lead], *sizes))


def _batched(ctx: Context, x: Node, rank: int, pool: Callable[[Node], Node]) -> Node:
    """`pool` of a tensor with `rank` spatial axes, which may come without a batch axis."""
    if x.type.rank == rank + 2:
        return pool(x)
    return ctx.squeeze(pool(ctx.unsqueeze(x, 0)), 0)


def _max_pool(
    ctx: Context,
    x: Node,
    rank: int,
    kernel_size: Ints,
    stride: Ints,
    padding: int | Ints,
    dilation: int | Ints,
    ceil_mode: bool,
) -> Node:
    kernel = spatial(kernel_size, rank)
    attrs = {
        "kernel": kernel,
        "stride": spatial(stride, rank) if stride else kernel,
        "padding": spatial(padding, rank),
        "dilation": spatial(dilation, rank),
        "ceil_mode": bool(ceil_mode),
        "layout": "channels_first",
    }
    return _batched(ctx, x, rank, lambda batch: ctx.emit("max_pool", batch, **attrs))


def _register_pools(rank: int) -> None:
    @converter(f"aten.max_pool{rank}d.default")
    def max_pool(
        ctx: Context,
        x: Node,
        kernel_size: Ints,
        stride: Ints = (),
        padding: int | Ints = 0,
        dilation: int | Ints = 1,
        ceil_mode: bool = False,
    ) -> Node:
        return _max_pool(ctx, x, rank, kernel_size, stride, padding, dilation, ceil_mode)

    @converter(f"aten.max_pool{rank}d_with_indices.default")
    def max_pool_with_indices(
        ctx: Context,
        x: Node,
        kernel_size: Ints,
        stride: Ints = (),
        padding: int | Ints = 0,
        dilation: int | Ints = 1,
        ceil_mode: bool = False,
    ) -> Result:
        values = _max_pool(ctx, x, rank, kernel_size, stride, padding, dilation, ceil_mode)
        sizes = values.shape[-rank:]
        return values, _max_indices(ctx, x, rank, kernel_size, stride, padding, dilation, sizes)

    @converter(f"aten.avg_pool{rank}d.default")
    def avg_pool(
        ctx: Context,
        x: Node,
        kernel_size: Ints,
        stride: Ints = (),
        padding: int | Ints = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Node:
        kernel = spatial(kernel_size, rank)
        attrs = {
            "kernel": kernel,
            "stride": spatial(stride, rank) if stride else kernel,
            "padding": spatial(padding, rank),
            "ceil_mode": bool(ceil_mode),
            "count_include_pad": bool(count_include_pad),
            "divisor": divisor_override,
            "layout": "channels_first",
        }
        return _batched(ctx, x, rank, lambda batch: ctx.emit("avg_pool", batch, **attrs))

    def adaptive(ctx: Context, x: Node, kind: str) -> Node:
        attrs = {"sizes": ctx.shape[-rank:], "layout": "channels_first"}
        return _batched(ctx, x, rank, lambda batch: ctx.emit(f"adaptive_{kind}_pool", batch, **attrs))

    names = [f"aten.adaptive_avg_pool{rank}d.default"]
    names += [f"aten._adaptive_avg_pool{rank}d.default"] if rank > 1 else []

    @converter(*names)
    def adaptive_avg_pool(ctx: Context, x: Node, output_size: int | Ints) -> Node:
        return adaptive(ctx, x, "avg")

    @converter(f"aten.adaptive_max_pool{rank}d.default")
    def adaptive_max_pool(ctx: Context, x: Node, output_size: int | Ints) -> Result:
        return adaptive(ctx, x, "max"), _NO_INDICES


for _rank in (1, 2, 3):
    _register_pools(_rank)


@converter("aten.max_unpool2d.default", "aten.max_unpool3d.default")
def max_unpool(ctx: Context, x: Node, indices: Node, output_size: Ints, *rest: object) -> Node:
    """Zeros, and each element at its place in the flattened spatial axes."""
    lead = x.type.rank - len(output_size)
    flat = (*x.shape[:lead], math.prod(x.shape[lead:]))
    room = ctx.full(0, x.dtype, (*x.shape[:lead], math.prod(output_size)))
    if not x.type.size:
        return ctx.reshape(room, ctx.shape)
    positions, values = ctx.reshape(indices, flat), ctx.reshape(x, flat)
    result = ctx.emit("put_along", room, positions, values, axis=lead, combine="set")
    return ctx.reshape(result, ctx.shape)


# -- resampling -------------------------------------------------------------------------------------------------


def _resize(
    ctx: Context, x: Node, rank: int, mode: str, coordinates: str, scales: Sequence[float | None]
) -> Node:
    """Sizes come from the exported result. A scale factor that is not exactly result / input shifts the sampling
    points, which the operator cannot express; PyTorch's own decomposition can."""
    sizes = ctx.shape[-rank:]
    for scale, extent, size in zip(scales, x.shape[-rank:], sizes, strict=False):
        if scale is not None and coordinates != "align_corners" and abs(extent * scale - size) > 1e-6 * size:
            raise Unsupported(
                f"scale factor {scale} of {extent} elements, which is not a whole number of elements"
            )
    return ctx.emit("resize", x, sizes=sizes, mode=mode, coordinates=coordinates)


def _register_resize(name: str, rank: int, mode: str, coordinates: str) -> None:
    corners = mode != "nearest"

    @converter(f"aten.{name}.vec")
    def by_factors(ctx: Context, x: Node, output_size: Ints | None, *rest: object) -> Node:
        align = bool(rest[0]) if corners else False
        factors = rest[-1] if len(rest) > corners else None
        scales = list(factors) if isinstance(factors, (list, tuple)) else []
        return _resize(ctx, x, rank, mode, "align_corners" if align else coordinates, scales)

    @converter(f"aten.{name}.default")
    def by_size(ctx: Context, x: Node, output_size: Ints, *rest: object, **keywords: object) -> Node:
        align = bool(rest[0]) if corners else False
        given = list(rest[1:] if corners else rest) + list(keywords.values())
        scales = [scale if isinstance(scale, float) else None for scale in given]
        return _resize(ctx, x, rank, mode, "align_corners" if align else coordinates, scales)


for _rank in (1, 2, 3):
    _register_resize(f"upsample_nearest{_rank}d", _rank, "nearest", "asymmetric")
    _register_resize(f"_upsample_nearest_exact{_rank}d", _rank, "nearest", "half_pixel")
_register_resize("upsample_linear1d", 1, "linear", "half_pixel")
_register_resize("upsample_bilinear2d", 2, "linear", "half_pixel")
_register_resize("upsample_trilinear3d", 3, "linear", "half_pixel")
_register_resize("upsample_bicubic2d", 2, "cubic", "half_pixel")
