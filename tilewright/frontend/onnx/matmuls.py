"""Matmuls and convolutions of floats and of bytes, for the ONNX operators built on them.

Bytes stay bytes up to the contraction, whose sums are exact in i32. Zero points are taken off afterwards:

    sum (a - p)(b - q) = sum a b - p sum b - q sum a + K p q

which is the same number, as integers wrap around; for constant weights the sums of b are constants.

`ctx.quantised` records the bytes that a float tensor was dequantised from. The product of two such tensors is the
product of their bytes times that of their scales, which is the intent of the QDQ form of a quantised model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tilewright.dtypes import DType
from tilewright.frontend.builder import Ints, Unsupported
from tilewright.frontend.onnx.context import Context
from tilewright.graph.ir import Node

Pairs = tuple[tuple[int, int], ...]

MAX_TERMS = 1 << 15  # products of two bytes whose sum i32 certainly holds


@dataclass(frozen=True)
class Quantised:
    """A float tensor that is (x - zero) * scale, with one scale or one per slice of `axis`."""

    x: Node
    scale: Node
    zero: Node | None
    axis: int

    @property
    def whole(self) -> bool:
        """One scale and one zero point for all."""
        return self.scale.type.size == 1 and (self.zero is None or self.zero.type.size == 1)

    def along(self, axis: int) -> bool:
        """One scale and zero point for all, or per slice of this axis."""
        return self.whole or (self.axis == axis and self.scale.type.rank == 1)


def product(ctx: Context, a: Node, b: Node) -> Node:
    """NumPy's matmul: vectors become matrices, and the added axis is dropped again."""
    if not a.type.rank or not b.type.rank:
        raise Unsupported("a matmul with a single number")
    row, column = a.type.rank == 1, b.type.rank == 1
    result = ctx.emit("matmul", ctx.unsqueeze(a, 0) if row else a, ctx.unsqueeze(b, 1) if column else b)
    shape = list(result.shape)
    if column:
        del shape[-1]
    if row:
        del shape[-1 if column else -2]
    return ctx.reshape(result, shape)


