"""Contractions: matmuls, convolutions, einsum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tilewright.frontend.builder import Ints, Unsupported
from tilewright.frontend.onnx.context import Context
from tilewright.frontend.onnx.matmuls import (
    Pairs,
    WindowAttributes,
    convolution,
    per_channel,
    product,
    quantised_convolution,
    quantised_matmul,
    window_padding,
)
from tilewright.frontend.onnx.registry import converter
from tilewright.graph.ir import Node
from tilewright.graph.ops.common import broadcast_shapes


@converter("MatMul")
def matmul(ctx: Context, a: Node, b: Node) -> Node:
    found = quantised_matmul(ctx, a, b)
    return product(ctx, a, b) if found is None else found


@converter("Gemm")
def gemm(
    ctx: Context,
    a: Node,
    b: Node,
    c: Node | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
    broadcast: int = 0,
) -> Node:
    if a.type.rank != 2 or b.type.rank != 2:
        raise Unsupported(f"{a.type!r} times {b.type!r}: must be matrices")
    if transA:
        a = ctx.permute(a, (1, 0))
    if c is not None and beta != 0:
        shape = (a.shape[0], b.shape[0 if transB else 1])
        if broadcast_shapes(c.shape, shape) != shape:
            raise Unsupported(f"C {c.type!r} for a result of {list(shape)}")
    exact = quantised_matmul(ctx, a, b, transposed=bool(transB))
    if exact is not None:
        result = exact if alpha == 1 else ctx.mul(exact, alpha)
        return result if c is None or beta == 0 else ctx.add(result, c if beta == 1 else ctx.mul(c, beta))
    plain = alpha == 1 and (c is None or (beta == 1 and c.shape == (b.shape[0 if transB else 1],)))
    if transB and plain:
        return ctx.emit("linear", a, b, *([] if c is None else [c]))
    result = ctx.emit("matmul", a, ctx.permute(b, (1, 0)) if transB else b)
    if alpha != 1:
        result = scaled(ctx, result, alpha)
    if c is not None and beta != 0:
        result = ctx.add(result, c if beta == 1 else scaled(ctx, c, beta))
    return result


def scaled(ctx: Context, x: Node, factor: float) -> Node:
    if x.dtype.is_float:
        return ctx.mul(x, factor)
    if factor != int(factor):
        raise Unsupported(f"integers times {factor}")
    return ctx.mul(x, int(factor))


# -- convolutions -----------------------------------------------------------------------------------------------------


@converter("Conv")
def conv(ctx: Context, x: Node, w: Node, bias: Node | None = None, **attributes: Any) -> Node:
    window = WindowAttributes.of(attributes)
    exact = quantised_convolution(ctx, x, w, window)
    if exact is None:
        return convolution(ctx, x, w, bias, window)
    return exact if bias is None else ctx.add(exact, per_channel(ctx, bias, x.type.rank - 2))


@converter("ConvTranspose")
def conv_transpose(
    ctx: Context,
    x: Node,
    w: Node,
    bias: Node | None = None,
    *,
    output_padding: Ints | None = None,
    output_shape: Ints | None = None,
    **attributes: Any,
) -> Node:
    """Computed in full, without padding; then the pads are sliced off, and additional output padding is zeros (plus
    the bias)."""
    window = WindowAttributes.of(attributes)
    rank = window.check(x, w)
    stride, dilation = window.stride(rank), window.dilation(rank)
    extra = (0,) * rank if output_padding is None else tuple(output_padding)
    kernel = w.shape[2:]
    if len(extra) != rank or any(
        not 0 <= m < max(s, d) for m, s, d in zip(extra, stride, dilation, strict=True)
    ):
        raise Unsupported(f"output_padding {extra} with strides {stride} and dilations {dilation}")
    if bias is not None and bias.shape != (w.shape[1] * window.group,):
        raise Unsupported(f"a bias {bias.type!r} for {w.shape[1] * window.group} channels")
    spans = [
        (extent - 1) * s + step * (k - 1) + 1 + more
        for extent, s, k, step, more in zip(x.shape[2:], stride, kernel, dilation, extra, strict=True)
    ]
    pairs = _transposed_padding(window, output_shape, spans, x.shape[2:], stride)
    zeros = (0,) * rank
    result = ctx.emit(
        "conv_transpose",
        x,
        w,
        stride=stride,
        padding=zeros,
        output_padding=zeros,
        dilation=dilation,
        groups=int(window.group),
    )
    low = [0, 0, *(max(0, -before) for before, _ in pairs)]
    high = [0, 0, *(more + max(0, -after) for more, (_, after) in zip(extra, pairs, strict=True))]
    result = ctx.pad(result, low, high, 0)
    for axis, (before, after) in enumerate(pairs, start=2):
        begin, end = max(0, before), result.shape[axis] - max(0, after)
        if end <= begin:
            raise Unsupported(f"pads {pairs} that leave nothing of {result.type!r}")
        result = ctx.slice_axis(result, axis, begin, end)
    return result if bias is None else ctx.add(result, per_channel(ctx, bias, rank))


def _transposed_padding(
    window: WindowAttributes, output_shape: Ints | None, spans: Ints, extents: Ints, stride: Ints
) -> Pairs:
    rank = len(spans)
    if output_shape is not None:
        sizes = tuple(output_shape)[-rank:]
        if len(output_shape) not in (rank, rank + 2) or any(
            not 0 < size < span + s for size, span, s in zip(sizes, spans, stride, strict=True)
        ):
            raise Unsupported(f"output_shape {tuple(output_shape)}: the windows reach {list(spans)}")
    elif window.auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        sizes = tuple(extent * s for extent, s in zip(extents, stride, strict=True))
    else:
        return window_padding(window.auto_pad, window.pads, extents, (1,) * rank, stride, (1,) * rank)
    pairs = []
    for span, size in zip(spans, sizes, strict=True):
        total = span - size
        half = total // 2
        if total < 0:
            pairs.append((0, total))  # what is missing is added at the end
        else:
            pairs.append((half, total - half) if window.auto_pad == "SAME_UPPER" else (total - half, half))
    return tuple(pairs)


# -- einsum -----------------------------------------------------------------------------------------------------------


@converter("Einsum")
def einsum(ctx: Context, *operands: Node, equation: str) -> Node:
    """Contract pairwise, left to right: each pair is a matmul over the letters that nothing else needs."""
    text = equation.replace(" ", "")
    left, arrow, right = text.partition("->")
    terms = left.split(",")
    if len(terms) != len(operands):
        raise Unsupported(f"the equation {equation!r} with {len(operands)} operands")
    labels = [
        _labels(term, operand.type.rank, operands) for term, operand in zip(terms, operands, strict=True)
    ]
    dots = max(
        (len(entry) for term in labels for entry in [[x for x in term if isinstance(x, int)]]), default=0
    )
    if arrow:
        wanted = _expand_dots(right, dots)
    else:
        counts: dict[str | int, int] = {}
        for term in labels:
            for letter in term:
                counts[letter] = counts.get(letter, 0) + 1
        once = sorted(letter for letter, count in counts.items() if count == 1 and isinstance(letter, str))
        wanted = [*range(-dots, 0), *once]
    current, have = _diagonals(ctx, operands[0], labels[0])
    for position in range(1, len(operands)):
        other, names = _diagonals(ctx, operands[position], labels[position])
        later = {letter for term in labels[position + 1 :] for letter in term} | set(wanted)
        current, have = _contract(ctx, current, have, other, names, later)
    summed = [axis for axis, letter in enumerate(have) if letter not in wanted]
    current = ctx.reduce("sum", current, summed, False)
    have = [letter for letter in have if letter in wanted]
    if sorted(map(str, have)) != sorted(map(str, wanted)):
        raise Unsupported(f"the equation {equation!r}")
    return ctx.permute(current, [have.index(letter) for letter in wanted])


Labels = list[str | int]  # a letter, or -1, -2, ... for the axes that an ellipsis stands for


def _expand_dots(term: str, count: int) -> Labels:
    before, dots, after = term.partition("...")
    return [*before, *(range(-count, 0) if dots else ()), *after]


def _labels(term: str, rank: int, operands: Sequence[Node]) -> Labels:
    before, dots, after = term.partition("...")
    hidden = rank - len(before) - len(after)
    if hidden < 0 or (hidden and not dots):
        raise Unsupported(f"the term {term!r} for a tensor of rank {rank}")
    return [*before, *range(-hidden, 0), *after]


def _diagonals(ctx: Context, x: Node, labels: Labels) -> tuple[Node, Labels]:
    """Replace axes with the same letter by one axis along their diagonal, as einsum does."""
    labels = list(labels)
    for letter in dict.fromkeys(labels):
        while labels.count(letter) > 1:
            first = labels.index(letter)
            second = labels.index(letter, first + 1)
            extent = x.shape[first]
            x = ctx.move_axis(ctx.move_axis(x, second, x.type.rank - 1), first, x.type.rank - 2)
            flat = ctx.reshape(x, (*x.shape[:-2], extent * extent))
            ctx.reserve(extent, "the positions of a diagonal")
            x = ctx.take(flat, np.arange(extent) * (extent + 1), flat.type.rank - 1)
            labels = [entry for slot, entry in enumerate(labels) if slot not in (first, second)] + [letter]
    return x, labels


def _contract(
    ctx: Context, a: Node, a_labels: Labels, b: Node, b_labels: Labels, later: set[str | int]
) -> tuple[Node, Labels]:
    """The product of two operands, summed over common letters that are not needed later."""

    def alone(x: Node, names: Labels, others: Labels) -> tuple[Node, Labels]:
        gone = [axis for axis, name in enumerate(names) if name not in others and name not in later]
        return ctx.reduce("sum", x, gone, False), [
            name for axis, name in enumerate(names) if axis not in gone
        ]

    a, a_labels = alone(a, a_labels, b_labels)
    b, b_labels = alone(b, b_labels, a_labels)
    shared = [name for name in a_labels if name in b_labels]
    batch = [name for name in shared if name in later]
    summed = [name for name in shared if name not in later]
    rows = [name for name in a_labels if name not in shared]
    columns = [name for name in b_labels if name not in shared]
    sizes: dict[str | int, int] = {}
    for x, names in ((a, a_labels), (b, b_labels)):
        for name, extent in zip(names, x.shape, strict=True):
            sizes[name] = max(sizes.get(name, 1), extent) if extent else 0

    def arranged(x: Node, names: Labels, order: Labels) -> Node:
        moved = ctx.permute(x, [names.index(name) for name in order])
        return ctx.broadcast_to(moved, [sizes[name] for name in order])

    def count(names: Labels) -> int:
        return math.prod(sizes[name] for name in names)

    left = ctx.reshape(
        arranged(a, a_labels, batch + rows + summed), (count(batch), count(rows), count(summed))
    )
    right = ctx.reshape(
        arranged(b, b_labels, batch + summed + columns), (count(batch), count(summed), count(columns))
    )
    result = ctx.emit("matmul", left, right)
    names = batch + rows + columns
    return ctx.reshape(result, [sizes[name] for name in names]), names


@converter("Det")
def det(ctx: Context, x: Node) -> Node:
    """The determinant, by unrolled elimination with pivoting, because models have small matrices."""
    size = x.shape[-1]
    if x.type.rank < 2 or x.shape[-2] != size or size > 16:
        raise Unsupported(f"matrices {list(x.shape[-2:])}: square ones of up to 16 rows")
    batch = x.shape[:-2]
    rows = ctx.widen(ctx.reshape(x, (math.prod(batch), size, size)))
    result = ctx.full(1, rows.dtype, (rows.shape[0],))
    for step in range(size):
        left = size - step
        column = ctx.reshape(ctx.slice_axis(rows, 2, 0, 1), (rows.shape[0], left))
        best = ctx.emit("argmax", ctx.emit("abs", column), axis=1, keepdims=True)
        slot = ctx.iota((rows.shape[0], left), 1)
        # Swap the pivot's row with the first.
        source = ctx.select(
            ctx.compare("eq", slot, 0), best, ctx.select(ctx.compare("eq", slot, best), 0, slot)
        )
        wide = ctx.broadcast_to(ctx.unsqueeze(source, 2), rows.shape)
        swapped = ctx.emit("take_along", rows, wide, axis=1)
        pivot = ctx.reshape(ctx.slice_axis(ctx.slice_axis(swapped, 1, 0, 1), 2, 0, 1), (rows.shape[0],))
        sign = ctx.select(
            ctx.compare("eq", ctx.reshape(best, (rows.shape[0],)), 0), ctx.full(1, rows.dtype), -1
        )
        result = ctx.mul(result, ctx.mul(pivot, sign))
        if left == 1:
            break
        first = ctx.slice_axis(ctx.slice_axis(swapped, 1, 0, 1), 2, 1, left)
        below = ctx.slice_axis(swapped, 1, 1, left)
        safe = ctx.select(ctx.compare("eq", pivot, 0), 1, pivot)
        factor = ctx.div(ctx.slice_axis(below, 2, 0, 1), ctx.reshape(safe, (rows.shape[0], 1, 1)))
        rows = ctx.sub(ctx.slice_axis(below, 2, 1, left), ctx.mul(factor, first))
    return ctx.cast(ctx.reshape(result, batch), x.dtype)
