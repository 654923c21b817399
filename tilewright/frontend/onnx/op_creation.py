"""Operators that create tensors from sizes, or without operands."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tilewright.dtypes import DType
from tilewright.frontend.builder import Unsupported
from tilewright.frontend.onnx.context import Context, axis_of
from tilewright.frontend.onnx.registry import converter
from tilewright.frontend.onnx.types import dtype_of
from tilewright.graph.ir import Node


@converter("Constant")
def constant(
    ctx: Context,
    *,
    value: np.ndarray | None = None,
    value_int: int | None = None,
    value_ints: Any = None,
    value_float: float | None = None,
    value_floats: Any = None,
    value_string: Any = None,
    value_strings: Any = None,
    sparse_value: Any = None,
) -> Node:
    if value is not None:
        return ctx.own(value)
    if value_int is not None or value_ints is not None:
        return ctx.constant(np.array(value_int if value_int is not None else value_ints, np.int64))
    if value_float is not None or value_floats is not None:
        return ctx.constant(np.array(value_float if value_float is not None else value_floats, np.float32))
    raise Unsupported("a constant of strings or a sparse one")


@converter("ConstantOfShape")
def constant_of_shape(ctx: Context, shape: Node, *, value: np.ndarray | None = None) -> Node:
    filled = np.zeros(1, np.float32) if value is None else value.reshape(-1)
    if filled.size != 1:
        raise Unsupported(f"a value of {filled.size} elements: must be one number")
    extents = ctx.static_ints(shape)
    if any(extent < 0 for extent in extents):
        raise Unsupported(f"the shape {extents}")
    return ctx.full(filled[0].item(), DType.of(filled), extents)


@converter("Shape")
def shape(ctx: Context, x: Node, *, start: int = 0, end: int | None = None) -> Node:
    return ctx.ints(x.shape[slice(start, end)])


@converter("Size")
def size(ctx: Context, x: Node) -> Node:
    return ctx.constant(np.array(math.prod(x.shape), np.int64))


@converter("Range")
def range_(ctx: Context, start: Node, limit: Node, delta: Node) -> Node:
    if any(x.type.size != 1 or x.dtype is not start.dtype for x in (start, limit, delta)):
        raise Unsupported(f"from {start.type!r} to {limit.type!r} by {delta.type!r}: must be one number each")
    first, last, step = (ctx.static(x).reshape(-1)[0].item() for x in (start, limit, delta))
    if step == 0:
        raise Unsupported("a step of 0")
    if isinstance(step, int):
        count = -((first - last) // step)  # exact, unlike a quotient of floats
    else:
        quotient = (last - first) / step
        if not math.isfinite(quotient):
            raise Unsupported(f"{quotient} elements")
        count = math.ceil(quotient)
    count = max(count, 0)
    ctx.reserve(count, f"{count} elements")
    wide = np.float64 if start.dtype.is_float else np.int64
    values = wide(first) + np.arange(count).astype(wide) * wide(step)
    return ctx.constant(values.astype(start.dtype.numpy))


@converter("EyeLike")
def eye_like(ctx: Context, x: Node, *, dtype: int | None = None, k: int = 0) -> Node:
    if x.type.rank != 2:
        raise Unsupported(f"{x.type!r}: must be a matrix")
    wanted = x.dtype if dtype is None else dtype_of(dtype)
    rows, columns = (ctx.iota(x.shape, axis) for axis in (0, 1))
    return ctx.cast(ctx.compare("eq", ctx.sub(columns, rows), k), wanted)


@converter("OneHot")
def one_hot(ctx: Context, indices: Node, depth: Node, values: Node, *, axis: int = -1) -> Node:
    rank = indices.type.rank + 1
    axis = axis_of(axis, rank)
    extent = ctx.static_int(depth)
    if values.shape != (2,):
        raise Unsupported(f"values {values.type!r}: must be two numbers")
    wide = ctx.cast(indices, DType.I64)  # floats too count as whole numbers
    wide = ctx.select(ctx.compare("lt", wide, 0), ctx.add(wide, extent), wide)
    shape = (*indices.shape[:axis], extent, *indices.shape[axis:])
    hit = ctx.compare("eq", ctx.unsqueeze(wide, axis), ctx.iota(shape, axis))
    off, on = (ctx.reshape(ctx.slice_axis(values, 0, position, position + 1), ()) for position in (0, 1))
    return ctx.select(hit, on, off)


def _window(name: str, formula: Any) -> None:
    @converter(name)
    def convert(ctx: Context, size: Node, *, output_datatype: int = 1, periodic: int = 1) -> Node:
        count = ctx.static_int(size)
        if count < 0:
            raise Unsupported(f"a window of {count} elements")
        ctx.reserve(count, f"a window of {count} elements")
        span = count if periodic else count - 1
        phase = 2 * np.pi * np.arange(count, dtype=np.float64) / max(span, 1)
        return ctx.constant(formula(phase).astype(dtype_of(output_datatype).numpy))


_window("HannWindow", lambda t: 0.5 - 0.5 * np.cos(t))
_window("HammingWindow", lambda t: 25 / 46 - 21 / 46 * np.cos(t))
_window("BlackmanWindow", lambda t: 0.42 - 0.5 * np.cos(t) + 0.08 * np.cos(2 * t))


@converter("MelWeightMatrix")
def mel_weights(
    ctx: Context,
    bins: Node,
    dft_length: Node,
    sample_rate: Node,
    lower_hertz: Node,
    upper_hertz: Node,
    *,
    output_datatype: int = 1,
) -> Node:
    count, length, rate = (ctx.static_int(x) for x in (bins, dft_length, sample_rate))
    low, high = (float(ctx.static(x).reshape(-1)[0]) for x in (lower_hertz, upper_hertz))
    spectrum = length // 2 + 1
    if not (count > 0 and spectrum > 0 and rate > 0):
        raise Unsupported(f"{count} bins of a spectrum of {spectrum}")
    ctx.reserve(count * spectrum, f"{count} bins of a spectrum of {spectrum}")
    ctx.budget.count(count // 16, f"{ctx.source}: {count} bins")
    if not all(math.isfinite(hertz) and 0 <= hertz <= rate for hertz in (low, high)):
        raise Unsupported(f"frequencies from {low} to {high} at a rate of {rate}")
    edges = 2595 * np.log10(1 + np.array([low, high]) / 700)
    mels = edges[0] + np.arange(count + 2) * ((edges[1] - edges[0]) / (count + 2))
    positions = ((length + 1) * (700 * (10 ** (mels / 2595) - 1)) // rate).astype(np.int64)
    result = np.zeros((spectrum, count))
    for mel in range(count):
        left, centre, right = positions[mel : mel + 3]
        if centre == left:
            result[centre, mel] = 1
        else:
            rising = np.arange(left, centre + 1)
            result[rising, mel] = (rising - left) / (centre - left)
        if right > centre:
            falling = np.arange(centre, right)
            result[falling, mel] = (right - falling) / (right - centre)
    return ctx.constant(result.astype(dtype_of(output_datatype).numpy))