def window_padding(
    auto_pad: str,
    pads: Ints | None,
    extents: Ints,
    kernel: Ints,
    stride: Ints,
    dilation: Ints,
) -> Pairs:
    """(low, high) per spatial axis, from `pads` or from the rule that `auto_pad` names."""
    rank = len(extents)
    if auto_pad not in ("NOTSET", "") and pads is not None and any(pads):
        raise Unsupported(f"both auto_pad {auto_pad} and pads {tuple(pads)}: must be one of them")
    if auto_pad in ("NOTSET", ""):
        if pads is None:
            return ((0, 0),) * rank
        if len(pads) != 2 * rank or any(width < 0 for width in pads):
            raise Unsupported(f"pads {tuple(pads)} for {rank} spatial axes")
        return tuple((pads[axis], pads[axis + rank]) for axis in range(rank))
    if auto_pad == "VALID":
        return ((0, 0),) * rank
    if auto_pad not in ("SAME_UPPER", "SAME_LOWER"):
        raise Unsupported(f"auto_pad {auto_pad}")
    pairs = []
    for extent, k, s, step in zip(extents, kernel, stride, dilation, strict=True):
        total = max(0, (-(-extent // s) - 1) * s + step * (k - 1) + 1 - extent)
        less, more = total // 2, total - total // 2
        pairs.append((less, more) if auto_pad == "SAME_UPPER" else (more, less))
    return tuple(pairs)


def ones(values: Ints | None, rank: int) -> tuple[int, ...]:
    return (1,) * rank if values is None else tuple(values)


@dataclass(frozen=True)
class WindowAttributes:
    """The attributes that every convolution has, with the standard's defaults."""

    auto_pad: str = "NOTSET"
    dilations: Ints | None = None
    group: int = 1
    kernel_shape: Ints | None = None
    pads: Ints | None = None
    strides: Ints | None = None

    @staticmethod
    def of(attributes: Mapping[str, Any]) -> WindowAttributes:
        unknown = [name for name in attributes if name not in WindowAttributes.__dataclass_fields__]
        if unknown:
            raise Unsupported(f"the attribute {', '.join(unknown)}")
        return WindowAttributes(**attributes)

    def check(self, x: Node, w: Node) -> int:
        """The number of spatial axes."""
        rank = x.type.rank - 2
        if self.kernel_shape is not None and tuple(self.kernel_shape) != w.shape[2:]:
            raise Unsupported(f"kernel_shape {tuple(self.kernel_shape)} with a weight {w.type!r}")
        if not 1 <= rank <= 3 or w.type.rank != x.type.rank:
            raise Unsupported(f"x {x.type!r} with a weight {w.type!r}")
        return rank

    def stride(self, rank: int) -> tuple[int, ...]:
        return ones(self.strides, rank)

    def dilation(self, rank: int) -> tuple[int, ...]:
        return ones(self.dilations, rank)

    def padding(self, x: Node, w: Node) -> Pairs:
        rank = x.type.rank - 2
        return window_padding(
            self.auto_pad, self.pads, x.shape[2:], w.shape[2:], self.stride(rank), self.dilation(rank)
        )

    def without_padding(self) -> WindowAttributes:
        return replace(self, auto_pad="VALID", pads=None)


def convolution(ctx: Context, x: Node, w: Node, bias: Node | None, window: WindowAttributes) -> Node:
    rank = window.check(x, w)
    operands = [x, w] if bias is None else [x, w, bias]
    return ctx.emit(
        "conv",
        *operands,
        stride=window.stride(rank),
        padding=window.padding(x, w),
        dilation=window.dilation(rank),
        groups=int(window.group),
        layout="channels_first",
    )


def per_channel(ctx: Context, values: Node, rank: int) -> Node:
    """One number per channel, in a shape that broadcasts against an image of `rank` spatial axes."""
    return ctx.reshape(values, (*values.shape, *[1] * rank))


# -- bytes ------------------------------------------------------------------------------------------------------------


def is_byte(x: Node) -> bool:
    return x.dtype in (DType.I8, DType.U8)


def one(ctx: Context, x: Node) -> Node:
    return ctx.reshape(x, ()) if x.type.size == 1 else x


def present(ctx: Context, zero: Node | None) -> Node | None:
    """The zero point as i32; None if it is known to be 0."""
    if zero is None or (ctx.statics.is_static(zero) and not ctx.static(zero).any()):
        return None
    return ctx.cast(zero, DType.I32)


def along(ctx: Context, parameter: Node | None, x: Node, *, rows: bool) -> Node | None:
    """A parameter of the matrix x: one number, or one per row (of a) or per column (of b)."""
    if parameter is None or parameter.type.rank != 1:
        return parameter
    if parameter.type.size == 1:
        return ctx.reshape(parameter, ())
    rows = rows and x.type.rank >= 2
    if parameter.shape[0] != x.shape[-2 if rows else -1]:
        raise Unsupported(
            f"parameters {parameter.type!r} for the {'rows' if rows else 'columns'} of {x.type!r}"
        )
    return ctx.reshape(parameter, (*parameter.shape, 1)) if rows else parameter


def integer_matmul(ctx: Context, a: Node, b: Node, a_zero: Node | None, b_zero: Node | None) -> Node:
    p = present(ctx, along(ctx, a_zero, a, rows=True))
    q = present(ctx, along(ctx, b_zero, b, rows=False))
    if q is not None and is_byte(b) and (signed := signed_parts(ctx, b, q, at_most=1)) is not None:
        (b,), q = signed, None
    if (p is None and q is None) or min(a.type.rank, b.type.rank) < 2:
        return product(ctx, *same_kind(ctx, less(ctx, a, p), less(ctx, b, q)))
    total = product(ctx, a, b)
    if p is not None:
        total = ctx.sub(
            total, ctx.mul(p, ctx.reduce("sum", ctx.cast(b, DType.I32), (b.type.rank - 2,), True))
        )
    if q is not None:
        total = ctx.sub(
            total, ctx.mul(q, ctx.reduce("sum", ctx.cast(a, DType.I32), (a.type.rank - 1,), True))
        )
    if p is not None and q is not None:
        total = ctx.add(total, ctx.mul(ctx.mul(p, q), a.shape[-1]))
    return total


def less(ctx: Context, x: Node, zero: Node | None) -> Node:
    return x if zero is None else ctx.sub(ctx.cast(x, DType.I32), zero)


def same_kind(ctx: Context, a: Node, b: Node) -> tuple[Node, Node]:
    """Both as bytes, or both as i32."""
    if is_byte(a) and is_byte(b):
        return a, b
    return ctx.cast(a, DType.I32), ctx.cast(b, DType.I32)


def integer_convolution(
    ctx: Context, x: Node, w: Node, x_zero: Node | None, w_zero: Node | None, window: WindowAttributes
) -> Node:
    """Padding has the value of the zero point, not zero."""
    rank = x.type.rank - 2
    for zeros, channels in ((x_zero, 1), (w_zero, w.shape[0])):
        if zeros is not None and zeros.type.size not in (1, channels):
            raise Unsupported(f"a zero point {zeros.type!r} for {channels} channels")
    zero = None if x_zero is None else one(ctx, x_zero)
    p, q = present(ctx, zero), present(ctx, w_zero)
    if q is not None:
        q = ctx.reshape(q, (q.type.size, *[1] * (w.type.rank - 1)))
    weights = signed_parts(ctx, w, q, at_most=2)
    if weights is None or not is_byte(x) or (p is not None and p.type.rank):
        data, weight = same_kind(ctx, less(ctx, x, p), less(ctx, w, q))
        return convolution(ctx, data, weight, None, window)
    if p is None or zero is None:
        return added(ctx, [convolution(ctx, x, part, None, window) for part in weights])
    data, inside = with_border(ctx, x, zero, window.padding(x, w)), window.without_padding()
    total = added(ctx, [convolution(ctx, data, part, None, inside) for part in weights])
    taken = added(
        ctx, [ctx.reduce("sum", ctx.cast(part, DType.I32), range(1, w.type.rank), False) for part in weights]
    )
    return ctx.sub(total, ctx.reshape(ctx.mul(taken, p), (w.shape[0], *[1] * rank)))


def signed_parts(ctx: Context, w: Node, q: Node | None, at_most: int) -> list[Node] | None:
    """A weight minus its zero point as a sum of byte tensors. It needs nine bits including the sign: one tensor if
    its values fit into eight bits, else two. None if it is unknown, or needs more than `at_most`."""
    if q is None:
        return [w] if is_byte(w) else None
    if not w.is_constant or not ctx.statics.is_static(q):
        return None
    rest = ctx.static(w).astype(np.int32) - ctx.static(q)
    parts: list[np.ndarray] = []
    while rest.any() or not parts:
        parts.append(np.clip(rest, -128, 127))
        rest = rest - parts[-1]
    if len(parts) > at_most:
        return None
    return [ctx.constant(part.astype(np.int8)) for part in parts]


def added(ctx: Context, parts: Sequence[Node]) -> Node:
    total, *others = parts
    for part in others:
        total = ctx.add(total, part)
    return total


def with_border(ctx: Context, x: Node, value: Node, padding: Pairs) -> Node:
    """An image padded with `value`, a single number that need not be constant."""
    low, high = zip(*((0, 0), (0, 0), *padding), strict=True)
    if not any((*low, *high)):
        return x
    if ctx.statics.is_static(value):
        return ctx.pad(x, low, high, int(ctx.static(value)))
    ctx.reserve(math.prod(n + a + b for n, a, b in zip(x.shape, low, high, strict=True)), "a border's mask")
    inside = np.pad(np.ones((1, 1, *x.shape[2:]), np.bool_), list(zip(low, high, strict=True)))
    return ctx.select(ctx.constant(inside), ctx.pad(x, low, high, 0), value)


# -- dequantised tensors ----------------------------------------------------------------------------------------------


def quantised_matmul(ctx: Context, a: Node, b: Node, *, transposed: bool = False) -> Node | None:
    """The product of two dequantised tensors via their bytes; None if they are not dequantised, or do not
    allow it."""
    left, right = ctx.quantised.get(a), ctx.quantised.get(b)
    if left is None or right is None or min(a.type.rank, b.type.rank) < 2 or a.shape[-1] > MAX_TERMS:
        return None
    columns = b.type.rank - (2 if transposed else 1)
    if not left.whole or not right.along(columns):
        return None
    matrix = right.x
    if transposed:
        matrix = ctx.permute(matrix, (1, 0))
    total = integer_matmul(ctx, left.x, matrix, left.zero, right.zero)
    scale = ctx.mul(one(ctx, left.scale), one(ctx, right.scale))
    return ctx.mul(ctx.cast(total, DType.F32), scale)


def quantised_convolution(ctx: Context, x: Node, w: Node, window: WindowAttributes) -> Node | None:
    """The same for a convolution."""
    left, right = ctx.quantised.get(x), ctx.quantised.get(w)
    if left is None or right is None or not left.whole or not right.along(0):
        return None
    if w.type.size // max(w.shape[0], 1) > MAX_TERMS:
        return None
    total = integer_convolution(ctx, left.x, right.x, left.zero, right.zero, window)
    scale = ctx.mul(one(ctx, left.scale), one(ctx, right.scale))
    if scale.type.rank:
        scale = per_channel(ctx, scale, x.type.rank - 2)
    return ctx.mul(ctx.cast(total, DType.F32), scale)
