"""Contractions (matmul, linear, convolution): most of the arithmetic of most models.

- `matmul` of (a [..., M, K], b [..., K, N]); leading axes broadcast.
- `linear` of (x [..., K], w [N, K]) or (x, w, bias [N]): x times w transposed.
- `conv(stride, padding, dilation, groups, layout)` of (x, w) or (x, w, bias [O]), over 1 to 3 spatial axes; `padding`
  is ((low, high), ...) of zeros per spatial axis. Layout "channels_first": x is N C spatial and w is O I/groups
  spatial; "channels_last": x is N spatial C and w is spatial I/groups O. The result has x's layout. With blocks of
  channels (`layouts.py`) w is as for channels last; the layout gives the result's block size, and x's last axis gives
  its own. So a channels-first image is N C spatial 1.
- `conv_transpose(stride, padding, output_padding, dilation, groups)` of (x, w) or (x, w, bias [O]), channels_first; w
  is I O/groups spatial, `padding` one integer per spatial axis. Decomposed before lowering.

Both operands have one element type, which is the result's; 16-bit floats are summed in f32. Two operands of i8 or u8,
in any mixture, are summed exactly in i32 and give i32. A bias has the result's type.

In the lowering a contraction is a `Reduce` of a product of exactly two loads, the data first and then the weight,
over (kernel axes, channels); rounding and bias are a stage after it. `conv` is lowered without padding: `rewrites/`
puts a `pad` before it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewright import te
from tilewright.dtypes import DType
from tilewright.graph.ir import Attrs, TensorType
from tilewright.graph.op import Application, Fusion, Op, register
from tilewright.graph.ops.common import (
    NUMBER,
    broadcast_indices,
    broadcast_shapes,
    divided,
    expect,
    expect_ints,
    expect_kind,
    expect_operands,
    expect_same_dtype,
    finish,
    is_int,
    label,
    remainder,
    scaled,
)
from tilewright.graph.ops.layouts import block_of, channels_of, expect_layout

BYTES = (DType.I8, DType.U8)


def result_dtype(a: TensorType, b: TensorType) -> DType:
    if a.dtype in BYTES and b.dtype in BYTES:
        return DType.I32
    dtype = expect_same_dtype((a, b))
    expect_kind(dtype, NUMBER)
    return dtype


def expect_bias(inputs: Sequence[TensorType], channels: int, dtype: DType) -> None:
    if len(inputs) > 2:
        wanted = TensorType((channels,), dtype)
        expect(inputs[2] == wanted, f"the bias must be {wanted!r}, got {inputs[2]!r}")


def product(a: te.Expr, b: te.Expr, dtype: DType) -> te.Expr:
    """The product of two loads, in the accumulation type."""
    return te.cast(a, dtype) * te.cast(b, dtype)


def exactly(array: np.ndarray) -> np.ndarray:
    """Bytes as f64, in which their products and sums are exact and NumPy has a fast matmul."""
    return array.astype(np.float64) if array.dtype.itemsize == 1 else array


def from_exact(result: np.ndarray, *operands: np.ndarray) -> np.ndarray:
    return result.astype(np.int32) if all(array.dtype.itemsize == 1 for array in operands) else result


def matrix_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return from_exact(np.matmul(exactly(a), exactly(b)), a, b)


# -- matmul, linear -----------------------------------------------------------------------------------------------


def infer_matmul(inputs: Sequence[TensorType], attrs: Attrs) -> TensorType:
    expect_operands(inputs, 2)
    a, b = inputs
    expect(a.rank >= 2 and b.rank >= 2, f"operands must be matrices or stacks of them, got {a!r} and {b!r}")
    expect(a.shape[-1] == b.shape[-2], f"a's columns and b's rows differ: {a.shape[-1]} and {b.shape[-2]}")
    batch = broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return TensorType((*batch, a.shape[-2], b.shape[-1]), result_dtype(a, b))


def lower_matmul(app: Application, inputs: Sequence[te.Tensor]) -> te.Tensor:
    a, b = inputs
    title, dtype, batch = label(app, "matmul"), app.type.dtype.compute, app.type.shape[:-2]

    def formula(*axes: te.Var) -> te.Expr:
        (k,) = te.reduce_axes([a.shape[-1]])
        lead, i, j = axes[:-2], axes[-2], axes[-1]
        left = a[(*broadcast_indices(lead, a.shape[:-2], batch), i, k)]
        right = b[(*broadcast_indices(lead, b.shape[:-2], batch), k, j)]
        return te.reduce_over("sum", product(left, right, dtype), [k])

    total = te.compute(title if dtype is app.type.dtype else f"{title}_sum", app.type.shape, dtype, formula)
    return finish(title, app.type, total)


def infer_linear(inputs: Sequence[TensorType], attrs: Attrs) -> TensorType:
    expect_operands(inputs, 2, 3)
    x, w = inputs[:2]
    expect(x.rank >= 1 and w.rank == 2, f"takes x [..., K] and w [N, K], got {x!r} and {w!r}")
    expect(x.shape[-1] == w.shape[1], f"x's last extent is {x.shape[-1]}, w's is {w.shape[1]}")
    dtype = result_dtype(x, w)
    expect_bias(inputs, w.shape[0], dtype)
    return TensorType((*x.shape[:-1], w.shape[0]), dtype)


def linear(attrs: Attrs, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    rows = matrix_product(x.reshape(math.prod(x.shape[:-1]), w.shape[1]), w.T)
    result = rows.reshape(*x.shape[:-1], w.shape[0])
    return result if bias is None else result + bias


def lower_linear(app: Application, inputs: Sequence[te.Tensor]) -> te.Tensor:
    x, w = inputs[:2]
    title, dtype = label(app, "linear"), app.type.dtype.compute

    def formula(*axes: te.Var) -> te.Expr:
        (k,) = te.reduce_axes([w.shape[1]])
        return te.reduce_over("sum", product(x[(*axes[:-1], k)], w[axes[-1], k], dtype), [k])

    last = len(inputs) == 2 and dtype is app.type.dtype
    total = te.compute(title if last else f"{title}_sum", app.type.shape, dtype, formula)
    bias = inputs[2] if len(inputs) == 3 else None
    return finish(title, app.type, total, None if bias is None else lambda *axes: bias[axes[-1]])


register(
    Op(
        "matmul",
        infer=infer_matmul,
        oracle=lambda attrs, a, b: matrix_product(a, b),
        fusion=Fusion.COMPLEX,
        lower=lower_matmul,
        flops=lambda app: 2 * app.type.size * app.inputs[0].shape[-1],
    )
)
register(
    Op(
        "linear",
        infer=infer_linear,
        oracle=linear,
        fusion=Fusion.COMPLEX,
        lower=lower_linear,
        flops=lambda app: app.type.size * (2 * app.inputs[1].shape[1] + (len(app.inputs) == 3)),
    )
)


# -- conv ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ConvGeometry:
    """The sizes of a convolution, whatever its layout."""

    batch: int
    channels: int  # of the result
    extents: tuple[int, ...]  # spatial, of x
    kernel: tuple[int, ...]
    groups: int
    group_inputs: int  # input channels of one group
    channels_last: bool
    block: int = 0  # channels of the result in a block; 0: no blocks
    read_block: int = 0  # the same for x

    @staticmethod
    def of(x: tuple[int, ...], w: tuple[int, ...], groups: int, layout: str) -> ConvGeometry:
        if block := block_of(layout):
            return ConvGeometry(x[0], w[-1], x[2:-1], w[:-2], groups, w[-2], False, block, x[-1])
        last = layout == "channels_last"
        extents, kernel = (x[1:-1], w[:-2]) if last else (x[2:], w[2:])
        channels, group_inputs = (w[-1], w[-2]) if last else (w[0], w[1])
        return ConvGeometry(x[0], channels, extents, kernel, groups, group_inputs, last)

    @property
    def group_outputs(self) -> int:
        return self.channels // self.groups

    @property
    def summed_channels(self) -> tuple[int, int]:
        """Input channels of a group: (blocks, channels per block), if x has whole blocks of them."""
        inside = self.read_block
        whole = inside > 1 and self.group_inputs % inside == 0
        return (self.group_inputs // inside, inside) if whole else (1, self.group_inputs)

    def result(self, spatial: Sequence[int]) -> tuple[int, ...]:
        """The shape of the result."""
        if self.block:
            return (self.batch, self.channels // self.block, *spatial, self.block)
        if self.channels_last:
            return (self.batch, *spatial, self.channels)
        return (self.batch, self.channels, *spatial)

    def parts(self, axes: Sequence[te.Expr]) -> tuple[te.Expr, Sequence[te.Expr], te.Expr]:
        """Split an index of the result into (batch, spatial, channel)."""
        if self.block:
            return axes[0], axes[2:-1], scaled(axes[1], self.block) + axes[-1]
        if self.channels_last:
            return axes[0], axes[1:-1], axes[-1]
        return axes[0], axes[2:], axes[1]

    def group(self, axes: Sequence[te.Expr]) -> te.Expr:
        """The group of the channel in an index of the result."""
        if self.block and self.group_outputs % self.block == 0:
            return divided(axes[1], self.group_outputs // self.block)
        return divided(self.parts(axes)[2], self.group_outputs)

    def position(self, batch: te.Expr, channel: te.Expr, spatial: Sequence[te.Expr]) -> tuple[te.Expr, ...]:
        """The index of an element of x."""
        if self.block:
            return (batch, divided(channel, self.read_block), *spatial, remainder(channel, self.read_block))
        return (batch, *spatial, channel) if self.channels_last else (batch, channel, *spatial)

    def weight_position(
        self, out: te.Expr, channel: te.Expr, kernel: Sequence[te.Expr]
    ) -> tuple[te.Expr, ...]:
        first = not self.channels_last and not self.block
        return (out, channel, *kernel) if first else (*kernel, channel, out)


def expect_spatial(x: TensorType, w: TensorType, blocks: bool = False) -> int:
    """The number of spatial axes."""
    rank = x.rank - blocks
    channels = "channels, in blocks" if blocks else "channels"
    expect(rank in (3, 4, 5), f"x must have 1 to 3 spatial axes alongside batch and {channels}, got {x!r}")
    expect(w.rank == rank, f"the weight must have x's rank {rank}, got {w!r}")
    return rank - 2


def expect_groups(attrs: Attrs) -> int:
    groups = attrs["groups"]
    expect(is_int(groups) and groups >= 1, f"groups must be a positive integer, got {groups!r}")
    return int(groups)


def infer_conv(inputs: Sequence[TensorType], attrs: Attrs) -> TensorType:
    expect_operands(inputs, 2, 3)
    x, w = inputs[:2]
    layout = expect_layout(attrs["layout"])
    rank = expect_spatial(x, w, blocks=block_of(layout) > 0)
    stride, dilation = (expect_ints(name, attrs[name], rank, 1) for name in ("stride", "dilation"))
    padding = attrs["padding"]
    pairs = isinstance(padding, tuple) and len(padding) == rank
    expect(pairs, f"padding must be {rank} pair(s) (low, high), got {padding!r}")
    for pair in padding:
        expect_ints("each pair of padding", pair, 2, 0)
    groups = expect_groups(attrs)
    sizes = ConvGeometry.of(x.shape, w.shape, groups, layout)
    expect(0 not in sizes.kernel, f"the kernel must not be empty, got {w!r}")
    channels = channels_of(x.shape, layout)
    expect(
        channels == groups * sizes.group_inputs,
        f"x has {channels} channels, the weight takes {groups} group(s) of {sizes.group_inputs}",
    )
    expect(
        sizes.channels % groups == 0, f"{sizes.channels} output channels do not divide into {groups} groups"
    )
    expect(
        sizes.channels % (sizes.block or 1) == 0,
        f"{sizes.channels} output channels do not divide into blocks of {sizes.block}",
    )
    padded = [extent + low + high for extent, (low, high) in zip(sizes.extents, padding, strict=True)]
    spatial = [
        (extent - step * (k - 1) - 1) // s + 1
        for extent, k, s, step in zip(padded, sizes.kernel, stride, dilation, strict=True)
    ]
    expect(
        all(extent >= 1 for extent in spatial),
        f"the dilated kernel {sizes.kernel} is larger than the padded extents {tuple(padded)}",
    )
    dtype = result_dtype(x, w)
    expect_bias(inputs, sizes.channels, dtype)
    return TensorType(sizes.result(spatial), dtype)


def kernel_positions(kernel: Sequence[int]) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(k) for k in kernel)))


def at_position(weights: np.ndarray, offset: tuple[int, ...]) -> np.ndarray:
    """The weights at one kernel position; the kernel axes are the last ones."""
    there: tuple[Any, ...] = (..., *offset)
    return np.asarray(weights[there])


def window_at(
    offset: Sequence[int], stride: Sequence[int], dilation: Sequence[int], extents: Sequence[int]
) -> tuple[slice, ...]:
    """The elements that one kernel position reads as the kernel moves over `extents` positions."""
    whole = slice(None)
    return (
        whole,
        whole,
        *(
            slice(k * step, k * step + s * (extent - 1) + 1, s)
            for k, s, step, extent in zip(offset, stride, dilation, extents, strict=True)
        ),
    )


def conv(attrs: Attrs, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """A matmul per kernel position, or per few positions if there are few channels: im2col with a memory bound."""
    if attrs["layout"] == "channels_last":
        first = {**attrs, "layout": "channels_first"}
        spatial_axes = tuple(range(w.ndim - 2))
        result = conv(first, np.moveaxis(x, -1, 1), w.transpose(-1, -2, *spatial_axes), bias)
        return np.moveaxis(result, 1, -1)
    if block := block_of(attrs["layout"]):
        last = {**attrs, "layout": "channels_last"}
        joined = np.moveaxis(x, 1, -2)
        result = conv(
            last, joined.reshape(*joined.shape[:-2], channels_of(x.shape, attrs["layout"])), w, bias
        )
        return np.moveaxis(result.reshape(*result.shape[:-1], w.shape[-1] // block, block), -2, 1)
    sizes = ConvGeometry.of(x.shape, w.shape, attrs["groups"], attrs["layout"])
    stride, dilation = attrs["stride"], attrs["dilation"]
    padded = np.pad(exactly(x), ((0, 0), (0, 0), *attrs["padding"]))
    spatial = tuple(
        (extent - step * (k - 1) - 1) // s + 1
        for extent, k, s, step in zip(padded.shape[2:], sizes.kernel, stride, dilation, strict=True)
    )
    groups, group_inputs, group_outputs = sizes.groups, sizes.group_inputs, sizes.group_outputs
    weights = exactly(w).reshape(groups, group_outputs, group_inputs, *sizes.kernel)
    total = np.zeros((sizes.batch, groups, group_outputs, math.prod(spatial)), weights.dtype)
    positions = kernel_positions(sizes.kernel)
    together = max(1, 256 // max(group_inputs, 1))
    for begin in range(0, len(positions), together):
        part = positions[begin : begin + together]
        seen = [padded[window_at(offset, stride, dilation, spatial)] for offset in part]
        columns = [view.reshape(sizes.batch, groups, group_inputs, math.prod(spatial)) for view in seen]
        rows = [at_position(weights, offset) for offset in part]
        total += np.matmul(np.concatenate(rows, -1), np.concatenate(columns, -2))
    result = from_exact(total, x, w).reshape(sizes.batch, sizes.channels, *spatial)
    return result if bias is None else result + bias.reshape(-1, *[1] * len(spatial))


def lower_conv(app: Application, inputs: Sequence[te.Tensor]) -> te.Tensor:
    x, w = inputs[:2]
    attrs, dtype = app.attrs, app.type.dtype.compute
    assert all(pair == (0, 0) for pair in attrs["padding"]), (
        "conv is lowered after its padding is made explicit"
    )
    sizes = ConvGeometry.of(x.shape, w.shape, attrs["groups"], attrs["layout"])

    def formula(*axes: te.Var) -> te.Expr:
        batch, spatial, out = sizes.parts(axes)
        # Axes of extent 1 are dropped, so that a pointwise or depthwise convolution has only its actual reduction
        # axes.
        blocks, inside = sizes.summed_channels
        extents = (blocks, *sizes.kernel, inside)
        summed = te.reduce_axes([extent for extent in extents if extent != 1])
        left = iter(summed)
        first, *kernel, channel = (next(left) if extent != 1 else te.as_index(0) for extent in extents)
        if blocks > 1:
            channel = scaled(first, inside) + channel
        seen = [
            scaled(position, s) if k == 1 else scaled(position, s) + scaled(offset, step)
            for position, offset, k, s, step in zip(
                spatial, kernel, sizes.kernel, attrs["stride"], attrs["dilation"], strict=True
            )
        ]
        source = channel
        if sizes.groups > 1:
            begin = scaled(sizes.group(axes), sizes.group_inputs)
            source = begin if sizes.group_inputs == 1 else begin + channel
        data = x[sizes.position(batch, source, seen)]
        term = product(data, w[sizes.weight_position(out, channel, kernel)], dtype)
        return te.reduce_over("sum", term, summed) if summed else term

    title = label(app, "conv")
    last = len(inputs) == 2 and dtype is app.type.dtype
    total = te.compute(title if last else f"{title}_sum", app.type.shape, dtype, formula)
    if len(inputs) == 2:
        return finish(title, app.type, total)
    bias = inputs[2]
    return finish(title, app.type, total, lambda *axes: bias[sizes.parts(axes)[2]])


def conv_flops(app: Application) -> int:
    x, w = app.inputs[:2]
    sizes = ConvGeometry.of(x.shape, w.shape, app.attrs["groups"], app.attrs["layout"])
    terms = sizes.group_inputs * math.prod(sizes.kernel)
    return app.type.size * (2 * terms + (len(app.inputs) == 3))


register(
    Op(
        "conv",
        infer=infer_conv,
        oracle=conv,
        fusion=Fusion.COMPLEX,
        lower=lower_conv,
        flops=conv_flops,
        attrs=("stride", "padding", "dilation", "groups", "layout"),
    )
)


# -- conv_transpose -----------------------------------------------------------------------------------------------


def infer_conv_transpose(inputs: Sequence[TensorType], attrs: Attrs) -> TensorType:
    expect_operands(inputs, 2, 3)
    x, w = inputs[:2]
    rank = expect_spatial(x, w)
    stride, dilation = (expect_ints(name, attrs[name], rank, 1) for name in ("stride", "dilation"))
    padding, extra = (expect_ints(name, attrs[name], rank, 0) for name in ("padding", "output_padding"))
    expect(
        all(more < max(s, step) for more, s, step in zip(extra, stride, dilation, strict=True)),
        f"output_padding must be smaller than stride or dilation, got {extra}, {stride} and {dilation}",
    )
    groups = expect_groups(attrs)
    expect(0 not in w.shape[2:], f"the kernel must not be empty, got {w!r}")
    expect(x.shape[1] == w.shape[0], f"x has {x.shape[1]} channels, the weight takes {w.shape[0]}")
    expect(x.shape[1] % groups == 0, f"{x.shape[1]} input channels do not divide into {groups} groups")
    spatial = tuple(
        (extent - 1) * s - 2 * p + step * (k - 1) + more + 1
        for extent, k, s, p, step, more in zip(
            x.shape[2:], w.shape[2:], stride, padding, dilation, extra, strict=True
        )
    )
    expect(all(extent >= 1 for extent in spatial), f"the result would have spatial extents {spatial}")
    channels = w.shape[1] * groups
    dtype = result_dtype(x, w)
    expect_bias(inputs, channels, dtype)
    return TensorType((x.shape[0], channels, *spatial), dtype)


def conv_transpose(attrs: Attrs, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """Add each element of x times the kernel to the result: one strided addition per kernel position."""
    stride, padding, dilation, groups = (attrs[name] for name in ("stride", "padding", "dilation", "groups"))
    batch, channels = x.shape[:2]
    extents, kernel = x.shape[2:], w.shape[2:]
    full = [
        (extent - 1) * s + step * (k - 1) + 1 + more
        for extent, k, s, step, more in zip(
            extents, kernel, stride, dilation, attrs["output_padding"], strict=True
        )
    ]
    data = exactly(x).reshape(batch, groups, channels // groups, math.prod(extents))
    weights = exactly(w).reshape(groups, channels // groups, w.shape[1], *kernel)
    total = np.zeros((batch, groups * w.shape[1], *full), data.dtype)
    for offset in kernel_positions(kernel):
        weight = at_position(weights, offset).transpose(0, 2, 1)
        added = np.matmul(weight, data).reshape(batch, groups * w.shape[1], *extents)
        total[window_at(offset, stride, dilation, extents)] += added
    inside = tuple(slice(p, extent - p) for p, extent in zip(padding, full, strict=True))
    result = from_exact(total[(slice(None), slice(None), *inside)], x, w)
    return result if bias is None else result + bias.reshape(-1, *[1] * len(extents))


def conv_transpose_flops(app: Application) -> int:
    x, w = app.inputs[:2]
    return 2 * x.size * math.prod(w.shape[1:]) + (app.type.size if len(app.inputs) == 3 else 0)


register(
    Op(
        "conv_transpose",
        infer=infer_conv_transpose,
        oracle=conv_transpose,
        fusion=Fusion.COMPLEX,
        flops=conv_transpose_flops,
        attrs=("stride", "padding", "output_padding", "dilation", "groups"),
    )
)
